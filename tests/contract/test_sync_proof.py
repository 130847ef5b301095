"""An engine that does not compute with what was sent is found out: in fp32 and bf16, full and LoRA.

The faults are small on purpose: one step of training, or one tensor of it, changes
log-probabilities less than bf16 rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import build_tiny_folder, tiny_adapter, tiny_model

from rllib_gigpo.engines import adapters
from rllib_gigpo.engines.packing import checksums, pack, unpack
from rllib_gigpo.engines.published import Published, check_held, serve
from rllib_gigpo.engines.transformers_engine import TransformersEngine
from tests.with_vllm import tiny_settings, vllm

POLICY = "default_policy"
LAYER = "model.layers.1.mlp.down_proj"
NAME = f"{LAYER}.weight"
HALF = f"base_model.model.{LAYER}.lora_B.weight"
ADAPTER = tiny_adapter("qwen2", tied=True, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_folder(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", tied=True)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["transformers", vllm])
def engine(request: pytest.FixtureRequest, folder: Path, dtype: str) -> Iterator[Any]:
    if request.param == "vllm":
        from rllib_gigpo.engines.vllm.engine import VLLMEngine

        settings = tiny_settings(dtype=dtype, max_model_len=64, kv_cache_memory_bytes=1 << 20)
        built: Any = VLLMEngine({POLICY: folder}, settings)
    else:
        built = TransformersEngine({POLICY: folder}, dtype=dtype, max_model_len=64)
    yield built
    built.close()


def weights(dtype: str, steps: int) -> dict[str, torch.Tensor]:
    """All weights after so many steps of 1 % each."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, value in tiny_model("qwen2", tied=True).named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        found[name] = (value.detach() * (1 + 0.01 * steps * noise)).to(getattr(torch, dtype))
    return found


def adapter(steps: int) -> dict[str, torch.Tensor]:
    """An adapter after so many steps of 1 % each."""
    return {name: value * (1 + 0.01 * steps) for name, value in ADAPTER.tensors.items()}


def published(tensors: dict[str, torch.Tensor], version: int, kind: Any) -> Published:
    config = ADAPTER.config if kind == "adapter" else None
    return Published(kind, pack(tensors), version, checksums(tensors), config)


def load(engine: Any, parcel: Published) -> None:
    serve(engine, POLICY, parcel, parcel.packed)


def set_version(engine: Any, version: int) -> None:
    parts = engine._policies if hasattr(engine, "_policies") else engine._batches
    parts[POLICY].version = version


def parcels(kind: str, dtype: str) -> tuple[Published, Published]:
    """Version 1, and version 2 one small step later."""
    make: Callable[[int], Any] = adapter if kind == "adapter" else lambda n: weights(dtype, n)
    old, new = (published(make(steps), steps, kind) for steps in (1, 2))
    return old, new


@pytest.mark.parametrize("kind", ["weights", "adapter"])
def test_an_engine_that_took_everything_passes(engine, dtype, kind):
    for parcel in parcels(kind, dtype):
        load(engine, parcel)
        check_held(parcel, engine.checksums(POLICY))


@pytest.mark.parametrize("kind", ["weights", "adapter"])
def test_an_engine_with_old_tensors_is_found_whatever_version_it_claims(engine, dtype, kind):
    old, new = parcels(kind, dtype)
    load(engine, old)
    set_version(engine, new.version)
    assert engine.version(POLICY) == new.version
    with pytest.raises(RuntimeError, match="computes with other tensors than the learner's"):
        check_held(new, engine.checksums(POLICY))


@pytest.mark.parametrize("kind", ["weights", "adapter"])
def test_an_engine_that_missed_one_tensor_is_found(engine, dtype, kind, monkeypatch):
    old, new = parcels(kind, dtype)
    load(engine, old)
    with one_tensor_missed(engine, kind, old, monkeypatch):
        load(engine, new)
        name = HALF if kind == "adapter" else NAME
        with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
            check_held(new, engine.checksums(POLICY))
    load(engine, new)
    check_held(new, engine.checksums(POLICY))


