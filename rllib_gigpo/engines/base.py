"""The engine contract: token ids in, token ids and log-probabilities out.

An engine serves one or more language-model policies to the rollouts. Rollouts talk to every
engine through this file alone, so an in-process transformers model and a vLLM actor are
interchangeable:

    Request (token ids, sampling, seed) -> Engine.generate -> Completion (token ids, log-probs)

Nothing is ever re-tokenised: the learner trains on `Completion.token_ids`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch

from rllib_gigpo.vision.pictures import PlacedPicture

FinishReason = Literal["stop", "length", "abort"]


class EngineError(RuntimeError):
    """A request that the engine refuses (empty or over-long prompt, unknown token id, ...)."""


@dataclass(frozen=True)
class Sampling:
    """How one response is drawn.

    Attributes:
        temperature: Divides the logits; 0 means greedy.
        top_p: Nucleus mass in (0, 1]; 1 keeps every token.
        top_k: Number of tokens kept; 0 keeps every token.
        max_tokens: Response length limit in tokens, at least 1.
        stop: Strings that end the response. The tokens that complete a stop string stay in
            `Completion.token_ids`.
        stop_token_ids: Token ids that end the response (the end-of-turn tokens of the model). The
            stop token stays in `Completion.token_ids` as its last element.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        prompt_ids: int32 [P], P >= 1.
        sampling: How the response is drawn.
        seed: Alone decides the random draws of this request: the same seed, prompt and weights
            give the same response whatever else runs beside it.
        request_id: Unique among the running requests; the handle for `Engine.abort`.
        policy_id: Which policy (RLlib module id) answers.
        agent_id: Which agent of the episode asks.
        group_id: Requests of one rollout group share it; all go to one engine, whose prefix cache
            they share.
        images: Pictures that the model sees in the place of prompt tokens.
    """

    prompt_ids: np.ndarray
    sampling: Sampling
    seed: int
    request_id: str
    policy_id: str = "default_policy"
    agent_id: str = "agent"
    group_id: int = 0
    images: tuple[PlacedPicture, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One response.

    Attributes:
        token_ids: int32 [T], the sampled tokens including the stop token or stop string.
        logps: float32 [T], log-probability of each sampled token after temperature and before
            top-p and top-k (greedy: at temperature 1).
        finish_reason: "stop" (stop string or id), "length" (`max_tokens`), "abort".
        weight_version: Version of the weights that produced the tokens.
    """

    token_ids: np.ndarray = field(repr=False)
    logps: np.ndarray = field(repr=False)
    finish_reason: FinishReason
    weight_version: int


class Engine(Protocol):
    """What every engine does. One event loop owns an engine."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus response in tokens."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Continue one prompt; many calls may be awaited at once and are batched together.

        Raises:
            EngineError: Empty prompt, prompt plus one token longer than `max_model_len`, token id
                outside the vocabulary, `max_tokens` below 1, or unknown `policy_id`.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a running request; its `generate` returns what it has, finish reason "abort".

        Unknown ids are ignored: the request may have finished a moment ago.
        """
        ...

    def load_weights(
        self, policy_id: str, tensors: Mapping[str, torch.Tensor], version: int
    ) -> None:
        """Replace the policy's weights (Hugging Face parameter names) and set its version.

        An adapter that served the policy is given up.

        Raises:
            EngineError: While requests run, or when names or shapes do not fit the model.
        """
        ...

    def load_adapter(
        self,
        policy_id: str,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        version: int,
    ) -> None:
        """Serve the policy with a LoRA adapter on its base weights, in place of the last adapter.

        Args:
            policy_id: The policy.
            tensors: The adapter's parameters under their names in a peft adapter file.
            config: The content of peft's adapter_config.json (`r`, `lora_alpha`,
                `target_modules`, ...).
            version: Version of the adapted weights.

        Raises:
            EngineError: While requests run, or when the adapter does not fit the model.
        """
        ...

    def checksums(self, policy_id: str = "default_policy") -> dict[str, int]:
        """Checksums (`engines.packing.checksum`) of the tensors that the policy computes with.

        Returns:
            By the names they were loaded under: all of the last `load_weights`, or the adapter's of
            the last `load_adapter`. What was loaded but is not in effect is left out or has another
            sum; what an engine keeps in a form that cannot be read back counts as it was received.
        """
        ...

    def version(self, policy_id: str = "default_policy") -> int:
        """Version of what now serves the policy; 0 before anything was loaded."""
        ...

    def sleep(self) -> None:
        """Give up device memory while the learner works."""
        ...

    def wake(self) -> None:
        """Take the memory back; the policy serves what was loaded last."""
        ...

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        ...


async def generate_batch(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Send all requests at once and return their completions in order."""
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))
