"""Policies that need no model, and the episodes they play."""

from __future__ import annotations

import random

import pytest

from envs.key_door import KeyDoor
from envs.key_door_team import KeyDoorTeam
from envs.spaces import TextSpace
from rllib_gigpo.agent import AgentProfile, ChatTemplate, LastSteps, NoMemory
from rllib_gigpo.games import SOLO_AGENT, Game
from rllib_gigpo.scripted import (
    NoLegalActionError,
    expert,
    half_expert,
    play_episode,
    random_legal,
)
from tests.fakes import Countdown

PROFILE = AgentProfile(ChatTemplate("{observation}"), memory=LastSteps(1))


def always(*actions):
    """A policy that takes the given actions in turn, then the last for ever."""
    left = list(actions)
    return lambda env, observation, info, rng: left.pop(0) if len(left) > 1 else left[0]


def play(env, policy, profile=PROFILE, seed=0, **kwargs):
    return play_episode(Game(env, "env"), profile, policy, random.Random(0), seed=seed, **kwargs)


class TestRandomLegal:
    def test_it_draws_every_admissible_action(self):
        rng = random.Random(0)
        info = {"admissible_actions": ["a", "b"]}
        assert {random_legal(Countdown(), "", info, rng) for _ in range(20)} == {"a", "b"}

    def test_an_environment_may_draw_its_own(self):
        class Own(Countdown):
            def random_action(self, rng):
                return f"own {rng.randrange(3)}"

        info = {"admissible_actions": ["a"]}
        rng = random.Random(0)
        drawn = {random_legal(Own(), "", info, rng) for _ in range(20)}
        assert drawn == {"own 0", "own 1", "own 2"}

    def test_examples_of_the_action_space_serve_where_nothing_is_listed(self):
        rng = random.Random(0)
        assert {random_legal(Countdown(), "", {}, rng) for _ in range(20)} == {"down", "jump"}

    def test_an_environment_that_tells_nothing_is_refused(self):
        env = Countdown()
        env.action_space = TextSpace()
        with pytest.raises(NoLegalActionError, match="Countdown offers no action to draw"):
            random_legal(env, "", {"admissible_actions": []}, random.Random(0))


class TestExperts:
    def test_an_expert_is_the_environments_own(self):
        env = KeyDoor()
        env.reset(seed=0)
        assert expert(env, "", {}, random.Random(0)) == env.expert_action()

    def test_an_environment_without_one_is_refused(self):
        with pytest.raises(ValueError, match=r"Countdown has no expert_action\(\)"):
            expert(Countdown(), "", {}, random.Random(0))

    def test_half_of_the_actions_are_the_experts(self):
        env = KeyDoor()
        _, info = env.reset(seed=0)
        rng = random.Random(0)
        best = env.expert_action()
        same = sum(half_expert(env, "", info, rng) == best for _ in range(400))
        # 1/2 + 1/2 * 1/4 = 0.625 of them: 250 expected, a standard deviation is 10.
        assert 220 <= same <= 280


class TestPlayEpisode:
    def test_every_step_is_told_as_a_model_would_see_it(self):
        # 4 -> "wait" is invalid, 4 -> jump 2 -> jump 0.
        episode = play(Countdown(4), always("wait", "jump"))
        assert [step.action for step in episode.steps] == ["wait", "jump", "jump"]
        assert [step.anchor for step in episode.steps] == ["left 4", "left 4", "left 2"]
        assert [step.reward for step in episode.steps] == [0.0, 0.0, 1.0]
        assert [step.is_valid for step in episode.steps] == [False, True, True]
        last = episode.steps[-1].context
        assert (last.task, last.observation, last.step) == ("count to 0", "left 2", 2)
        assert (last.history, last.history_length) == (
            "[Observation 2: 'left 4', Action 2: 'jump']",
            1,
        )
        assert last.admissible_actions == ("down", "jump")
        assert (episode.length, episode.truncated, episode.verdict["won"]) == (3, False, True)

    def test_the_users_anchor_counts(self):
        own = AgentProfile(
            ChatTemplate("{observation}"), anchor=lambda seen, info: int(seen[-1]) // 2
        )
        steps = play(Countdown(3), always("down"), own).steps
        assert [step.anchor for step in steps] == [1, 1, 0]

    def test_seed_and_options_choose_the_episode(self):
        env = Countdown()
        starts = {play(env, always("down"), seed=seed).length for seed in range(20)}
        assert starts == {2, 3, 4}
        assert play(env, always("down"), options={"start": 7}).length == 7

    def test_a_limit_truncates(self):
        episode = play(KeyDoor(horizon=2), always("go nowhere"))
        assert (episode.length, episode.truncated) == (2, True)
        assert episode.verdict["won"] is False

    def test_a_team_is_rewarded_and_judged_agent_by_agent(self):
        env = KeyDoorTeam(horizon=20)
        profile = AgentProfile(ChatTemplate("{observation}"), memory=NoMemory())
        played = []

        def policy(env, observation, info, rng):
            played.append("go nowhere" if len(played) == 1 else env.expert_action())
            return played[-1]

        episode = play(env, policy, profile)
        steps = episode.steps
        assert episode.verdict["won"] is True
        assert [step.agent for step in steps[:3]] == ["agent_0", "agent_1", "agent_0"]
        # Only agent_1's first move was invalid, which it is told when it moves again.
        assert [step.is_valid for step in steps] == [True, False, *[True] * (len(steps) - 2)]
        # Both earn the reward: the last mover for that move, the other for its move before.
        assert [step.reward for step in steps] == [*[0.0] * (len(steps) - 2), 1.0, 1.0]
        assert [step.context.step for step in steps[:4]] == [0, 0, 1, 1]
        assert SOLO_AGENT not in {step.agent for step in steps}

    def test_what_an_agent_earns_before_its_first_step_counts_in_that(self):
        class Generous(KeyDoorTeam):
            def step(self, action_dict):
                observations, rewards, *rest = super().step(action_dict)
                return observations, {**rewards, "agent_1": 0.25}, *rest

        steps = play(Generous(horizon=3), always("go nowhere")).steps
        assert [step.agent for step in steps] == ["agent_0", "agent_1", "agent_0"]
        # 0.25 after each of three steps: agent_1 acts in the second, so that all three are its own.
        assert [step.reward for step in steps] == [0.0, 0.75, 0.0]
