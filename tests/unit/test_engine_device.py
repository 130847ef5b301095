"""Ray hides no GPU from a process that has reserved none: the engine inside must not take one."""

from __future__ import annotations

import pytest
import torch

from rllib_gigpo.env_runner import LLMEnvRunner
from tests.tiny_runs import tiny_config


@pytest.mark.parametrize(
    ("worker_index", "learners", "device"),
    [
        (1, {}, "cpu"),
        (0, {}, "cpu"),
        # The GPU is the learner's, which has a process of its own.
        (0, {"num_learners": 1, "num_gpus_per_learner": 1}, "cpu"),
    ],
)
def test_an_engine_is_on_the_cpu_where_no_gpu_is_reserved(
    monkeypatch, worker_index, learners, device
):
    config = tiny_config().learners(**learners)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    runner = LLMEnvRunner(config=config, worker_index=worker_index)
    assert runner.engine._device.type == device
    runner.stop()


@pytest.mark.parametrize(
    ("worker_index", "runners", "learners"),
    [(1, {"num_gpus_per_env_runner": 0.5}, {}), (0, {}, {"num_gpus_per_learner": 1})],
)
def test_an_engine_takes_the_gpu_that_is_reserved(monkeypatch, worker_index, runners, learners):
    config = tiny_config().env_runners(**runners).learners(**learners)
    asked = []
    monkeypatch.setattr(
        "rllib_gigpo.env_runner.build_engine", lambda config, device: asked.append(device)
    )
    runner = LLMEnvRunner(config=config, worker_index=worker_index)
    assert runner.engine is None
    # TransformersEngine takes CUDA where it is told no device and there is a GPU.
    assert asked == [None]
