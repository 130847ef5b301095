"""Small real things to test with: tokenizers, a scripted engine, and environments.

Words are tokens, so every prompt length in a test can be counted by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

from envs.spaces import TextSpace
from rllib_gigpo.engines.base import Completion, Request
from rllib_gigpo.models.tiny import make_tokenizer, vocabulary


def word_tokenizer(*texts: str):
    """The tiny model's tokenizer over the words of the texts: one token per word.

    A prompt of one user message of n words has n + 2 tokens: `<user>` before, `<assistant>` after.
    """
    return make_tokenizer(vocabulary(texts), max_length=4096)


class ByteTokenizer:
    """One token per UTF-8 byte, so that one character can be several tokens."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **_: Any) -> list[int]:
        return [byte for message in messages for byte in message["content"].encode()]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


class ScriptedEngine:
    """Answers every request with a text from a function, after some turns of the event loop.

    Keeps the requests in the order in which they came.
    """

    max_model_len = 4096

    def __init__(
        self,
        tokenizer: Any,
        reply: Callable[[Request], str],
        *,
        turns: Callable[[Request], int] = lambda request: 1,
        weight_version: int = 0,
    ):
        self.tokenizer = tokenizer
        self.reply = reply
        self.turns = turns
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.most_running = 0
        self._version = weight_version

    async def generate(self, request: Request) -> Completion:
        assert request.request_id not in self.running, "request ids must be unique"
        self.requests.append(request)
        self.running.add(request.request_id)
        self.most_running = max(self.most_running, len(self.running))
        try:
            for _ in range(self.turns(request)):
                await asyncio.sleep(0)
            ids = self.tokenizer(self.reply(request), add_special_tokens=False)["input_ids"]
        finally:
            self.running.discard(request.request_id)
        is_cut = len(ids) > request.sampling.max_tokens
        token_ids = np.array(ids[: request.sampling.max_tokens], dtype=np.int32)
        # Different for every token of every request, so that a mix-up shows.
        logps = -(request.seed % 1000 + 1) * 1e-3 - np.arange(len(token_ids), dtype=np.float32)
        return Completion(
            token_ids, logps.astype(np.float32), "length" if is_cut else "stop", self._version
        )

    async def abort(self, request_id: str) -> None:
        self.running.discard(request_id)

    def load_weights(
        self, policy_id: str, tensors: Mapping[str, torch.Tensor], version: int
    ) -> None:
        self._version = version

    def version(self, policy_id: str = "default_policy") -> int:
        return self._version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Countdown(gymnasium.Env[str, str]):
    """Says how many steps are left, `start` at first; the last one gives reward 1.

    "down" takes one step, "jump" takes two, anything else is invalid and takes none.

    Args:
        start: Steps of an episode, or None for 2 to 4 by the reset seed.
    """

    WORDS = "left 0 1 2 3 4 5 6 7 8 9 down jump wait <action> </action> <think> </think> count to"

    def __init__(self, start: int | None = None):
        self.start = start
        self.observation_space = TextSpace()
        self.action_space = TextSpace(["down", "jump"])
        self.seeds: list[int | None] = []
        self.closed = False
        self.left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.left = self.start or int(self.np_random.integers(2, 5))
        self.left = (options or {}).get("start", self.left)
        return self._seen(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left = max(0, self.left - {"down": 1, "jump": 2}.get(action, 0))
        done = self.left == 0
        info = {**self._info(), "is_action_valid": action in ("down", "jump")}
        return self._seen(), float(done), done, False, info

    def close(self) -> None:
        self.closed = True

    def _seen(self) -> str:
        return f"left {self.left}"

    def _info(self) -> dict[str, Any]:
        return {
            "task": "count to 0",
            "task_id": f"from {self.left}",
            "admissible_actions": ["down", "jump"],
            "won": self.left == 0,
        }
