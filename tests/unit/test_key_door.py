"""KeyDoor and KeyDoorTeam: rules, words, layouts, solver, and what each agent earns."""

from __future__ import annotations

import itertools
import statistics

import gymnasium
import numpy as np
import pytest
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from envs.key_door import KeyDoor
from envs.key_door_team import KeyDoorTeam


def layout_of(agent, key, door, size=4):
    """The number of a layout, found by asking every layout's first full view."""
    for layout in range(size**2 * (size**2 - 1) * (size**2 - 2)):
        env = KeyDoor(size=size)
        env.reset(options={"layout": layout})
        if (env._agent, env._key, env._door) == (agent, key, door):
            return layout
    raise AssertionError((agent, key, door))


@pytest.fixture(scope="module")
def corner_layout():
    """Agent at column 1, row 0; key at (0, 1), south west; door at (1, 2), south."""
    return layout_of((1, 0), (0, 1), (1, 2))


def play(env, layout, actions):
    observation, info = env.reset(options={"layout": layout})
    steps = [(observation, 0.0, False, False, info)]
    return steps + [env.step(action) for action in actions]


def test_an_episode_step_by_step(corner_layout):
    steps = play(
        KeyDoor(),
        corner_layout,
        # into the wall, to the key's column, onto the key, then round to the door
        ["go north", "go west", "go south", "go east", "go south"],
    )
    assert [observation for observation, *_ in steps] == [
        "at 1 0 . key south west . door south .",
        "at 1 0 . key south west . door south .",
        "at 0 0 . key south . door south east .",
        "at 0 1 . key hold . door south east .",
        "at 1 1 . key hold . door south .",
        "at 1 2 . key hold . door here .",
    ]
    assert [reward for _, reward, *_ in steps] == [0, 0, 0, 0, 0, 1]
    assert [terminated for _, _, terminated, *_ in steps] == [False] * 5 + [True]
    assert not any(truncated for *_, truncated, _ in steps)
    assert [info["won"] for *_, info in steps] == [False] * 5 + [True]


def test_the_door_without_the_key_does_nothing(corner_layout):
    steps = play(KeyDoor(), corner_layout, ["go south", "go south", "go south"])
    assert [observation for observation, *_ in steps[1:]] == [
        "at 1 1 . key west . door south .",
        "at 1 2 . key north west . door here .",
        "at 1 3 . key north west . door north .",
    ]
    assert not any(reward or terminated for _, reward, terminated, *_ in steps)


def test_local_view_tells_neighbours_and_key_only(corner_layout):
    steps = play(KeyDoor(view="local"), corner_layout, ["go west", "go south", "go east"])
    assert [observation for observation, *_ in steps] == [
        "north wall . south empty . east empty . west empty . key away .",
        "north wall . south key . east empty . west wall . key away .",
        "north empty . south empty . east empty . west wall . key hold .",
        "north empty . south door . east empty . west empty . key hold .",
    ]


@pytest.mark.parametrize(("view", "distinct"), [("full", 31), ("local", 25)])
def test_local_view_gives_different_states_the_same_observation(corner_layout, view, distinct):
    env = KeyDoor(view=view, horizon=200)
    env.action_space.seed(0)
    observation_of = {}
    for _ in range(50):
        observation, _ = env.reset(options={"layout": corner_layout})
        terminated = truncated = False
        while not (terminated or truncated):
            observation_of[env._agent, env._has_key] = observation
            observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        observation_of[env._agent, env._has_key] = observation
    # 15 cells without the key (its own cell gives it) and 16 with it. Three pairs look alike
    # in the local view, before and after: (1, 0) and (2, 0) see only the north wall, (3, 1) and
    # (3, 2) only the east wall, (2, 1) and (1, 2) nothing.
    assert len(observation_of) == 31
    assert len(set(observation_of.values())) == distinct


def states_by_observation(env):
    """From each local view to the (distance, directions) of what is sought, over all states."""
    found = {}
    cells = list(itertools.product(range(env.size), repeat=2))
    for env._has_key, env._agent in itertools.product((False, True), cells):
        goal = env._door if env._has_key else env._key
        if env._agent != goal:
            distance = sum(abs(a - b) for a, b in zip(env._agent, goal, strict=True))
            state = (distance, frozenset(env._directions(goal)))
            found.setdefault(env._observation(), []).append(state)
    return found


def test_states_that_look_alike_are_at_different_distances():
    env = KeyDoor(view="local")
    for layout in range(0, env.num_layouts, 7):
        env.reset(options={"layout": layout})
        views = states_by_observation(env).values()
        assert any(len({distance for distance, _ in states}) > 1 for states in views)


