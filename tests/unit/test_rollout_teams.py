"""Rollouts of teams: turns, rewards, verdicts and ends of every agent of an RLlib MultiAgentEnv."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from envs.key_door import KeyDoor
from envs.key_door_team import KeyDoorTeam
from rllib_gigpo.engines.base import Request
from rllib_gigpo.grouping import exact_anchors
from rllib_gigpo.metrics import episode_metrics
from rllib_gigpo.rows import agent_episodes, episodes_to_batch, step_is_valid
from tests.fakes import Countdown
from tests.stage import Stage, task, words


def east_then_nonsense(request: Request) -> str:
    """agent_0 walks, agent_1 breaks the format; the seat is in the request's id."""
    seat, step = map(int, request.request_id.split(":")[-2:])
    if seat == 1:
        return "nonsense" if step == 0 else "<action> go back </action>"
    return "<action> go east </action>"


def single(episode: Any) -> Mapping[str, Any]:
    return dict(agent_episodes(episode))


def expert_moves(seed: int) -> list[str]:
    env = KeyDoor()
    env.reset(seed=seed)
    moves = []
    is_over = False
    while not is_over:
        moves.append(env.expert_action())
        *_, is_over, _, _ = env.step(moves[-1])
    return moves


def test_a_won_team_episode():
    moves = expert_moves(seed=4)
    assert len(moves) >= 3

    def reply(request: Request) -> str:
        seat, step = map(int, request.request_id.split(":")[-2:])
        return f"<action> {moves[2 * step + seat]} </action>"

    stage = Stage(reply, make=KeyDoorTeam, policy_of=lambda agent: f"policy of {agent}")
    (episode,) = stage.play(task(env_seed=4))
    assert len(stage.engine.requests) == episode.env_steps() == len(moves)
    assert [request.policy_id for request in stage.engine.requests] == [
        f"policy of agent_{number % 2}" for number in range(len(moves))
    ]
    agents = single(episode)
    assert {agent: len(one) for agent, one in agents.items()} == {
        "agent_0": (len(moves) + 1) // 2,
        "agent_1": len(moves) // 2,
    }
    for agent, one in agents.items():
        # Both earn 1, each at its own last move.
        assert list(one.rewards) == [0.0] * (len(one) - 1) + [1.0]
        assert (one.is_terminated, one.is_truncated) == (True, False)
        assert one.module_id == f"policy of {agent}"
        assert all(step_is_valid(one, step) for step in range(len(one)))
        assert words(one.observations[len(one)]) == ""
    assert [words(a) for a in agents["agent_0"].actions] == [
        f"<action> {move} </action>" for move in moves[::2]
    ]
    assert [words(a) for a in agents["agent_1"].actions] == [
        f"<action> {move} </action>" for move in moves[1::2]
    ]
    assert episode.custom_data["won"] is True
    assert (episode.is_terminated, episode.is_truncated) == (True, False)


def test_each_agent_of_a_team_is_judged_by_its_own_actions():
    stage = Stage(east_then_nonsense, make=lambda: KeyDoorTeam(horizon=5))
    (episode,) = stage.play(task(env_seed=4))
    agents = single(episode)
    # Five moves: agent_0 makes the first, third and fifth, agent_1 the second and fourth.
    assert {agent: len(one) for agent, one in agents.items()} == {"agent_0": 3, "agent_1": 2}
    assert [step_is_valid(agents["agent_0"], step) for step in range(3)] == [True] * 3
    # "nonsense" breaks the format, "go back" is no move.
    assert [step_is_valid(agents["agent_1"], step) for step in range(2)] == [False, False]
    assert list(agents["agent_1"].extra_model_outputs["format_is_valid"]) == [False, True]
    assert episode.is_truncated
    for one in agents.values():
        assert list(one.rewards) == [0.0] * len(one)
        assert one.is_truncated


@pytest.mark.parametrize("limit", [1, 2])
def test_max_episode_steps_counts_each_agents_own_steps(limit):
    stage = Stage("nonsense", make=KeyDoorTeam, max_episode_steps=limit)
    (episode,) = stage.play(task(env_seed=4))
    # agent_0 reaches its limit first; agent_1 has then moved once less.
    assert {agent: len(one) for agent, one in single(episode).items()} == (
        {"agent_0": 1} if limit == 1 else {"agent_0": 2, "agent_1": 1}
    )
    assert (episode.is_terminated, episode.is_truncated) == (False, True)
    assert len(stage.engine.requests) == 2 * limit - 1


