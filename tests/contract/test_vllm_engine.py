"""What the in-process vLLM engine does beyond the contract, against vLLM's own classes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import Family, build_tiny_folders, forward_logps, tiny_adapter, tiny_model

from rllib_gigpo.engines.base import Completion, EngineError, Request, Sampling, generate_batch
from rllib_gigpo.engines.vllm.actor import check_reserved
from rllib_gigpo.engines.vllm.engine import VLLMEngine
from rllib_gigpo.engines.vllm.process import EngineDiedError
from tests.with_vllm import needs_vllm, tiny_settings

pytestmark = [
    pytest.mark.vllm,
    needs_vllm,
]

# 2 layers x 2 x 32 x 4 bytes = 512 bytes a token: the cache holds 1024 tokens.
SETTINGS = tiny_settings(max_model_len=128, kv_cache_memory_bytes=1 << 19)
MODELS: dict[str, tuple[Family, bool]] = {
    "qwen2": ("qwen2", True),
    "qwen3": ("qwen3", False),
    "llama": ("llama", True),
}
PROMPT = np.arange(40, 60, dtype=np.int32)
EXACT = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_tiny_folders(tmp_path_factory.mktemp("models"), MODELS)


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(folders, SETTINGS)
    yield engine
    engine.close()


def request_of(policy: str = "llama", seed: int = 0, **sampling: Any) -> Request:
    settings = Sampling(**{"max_tokens": 8, **sampling})
    return Request(PROMPT, settings, seed=seed, request_id=f"{policy}-{seed}", policy_id=policy)


def generate(engine: VLLMEngine, *args: Any, **kwargs: Any) -> Completion:
    return asyncio.run(engine.generate(request_of(*args, **kwargs)))


def assert_served_by(model: Any, completion: Completion) -> None:
    expected = forward_logps(model, PROMPT, completion.token_ids)
    np.testing.assert_allclose(completion.logps, expected, atol=EXACT)


# --- LoRA ---------------------------------------------------------------------------------------


def test_an_adapter_that_vllm_refuses_leaves_the_old_one(engine: VLLMEngine) -> None:
    small = tiny_adapter("llama", tied=True, seed=1)
    large = tiny_adapter("llama", tied=True, seed=2, rank=16)
    engine.load_adapter("llama", small.tensors, small.config, 1)
    with pytest.raises(EngineError, match="rank"):
        engine.load_adapter("llama", large.tensors, large.config, 2)
    completion = generate(engine)
    assert completion.weight_version == 1
    assert_served_by(small.merged, completion)
    engine.load_weights("llama", dict(tiny_model("llama", tied=True).named_parameters()), 0)


# --- refusals -----------------------------------------------------------------------------------


def test_a_process_holds_one_engine(engine: VLLMEngine, folders: dict[str, Path]) -> None:
    with pytest.raises(EngineError, match="already runs a vLLM engine"):
        VLLMEngine(folders, SETTINGS)


def test_a_temperature_that_vllm_would_change_is_refused(engine: VLLMEngine) -> None:
    with pytest.raises(EngineError, match=r"0\.001"):
        generate(engine, temperature=0.001)


@pytest.mark.parametrize("sampling", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -5}])
def test_what_vllm_refuses_is_an_engine_error(
    engine: VLLMEngine, sampling: dict[str, float]
) -> None:
    with pytest.raises(EngineError, match=next(iter(sampling))):
        generate(engine, **sampling)
    assert generate(engine).finish_reason == "length"


def test_a_running_request_id_is_refused(engine: VLLMEngine) -> None:
    async def scenario() -> list[Any]:
        twice = [engine.generate(request_of()), engine.generate(request_of())]
        return await asyncio.gather(*twice, return_exceptions=True)

    first, second = asyncio.run(scenario())
    assert first.finish_reason == "length"
    assert isinstance(second, EngineError)


def test_a_sleeping_engine_refuses_requests(engine: VLLMEngine) -> None:
    engine.sleep()
    with pytest.raises(EngineError, match="wake"):
        generate(engine)
    engine.wake()
    assert generate(engine).finish_reason == "length"


def test_sleep_mode_wakes_weights_for_a_load_and_the_rest_later(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in which vLLM is asked; on a CPU its workers keep their memory."""
    with_sleep = dataclasses.replace(SETTINGS, enable_sleep_mode=True, num_gpus=1)
    monkeypatch.setattr(engine, "settings", with_sleep)
    executor = engine._policies["llama"].llm.model_executor
    before = generate(engine)
    engine.sleep()
    assert executor.sleeping_tags == {"weights", "kv_cache"}
    model = tiny_model("llama", tied=True)
    engine.load_weights("llama", dict(model.named_parameters()), 0)
    assert executor.sleeping_tags == {"kv_cache"}
    engine.wake()
    assert executor.sleeping_tags == set()
    np.testing.assert_array_equal(before.token_ids, generate(engine).token_ids)
    assert generate(engine, "qwen3").finish_reason == "length"


