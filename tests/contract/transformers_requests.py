"""Requests to a tiny transformers engine, compared with a plain Hugging Face forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from tiny_models import VOCAB_SIZE, forward_logps, tiny_model

from rllib_gigpo.engines.base import Completion, Request, Sampling, generate_batch
from rllib_gigpo.engines.transformers_engine import TransformersEngine

POLICY = "default_policy"
EXACT = 1e-4


def build(**settings: Any) -> TransformersEngine:
    return TransformersEngine({POLICY: tiny_model("llama", tied=True)}, **settings)


def request(prompt: Sequence[int] | np.ndarray, name: str = "r", **sampling: Any) -> Request:
    """The request's seed is drawn from its name."""
    return Request(
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        sampling=Sampling(**{"max_tokens": 8, **sampling}),
        seed=int.from_bytes(name.encode()),
        request_id=name,
    )


def run(engine: TransformersEngine, requests: Sequence[Request]) -> list[Completion]:
    return asyncio.run(generate_batch(engine, requests))


def random_prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length, dtype=np.int32)


def assert_exact(requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Log-probabilities are those of a plain forward pass over prompt and response."""
    model = tiny_model("llama", tied=True)
    for sent, completion in zip(requests, completions, strict=True):
        temperature = sent.sampling.temperature or 1.0
        expected = forward_logps(model, sent.prompt_ids, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.logps, expected, atol=EXACT)


def difference(engine: TransformersEngine, requests: Sequence[Request]) -> dict[str, int]:
    """What the requests add to the engine's totals."""
    before = engine.stats()
    assert_exact(requests, run(engine, requests))
    return {name: total - before[name] for name, total in engine.stats().items()}
