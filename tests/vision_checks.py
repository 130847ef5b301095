"""What the tests of engines with pictures ask and compare."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rllib_gigpo.encoding import Encoded
from rllib_gigpo.engines.base import Completion, Engine, Request, Sampling, generate_batch
from rllib_gigpo.engines.packing import checksums
from rllib_gigpo.lora import LoRASettings, adapter_weights, add_adapter
from rllib_gigpo.models import load_causal_lm, load_tokenizer
from rllib_gigpo.sequences import pack, response_logps
from rllib_gigpo.vision.sight import Sight, load_sight
from tests.vision_models import build_folder, make_model, plain_logps, various_prompts
from tests.with_vllm import tiny_settings

EXACT = 1e-4


def loaded(folder: Path) -> tuple[Any, Sight, Any]:
    sight = load_sight(str(folder))
    assert sight is not None
    return load_tokenizer(str(folder)), sight, load_causal_lm(str(folder))


def prompts_of(tokenizer: Any, sight: Sight) -> list[Encoded]:
    """Those of `various_prompts`, and the first one again."""
    prompts = various_prompts(tokenizer, sight)
    return [*prompts, prompts[0]]


def ask(engine: Engine, prompts: Sequence[Encoded], tokens: int = 6) -> list[Completion]:
    requests = [
        Request(p.ids, Sampling(max_tokens=tokens), number, str(number), images=p.images)
        for number, p in enumerate(prompts)
    ]
    return asyncio.run(generate_batch(engine, requests))


def check(model: Any, sight: Sight, prompts: list[Encoded], answers: list[Completion]) -> int:
    """Compare with transformers' own pass; returns the number of tokens compared.

    That pass cannot tell an answer that says the token of pictures from one that shows some: what
    comes from there on is left out.
    """
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 6
        said = [*answer.token_ids.tolist(), sight.family.image_token_id]
        known = said.index(sight.family.image_token_id)
        if known:
            expected = plain_logps(model, sight, prompt, said[:known])
            assert answer.logps[:known] == pytest.approx(expected, abs=EXACT)
        compared += known
    return compared


def check_adapter(engine: Engine, folder: Path, prompts: list[Encoded], sight: Sight) -> None:
    """An adapter of the language model, as the learner has it."""
    pytest.importorskip("peft")
    model = load_causal_lm(str(folder))
    add_adapter(model, LoRASettings(rank=4, alpha=8.0), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.manual_seed(0)
            parameter.data = 0.1 * torch.randn_like(parameter)
    tensors, config = adapter_weights(model)
    engine.load_adapter("default_policy", tensors, config, 1)
    assert engine.checksums() == checksums(tensors)
    plain = load_causal_lm(str(folder))
    gaps = []
    for prompt, answer in zip(prompts, ask(engine, prompts), strict=True):
        (batch,) = pack([prompt.ids], [answer.token_ids], 1, [prompt.images])
        with torch.no_grad():
            found = response_logps(model, batch, sight=sight).logps[0].numpy()
            without = response_logps(plain, batch, sight=sight).logps[0].numpy()
        assert answer.logps == pytest.approx(found, abs=EXACT)
        gaps.append(np.abs(without - found).max())
    assert min(gaps) > 1e-3


def check_vllm(family: str, folder: Path) -> None:
    """Answers before and after syncs: of an adapter, and of everything, the vision tower too."""
    from rllib_gigpo.engines.vllm.engine import VLLMEngine

    tokenizer, sight, model = loaded(build_folder(folder, family))
    settings = tiny_settings(max_num_seqs=8, kv_cache_memory_bytes=1 << 20)
    engine = VLLMEngine({"default_policy": str(folder)}, settings)
    try:
        prompts = prompts_of(tokenizer, sight)
        assert check(model, sight, prompts, ask(engine, prompts)) >= 15
        check_adapter(engine, folder, prompts, sight)
        changed = make_model(model.config, seed=1)
        engine.load_weights("default_policy", dict(changed.named_parameters()), 1)
        assert check(changed, sight, prompts, ask(engine, prompts)) >= 15
    finally:
        engine.close()
