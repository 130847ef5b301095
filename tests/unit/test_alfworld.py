"""ALFWorld as an environment: games, panel, seeds, rewards, anchors, expert and errors."""

from __future__ import annotations

import json
import pickle
import random
import sys
import threading

import pytest

from envs.alfworld import ANCHORS, TASK_TYPES, ALFWorld, textworld_engine
from envs.alfworld.fast.engine import compiled
from envs.alfworld.games import list_games
from envs.alfworld.shipped_games import build_shipped_game, shipped_splits
from tests.child import run_python

HEAT = (
    "train/pick_heat_then_place_in_recep-Mug-None-CoffeeMachine-GalleyKitchen/layout_1/game.tw-pddl"
)
SAFE = "train/pick_and_place_simple-KeyChain-None-Safe-Bedroom/layout_1/game.tw-pddl"


def shipped(**kwargs) -> ALFWorld:
    return ALFWorld(games="shipped", **kwargs)


def start(env: ALFWorld, task_id: str):
    return env.reset(seed=0, options={"task_id": task_id})


def play_expert(env: ALFWorld):
    """Play the expert to the end; return the last step's result and the number of steps."""
    steps = 0
    while True:
        result = env.step(env.expert_action())
        steps += 1
        if result[2] or result[3]:
            return result, steps


def test_shipped_splits_hold_all_six_task_types_in_both_verb_forms():
    counts = {split: len(ids) for split, ids in shipped_splits().items()}
    # train: 5 + 3 + 3 tasks x 4 layouts; seen: the same x 2; unseen: 5 + 3 tasks x 3 layouts.
    assert counts == {
        "train": 44,
        "train_put": 44,
        "valid_seen": 22,
        "valid_seen_put": 22,
        "valid_unseen": 24,
        "valid_unseen_put": 24,
    }
    for split in counts:
        games = list_games("shipped", split, None, None)
        assert {game.task_type for game in games} == set(TASK_TYPES)
        ids = [game.task_id for game in games]
        assert ids == sorted(ids)


@pytest.mark.parametrize("split", shipped_splits())
def test_expert_wins_every_shipped_game(split):
    env = shipped(split=split)
    for task_id in env.task_ids():
        _, info = start(env, task_id)
        assert info["won"] is False
        (_, reward, terminated, truncated, info), steps = play_expert(env)
        assert (reward, terminated, truncated, info["won"]) == (10.0, True, False, True)
        # Two objects at most, each fetched and placed behind closed doors: 2 x (go, open, take, go,
        # open, put) = 12.
        assert steps <= 12


def test_layouts_differ_and_never_start_where_the_goal_is():
    places = set()
    for layout in (1, 2, 3, 4):
        problem = build_shipped_game(SAFE.replace("layout_1", f"layout_{layout}"))["pddl_problem"]
        homes = [line for line in problem.split("\n") if "inReceptacle KeyChain" in line]
        assert len(homes) == 2
        assert not any("Safe" in home for home in homes)
        places.add(tuple(homes))
    assert len(places) > 1


def test_first_observation_is_the_room_and_task_the_goal():
    observation, info = start(shipped(), HEAT)
    assert observation.startswith("You are in the middle of a room. Looking quickly around you,")
    assert observation.endswith(", and a stoveburner 1.")
    assert info["task"] == "put a hot mug in coffeemachine."
    assert info["task_id"] == HEAT
    assert info["task_type"] == "pick_heat_then_place"
    assert {"help", "inventory", "look", "go to fridge 1"} <= set(info["admissible_actions"])


def test_same_seed_draws_the_same_game_everywhere():
    env = shipped()
    drawn = [env.task_ids().index(env.reset(seed=seed)[1]["task_id"]) for seed in range(4)]
    # Fixed by numpy's PCG64 and by the sorted list of 44 games.
    assert drawn == [37, 20, 36, 35]
    # What follows without a seed is settled by the seed before.
    following = []
    for fresh in (env, shipped()):
        fresh.reset(seed=5)
        following.append([fresh.reset()[1]["task_id"] for _ in range(3)])
    assert following[0] == following[1]


def test_panel_plays_any_listed_game_and_refuses_others():
    env = shipped(split="valid_unseen", task_types=["look_at_obj_in_light", "pick_two_obj"])
    kinds = {start(env, task_id)[1]["task_type"] for task_id in env.task_ids()}
    assert kinds == {"look_at_obj_in_light", "pick_two_obj"}
    with pytest.raises(ValueError, match=r"is not one of this split's 9 games; task_ids\(\)"):
        start(env, HEAT)