@contextmanager
def one_tensor_missed(
    engine: Any, kind: str, old: Published, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Let the engine lose a tensor on its way into the model."""
    with monkeypatch.context() as patch:
        if not hasattr(engine, "_policies"):
            if kind == "weights":
                _keep_in_transformers(engine, unpack(old.packed)[NAME], patch)
            else:
                merged = adapters.MergedAdapter._merged
                patch.setattr(
                    adapters.MergedAdapter,
                    "_merged",
                    _once_unmerged(merged, LAYER),
                )
        else:
            _drop_in_vllm(kind, patch)
        yield


def _keep_in_transformers(engine: Any, old: torch.Tensor, patch: pytest.MonkeyPatch) -> None:
    load_weights = type(engine).load_weights

    def forgetful(policy_id: str, tensors: Any, version: int) -> None:
        load_weights(engine, policy_id, tensors, version)
        with torch.no_grad():
            engine._batches[POLICY].model.get_parameter(NAME).copy_(old)

    patch.setattr(engine, "load_weights", forgetful)


def _once_unmerged(merged: Any, layer: str) -> Any:
    """The base weight the first time a layer is merged, the truth when it is checked."""
    seen = []

    def lazy(self: Any, name: str) -> torch.Tensor:
        if name == layer and not seen:
            seen.append(name)
            return self._base[name]
        return merged(self, name)

    return lazy


def _drop_in_vllm(kind: str, patch: pytest.MonkeyPatch) -> None:
    from rllib_gigpo.engines.vllm import engine as module

    if kind == "weights":
        whole = module.load_into_worker
        patch.setattr(
            module,
            "load_into_worker",
            lambda worker, tensors: whole(
                worker, {name: value for name, value in tensors.items() if name != NAME}
            ),
        )
    else:
        request = module.adapter_request
        patch.setattr(
            module,
            "adapter_request",
            lambda policy, tensors, *rest: request(
                policy, {**tensors, HALF: torch.zeros_like(tensors[HALF])}, *rest
            ),
        )


@pytest.fixture
def algorithm(local_ray):
    from tests.tiny_runs import tiny_config

    algorithm = tiny_config().build_algo()
    yield algorithm
    algorithm.stop()


@pytest.mark.ray
def test_a_run_whose_own_engine_kept_old_weights_stops(algorithm, monkeypatch):
    def claim(engine: Any, policy_id: str, tensors: Any, version: int) -> None:
        engine._batches[policy_id].version = version

    algorithm.train()
    algorithm.first_learner(_take_a_step_too_small_for_the_probe)
    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "load_weights", claim)
        with pytest.raises(RuntimeError, match="computes with other tensors"):
            algorithm.weights.push(algorithm.num_updates)
    algorithm.weights.push(algorithm.num_updates)


def _take_a_step_too_small_for_the_probe(learner: Any) -> None:
    with torch.no_grad():
        for parameter in learner.module[POLICY].parameters():
            parameter.mul_(1 + 1e-6)


@pytest.mark.ray
def test_an_engine_that_is_built_later_is_checked_then(algorithm):
    from rllib_gigpo.env_runner import LLMEnvRunner
    from rllib_gigpo.sampler import training_tasks

    (sent,) = algorithm.first_learner(lambda learner: learner.published(1)).values()
    for checksums_, fault in ((sent.checksums, None), ({"lm_head.weight": 1}, "other tensors")):
        runner = LLMEnvRunner(config=algorithm.config, worker_index=0)
        parcel = replace(sent, checksums=checksums_)
        assert runner.load_weights({POLICY: parcel}, 1) == {POLICY: 1}
        assert runner.checksums() == {}
        played = runner.play(training_tasks(algorithm.config, 0))
        assert (played.error is None) == (fault is None)
        assert fault is None or fault in str(played.error)
        runner.stop()