def test_states_that_look_alike_may_have_no_good_move_in_common():
    env = KeyDoor(size=5, view="local")
    env.reset(seed=0)
    env._key, env._door = (3, 1), (0, 4)
    # Nothing is near (1, 1) and (3, 3): the key is two steps east of one, two north of the other.
    nothing = "north empty . south empty . east empty . west empty . key away ."
    states = states_by_observation(env)[nothing]
    assert (2, frozenset({"east"})) in states
    assert (2, frozenset({"north"})) in states


def test_invalid_action_costs_a_step_and_changes_nothing(corner_layout):
    first, second = play(KeyDoor(horizon=3), corner_layout, ["Go west"])
    assert second[0] == first[0]
    assert second[4]["is_action_valid"] is False
    *_, last = play(KeyDoor(horizon=2), corner_layout, ["jump", "go west"])
    assert last[2:4] == (False, True)
    assert last[4]["is_action_valid"] is True
    assert last[4]["admissible_actions"] == []


def test_success_at_the_horizon_is_terminated_not_truncated(corner_layout):
    moves = ["go west", "go south", "go east", "go south"]
    *_, last = play(KeyDoor(horizon=4), corner_layout, moves)
    assert last[1:4] == (1.0, True, False)


def test_layouts_are_all_ordered_choices_of_three_cells():
    env = KeyDoor()
    assert env.num_layouts == 16 * 15 * 14 == 3360
    layouts = set()
    for layout in range(env.num_layouts):
        env.reset(options={"layout": layout})
        layouts.add((env._agent, env._key, env._door))
    cells = [(x, y) for x in range(4) for y in range(4)]
    assert layouts == set(itertools.permutations(cells, 3))


def test_seeds_name_the_same_layouts_everywhere():
    # Pinned: they must never change, on any machine or with any release of NumPy.
    env = KeyDoor()
    assert [env.reset(seed=seed)[1]["task_id"] for seed in range(3)] == [
        "4x4-2858",
        "4x4-1589",
        "4x4-2814",
    ]


def test_words_cover_every_observation_and_action():
    words = KeyDoor.words()
    assert len(words) == len(set(words))
    seen = {word for action in KeyDoor.actions for word in action.split()}
    rng = np.random.default_rng(0)
    for size, view in [(2, "full"), (4, "full"), (10, "full"), (3, "local"), (10, "local")]:
        env = KeyDoor(size=size, horizon=60, view=view)
        for seed in range(60):
            observation, _ = env.reset(seed=seed)
            terminated = truncated = False
            while not (terminated or truncated):
                seen |= set(observation.split())
                # half random, half expert, so that walls, keys and doors are all met
                action = env.expert_action() if rng.random() < 0.5 else env.action_space.sample()
                observation, _, terminated, truncated, _ = env.step(action)
            seen |= set(observation.split())
    assert seen == set(words)


@pytest.mark.parametrize("view", ["full", "local"])
def test_expert_wins_every_layout_by_a_shortest_path(view):
    env = KeyDoor(view=view)
    lengths = []
    for layout in range(env.num_layouts):
        env.reset(options={"layout": layout})
        distance = sum(
            abs(a - b)
            for start, goal in [(env._agent, env._key), (env._key, env._door)]
            for a, b in zip(start, goal, strict=True)
        )
        terminated, steps = False, 0
        while not terminated:
            _, reward, terminated, _, _ = env.step(env.expert_action())
            steps += 1
        assert (reward, steps) == (1.0, distance)
        lengths.append(steps)
    # The mean distance of two distinct cells of a 4x4 grid: over ordered pairs of coordinates
    # 0..3 the mean |difference| is (2 * (1*3 + 2*2 + 3*1)) / 16 = 1.25, two axes 2.5, without
    # the 16 equal pairs of 256: 2.5 * 256 / 240 = 8 / 3. Two such walks: 16 / 3.
    assert statistics.mean(lengths) == pytest.approx(16 / 3)


def test_uniform_moves_win_about_one_episode_in_six():
    env = KeyDoor()
    env.action_space.seed(0)
    wins = 0
    for seed in range(2000):
        env.reset(seed=seed)
        terminated = truncated = False
        while not (terminated or truncated):
            _, _, terminated, truncated, info = env.step(env.action_space.sample())
        wins += info["won"]
    # 16 % with a standard error of sqrt(.16 * .84 / 2000) = 0.8 %
    assert 0.135 < wins / 2000 < 0.185


def test_gymnasium_id():
    env = gymnasium.make("envs:rllib_gigpo/KeyDoorLocal-v0", horizon=7)
    assert isinstance(env.unwrapped, KeyDoor)
    assert (env.unwrapped.view, env.unwrapped.horizon) == ("local", 7)


