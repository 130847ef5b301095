"""Gymnasium environments told in words: what is shown, which words act, when an episode is won."""

import json
import re

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envs.adapters.gym_text import GymText
from rllib_gigpo.agent.profile import default_profile
from rllib_gigpo.registry import get_env_spec

DRY = {"kwargs": {"is_slippery": False}}


def play(env: GymText, *actions: str) -> tuple:
    env.reset(seed=0)
    for action in actions[:-1]:
        env.step(action)
    return env.step(actions[-1])


def test_frozen_lake_is_a_grid_with_the_agents_cell_in_brackets():
    env = GymText(target="FrozenLake-v1", **DRY)
    observation, info = env.reset(seed=0)
    assert observation == "[S] F F F\nF H F H\nF F F H\nH F F G"
    assert info["task"].endswith("[ ] is where you stand.")
    assert info["admissible_actions"] == ["left", "down", "right", "up"]
    assert env.step("down")[0] == "S F F F\n[F] H F H\nF F F H\nH F F G"
    assert env.horizon == 100


def test_frozen_lake_tells_where_the_ice_is_slippery():
    assert GymText().reset(seed=0)[1]["task"].endswith("The ice is slippery.")


def test_frozen_lake_is_won_at_the_goal_and_lost_in_a_hole():
    path = ("down", "down", "right", "right", "down", "right")
    observation, reward, terminated, truncated, info = play(GymText(**DRY), *path)
    assert observation == "S F F F\nF H F H\nF F F H\nH F F [G]"
    assert (reward, terminated, truncated, info["won"]) == (1.0, True, False, True)
    assert info["admissible_actions"] == []
    _, reward, terminated, _, info = play(GymText(**DRY), "down", "right")
    assert (reward, terminated, info["won"]) == (0.0, True, False)


def test_the_last_action_leaves_no_trace_in_the_state():
    env = GymText(**DRY)
    start, _ = env.reset(seed=0)
    assert env.step("left")[0] == env.step("up")[0] == start


def test_cliff_walking_is_won_by_any_end():
    path = ("up", *["right"] * 11, "down")
    observation, reward, terminated, _, info = play(
        GymText(target="CliffWalking-v1", horizon=50), *path
    )
    assert observation.splitlines()[3] == "S C C C C C C C C C C [G]"
    assert (reward, terminated, info["won"]) == (-1.0, True, True)


def test_stepping_off_the_cliff_leads_back():
    observation, reward, terminated, *_ = play(
        GymText(target="CliffWalking-v1", horizon=50), "right"
    )
    assert observation.splitlines()[3].startswith("[S]")
    assert (reward, terminated) == (-100.0, False)


def test_taxi_is_told_in_sentences():
    env = GymText(target="Taxi-v3")
    env.reset(seed=0)
    # ((3 * 5 + 0) * 5 + 3) * 4 + 2 = 314: row 3, column 0, passenger at stand 3, destination 2.
    assert list(env._inner.unwrapped.decode(314)) == [3, 0, 3, 2]
    env._inner.unwrapped.s = 314
    observation, *_ = env.step("north")
    assert observation.endswith(
        "The taxi is at row 2 column 0. The passenger is at blue. The destination is yellow."
    )
    assert "yellow at row 4 column 0" in observation
    # Row 4, column 3 with the passenger at blue: picked up; then driven to row 4, column 0.
    env._inner.unwrapped.s = env._inner.unwrapped.encode(4, 3, 3, 2)
    assert "The passenger is in the taxi." in env.step("Pick  up")[0]
    env._inner.unwrapped.s = env._inner.unwrapped.encode(4, 0, 4, 2)
    _, reward, terminated, _, info = env.step("drop off")
    assert (reward, terminated, info["won"]) == (20.0, True, True)


def test_blackjack_is_told_in_a_sentence():
    observation, info = GymText(target="Blackjack-v1", horizon=9).reset(seed=1)
    assert re.fullmatch(
        r"Your cards sum to \d+, with (no|a) usable ace\. The dealer shows \d+\.", observation
    )
    assert info["admissible_actions"] == ["stick", "hit"]


def test_minigrid_tells_the_agents_own_view():
    pytest.importorskip("minigrid", reason="needs the extra [minigrid]")
    env = GymText(target="minigrid:MiniGrid-DoorKey-5x5-v0")
    _, info = env.reset(seed=0)
    grid = env._inner.unwrapped
    # The world is set by hand, columns from the west, rows from the north; the border is wall:
    # column 1 is free but for a key at (1, 3); column 2 is wall but for a door at (2, 2).
    from minigrid.core.world_object import Door, Key

    for y in (1, 2):
        grid.grid.set(1, y, None)
    for y in (1, 2, 3):
        grid.grid.set(2, y, Door("blue", is_locked=True) if y == 2 else grid.grid.get(2, 0))
    grid.grid.set(1, 3, Key("blue"))
    grid.agent_pos, grid.agent_dir = (1, 1), 0
    assert env.step("turn right")[0] == (
        "You face south. Walls: 3 ahead, 1 to the left, 1 to the right. You see: locked blue door "
        "1 ahead and 1 to the left, blue key 2 ahead. You carry: nothing."
    )
    env.step("go forward")
    assert env.step("pick up")[0].endswith(
        "You see: locked blue door 1 to the left. You carry: blue key."
    )
    assert env.step("turn left")[0] == (
        "You face east. Walls: 2 to the left, 2 to the right. You see: locked blue door 1 ahead. "
        "You carry: blue key."
    )
    assert info["task"] == "use the key to open the door and then get to the goal"
    assert "pick up" in info["admissible_actions"]