def test_a_cut_team_episode_keeps_no_verdict_of_an_earlier_action():
    # agent_0's first action is well written and no move of the game; its second is cut off before
    # the environment says anything about it.
    replies = ["<action> go back </action>", "<action> go east </action>"]
    stage = Stage(
        lambda r: replies[int(r.request_id.rpartition(":")[2])],
        make=KeyDoorTeam,
        max_episode_steps=2,
    )
    (episode,) = stage.play(task(env_seed=4))
    mover = single(episode)["agent_0"]
    assert [step_is_valid(mover, step) for step in range(2)] == [False, True]


def test_a_prompt_over_the_limit_ends_a_team_episode_too():
    class Wordy(KeyDoorTeam):
        """agent_1 sees more than fits."""

        def step(self, action_dict):
            observations, *rest = super().step(action_dict)
            return dict.fromkeys(observations, "key " * 60), *rest

    stage = Stage("nonsense", make=Wordy, max_prompt_tokens=40, on_long_prompt="end_episode")
    (episode,) = stage.play(task(env_seed=4))
    assert {agent: len(one) for agent, one in single(episode).items()} == {"agent_0": 1}
    assert episode.is_truncated
    assert len(stage.engine.requests) == 1


class Choir(MultiAgentEnv):
    """Two agents act at once; "b" ends by itself after its first step, the team after three."""

    def __init__(self):
        super().__init__()
        self.agents = self.possible_agents = ["a", "b"]
        space = Countdown().observation_space
        self.observation_spaces = self.action_spaces = dict.fromkeys("ab", space)
        self.acted: list[dict[str, str]] = []

    def reset(self, *, seed=None, options=None):
        return dict.fromkeys("ab", "left 3"), {"a": {}, "b": {}}

    def step(self, action_dict):
        self.acted.append(dict(action_dict))
        left = 3 - len(self.acted)
        seen = dict.fromkeys(action_dict, f"left {left}")
        rewards = {agent: 0.5 if agent == "b" else 2.0 for agent in action_dict}
        over = {"b": "b" in action_dict, "__all__": left == 0}
        return seen, rewards, over, {"__all__": False}, {agent: {} for agent in seen}


def test_agents_that_act_at_once_are_asked_at_once_and_leave_one_by_one():
    env = Choir()
    stage = Stage(
        lambda r: (
            "<action> down </action>" if ":0:0:" in r.request_id else "<action> wait </action>"
        ),
        make=lambda: env,
        turns=lambda r: r.seed % 5,
    )
    (episode,) = stage.play(task())
    first = {request.request_id.split(":")[-2] for request in stage.engine.requests[:2]}
    assert first == {"0", "1"}
    # After its end "b" neither speaks nor acts.
    assert [sorted(actions) for actions in env.acted] == [["a", "b"], ["a"], ["a"]]
    assert len(stage.engine.requests) == 4
    agents = single(episode)
    assert list(agents["a"].rewards) == [2.0, 2.0, 2.0]
    assert list(agents["b"].rewards) == [0.5]
    assert episode.is_terminated


# What an agent earns ------------------------------------------------------------------------------


class Relay(MultiAgentEnv):
    """Plays a script: who is shown something after each step, who has ended, and what is earned.

    Args:
        steps: Per step (shown, ended by themselves, rewards); the last one ends the episode.
        begin: Who is shown something at first.
    """

    def __init__(self, *steps: tuple[str, str, dict[str, float]], begin: str = "a"):
        super().__init__()
        self.agents = self.possible_agents = list("abc")
        self.steps, self.begin, self.taken = steps, begin, 0

    def reset(self, *, seed=None, options=None):
        self.taken = 0
        return dict.fromkeys(self.begin, "left 1"), {}

    def step(self, action_dict):
        shown, ended, rewards = self.steps[self.taken]
        self.taken += 1
        earned = {**dict.fromkeys(action_dict, 0.0), **rewards}
        over = {**dict.fromkeys(ended, True), "__all__": self.taken == len(self.steps)}
        return dict.fromkeys(shown, "left 1"), earned, over, {"__all__": False}, {}