def test_invalid_commands_change_nothing_and_cost_a_step():
    env = shipped(horizon=3)
    _, info = start(env, SAFE)
    for command in ("dance", "take keychain 1 from safe 1"):
        observation, reward, terminated, truncated, after = env.step(command)
        assert (observation, reward, terminated, truncated) == (
            "Nothing happens.",
            0.0,
            False,
            False,
        )
        assert after["is_action_valid"] is False
        assert after["admissible_actions"] == info["admissible_actions"]
    *_, truncated, after = env.step("  look ")
    assert (truncated, after["is_action_valid"]) == (True, True)
    with pytest.raises(RuntimeError, match=r"call reset\(\) before step"):
        env.step("look")
    with pytest.raises(RuntimeError, match=r"call reset\(\) before expert_action"):
        env.expert_action()


def test_winning_on_the_last_step_terminates():
    env = shipped()
    start(env, SAFE)
    _, steps = play_expert(env)
    env = shipped(horizon=steps)
    start(env, SAFE)
    (_, reward, terminated, truncated, _), _ = play_expert(env)
    assert (reward, terminated, truncated) == (10.0, True, False)


def test_anchors_add_what_they_say():
    anchors = {}
    for anchor in ANCHORS:
        env = shipped(anchor=anchor)
        _, info = start(env, HEAT)
        observation = ""
        while not observation.startswith("You pick up the mug"):
            observation, *_, info = env.step(env.expert_action())
        anchors[anchor] = info["anchor"]
    mug = observation.removeprefix("You pick up the ").split(" from ")[0]
    assert anchors["observation"] == observation
    assert anchors["observation+inventory"] == f"{observation}\nYou are carrying: a {mug}."
    assert anchors["observation+admissible"] == "\n".join(
        [observation, *info["admissible_actions"]]
    )


def test_expert_wins_from_anywhere():
    env = shipped(horizon=100)
    rng = random.Random(0)
    for task_id in env.task_ids()[::5]:
        _, info = start(env, task_id)
        for _ in range(30):
            if not info["won"]:
                *_, info = env.step(rng.choice(info["admissible_actions"]))
        if not info["won"]:
            (*_, info), _ = play_expert(env)
        assert info["won"]


@pytest.mark.parametrize("steps", [0, 4])
def test_pickled_copy_goes_on_where_the_original_is(steps):
    env = shipped(anchor="observation+inventory")
    start(env, HEAT)
    for _ in range(steps):
        env.step(env.expert_action())
    copy = pickle.loads(pickle.dumps(env))
    assert copy.expert_action() == env.expert_action()
    assert copy.step(env.expert_action()) == env.step(env.expert_action())
    assert copy.reset()[1] == env.reset()[1]


def test_closing_twice_and_starting_again():
    env = shipped()
    start(env, SAFE)
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="no episode is running"):
        env.step("look")
    assert start(env, SAFE)[1]["task_id"] == SAFE


def test_games_are_compiled_once():
    env, other = shipped(), shipped()
    start(env, SAFE)
    hits = compiled.cache_info().hits
    start(other, SAFE)
    assert compiled.cache_info().hits == hits + 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"games": "mine"}, '"real" or "shipped", got \'mine\''),
        ({"split": "test"}, "no shipped split is named 'test'; use one of train"),
        ({"task_types": ["pick"]}, r"task_types must name some of pick_and_place, .*\['pick'\]"),
        ({"task_types": []}, "task_types must name some of"),
        ({"anchor": "state"}, "anchor must be one of observation, .*'state'"),
        ({"engine": "slow"}, "engine must be one of fast, textworld; got 'slow'"),
        ({"horizon": 0}, "horizon must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ALFWorld(**{"games": "shipped", **kwargs})


def test_missing_data_names_variable_command_and_shipped_games(monkeypatch, tmp_path):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    message = 'ALFWORLD_DATA is not set.*`alfworld-download .*games="shipped"'
    with pytest.raises(FileNotFoundError, match=message):
        ALFWorld()
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"ALFWORLD_DATA='{tmp_path}', expected a folder"):
        ALFWorld()
    with pytest.raises(FileNotFoundError, match="data_dir="):
        ALFWorld(data_dir=tmp_path / "nowhere")


def write_game(folder, **fields):
    folder.mkdir(parents=True)
    data = {**build_shipped_game(SAFE), "solvable": True, **fields}
    (folder / "game.tw-pddl").write_text(json.dumps(data))