@pytest.mark.parametrize("action", ["", "jump", "0", "left right"])
def test_what_names_no_action_changes_nothing_and_is_flagged(action):
    env = GymText(**DRY)
    start, _ = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(action)
    assert (observation, reward, terminated, truncated) == (start, 0.0, False, False)
    assert info["is_action_valid"] is False
    assert env.step("LEFT")[4]["is_action_valid"] is True


class Switch(gymnasium.Env):
    """An environment without a view: the space of its actions is a setting."""

    def __init__(self, space: spaces.Space, observation=None):
        self.action_space = space
        self.observation_space = spaces.Discrete(1)
        self.shown = observation
        self.taken: list = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.shown, {}

    def step(self, action):
        self.taken.append(action)
        return self.shown, 0.5, True, False, {}


@pytest.fixture
def switch():
    gymnasium.register("Switch-v0", entry_point=Switch, max_episode_steps=3)
    yield lambda space, seen=None, **more: GymText(
        target="Switch-v0", kwargs={"space": space, "observation": seen}, **more
    )
    del gymnasium.registry["Switch-v0"]


@pytest.mark.parametrize(
    ("space", "good", "taken", "bad"),
    [
        (spaces.Discrete(3, start=1), "2", 2, "0"),
        (spaces.Text(3), "abc", "abc", "abcd"),
        (spaces.Box(0.0, 1.0, (2,)), "[0.5, 1]", np.array([0.5, 1.0], np.float32), "[2, 0]"),
        (spaces.MultiDiscrete([2, 3]), "[1, 2]", np.array([1, 2]), "[1, 3]"),
        (spaces.Box(0.0, 1.0, (2,)), "[0, 0]", np.zeros(2, np.float32), "{not json"),
    ],
)
def test_actions_of_other_spaces(switch, space, good, taken, bad):
    env = switch(space)
    env.reset(seed=0)
    assert env.step(bad)[4]["is_action_valid"] is False
    *_, info = env.step(good)
    assert info["is_action_valid"] is True
    (action,) = env._inner.unwrapped.taken
    np.testing.assert_array_equal(action, taken)


_BOX = spaces.Box(0.0, 1.0, (2,))
_NESTED = spaces.Dict({"go": spaces.Discrete(3), "at": spaces.Tuple((_BOX, spaces.Text(2)))})
_ENDLESS = spaces.Box(-np.inf, np.inf, (1,))


def test_nested_actions_come_in_the_types_of_their_spaces(switch):
    env = switch(_NESTED)
    env.reset(seed=0)
    assert env.step('{"at": [[0.5, 1], "ab"], "go": 2}')[4]["is_action_valid"] is True
    (taken,) = env._inner.unwrapped.taken
    assert _NESTED.contains(taken)
    (at, text), go = taken["at"], taken["go"]
    assert (at.dtype, at.tolist(), text, go) == (np.float32, [0.5, 1.0], "ab", 2)


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.MultiDiscrete([3, 3]), "[1.7, 0.2]"),
        (spaces.MultiDiscrete([3, 3]), "[99999999999999999999999, 0]"),
        (spaces.MultiDiscrete([3, 3]), '["1", "2"]'),
        (spaces.MultiDiscrete([3, 3]), "[1e400, 0]"),
        (spaces.MultiDiscrete([3, 3]), "[NaN, 0]"),
        (spaces.MultiDiscrete([3, 3]), "[[1], 2]"),
        (spaces.MultiBinary(2), "[0.5, 1]"),
        (spaces.Box(0, 9, (1,), np.int8), "[257]"),
        (spaces.Box(0, 9, (1,), np.int64), "[1.5]"),
        (_ENDLESS, "[1e400]"),
        (_ENDLESS, "[1e39]"),
        (_ENDLESS, "[null]"),
        pytest.param(_ENDLESS, "[" * 200_000, id="deep"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))), "[1]"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))), "[1, 0.5]"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))), "[1, 99999999999999999999999]"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))), '"11"'),
        (_NESTED, '{"go": 2}'),
        (_NESTED, '{"at": [[0.5, 1], "ab"], "go": 2, "too": 1}'),
        (_NESTED, '{"at": [[0.5, 1], "ab"], "go": [2]}'),
        (_NESTED, "[2]"),
        (spaces.Sequence(spaces.Discrete(2)), "[99999999999999999999999]"),
    ],
)
def test_what_the_space_cannot_hold_changes_nothing_and_is_flagged(switch, space, action):
    env = switch(space)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(action)
    assert (reward, terminated, info["is_action_valid"]) == (0.0, False, False)
    assert env._inner.unwrapped.taken == []


