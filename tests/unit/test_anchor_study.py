"""Groups played without a model, and what GiGPO makes of them: numbers computed by hand."""

from __future__ import annotations

import pytest

from envs.key_door_team import KeyDoorTeam
from rllib_gigpo.agent import AgentProfile, ChatTemplate, NoMemory
from rllib_gigpo.agent.prompt import PromptContext
from rllib_gigpo.anchor_study import AnchorStudy, play_groups, study, verdict
from rllib_gigpo.grouping import AnchorRule
from rllib_gigpo.scripted import ScriptedEpisode, Step, random_legal
from tests.fakes import Countdown

PROFILE = AgentProfile(ChatTemplate("{observation}"), memory=NoMemory())


def episode(*steps, won=None, agents=("agent",)):
    """An episode of (anchor, reward) pairs, the agents in turn."""
    told = [
        Step(
            agents[n % len(agents)],
            PromptContext(task="", observation=anchor, step=n // len(agents)),
            anchor,
            "act",
            reward,
            is_valid=anchor != "bad",
        )
        for n, (anchor, reward) in enumerate(steps)
    ]
    facts = {} if won is None else {"won": won}
    return ScriptedEpisode(told, len(told), False, facts)


GROUPS = [
    [
        # Returns from the end at gamma 0.5: B 1, A 0.5.
        episode(("A", 0.0), ("B", 1.0), won=True),
        # bad 0, A 0.
        episode(("A", 0.0), ("bad", 0.0), won=False),
    ],
    # Both episodes the same: no return differs.
    [episode(("A", 0.0), ("C", 2.0), won=True), episode(("A", 0.0), ("C", 2.0), won=True)],
]


def test_everything_by_hand():
    found = study(GROUPS, AnchorRule(), gamma=0.5)
    # 8 steps. Group 0: A twice (returns 0.5 and 0: both get a step advantage), B and bad once.
    # Group 1: A and C twice each, equal returns. Episode advantages: the 4 steps of group 0.
    assert found == AnchorStudy(
        episodes=4,
        success=0.75,
        return_mean=(1.0 + 0.0 + 2.0 + 2.0) / 4,
        length_mean=2.0,
        length_max=2,
        invalid_share=1 / 8,
        repeat_share=6 / 8,
        step_shares=(2 / 8, 6 / 8, 0.0, 0.0, 0.0, 0.0),
        step_advantage_share=2 / 8,
        episode_advantage_share=4 / 8,
    )


def test_success_is_unknown_where_the_environment_does_not_tell():
    assert study([[episode(("A", 1.0)), episode(("A", 0.0))]], AnchorRule()).success is None


def test_the_rule_decides_which_states_are_equal():
    groups = [[episode(("a" * 20, 1.0)), episode(("a" * 19 + "b", 0.0))]]
    assert study(groups, AnchorRule()).repeat_share == 0.0
    assert study(groups, AnchorRule("similarity", 0.9)).repeat_share == 1.0


def test_agents_of_a_team_are_told_apart():
    steps = (("A", 0.0), ("A", 1.0))
    groups = [[episode(*steps, agents=("one", "two")), episode(*steps, agents=("one", "two"))]]
    found = study(groups, AnchorRule())
    # Each agent's A is met in both episodes; the returns per agent are 0 and 1.
    assert found.step_shares[1] == 1.0
    assert found.step_advantage_share == 0.0
    assert found.return_mean == 0.5


def test_a_group_starts_from_one_seed():
    env = Countdown()
    groups = play_groups(env, PROFILE, random_legal, groups=3, group_size=2, seed=7)
    assert env.seeds == [7, 7, 8, 8, 9, 9]
    assert [len(group) for group in groups] == [2, 2, 2]
    for group in groups:
        assert group[0].steps[0].anchor == group[1].steps[0].anchor


def test_a_real_team_can_be_studied():
    groups = play_groups(KeyDoorTeam(), PROFILE, random_legal, groups=2, group_size=4)
    found = study(groups, AnchorRule())
    assert found.episodes == 8
    assert 0.5 < found.repeat_share <= 1.0
    assert found.length_max <= 20


@pytest.mark.parametrize(
    ("repeat", "credit", "words"),
    [
        (0.04, 0.0, "GiGPO would be GRPO here: 4% of the steps"),
        (0.5, 0.04, "No credit to give yet: 50% of the steps meet a state again and 4% get"),
        (0.5, 0.3, "GiGPO will help here: 50% of the steps meet a state again and 30% get"),
    ],
)
def test_the_verdict_says_what_to_do(repeat, credit, words):
    found = study(GROUPS, AnchorRule())
    assert verdict(found._replace(repeat_share=repeat, step_advantage_share=credit)).startswith(
        words
    )