def test_requests_put_off_for_lack_of_memory_come_out_the_same(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 x (20 + 100) tokens in a cache of 1024: vLLM preempts some and computes them again."""
    scheduler = engine._policies["llama"].llm.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def counting(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", counting)
    requests = [request_of(seed=seed, max_tokens=100) for seed in range(16)]
    together = asyncio.run(generate_batch(engine, requests))
    assert preempted
    for request, other in list(zip(requests, together, strict=True))[::5]:
        alone = asyncio.run(engine.generate(request))
        np.testing.assert_array_equal(alone.token_ids, other.token_ids)
        np.testing.assert_allclose(alone.logps, other.logps, atol=EXACT)


# --- samplers -----------------------------------------------------------------------------------


def test_the_gpu_runners_sampler_returns_logits_before_top_k(
    monkeypatch: pytest.MonkeyPatch, engine: VLLMEngine
) -> None:
    """vLLM's second sampler needs a GPU's kernels; the two that matter here are replaced."""
    from vllm.v1.worker.gpu.sample import sampler as vllm_sampler

    from rllib_gigpo.engines.vllm.sampler import install

    def keep_one_in_place(logits: torch.Tensor, top_k: Any, top_p: Any) -> torch.Tensor:
        if top_k is None and top_p is None:
            return logits
        kept = logits.argmax(dim=-1, keepdim=True)
        return logits.masked_fill_(torch.ones_like(logits).scatter(1, kept, 0).bool(), -torch.inf)

    monkeypatch.setattr(vllm_sampler, "apply_top_k_top_p", keep_one_in_place)
    monkeypatch.setattr(
        vllm_sampler, "gumbel_sample", lambda logits, *args, **kwargs: logits.argmax(dim=-1)
    )
    sampler = object.__new__(vllm_sampler.Sampler)
    sampler.use_flashinfer, sampler.use_fp64_gumbel = False, False
    sampler.sampling_states = SimpleNamespace(
        temperature=SimpleNamespace(gpu=None), seeds=SimpleNamespace(gpu=None)
    )
    worker = SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler))
    install(worker)
    tempered = torch.tensor([[0.0, 2.0, 1.0]])
    for top_k in (None, torch.tensor([1])):
        sampled, returned = worker.model_runner.sampler._sample_random(
            tempered.clone(), None, None, None, top_k, None, False
        )
        assert sampled.tolist() == [1]
        torch.testing.assert_close(returned, tempered)


def test_an_unknown_sampler_is_refused(engine: VLLMEngine) -> None:
    from rllib_gigpo.engines.vllm.sampler import install

    with pytest.raises(RuntimeError, match="int"):
        install(SimpleNamespace(model_runner=SimpleNamespace(sampler=3)))


# --- the process and its end ---------------------------------------------------------------------


def test_closing_ends_running_requests_and_death_reaches_everyone(
    engine: VLLMEngine, folders: dict[str, Path]
) -> None:
    """Runs last: it closes the shared engine, and starts engines of its own."""

    async def send_and(then: Any, engine: VLLMEngine) -> list[Any]:
        tasks = [
            asyncio.create_task(engine.generate(request_of(seed=seed, max_tokens=100)))
            for seed in range(3)
        ]
        await asyncio.sleep(0.02)
        then()
        return await asyncio.gather(*tasks, return_exceptions=True)

    closed = asyncio.run(send_and(engine.close, engine))
    assert all(isinstance(outcome, EngineError) for outcome in closed)
    assert not torch.distributed.is_initialized()

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    preload, set_num_threads = os.environ.get("LD_PRELOAD"), torch.set_num_threads
    mortal = VLLMEngine({"llama": folders["llama"]}, SETTINGS)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert os.environ.get("LD_PRELOAD") == preload
    assert torch.set_num_threads is set_num_threads

    def break_it() -> None:
        def step() -> None:
            raise ZeroDivisionError("a kernel failed")

        mortal._policies["llama"].llm.step = step

    died = asyncio.run(send_and(break_it, mortal))
    assert all(isinstance(outcome, EngineDiedError) for outcome in died)
    assert "a kernel failed" in str(died[0])
    with pytest.raises(EngineDiedError):
        generate(mortal)
    weights = dict(tiny_model("llama", tied=True).named_parameters())
    with pytest.raises(EngineDiedError):
        mortal.load_weights("llama", weights, 1)
    mortal.close()


def test_no_engine_takes_a_gpu_that_ray_has_not_reserved(monkeypatch):
    from vllm.platforms import current_platform

    check_reserved(SETTINGS)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(EngineError, match=r"engine_num_gpus=0, .*: set engines\(engine_num_gpus=1"):
        check_reserved(SETTINGS)
    check_reserved(dataclasses.replace(SETTINGS, num_gpus=0.5))