def test_whole_numbers_and_flags_may_be_spelled_otherwise(switch):
    env = switch(spaces.MultiDiscrete([3, 3]))
    env.reset(seed=0)
    assert env.step("[1.0, 2]")[4]["is_action_valid"] is True
    env = switch(spaces.MultiBinary(2))
    env.reset(seed=0)
    assert env.step("[true, false]")[4]["is_action_valid"] is True
    assert env._inner.unwrapped.taken[0].tolist() == [1, 0]


def test_names_of_any_case_act_and_one_as_it_is_spelled_comes_first(switch):
    env = switch(spaces.Discrete(3), actions=["Go", "go", "Stop Now"])
    env.reset(seed=0)
    assert default_profile().read("<think>x</think><action>Stop  Now</action>").text == "Stop Now"
    for action in ("go", "Go", "GO", "stop now", "Stop Now"):
        env.step(action)
        env.reset(seed=0)
    assert env._inner.unwrapped.taken == [1, 0, 0, 2, 2]


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ("as it is\n", "as it is\n"),
        (7, "7"),
        (np.array([0.5, 1.0]), "[0.5, 1.0]"),
        (
            {"a": np.int64(1), "b": (np.float64(2.0), [np.array([3])])},
            '{"a": 1, "b": [2.0, [[3]]]}',
        ),
    ],
)
def test_an_observation_without_a_view_is_text_or_json(switch, observation, text):
    assert switch(spaces.Discrete(2), observation).reset(seed=0)[0] == text
    if not isinstance(observation, str):
        json.loads(text)


def test_own_names_view_task_and_rule_replace_the_views(switch):
    env = switch(
        spaces.Discrete(2),
        actions=["off", "on"],
        view=lambda inner, seen: f"seen {seen} of {type(inner.unwrapped).__name__}",
        task="Switch it on.",
        won="rewarded",
    )
    observation, info = env.reset(seed=0)
    assert observation == "seen None of Switch"
    assert info == {"task": "Switch it on.", "admissible_actions": ["off", "on"], "won": False}
    *_, info = env.step("on")
    assert info["won"] is True
    assert env._inner.unwrapped.taken == [1]


def test_winning_is_not_told_where_it_is_not_known(switch):
    env = switch(spaces.Discrete(2))
    assert "won" not in env.reset(seed=0)[1]
    assert "won" not in env.step("1")[4]


def test_an_ansi_picture_loses_colours_and_the_last_action():
    class Painted(Switch):
        metadata = {"render_modes": ["ansi"]}  # noqa: RUF012

        def __init__(self, render_mode=None):
            super().__init__(spaces.Discrete(1), 0)
            self.render_mode = render_mode

        def render(self):
            return "  (Down)\n\x1b[41mS\x1b[0mF (a room)\nFG\n"

    gymnasium.register("Painted-v0", entry_point=Painted, max_episode_steps=3)
    assert GymText(target="Painted-v0").reset(seed=0)[0] == "SF (a room)\nFG"
    del gymnasium.registry["Painted-v0"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": "Nowhere-v0"}, ValueError, "gymnasium knows no environment 'Nowhere-v0'"),
        ({"target": "no_module:X-v0"}, ImportError, "needs the module 'no_module'"),
        ({"target": "CliffWalking-v1"}, ValueError, "without a step limit: set one"),
        ({"actions": ["a"]}, ValueError, "has 4 actions, not 1"),
        ({"won": "maybe"}, ValueError, "won must be 'terminated', 'rewarded' or None"),
        ({"view": "nothing"}, ValueError, "view is 'nothing': expected module:attribute"),
        ({"view": "tests.fakes:none"}, ValueError, "module 'tests.fakes' has no 'none'"),
        ({"view": "tests.none:none"}, ValueError, "there is no module 'tests.none'"),
        (
            {"target": "Pendulum-v1", "actions": ["a"]},
            ValueError,
            "names the actions of a Discrete space",
        ),
        ({"horizon": 0}, ValueError, "horizon must be at least 1 step, got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        GymText(**arguments)


def test_the_horizon_replaces_the_registered_limit():
    env = GymText(target="Taxi-v3", horizon=201)
    env.reset(seed=0)
    ends = [env.step("south")[3] for _ in range(201)]
    assert ends == [False] * 200 + [True]


def test_the_prefix_finds_it_and_a_bare_id_stays_as_it_is():
    spec = get_env_spec("gym:FrozenLake-v1")
    assert spec.make(DRY).reset(seed=0)[0].startswith("[S] F")
    assert spec.name == "gym:FrozenLake-v1"
    assert get_env_spec("FrozenLake-v1").make().reset(seed=0)[0] == 0
