"""A model in this process, asked from many threads at once."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Mapping, Sequence

from rllib_gigpo.agent.prompt import Message
from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.encoding import PromptTooLongError, encode_chat
from rllib_gigpo.engines import build_engine
from rllib_gigpo.engines.base import Request, Sampling
from rllib_gigpo.models import (
    load_generation_config,
    load_tokenizer,
    materialize,
    number_of_positions,
    stop_token_ids,
)
from rllib_gigpo.vision.pictures import Picture
from rllib_gigpo.vision.sight import load_sight


class LocalModel:
    """The transformers engine, whose event loop runs in a thread of its own.

    Requests that wait at the same time are decoded together.

    Args:
        config: Environment, agent, model, limits and `eval_temperature`.

    Raises:
        ValueError: The limits of prompt and response exceed what the model can hold.
    """

    def __init__(self, config: GiGPOConfig):
        config.validate()
        path = materialize(config.model_spec)
        _check_length(config, number_of_positions(path))
        self._tokenizer, self._sight = load_tokenizer(path), load_sight(path)
        self._limit = config.max_prompt_tokens
        self._sampling = Sampling(
            temperature=config.eval_temperature,
            max_tokens=config.max_response_tokens,
            stop=config.agent_profile.stop,
            stop_token_ids=stop_token_ids(self._tokenizer, load_generation_config(path)),
        )
        self._policy = config.module_ids[0]
        self._engine = build_engine(config)
        self._numbers = itertools.count()
        self._encoding = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(
        self, messages: Sequence[Message], pictures: Mapping[str, Picture], seed: int
    ) -> str:
        """Return the response to chat messages.

        Raises:
            PromptTooLongError: The prompt is over the limit.
        """
        with self._encoding:  # tokenizers are not made for threads
            prompt = encode_chat(self._tokenizer, list(messages), pictures, self._sight)
        if len(prompt.ids) > self._limit:
            raise PromptTooLongError(
                f"the prompt has {len(prompt.ids)} tokens, the limit is {self._limit}: raise "
                "--max-prompt-tokens"
            )
        request = Request(
            prompt_ids=prompt.ids,
            images=prompt.images,
            sampling=self._sampling,
            seed=seed,
            request_id=str(next(self._numbers)),
            policy_id=self._policy,
        )
        waiting = asyncio.run_coroutine_threadsafe(self._engine.generate(request), self._loop)
        tokens = waiting.result().token_ids
        with self._encoding:
            return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def close(self) -> None:
        """Stop the engine and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._engine.close()
        self._loop.close()


def _check_length(config: GiGPOConfig, positions: int) -> None:
    prompt, response = config.max_prompt_tokens, config.max_response_tokens
    if prompt + response > positions:
        raise ValueError(
            f"--max-prompt-tokens={prompt} and --max-response-tokens={response} are "
            f"{prompt + response} tokens together, but the model has {positions} positions: lower "
            "one of them"
        )
