"""What the tests of every engine's contract ask, and of which tiny random models.

The reference is a plain Hugging Face forward pass in fp32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from tiny_models import Family, tiny_model
from transformers import PreTrainedModel

from rllib_gigpo.engines.base import (
    Completion,
    Engine,
    EngineError,
    Request,
    Sampling,
    generate_batch,
)

Result = TypeVar("Result")

MAX_MODEL_LEN = 256
MODELS: dict[str, tuple[Family, bool]] = {
    f"{family}-{'tied' if tied else 'untied'}": (family, tied)
    for family in ("qwen2", "qwen3", "llama")
    for tied in (True, False)
}
POLICY = "llama-tied"
FRESH = "llama-untied"
PROMPT = np.arange(40, 60, dtype=np.int32)
EXACT = 1e-4


def model_of(policy: str, seed: int = 0) -> PreTrainedModel:
    family, tied = MODELS[policy]
    return tiny_model(family, tied=tied, seed=seed)


def weights_of(policy: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(model_of(policy, seed).named_parameters())


class Client:
    """Sends requests with fresh ids and waits for them."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop):
        self.engine = engine
        self._loop = loop
        self._count = 0

    def request(
        self,
        prompt: Sequence[int] | np.ndarray = PROMPT,
        *,
        seed: int = 0,
        policy: str = POLICY,
        **sampling: Any,
    ) -> Request:
        self._count += 1
        return Request(
            prompt_ids=np.asarray(prompt, dtype=np.int32),
            sampling=Sampling(**{"max_tokens": 12, **sampling}),
            seed=seed,
            request_id=f"request-{self._count}",
            policy_id=policy,
        )

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(coroutine)

    def batch(self, requests: Sequence[Request]) -> list[Completion]:
        return self.run(generate_batch(self.engine, requests))

    def one(self, *args: Any, **kwargs: Any) -> Completion:
        return self.batch([self.request(*args, **kwargs)])[0]

    def refused(self, *args: Any, match: str, **kwargs: Any) -> None:
        with pytest.raises(EngineError, match=match):
            self.one(*args, **kwargs)
