"""The contract's checks of teams, and of what an info may hold."""

from __future__ import annotations

import pytest
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from envs.arithmetic_team import ArithmeticTeam
from envs.key_door import KeyDoor
from rllib_gigpo.env_checks import ContractError, check_invalid_actions, check_types
from rllib_gigpo.scripted import random_legal


class Unpaid(ArithmeticTeam):
    """Gives the solver nothing, not even 0.0, for a move that does not end the episode."""

    def step(self, action_dict):
        seen, rewards, over, cut, infos = super().step(action_dict)
        if not over["__all__"]:
            rewards.pop("solver", None)
        return seen, rewards, over, cut, infos


class Leaver(MultiAgentEnv):
    """Two agents act at once; "b" ends by itself after its first step and must not act again."""

    def __init__(self):
        super().__init__()
        self.agents = self.possible_agents = ["a", "b"]

    def reset(self, *, seed=None, options=None):
        self.taken = 0
        return self.told()

    def told(self):
        info = {"admissible_actions": ["wait"], "task": "wait"}
        return dict.fromkeys("ab", "here"), {agent: dict(info) for agent in "ab"}

    def step(self, action_dict):
        expected = {"a", "b"} if self.taken == 0 else {"a"}
        assert set(action_dict) == expected, "an agent acts that has ended"
        self.taken += 1
        seen, infos = self.told()
        over = {"b": True, "__all__": self.taken == 3}
        rewards = dict.fromkeys("ab" if self.taken == 3 else action_dict, 0.5)
        return seen, rewards, over, {"__all__": False}, infos


def test_every_agent_that_acts_gets_a_reward():
    check_types(ArithmeticTeam, random_legal)
    with pytest.raises(ContractError, match="an agent that acted got no reward"):
        check_types(Unpaid, random_legal)


def test_an_agent_that_has_ended_by_itself_acts_no_more():
    check_types(Leaver, random_legal)
    check_invalid_actions(Leaver, random_legal)


def saying(**told):
    class Saying(KeyDoor):
        def _info(self):
            return super()._info() | told

    return Saying


@pytest.mark.parametrize(
    "told",
    [
        {"anchor": "the hall"},
        {"anchor": b"\x00"},
        {"anchor": 7},
        {"anchor": ("hall", 1)},
        {"event": "fell"},
        {"event": None},
        {"tools": [{"name": "turn"}]},
        {"task_type": "look"},
    ],
    ids=str,
)
def test_an_info_may_hold(told):
    check_types(saying(**told), random_legal)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"anchor": ["hall"]}, "not a str or bytes or int or tuple"),
        ({"anchor": 0.5}, "not a str or bytes or int or tuple"),
        ({"event": 3}, "not a str or NoneType"),
        ({"tools": {"name": "turn"}}, "not a list"),
        ({"task_type": 3}, "not a str"),
    ],
    ids=str,
)
def test_an_info_may_not_hold(told, message):
    with pytest.raises(ContractError, match=message):
        check_types(saying(**told), random_legal)
