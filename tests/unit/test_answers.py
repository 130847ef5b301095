"""What an environment may say in its infos, rewards and flags, and what is refused."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from envs.arithmetic_team import ArithmeticTeam
from rllib_gigpo.agent.memory_events import KeyEvents
from rllib_gigpo.agent.memory_summary import RunningSummary
from rllib_gigpo.agent.profiles import tools
from rllib_gigpo.answers import check_infos
from rllib_gigpo.grouping import exact_anchors
from rllib_gigpo.observations import state_key
from rllib_gigpo.state_keys import structural_key
from rllib_gigpo.stepping import EnvFailure, StepSettings
from tests.fakes import Countdown
from tests.stage import PROFILE, Stage, task

PIXELS = np.zeros((2, 3, 3), dtype=np.uint8)
ANCHORS = [
    "the hall",
    b"\x00",
    7,
    True,
    ("hall", 1, (b"x",)),
    PIXELS,
    {"text": "a", "image": PIXELS},
]
NO_ANCHORS = [None, 0.5, np.int64(3), ["hall"], {"room": "hall"}, {1}, ("hall", ["key"])]
OTHER_FAULTS = {
    "event": [3, ["fell"], {"what": "fell"}, b"fell"],
    "note": [3, None, ["left"]],
    "tools": ["turn", {"name": "turn"}, ["turn"], [{"name": {1}}], [{"of": object()}], 3],
    "task_type": [3, ["look"]],
}


@pytest.mark.parametrize("anchor", ANCHORS, ids=repr)
def test_what_counts_as_an_anchor_can_be_compared(anchor):
    check_infos("Test", {"a": {"anchor": anchor}})
    assert exact_anchors([state_key(anchor)] * 2).tolist() == [0, 0]


@pytest.mark.parametrize("anchor", NO_ANCHORS, ids=repr)
def test_what_cannot_be_compared_is_no_anchor(anchor):
    with pytest.raises(TypeError):
        exact_anchors([state_key(anchor)])
    with pytest.raises(
        TypeError, match=r"environment 'Test' gave info\['anchor'\]=.*expected a str"
    ):
        check_infos("Test", {"a": {"anchor": anchor}})
    # The cure that the sentence names.
    if not isinstance(anchor, tuple):
        check_infos("Test", {"a": {"anchor": structural_key(anchor)}})


@pytest.mark.parametrize(
    "info",
    [
        {"event": "fell"},
        {"event": None},
        {"note": "left"},
        {"tools": []},
        {"tools": ({"name": "turn", "parameters": {"a": [1, None]}},)},
    ],
    ids=repr,
)
def test_what_is_right_passes(info):
    check_infos("Test", {"a": info})


@pytest.mark.parametrize(
    "key", ["task", "task_id", "task_type", "anchor", "event", "note", "tools"]
)
def test_no_text_may_hold_a_lone_surrogate(key):
    text = "a \ud800"
    told = [{"name": text}] if key == "tools" else text
    with pytest.raises(ValueError, match=rf"info\['{key}'\] holds '\\ud800' .* lone surrogate"):
        check_infos("Test", {"a": {key: told}})


def telling(**info):
    class Telling(Countdown):
        """Says something more at its first step."""

        def step(self, action):
            *rest, told = super().step(action)
            return *rest, {**told, **info}

    return Telling


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("anchor", anchor) for anchor in NO_ANCHORS),
        *((key, value) for key, values in OTHER_FAULTS.items() for value in values),
    ],
    # An address would give the test another name in every process.
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),
)
def test_a_wrong_value_is_a_failure_of_the_environment_whoever_reads_it(key, value):
    """The profile reads all of them; none may break anything far from its cause."""
    reading = replace(PROFILE, prompt=tools.ToolPrompt(), memory=KeyEvents())
    for profile in (reading, replace(PROFILE, memory=RunningSummary())):
        stage = Stage(make=telling(**{key: value}), profile=profile, steps=StepSettings())
        with pytest.raises(EnvFailure, match=rf"'Test' .*info\['{key}'\]"):
            stage.rollout(task(start=3))
        dropping = StepSettings(on_failure="drop")
        stage = Stage(make=telling(**{key: value}), profile=profile, steps=dropping)
        assert stage.rollout(task(start=3)).dropped == (0,)
        assert stage.stepper.counts == {"env_errors": 1}


# Rewards and flags of teams -----------------------------------------------------------------------


def answering(change):
    class Changed(ArithmeticTeam):
        """Answers otherwise than it should at every step."""

        def step(self, action_dict):
            return change(*super().step(action_dict))

    return Changed


def refused(make) -> str:
    stage = Stage("<action> 1 </action>", make=make)
    with pytest.raises(EnvFailure) as error:
        asyncio.run(stage.start(task()))
    return str(error.value)


def test_an_agent_that_acted_has_a_reward():
    told = refused(answering(lambda seen, rewards, *rest: (seen, {"verifier": 1.0}, *rest)))
    assert "environment 'Test' gave no reward to 'solver', which acted: expected a number" in told
    assert "0.0 where it earned nothing" in told


def test_at_the_last_step_too():
    class Forgetful(MultiAgentEnv):
        """Ends after one step and gives a reward to one of two."""

        possible_agents = ("a", "b")

        def reset(self, *, seed=None, options=None):
            return dict.fromkeys("ab", "left 1"), {}

        def step(self, action_dict):
            over = {"__all__": True}
            return dict.fromkeys("ab", "left 0"), {"a": 1.0}, over, {"__all__": False}, {}

    assert "gave no reward to 'b', which acted" in refused(Forgetful)


@pytest.mark.parametrize("part", [2, 3])
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"__all__": "no"}, "='no': expected True or False"),
        ({"__all__": False, "solver": "no"}, "='no': expected True or False"),
        ({"solver": False}, "expected a flag for '__all__'"),
        (False, "gave False as its "),
    ],
)
def test_flags_of_teams_are_flags(part, flags, told):
    def change(*answer):
        return *answer[:part], flags, *answer[part + 1 :]

    sentence = refused(answering(change))
    assert "environment 'Test' gave " in sentence
    assert told in sentence
