"""Critic, whitening and KL in the reward: two learner processes take the steps of one."""

from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import SampleBatch

from rllib_gigpo.rows import object_array
from tests.learner_pairs import Pair
from tests.tiny_runs import build_learner, module_of, parameters, random_rows, update

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

PPO: dict[str, Any] = {
    "estimator": "gae",
    "critic": "head",
    "omega": 0.0,
    "gamma": 0.9,
    "lambda_": 0.8,
    "whiten_advantages": True,
    "critic_lr": 0.1,
    "kl_coeff": 0.5,
    "lr": 0.1,
    "num_minibatches": 2,
    "num_epochs": 2,
    "grad_clip": 0.5,
}
CASES: dict[str, dict[str, Any]] = {
    "ppo over steps": {},
    "ppo over tokens": {"gae_level": "token"},
    "ppo with an adaptive KL in the reward": {
        "kl_in": "reward",
        "kl_estimator": "k1",
        "kl_target": 0.01,
        "kl_horizon": 100,
    },
    "ppo over tokens with the KL in the reward": {
        "gae_level": "token",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    # The critic that the processes have is neither asked nor trained here.
    "reinforce++": {
        "estimator": "reinforce",
        "critic": None,
        "lambda_": 1.0,
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    "reinforce++ with baseline": {
        "estimator": "gigpo",
        "critic": None,
        "lambda_": 1.0,
        "f_norm": "none",
    },
}


@pytest.fixture(scope="module")
def pair(local_ray):
    pair = Pair(PPO, invalid_action_penalty=0.1)
    yield pair
    pair.algorithm.stop()


def rows(seed: int) -> SampleBatch:
    """13 rows, one of them far longer than the others, and two truncated episodes."""
    batch = random_rows(13, steps=1, group_size=13, seed=seed)
    batch["prompt_ids"][4] = np.arange(60, dtype=np.int32) % 30
    batch["truncated"] = np.isin(np.arange(13), (2, 9))
    batch["next_prompt_ids"] = object_array(
        [np.arange(5 + i, dtype=np.int32)[: 99 if i in (2, 9) else 0] for i in range(13)]
    )
    return batch


def test_an_algorithm_with_two_learners_values_truncated_episodes(pair):
    # First of all, because the cases below leave the learners with settings of their own.
    # Untrained, it plays to the horizon: every episode is truncated and goes on with a value.
    result = pair.algorithm.train()
    assert result["env_runners"]["truncated_rate"] > 0.5
    found = result["learners"][DEFAULT_MODULE_ID]
    assert np.isfinite(found["vf_loss"])
    assert found["critic_gradient_norm"] > 0.0


@pytest.mark.parametrize("case", CASES)
def test_two_learners_step_like_one(pair, case):
    pair.begin(**CASES[case])
    alone = build_learner(**{**PPO, **CASES[case]})
    for iteration in range(3):
        batch = rows(iteration)
        expected = update(alone, batch, iteration)
        for report in pair.update(batch, iteration):
            assert set(expected) <= set(report)
            for name in (
                "gradient_norm",
                "critic_gradient_norm",
                "vf_loss",
                "vf_explained_var",
                "kl",
                "kl_coeff",
                "policy_loss",
                "advantage_std",
            ):
                if name in expected:
                    close = pytest.approx(expected[name], rel=1e-4, abs=1e-6)
                    assert report[name] == close, name
        own = alone.advantages[DEFAULT_MODULE_ID].total
        for found in pair.each(lambda learner: learner.advantages[DEFAULT_MODULE_ID].total):
            np.testing.assert_allclose(found, own, rtol=1e-4, atol=1e-5)
    for weights in pair.weights():
        torch.testing.assert_close(weights, parameters(alone), rtol=1e-4, atol=1e-5)
    if CASES[case].get("critic", "head"):
        head = module_of(alone).value_head.state_dict()
        found = pair.each(lambda learner: learner.module[DEFAULT_MODULE_ID].value_head.state_dict())
        for other in found:
            torch.testing.assert_close(other, head, rtol=1e-4, atol=1e-5)
    assert expected["gradient_norm"] > 0.0
