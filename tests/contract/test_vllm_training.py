"""GiGPO on vLLM engines: one trial's engines serve its runners and its evaluation, and may die."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_gigpo import GiGPOConfig, LoRASettings
from rllib_gigpo.gigpo import GiGPO, engine_bundles
from rllib_gigpo.sampler import training_tasks
from tests.tiny_runs import tiny_config
from tests.with_vllm import skip_without_vllm

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

_OPTIONS = {"kv_cache_memory_bytes": 1 << 26}


def vllm_config(**engines) -> GiGPOConfig:
    return (
        tiny_config(kl_coeff=0.01)
        .env_runners(num_env_runners=2)
        .engines(engine="vllm", engine_options=_OPTIONS, **engines)
        .evaluation(evaluation_interval=None, evaluation_num_env_runners=1, evaluation_duration=2)
    )


@pytest.fixture(scope="module")
def algorithm(local_ray):
    skip_without_vllm()
    algorithm = vllm_config().build_algo()
    yield algorithm
    algorithm.stop()


def engines(algorithm: GiGPO) -> list:
    return list(algorithm.weights.fleet.fleet.engines[DEFAULT_MODULE_ID])


def kill(engine) -> None:
    os.kill(ray.get(engine.birth.remote()).pid, signal.SIGKILL)


def test_rows_carry_the_version_that_was_synced(algorithm):
    for version in range(2):
        tasks = training_tasks(algorithm.config, version)
        collected = algorithm.play(algorithm.env_runner_group, tasks)
        versions = {
            int(v) for e in collected.episodes for v in e.extra_model_outputs["weight_version"]
        }
        assert versions == {algorithm.num_updates}
        algorithm.train()


def test_engine_and_learner_agree_after_every_sync(algorithm):
    result = algorithm.train()
    learned = result["learners"][DEFAULT_MODULE_ID]
    # Recomputed old log-probabilities against the engine's own, fp32.
    assert learned["engine_logp_gap"] < 1e-4
    assert learned["engine_logp_gap_max"] < 1e-3


def test_evaluation_shares_the_engines(algorithm):
    before = ray.get(engines(algorithm)[0].birth.remote()).incarnation
    results = algorithm.evaluate()["env_runners"]
    assert results["num_episodes"] == 2
    assert ray.get(engines(algorithm)[0].birth.remote()).incarnation == before


def test_an_iteration_survives_the_death_of_its_engine(algorithm):
    version = algorithm.num_updates
    expected = algorithm.play(algorithm.env_runner_group, training_tasks(algorithm.config, 77))
    kill(engines(algorithm)[0])
    collected = algorithm.play(algorithm.env_runner_group, training_tasks(algorithm.config, 77))
    assert collected.dropped == ()
    for episode, twin in zip(collected.episodes, expected.episodes, strict=True):
        assert set(episode.extra_model_outputs["weight_version"]) == {version}
        # The engine that came back has the newest weights, so it says the same.
        for action, other in zip(episode.actions, twin.actions, strict=True):
            np.testing.assert_array_equal(action, other)
    assert algorithm.train()["env_runners"]["num_episodes"] == 4


def test_an_iteration_survives_the_death_of_a_runner(algorithm):
    actors = algorithm.env_runner_group._worker_manager.actors()
    ray.kill(next(iter(actors.values())), no_restart=False)
    result = algorithm.train()["env_runners"]
    assert result["num_episodes"] == 4
    assert result["num_groups_dropped"] == 0


def test_a_sync_that_reaches_no_engine_stops_the_run(algorithm, monkeypatch):
    monkeypatch.setattr(algorithm.weights.fleet, "publish", lambda *parcel: None)
    monkeypatch.setattr(algorithm.weights, "_check_checksums", lambda: None)
    with pytest.raises(RuntimeError, match="serves weight version"):
        algorithm.weights.push(algorithm.num_updates + 1)
    monkeypatch.undo()
    algorithm.weights.push(algorithm.num_updates)


def test_old_weights_under_a_new_version_stop_the_run(algorithm, monkeypatch):
    weights = algorithm.weights
    old = weights._published[DEFAULT_MODULE_ID]
    publish = weights.fleet.publish

    def publish_old(module_id, published, send):
        publish(module_id, replace(published, packed=old.packed), send)

    algorithm.first_learner(_change_the_last_bits)
    monkeypatch.setattr(weights.fleet, "publish", publish_old)
    with pytest.raises(RuntimeError, match="computes with other tensors"):
        weights.push(algorithm.num_updates)
    monkeypatch.undo()
    weights.push(algorithm.num_updates)


def _change_the_last_bits(learner) -> None:
    """A step too small for any probe to see."""
    with torch.no_grad():
        for parameter in learner.module[DEFAULT_MODULE_ID].parameters():
            parameter.mul_(1 + 1e-6)


def test_a_trial_reserves_its_engines():
    config = vllm_config(num_engines=2, engine_num_gpus=0.5, engine_num_cpus=2)
    assert engine_bundles(config) == [{"CPU": 2, "GPU": 0.5}] * 2
    assert engine_bundles(tiny_config()) == []


def test_resources_of_a_trial_hold_the_engine_bundles():
    bundles = GiGPO.default_resource_request(vllm_config(num_engines=3).to_dict()).bundles
    # main process, 2 runners, 1 evaluation runner, 3 engines
    assert len(bundles) == 7
    assert bundles[-3:] == [{"CPU": 1.0}] * 3


def test_an_engine_that_comes_back_serves_the_newest_adapter(local_ray):
    skip_without_vllm()
    config = (
        tiny_config(kl_coeff=0.01, invalid_action_penalty=0.5, optimizer_name="adamw", lr=0.05)
        .llm(lora=LoRASettings(rank=4, alpha=8))
        .engines(engine="vllm", engine_options=_OPTIONS)
    )
    algorithm = config.build_algo()
    try:
        algorithm.train()
        kill(engines(algorithm)[0])
        learned = algorithm.train()["learners"][DEFAULT_MODULE_ID]
        # The adapter differs from the base by now, and the new engine process speaks with it.
        assert learned["kl"] > 1e-3
        assert learned["engine_logp_gap"] < 1e-4
    finally:
        algorithm.stop()