@pytest.mark.parametrize("cls", [KeyDoor, KeyDoorTeam])
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": 1}, "size must be 2 to 10 cells, got 1"),
        ({"size": 11}, "size must be 2 to 10 cells, got 11"),
        ({"horizon": 0}, "horizon must be at least .*, got 0"),
        ({"view": "top"}, "view must be one of .*, got 'top'"),
    ],
)
def test_bad_arguments_are_refused(cls, kwargs, message):
    with pytest.raises(ValueError, match=message):
        cls(**kwargs)


def test_steps_without_an_episode_are_refused(corner_layout):
    env = KeyDoor(horizon=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="call reset"):
            env.step("go north")
        with pytest.raises(RuntimeError, match="call reset"):
            env.expert_action()
        play(env, corner_layout, ["go north"])


@pytest.mark.parametrize("layout", [-1, 3360])
def test_layouts_out_of_range_are_refused(layout):
    with pytest.raises(ValueError, match=r"layout must be in \[0, 3360\)"):
        KeyDoor().reset(options={"layout": layout})


def play_team(env, layout, actions):
    """Play through RLlib's episode, which sorts delayed rewards to the agents' own steps."""
    observations, infos = env.reset(options={"layout": layout})
    episode = MultiAgentEpisode()
    episode.add_env_reset(observations=observations, infos=infos)
    movers = []
    for action in actions:
        (mover,) = observations
        movers.append(mover)
        observations, rewards, terminateds, truncateds, infos = env.step({mover: action})
        episode.add_env_step(
            observations,
            {mover: action},
            rewards,
            infos,
            terminateds=terminateds,
            truncateds=truncateds,
        )
    return episode, movers


def test_team_takes_turns_and_both_earn_the_reward(corner_layout):
    actions = ["go west", "go south", "go east", "go south"]
    episode, movers = play_team(KeyDoorTeam(), corner_layout, actions)
    assert movers == ["agent_0", "agent_1", "agent_0", "agent_1"]
    assert episode.is_terminated
    first, second = episode.agent_episodes["agent_0"], episode.agent_episodes["agent_1"]
    assert list(first.get_observations()) == [
        "at 1 0 . key south west . door south .",
        "at 0 1 . key hold . door south east .",
        "at 1 2 . key hold . door here .",
    ]
    assert list(second.get_observations()) == [
        "at 0 0 . key south . door south east .",
        "at 1 1 . key hold . door south .",
        "at 1 2 . key hold . door here .",
    ]
    # agent_1 reaches the door; agent_0 earns the same for its move before
    assert list(first.get_rewards()) == [0.0, 1.0]
    assert list(second.get_rewards()) == [0.0, 1.0]
    assert first.is_terminated
    assert second.is_terminated


def test_team_is_truncated_with_a_last_observation_for_both(corner_layout):
    episode, _ = play_team(KeyDoorTeam(horizon=3), corner_layout, ["go west"] * 3)
    assert episode.is_truncated
    assert {a: len(e) for a, e in episode.agent_episodes.items()} == {"agent_0": 2, "agent_1": 1}
    assert sum(episode.get_return() for episode in episode.agent_episodes.values()) == 0.0


def test_team_tells_each_agent_about_its_own_action(corner_layout):
    episode, _ = play_team(KeyDoorTeam(horizon=4), corner_layout, ["jump", *["go west"] * 3])
    flags = {
        agent: [info.get("is_action_valid") for info in agent_episode.get_infos()]
        for agent, agent_episode in episode.agent_episodes.items()
    }
    assert flags == {"agent_0": [None, False, True], "agent_1": [None, True, True]}


def test_team_refuses_the_wrong_agent():
    env = KeyDoorTeam()
    env.reset(seed=0)
    for actions in ({"agent_1": "go west"}, {}, dict.fromkeys(env.agents, "go west")):
        with pytest.raises(ValueError, match="turn of agent_0"):
            env.step(actions)


def test_team_needs_a_turn_for_each_agent():
    with pytest.raises(ValueError, match="horizon must be at least 2"):
        KeyDoorTeam(horizon=1)


def test_team_expert_wins():
    env = KeyDoorTeam()
    for seed in range(50):
        observations, _ = env.reset(seed=seed)
        terminateds = {"__all__": False}
        while not terminateds["__all__"]:
            (mover,) = observations
            observations, rewards, terminateds, *_ = env.step({mover: env.expert_action()})
        assert rewards == {"agent_0": 1.0, "agent_1": 1.0}
    assert KeyDoorTeam.words() == KeyDoor.words()
