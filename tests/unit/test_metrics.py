"""Metrics of episodes and of anchor groups, against numbers counted by hand."""

import math

import numpy as np
import pytest
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rllib_gigpo.metrics import episode_metrics, episode_return, step_group_metrics
from tests.episodes import Step, solo, team

# One long failure and two short successes.
LONG = solo(
    0,
    0,
    *(Step("a", -1.0, prompt=[1] * 10, response=[2] * 2, well_formed=False) for _ in range(5)),
    Step("a", 0.0, prompt=[1] * 10, response=[2] * 8, reason="length", accepted=True),
    truncated=True,
    won=False,
    task_type="heat",
    numbers={"score": 0.2},
)
SHORT = solo(
    0,
    1,
    Step("a", 1.0, prompt=[1] * 4, response=[2] * 3, accepted=False),
    Step("b", 9.0, prompt=[1] * 4, response=[2] * 3, accepted=True),
    won=True,
    task_type="heat",
    numbers={"score": 1.0},
)
QUICK = solo(1, 0, Step("a", 7.0), won=True, task_type="cool")


def test_every_episode_counts_once_however_long_it_is():
    found = episode_metrics([LONG, SHORT, QUICK])
    # Returns -5, 10, 7; lengths 6, 2, 1. Over steps the mean return would be (-30+20+7)/9 = -1/3.
    assert found["episode_return_mean"] == pytest.approx(12 / 3)
    assert found["episode_len_mean"] == pytest.approx(9 / 3)
    assert found["success_rate"] == pytest.approx(2 / 3)
    assert found["truncated_rate"] == pytest.approx(1 / 3)
    assert found["success_rate/heat"] == pytest.approx(1 / 2)
    assert found["success_rate/cool"] == 1.0
    assert found["num_episodes"] == 3
    assert found["num_env_steps_sampled"] == 9


def test_rates_and_token_counts_are_means_over_steps():
    found = episode_metrics([LONG, SHORT, QUICK])
    # Valid: the last of LONG, the second of SHORT, and QUICK's: 3 of 9.
    assert found["valid_action_rate"] == pytest.approx(3 / 9)
    # 6 x 10 + 2 x 4 + 2 tokens of prompts, 5 x 2 + 8 + 2 x 3 + 1 of responses.
    assert found["prompt_tokens_mean"] == pytest.approx(70 / 9)
    assert found["response_tokens_mean"] == pytest.approx(25 / 9)
    assert found["response_cut_rate"] == pytest.approx(1 / 9)


def test_other_numbers_of_the_environment_are_means_over_the_episodes_that_have_them():
    found = episode_metrics([LONG, SHORT, QUICK])
    assert found["score_mean"] == pytest.approx(0.6)
    # Both heat; the one that cools tells no score.
    assert found["score_mean/heat"] == pytest.approx(0.6)
    assert "score_mean/cool" not in found


def test_what_the_environment_does_not_tell_is_left_out():
    found = episode_metrics([solo(0, 0, Step("a", 1.0))])
    assert not [name for name in found if name.startswith(("success", "score"))]
    assert found["valid_action_rate"] == 1.0


def test_an_environment_that_tells_of_its_successes_alone_has_lost_the_other_episodes():
    lost = solo(0, 1, Step("a", 0.0), task_type="heat")
    found = episode_metrics([QUICK, lost, lost, lost])
    assert found["success_rate"] == pytest.approx(1 / 4)
    assert found["success_rate/cool"] == 1.0
    assert found["success_rate/heat"] == 0.0


def test_a_teams_return_is_the_mean_over_its_agents():
    both = team(
        0,
        0,
        Step("a", 1.0, agent="x"),
        Step("b", 4.0, agent="y", well_formed=False),
        Step("c", 2.0, agent="x"),
        won=True,
    )
    # x has 1 + 2, y has 4.
    assert episode_return(both) == pytest.approx(3.5)
    found = episode_metrics([both, both])
    assert found["episode_return_mean"] == pytest.approx(3.5)
    assert found["episode_len_mean"] == 3
    assert found["success_rate"] == 1.0
    assert found["num_episodes"] == 2
    assert found["valid_action_rate"] == pytest.approx(2 / 3)
    assert found["agent_episode_return_mean/x"] == pytest.approx(3.0)
    assert found["agent_episode_return_mean/y"] == pytest.approx(4.0)
    assert found["module_episode_return_mean/policy of x"] == pytest.approx(3.0)


def test_an_episode_without_steps_returns_0():
    cut = team(0, 0, truncated=True)
    assert episode_return(cut) == 0.0
    assert episode_return(solo(0, 0, truncated=True)) == 0.0
    found = episode_metrics([cut, solo(0, 1, Step("a", 4.0))])
    assert found["episode_return_mean"] == pytest.approx(2.0)
    assert found["episode_len_mean"] == pytest.approx(0.5)
    assert not any(math.isnan(value) for value in found.values())


# Anchor groups -----------------------------------------------------------------------------------


def batch(**modules: list[tuple[int, int, int, int]]) -> MultiAgentBatch:
    """Rows from (group, agent, anchor, number of equal rows)."""
    columns = {}
    for module, kinds in modules.items():
        rows = np.array([kind[:3] for kind in kinds for _ in range(kind[3])])
        columns[module] = SampleBatch(dict(zip(("group", "agent", "anchor"), rows.T, strict=True)))
    return MultiAgentBatch(columns, env_steps=0)


def test_the_histogram_counts_groups_and_their_steps():
    found = step_group_metrics(
        # Sizes 1, 3, 1, 9, 6: the anchor is the same in two groups, and for two agents.
        batch(policy=[(0, 0, 5, 1), (1, 0, 5, 3), (1, 1, 5, 1), (1, 0, 6, 9), (2, 0, 7, 6)])
    )
    assert found["step_groups/count"] == 5
    groups = {"1": 2, "2-5": 1, "6-8": 1, "9": 1, "10-49": 0, ">=50": 0}
    steps = {"1": 2, "2-5": 3, "6-8": 6, "9": 9, "10-49": 0, ">=50": 0}
    for name in groups:
        assert found[f"step_groups/group_share/{name}"] == pytest.approx(groups[name] / 5)
        assert found[f"step_groups/step_share/{name}"] == pytest.approx(steps[name] / 20)
    assert len(found) == 13


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (1, "1"),
        (2, "2-5"),
        (5, "2-5"),
        (6, "6-8"),
        (8, "6-8"),
        (9, "9"),
        (10, "10-49"),
        (49, "10-49"),
        (50, ">=50"),
        (400, ">=50"),
    ],
)
def test_the_edges_of_the_bins(size, name):
    found = step_group_metrics(batch(policy=[(0, 0, 0, size)]))
    full = {key for key, value in found.items() if value == 1.0 and key != "step_groups/count"}
    assert full == {f"step_groups/group_share/{name}", f"step_groups/step_share/{name}"}


def test_modules_are_counted_together_but_never_mixed():
    # Equal ids under two modules are two groups.
    found = step_group_metrics(batch(walker=[(0, 0, 0, 2)], thinker=[(0, 0, 0, 1)]))
    assert found["step_groups/count"] == 2
    assert found["step_groups/step_share/2-5"] == pytest.approx(2 / 3)
    assert found["step_groups/group_share/2-5"] == pytest.approx(1 / 2)
