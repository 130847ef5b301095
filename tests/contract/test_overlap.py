"""Rollouts of the next iteration beside the update: bounded staleness, nothing lost."""

from __future__ import annotations

import pytest
import ray
from ray.rllib.core import DEFAULT_MODULE_ID

from tests.tiny_runs import tiny_config

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def algorithm(local_ray):
    config = tiny_config(max_staleness=1, entropy_coeff=1.0).env_runners(num_env_runners=2)
    algorithm = config.build_algo()
    yield algorithm
    algorithm.stop()


def test_rows_are_one_version_old_from_the_second_iteration_on(algorithm):
    results = [algorithm.train() for _ in range(3)]
    assert [r["env_runners"]["staleness"] for r in results] == [0.0, 1.0, 1.0]
    assert all(r["env_runners"]["num_episodes"] == 4 for r in results)


def test_the_correction_is_on_and_sees_the_older_policy(algorithm):
    assert algorithm.config.correction is not None
    learned = algorithm.train()["learners"][DEFAULT_MODULE_ID]
    # Recomputed with the present weights against an engine that had those of the update before.
    assert learned["engine_logp_gap"] > 0
    assert learned["correction_max"] > 0


def test_a_runner_that_dies_while_playing_ahead_costs_no_group(algorithm):
    algorithm.sampler.play_ahead(algorithm.num_updates)
    ray.kill(
        next(iter(algorithm.env_runner_group._worker_manager.actors().values())), no_restart=False
    )
    assert algorithm.train()["env_runners"]["num_episodes"] == 4


def test_evaluation_in_between_uses_the_present_weights(algorithm):
    algorithm.train()
    algorithm.evaluate()
    assert algorithm.weights.version == algorithm.num_updates
    assert algorithm.train()["env_runners"]["staleness"] == 1.0
