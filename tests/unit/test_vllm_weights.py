"""Settings of the vLLM engine and what fits its model; none of it needs vLLM."""

from __future__ import annotations

import pytest
import torch

from rllib_gigpo.engines.base import EngineError
from rllib_gigpo.engines.vllm.settings import VLLMSettings
from rllib_gigpo.engines.vllm.weights import fitting

SHAPES = {"a": (2, 3), "b": (4,)}


def test_fitting_weights_drop_the_tied_copy() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "tied": torch.zeros(1)}
    assert fitting(tensors, SHAPES, frozenset({"tied"})).keys() == SHAPES.keys()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.zeros(2, 3)}, r"1 missing \(b\)"),
        (
            {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1)},
            r"1 unknown \(c\)",
        ),
        (
            {"a": torch.zeros(3, 2), "b": torch.zeros(4)},
            r"1 of wrong shape \(a \(3, 2\) instead of \(2, 3\)\)",
        ),
        ({}, r"2 missing \(a, b\)"),
    ],
)
def test_unfitting_weights_are_named(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        fitting(tensors, SHAPES, frozenset())


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"max_model_len": 0}, "max_model_len=0: expected a whole number"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: expected a whole number"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"tensor_parallel_size": 4, "num_gpus": 2}, "set num_gpus=4"),
        ({"tensor_parallel_size": 2, "num_gpus": 4}, "set num_gpus=2"),
        ({"num_gpus": 2}, "num_gpus=2 with tensor_parallel_size=1, which uses one GPU: set"),
        ({"enable_sleep_mode": True}, "set num_gpus"),
        ({"max_lora_rank": 513}, "max_lora_rank is 513: vLLM serves adapters of rank 512 at most"),
    ],
)
def test_bad_settings_are_refused_with_the_cure(settings: dict, cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        VLLMSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 0.85),
        ({"num_gpus": 1}, 0.85),
        ({"num_gpus": 0.5}, 0.425),
        ({"num_gpus": 2, "tensor_parallel_size": 2}, 0.85),
        ({"num_gpus": 0.5, "gpu_memory_utilization": 0.3}, 0.3),
    ],
)
def test_an_engine_takes_its_part_of_a_gpus_memory(settings: dict, share: float) -> None:
    args = VLLMSettings(**settings).engine_args("folder", on_cpu=False)
    assert args["gpu_memory_utilization"] == share


def test_engine_arguments_fit_the_device() -> None:
    settings = VLLMSettings(max_model_len=64)
    cpu = settings.engine_args("folder", on_cpu=True)
    gpu = settings.engine_args("folder", on_cpu=False)
    assert (cpu["block_size"], cpu["enforce_eager"]) == (32, True)
    assert cpu["kv_cache_memory_bytes"] == 2**30
    assert (gpu["block_size"], gpu["enforce_eager"]) == (None, False)
    assert gpu["gpu_memory_utilization"] == 0.85
    assert gpu["kv_cache_memory_bytes"] is None
    for args in (cpu, gpu):
        assert args["model"] == "folder"
        assert args["max_model_len"] == 64
        assert args["distributed_executor_backend"] == "uni"
        assert "enable_lora" not in args
    parallel = VLLMSettings(tensor_parallel_size=2, num_gpus=2, enable_lora=True, max_lora_rank=8)
    args = parallel.engine_args("folder", on_cpu=False)
    assert args["distributed_executor_backend"] == "mp"
    assert (args["enable_lora"], args["max_loras"], args["max_lora_rank"]) == (True, 1, 8)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (4, 8), (8, 8), (33, 64), (512, 512)])
def test_room_for_an_adapter_is_the_next_that_vllm_offers(rank: int, room: int) -> None:
    settings = VLLMSettings(enable_lora=True, max_lora_rank=rank)
    assert settings.engine_args("folder", on_cpu=True)["max_lora_rank"] == room


def test_chosen_values_override_the_devices() -> None:
    settings = VLLMSettings(block_size=16, kv_cache_memory_bytes=1 << 20, enforce_eager=True)
    for on_cpu in (True, False):
        args = settings.engine_args("folder", on_cpu=on_cpu)
        assert (args["block_size"], args["kv_cache_memory_bytes"]) == (16, 1 << 20)
        assert args["enforce_eager"] is True