EARNED = {
    # Acts at every step, with what it is shown at once.
    "at its own steps": (Relay(("a", "", {"a": 1.0}), ("a", "", {"a": 2.0})), {"a": [1.0, 2.0]}),
    "between two turns": (
        Relay(("b", "", {"a": 1.0}), ("a", "", {"a": 2.0, "b": 4.0}), ("ab", "", {"a": 8.0})),
        {"a": [3.0, 8.0], "b": [4.0]},
    ),
    "before it was shown anything": (
        Relay(("a", "", {"b": 1.0}), ("b", "", {"b": 2.0}), ("ab", "", {"b": 4.0})),
        {"a": [0.0, 0.0], "b": [7.0]},
    ),
    "before its first step, which waits for what comes of it": (
        Relay(("b", "", {"b": 1.0}), ("a", "", {"b": 2.0}), ("ab", "", {"b": 4.0})),
        {"a": [0.0, 0.0], "b": [7.0]},
    ),
    "after it ended by itself": (
        Relay(("ab", "b", {"b": 1.0}), ("a", "", {"b": 2.0}), ("a", "", {"b": 4.0}), begin="ab"),
        {"a": [0.0, 0.0, 0.0], "b": [7.0]},
    ),
    "after it ended by itself, shown all the while": (
        Relay(("ab", "b", {"b": 1.0}), ("ab", "b", {"b": 2.0}), ("ab", "b", {}), begin="ab"),
        {"a": [0.0, 0.0, 0.0], "b": [3.0]},
    ),
    "after it ended by itself, shown nothing any more": (
        Relay(("a", "b", {"b": 1.0}), ("a", "b", {"b": 2.0}), ("ab", "", {"b": 4.0}), begin="ab"),
        {"a": [0.0, 0.0, 0.0], "b": [7.0]},
    ),
    "without ever acting": (
        Relay(("a", "", {"c": 1.0}), ("abc", "", {"a": 2.0, "c": 4.0})),
        {"a": [0.0, 2.0]},
    ),
}


@pytest.mark.parametrize("kind", EARNED)
def test_all_that_an_agent_earns_counts_in_one_of_its_steps(kind):
    env, expected = EARNED[kind]
    (episode,) = Stage("nonsense", make=lambda: env).play(task())
    agents = single(episode)
    assert {agent: list(one.rewards) for agent, one in agents.items()} == expected
    batch = episodes_to_batch([episode], lambda keys, *_: exact_anchors(keys))
    rows = batch["default_policy"]
    assert {
        agent: rows["reward"][rows["agent_id"] == agent].tolist() for agent in expected
    } == expected
    assert episode_metrics([episode])["episode_return_mean"] == sum(
        map(sum, expected.values())
    ) / len(expected)


@pytest.mark.parametrize("shown", ["a", "ab"])
def test_an_agent_that_ended_by_itself_leaves_no_state_for_a_critic(shown):
    # b ends at the first step; the team is cut off two steps later.
    relay = Relay((shown, "b", {}), ("a", "", {}), ("a", "", {}), ("a", "", {}), begin="ab")
    stage = Stage("nonsense", make=lambda: relay, max_episode_steps=3)
    stage.settings = replace(stage.settings, keep_last_prompts=True)
    (episode,) = stage.play(task())
    last = {agent: words(one.observations[len(one)]) for agent, one in single(episode).items()}
    assert last == {"a": "<user> left 1 <assistant>", "b": ""}


@pytest.mark.parametrize("settings", [{"horizon": 4}, {"max_episode_steps": 2}])
def test_a_team_that_is_cut_off_leaves_every_agent_a_state_for_a_critic(settings):
    # KeyDoorTeam marks every agent of a team that has run out of time.
    limit = settings.pop("max_episode_steps", None)
    stage = Stage("nonsense", make=lambda: KeyDoorTeam(**settings), max_episode_steps=limit)
    stage.settings = replace(stage.settings, keep_last_prompts=True)
    (episode,) = stage.play(task(env_seed=4))
    assert episode.is_truncated
    for one in single(episode).values():
        assert words(one.observations[len(one)]).startswith("<user> at")
