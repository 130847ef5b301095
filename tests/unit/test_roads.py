"""Which road weights take, and which roads are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rllib_gigpo import GiGPOConfig, LoRASettings
from rllib_gigpo.gigpo import GiGPO


def config_of(learner_gpus: float = 0, engine_gpus: float = 0, **engines: Any) -> GiGPOConfig:
    return (
        GiGPOConfig()
        .environment("KeyDoor")
        .llm(model="tiny", max_prompt_tokens=64, max_response_tokens=8)
        .learners(num_gpus_per_learner=learner_gpus)
        .engines(**{"engine": "vllm", "engine_num_gpus": engine_gpus, **engines})
    )


@pytest.mark.parametrize(
    ("learner_gpus", "engine_gpus", "num_engines", "road"),
    [
        (0, 0, 1, "ray"),
        (1, 0, 1, "ray"),
        (0, 1, 1, "ray"),
        (0.5, 0.5, 1, "ipc"),
        (1, 1, 1, "nccl"),
        (1, 0.5, 1, "nccl"),
        (0.5, 2, 1, "nccl"),
        (1, 1, 4, "nccl"),
        # The engines may share a GPU that is not the learner's.
        (1, 0.5, 2, "ray"),
        # One engine shares the learner's GPU, the other has another one.
        (0.5, 0.5, 2, "ray"),
        (0.25, 0.25, 3, "ipc"),
        # 1.0000000000000002 in floating point.
        (0.09, 0.07, 13, "ipc"),
        # Fractions, but no two of them fit on one GPU.
        (0.7, 0.7, 1, "nccl"),
        (1, 0.6, 4, "nccl"),
    ],
)
def test_auto_takes_the_road_that_the_gpus_allow(learner_gpus, engine_gpus, num_engines, road):
    options = {"tensor_parallel_size": engine_gpus} if engine_gpus > 1 else {}
    config = config_of(learner_gpus, engine_gpus, num_engines=num_engines, engine_options=options)
    config.validate()
    assert config.weight_road == road
    assert config.vllm_settings.weight_transfer == (None if road == "ray" else road)


def test_the_engines_of_all_policies_count():
    def of_policies(*gpus: float) -> GiGPOConfig:
        return config_of(*gpus).multi_agent(policies={"a", "b"})

    # A group of NCCL is of one policy: the two engines may share the second GPU.
    assert of_policies(1, 0.5).weight_road == "nccl"
    assert of_policies(0.5, 0.5).weight_road == "ray"
    assert of_policies(0.5, 0.25).weight_road == "ipc"
    assert of_policies(1, 1).weight_road == "nccl"


def test_adapters_and_in_process_engines_take_the_store():
    assert config_of(1, 1).llm(lora=LoRASettings(rank=4, alpha=8)).weight_road == "ray"
    assert config_of(1, 0, engine="transformers").weight_road == "ray"


@pytest.mark.parametrize("road", ["ray", "nccl", "ipc"])
def test_a_road_that_is_asked_for_is_taken(road):
    gpus = 0.5 if road == "ipc" else 1
    config = config_of(gpus, gpus, weight_sync=road)
    config.validate()
    assert config.weight_road == road


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of(1, 1, weight_sync="rdma"), "expected one of 'auto', 'ray', 'nccl', 'ipc'"),
        (config_of(1, 0, engine="transformers", weight_sync="nccl"), "set engine='vllm'"),
        (config_of(1, 0, weight_sync="nccl"), "engine_num_gpus=0"),
        (config_of(0, 1, weight_sync="ipc"), "num_gpus_per_learner=0"),
        (config_of(0.5, 0.5, weight_sync="nccl"), "cannot share a GPU"),
        (config_of(1, 0.5, weight_sync="ipc"), "only processes on one GPU"),
        (
            config_of(1, 0.5, weight_sync="nccl", num_engines=2),
            "engine_num_gpus=0.5 and 2 engines in all: two members of an NCCL group cannot share",
        ),
        (
            config_of(0.5, 0.5, weight_sync="ipc", num_engines=2),
            "2 engines in all: only processes on one GPU can do so; give learner and engines",
        ),
        (
            config_of(0.3, 0.3, weight_sync="ipc").learners(num_learners=2),
            "num_gpus_per_learner=0.3 with num_learners=2",
        ),
        (
            config_of(1, 1, weight_sync="nccl").llm(lora=LoRASettings(rank=4, alpha=8)),
            "adapters are small",
        ),
        (
            config_of(1, 1, weight_sync="nccl").learners(num_learners=2, sharding="fsdp"),
            "which holds a part of the weights",
        ),
    ],
)
def test_a_road_that_leads_nowhere_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_placement_of_one_shared_gpu_and_of_separate_ones():
    """The main process (with its local learner) and one bundle per engine."""
    shared = config_of(0.5, 0.5, engine_sleep=True)
    bundles = GiGPO.default_resource_request(shared.to_dict()).bundles
    assert bundles == [{"CPU": 1.0, "GPU": 0.5}, {"CPU": 1.0, "GPU": 0.5}]
    options = {"tensor_parallel_size": 2}
    separate = config_of(1, 2, num_engines=2, engine_options=options).learners(num_learners=2)
    bundles = GiGPO.default_resource_request(separate.to_dict()).bundles
    assert sum(bundle.get("GPU", 0) for bundle in bundles) == 2 * 1 + 2 * 2
    assert bundles[-2:] == [{"CPU": 1.0, "GPU": 2.0}] * 2
    assert separate.vllm_settings.weight_transfer == "nccl"