def test_real_games_are_found_as_the_reference_finds_them(monkeypatch, tmp_path):
    split = tmp_path / "json_2.1.1" / "train"
    kinds = ["pick_two_obj_and_place-Pen", "pick_and_place_simple-Mug", "look_at_obj_in_light-Book"]
    for kind in kinds:
        write_game(split / kind / "trial_1")
    write_game(split / "pick_and_place_simple-Cup" / "trial_1", solvable=False)
    write_game(split / "pick_and_place_simple-Pan" / "trial_1", solvable=True, walkthrough=["look"])
    write_game(split / "pick_and_place_with_movable_recep-Pen" / "trial_1")
    write_game(split / "pick_and_place_simple-AppleSliced" / "trial_1")
    write_game(split / "stack_things-Pen" / "trial_1")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    env = ALFWorld()
    assert env.task_ids() == [
        "train/look_at_obj_in_light-Book/trial_1/game.tw-pddl",
        "train/pick_and_place_simple-Mug/trial_1/game.tw-pddl",
        "train/pick_and_place_simple-Pan/trial_1/game.tw-pddl",
        "train/pick_two_obj_and_place-Pen/trial_1/game.tw-pddl",
    ]
    assert start(env, env.task_ids()[1])[1]["task"] == "put some keychain on safe."
    assert play_expert(env)[0][4]["won"]


def test_the_newest_version_that_has_the_split_is_played(tmp_path):
    old, new = tmp_path / "json_2.1.1", tmp_path / "json_2.1.10"
    write_game(old / "train" / "pick_and_place_simple-Old" / "trial_1")
    write_game(old / "mine" / "pick_and_place_simple-Mug" / "trial_1")
    write_game(tmp_path / "json_2.1.2" / "train" / "pick_and_place_simple-Mid" / "trial_1")
    write_game(new / "train" / "pick_and_place_simple-New" / "trial_1")

    def names(**kwargs):
        return [task_id.split("/")[1] for task_id in ALFWorld(**kwargs).task_ids()]

    assert names(data_dir=tmp_path) == ["pick_and_place_simple-New"]
    assert names(data_dir=tmp_path, split="mine") == ["pick_and_place_simple-Mug"]
    assert names(data_dir=old) == ["pick_and_place_simple-Old"]
    message = r"split 'tain' holds no game.tw-pddl .* there are mine, train"
    with pytest.raises(ValueError, match=message):
        ALFWorld(data_dir=tmp_path, split="tain")
    with pytest.raises(ValueError, match="has 1 games, none of type pick_two_obj"):
        ALFWorld(data_dir=tmp_path, task_types=["pick_two_obj"])


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[alfworld\]'"):
        shipped(engine="textworld")


def test_two_resets_at_once_leave_the_command_line_as_it_was(monkeypatch):
    before, inside, waits, go_on = sys.argv, *(threading.Event() for _ in range(3))

    class Planner:
        """Overwrites the command line, as the translator does."""

        def load(self, game):
            sys.argv = [game]
            inside.set()
            assert go_on.wait(20)

        def reset(self):
            state = {"admissible_commands": [], "won": False}
            return type("State", (dict,), {"feedback": ""})(state)

    class Told:
        """The lock, and who comes to it while it is held."""

        def __init__(self):
            self._lock = threading.Lock()

        def __enter__(self):
            if inside.is_set():
                waits.set()
            self._lock.acquire()

        def __exit__(self, *error):
            self._lock.release()

    def reset(name):
        engine = textworld_engine.TextWorldEngine.__new__(textworld_engine.TextWorldEngine)
        engine._env, engine._loaded = Planner(), None
        engine.reset(name)

    monkeypatch.setattr(textworld_engine, "load_game", lambda game: game)
    monkeypatch.setattr(textworld_engine, "_TRANSLATOR", Told())
    threads = [threading.Thread(target=reset, args=(name,)) for name in ("one", "two")]
    try:
        threads[0].start()
        assert inside.wait(20)
        threads[1].start()
        assert waits.wait(20)
        go_on.set()
        for thread in threads:
            thread.join(20)
        assert sys.argv is before
    finally:
        go_on.set()
        sys.argv = before


def test_fast_engine_imports_no_simulator():
    code = (
        "import sys; from envs.alfworld import ALFWorld; env = ALFWorld(games='shipped');"
        " env.reset(seed=0); env.step('look');"
        " print([m for m in ('alfworld', 'textworld', 'torch', 'ray') if m in sys.modules])"
    )
    assert run_python("-c", code).stdout.strip() == "[]"
