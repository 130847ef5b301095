"""Episodes of 500 steps: every step costs what the first one costs."""

from __future__ import annotations

import pickle

import gymnasium
import numpy as np
import pytest

from envs.spaces import TextSpace
from rllib_gigpo import AgentProfile, ChatTemplate, GiGPOConfig, LastSteps
from rllib_gigpo.rows import episodes_to_batch
from tests.tiny_runs import SHAPE

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

PROMPT_LIMIT = 48


class Treadmill(gymnasium.Env):
    """Ten places in a ring; being at place 7 gives 1. It ends at its horizon only."""

    observation_space, action_space = TextSpace(), TextSpace(["on", "back"])

    def __init__(self, *, horizon: int = 500):
        self.horizon = horizon

    @classmethod
    def words(cls):
        return ["place", *map(str, range(10)), "on", "back"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = int(self.np_random.integers(10)), 0
        return f"place {self.place}", {"admissible_actions": ["on", "back"]}

    def step(self, action):
        # Whatever an untrained model says moves it, so that members of a group part.
        self.place = (self.place + (1 if len(action) % 2 else -1)) % 10
        self.steps += 1
        info = {"is_action_valid": action in ("on", "back"), "won": False}
        reward = float(self.place == 7)
        return f"place {self.place}", reward, False, self.steps == self.horizon, info


def build(horizon: int):
    profile = AgentProfile(
        ChatTemplate("{observation}", user_with_history="{history} {observation}"),
        memory=LastSteps(1000),
        vocabulary=("<action> on back </action> Observation Action step 1 2 3",),
    )
    return (
        GiGPOConfig()
        .environment("tests.contract.test_long_horizon:Treadmill", env_config={"horizon": horizon})
        .agent(profile=profile)
        .llm(model="tiny", options=SHAPE, max_prompt_tokens=PROMPT_LIMIT, max_response_tokens=4)
        .training(num_groups=1, group_size=2, kl_coeff=0.0, num_minibatches=2, minibatch_size=None)
        .build_algo()
    )


def train(horizon: int):
    """One iteration; its result and the episodes that it trained on."""
    algorithm, trained = build(horizon), []
    to_rows = algorithm._to_rows
    algorithm._to_rows = lambda episodes: trained.extend(episodes) or to_rows(episodes)
    result = algorithm.train()
    algorithm.stop()
    return result, trained, algorithm.config


def bytes_per_step(episodes) -> float:
    return len(pickle.dumps(episodes)) / sum(map(len, episodes))


def test_an_episode_of_500_steps_trains_and_a_step_costs_no_more_than_in_one_of_50():
    _, short, _ = train(50)
    result, long, config = train(500)
    assert [len(episode) for episode in long] == [500, 500]
    # A transcript that grew with the episode would cost ten times as much per step.
    assert bytes_per_step(long) == pytest.approx(bytes_per_step(short), rel=0.1)

    (rows,) = episodes_to_batch(long, config.anchor_rule, config.module_of).policy_batches.values()
    lengths = np.array([len(ids) for ids in rows["prompt_ids"]])
    # The memory of 1,000 steps is cut to what fits, and fills it.
    assert lengths.max() <= PROMPT_LIMIT
    assert np.median(lengths[100:]) > PROMPT_LIMIT - 12

    assert result["env_runners"]["episode_len_mean"] == 500
    learned = result["learners"]["default_policy"]
    assert np.isfinite(learned["gradient_norm"])
    assert learned["gradient_norm"] > 0
