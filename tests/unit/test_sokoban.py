"""Sokoban: rules and rewards, generated levels, levels from files, the solver, both views."""

from __future__ import annotations

import itertools
import pickle
from collections import deque

import numpy as np
import pytest

from envs.sokoban import Sokoban
from envs.sokoban.draw import SYMBOLS, TILE_PIXELS
from envs.sokoban.files import LevelFiles
from envs.sokoban.generate import generate_level
from envs.sokoban.level import Level, format_level, parse_level
from envs.sokoban.solver import Solver
from tests.shared_data import shared_data

# One box two cells west of its target, and one that stands on its target.
TWO_BOXES = """\
; 0
#######
#@$ . #
#   * #
#######
"""


def levels_file(tmp_path, text=TWO_BOXES, name="levels.txt"):
    path = tmp_path / name
    path.write_text(text)
    return path


def play(env, actions, **reset):
    observation, info = env.reset(**reset)
    return [(observation, 0.0, False, False, info), *map(env.step, actions)]


def test_an_episode_step_by_step(tmp_path):
    env = Sokoban(levels=levels_file(tmp_path), horizon=20)
    steps = play(env, ["right", "up", "right"])
    assert [observation for observation, *_ in steps] == [
        "# # # # # # #\n# P X _ O _ #\n# _ _ _ √ _ #\n# # # # # # #",
        "# # # # # # #\n# _ P X O _ #\n# _ _ _ √ _ #\n# # # # # # #",
        "# # # # # # #\n# _ P X O _ #\n# _ _ _ √ _ #\n# # # # # # #",  # the wall holds it
        "# # # # # # #\n# _ _ P √ _ #\n# _ _ _ √ _ #\n# # # # # # #",
    ]
    # every step costs 0.1; the last box on its target gives 1, and all of them 10: -.1 + 1 + 10
    assert [reward for _, reward, *_ in steps] == pytest.approx([0, -0.1, -0.1, 10.9])
    assert [terminated for _, _, terminated, *_ in steps] == [False, False, False, True]
    assert [info["won"] for *_, info in steps] == [False, False, False, True]
    assert [info["boxes_on_target"] for *_, info in steps] == [1, 1, 1, 2]
    assert steps[-1][4]["admissible_actions"] == []


def test_a_box_off_its_target_takes_one_and_gives_it_again(tmp_path):
    level = "; 0\n########\n#. @*  #\n# $    #\n########\n"
    env = Sokoban(levels=levels_file(tmp_path, level), horizon=20)
    # off the target: -.1 - 1; round the box in four steps; back on: -.1 + 1
    steps = play(env, ["right", "down", "right", "right", "up", "left"])
    assert [reward for _, reward, *_ in steps] == pytest.approx(
        [0, -1.1, -0.1, -0.1, -0.1, -0.1, 0.9]
    )
    assert steps[1][0].splitlines()[1] == "# O _ _ S X _ #"
    assert steps[6][0].splitlines()[1] == "# O _ _ √ P _ #"
    assert [info["boxes_on_target"] for *_, info in steps] == [1, 0, 0, 0, 0, 0, 1]


def test_a_box_against_the_wall_stays(tmp_path):
    level = "; 0\n#####\n#.@$#\n#####\n"
    first, second = play(Sokoban(levels=levels_file(tmp_path, level)), ["right"])
    assert second[0] == first[0]
    assert second[4]["is_action_valid"] is True


def test_two_boxes_in_a_row_do_not_move(tmp_path):
    level = "; 0\n#######\n#@$$ .#\n#.    #\n#######\n"
    first, second = play(Sokoban(levels=levels_file(tmp_path, level)), ["right"])
    assert second[0] == first[0]
    assert second[1] == pytest.approx(-0.1)


def test_an_invalid_action_costs_a_step_and_changes_nothing(tmp_path):
    env = Sokoban(levels=levels_file(tmp_path), horizon=2)
    first, second, third = play(env, ["still", "Right"])
    assert first[0] == second[0] == third[0]
    assert [step[1] for step in (second, third)] == [-0.1, -0.1]
    assert second[4]["is_action_valid"] is False
    assert third[2:4] == (False, True)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step("up")
    with pytest.raises(RuntimeError, match="call reset"):
        env.expert_action()


def shortest_by_brute_force(level: Level) -> int | None:
    """Breadth-first over single moves, written without the solver's ideas."""
    start = (level.player, level.boxes)
    distance = {start: 0}
    waiting = deque([start])
    while waiting:
        player, boxes = state = waiting.popleft()
        if boxes == level.targets:
            return distance[state]
        for step in level.steps.values():
            ahead, beyond = player + step, player + 2 * step
            if ahead not in level.floor:
                continue
            moved = boxes
            if ahead in boxes:
                if beyond not in level.floor or beyond in boxes:
                    continue
                moved = boxes - {ahead} | {beyond}
            if (ahead, moved) not in distance:
                distance[ahead, moved] = distance[state] + 1
                waiting.append((ahead, moved))
    return None


@pytest.mark.parametrize(
    ("size", "num_boxes", "seeds"), [((6, 6), 1, 60), ((7, 6), 2, 25), ((6, 6), 3, 6)]
)
def test_generated_levels_are_solved_by_a_shortest_plan(size, num_boxes, seeds):
    for seed in range(seeds):
        level = generate_level(seed, *size, num_boxes, 30)
        assert len(level.boxes) == len(level.targets) == num_boxes
        assert not level.boxes & level.targets
        found = Solver(level).solve(level.boxes, level.player)
        assert found.moves is not None
        assert len(found.moves) == shortest_by_brute_force(level)
        assert len(found.moves) <= 30


def test_the_expert_wins_every_default_level_within_the_horizon():
    env = Sokoban()
    lengths = []
    for seed in range(300):
        env.reset(seed=seed)
        shortest = len(Solver(env.level).solve(env.level.boxes, env.level.player).moves or [])
        terminated, steps = False, 0
        while not terminated:
            _, _, terminated, truncated, info = env.step(env.expert_action())
            assert not truncated
            steps += 1
        assert info["won"]
        assert steps == shortest
        lengths.append(steps)
    assert min(lengths) >= 2
    assert max(lengths) <= env.horizon


def test_the_expert_finds_its_way_back_after_other_moves():
    env = Sokoban(horizon=60)
    env.reset(seed=1)
    plan = len(Solver(env.level).solve(env.level.boxes, env.level.player).moves or [])
    first = env.expert_action()
    back = {"up": "down", "down": "up", "left": "right", "right": "left"}[first]
    boxes = set(env._boxes)
    env.step(first)
    assert env._boxes == boxes, "seed 1 starts with a walk"
    env.step(back)
    steps = 0
    terminated = False
    while not terminated:
        terminated = env.step(env.expert_action())[2]
        steps += 1
    assert steps == plan


def test_seeds_name_the_same_levels_everywhere():
    # Pinned: they must never change, on any machine or with any release of Python and NumPy.
    assert Sokoban().reset(seed=0)[0] == PINNED
    assert generate_level(5, 6, 6, 1, 15) == generate_level.__wrapped__(5, 6, 6, 1, 15)
    different = {Sokoban().reset(seed=seed)[1]["task_id"] for seed in range(100)}
    assert len(different) == 100


PINNED = """\
# # # # # #
# # _ O _ #
# # _ _ P #
# # # X _ #
# _ _ _ _ #
# # # # # #"""


def test_search_depth_and_horizon_bound_the_solution():
    for seed in range(50):
        for env in (Sokoban(search_depth=4), Sokoban(horizon=4)):
            env.reset(seed=seed)
            assert (shortest_by_brute_force(env.level) or 99) <= 4


def test_a_lost_box_is_given_up_at_once():
    level = parse_level(["######", "#@   #", "# $  #", "#   .#", "######"])
    cornered = frozenset({level.width + 4})  # the corner in the north east
    found = Solver(level).solve(cornered, level.player)
    assert found == (None, 0, True)
    # The free box has two pushes to the east and one to the south; both come from one side each.
    assert shortest_by_brute_force(level) == len(
        Solver(level).solve(level.boxes, level.player).moves or []
    )


def test_four_that_nobody_can_move_are_cut_off():
    # Two boxes side by side below a wall, neither on a target: pushing the second up there loses.
    level = parse_level(["######", "# $  #", "#  $ #", "#  @ #", "#. . #", "######"])
    free = frozenset(level.boxes)
    stuck = frozenset({level.width + 2, level.width + 3})
    assert Solver(level)._is_stuck(level.width + 3, stuck)
    assert not Solver(level)._is_stuck(2 * level.width + 3, free)
    # On targets they may stay.
    done = parse_level(["######", "# .. #", "# $$ #", "#@   #", "######"])
    assert not Solver(done)._is_stuck(done.width + 2, done.targets)


def test_the_solver_gives_up_where_it_is_told():
    level = generate_level(3, 6, 6, 1, 30)
    found = Solver(level, max_states=1).solve(level.boxes, level.player)
    assert found == (None, 1, False)
    # Nothing is known then: the expert still moves.
    env = Sokoban()
    env.reset(seed=0)
    env._solver = Solver(env.level, max_states=1)
    assert env.expert_action() == "up"
    # And it does not search again and again.
    env._solver = None
    env.step("down")
    assert env.expert_action() == "up"
    assert env._solver is None
    env.reset(seed=0)
    assert env.expert_action() == "down"


def test_levels_are_read_and_written_in_the_usual_symbols():
    rows = ["#####", "#@$.#", "# *+#".replace("+", " "), "#####"]
    level = parse_level(rows)
    assert (level.width, level.height) == (5, 4)
    assert level.player == 6
    assert level.boxes == {7, 12}
    assert level.targets == {8, 12}
    assert format_level(level).splitlines() == rows
    onto = parse_level(["#####", "#+$ #", "#####"])
    assert onto.player in onto.targets
    assert parse_level(["#####", "#@$.#", "####"]).floor == {6, 7, 8}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["#####", "#@$.#", "#@  #", "#####"], "2 players, expected one"),
        (["#####", "# $.#", "#####"], "0 players, expected one"),
        (["#####", "#@$ #", "#####"], "1 boxes and 0 targets"),
        (["#####", "#@  #", "#####"], "0 boxes and 0 targets"),
        (["#####", "#@$.", "## ##"], "border is open"),
        (["#####", "#@$.x", "#####"], "unknown symbol 'x'"),
        (["#####", "#@ *#", "#####"], "every box stands on a target already"),
        ([], "0 players"),
    ],
)
def test_what_is_no_level_is_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        parse_level(rows)


def test_files_of_a_folder_are_one_list(tmp_path):
    (tmp_path / "sub").mkdir()
    levels_file(tmp_path, TWO_BOXES + "\n; 1\n####\n#@$.#\n#####\n", "b.txt")
    levels_file(tmp_path / "sub", TWO_BOXES, "a.txt")
    levels_file(tmp_path, "All rights reserved.\n", "LICENSE.txt")
    found = LevelFiles(str(tmp_path))
    assert [found.name(number) for number in range(len(found))] == [
        "b.txt:0",
        "b.txt:1",
        "sub/a.txt:0",
    ]
    assert found[0] == found[2]
    assert found[1].boxes == {7}
    with pytest.raises(IndexError, match="no level 3 among 3"):
        found[3]
    env = Sokoban(levels=tmp_path)
    assert env.reset(options={"level": 1})[1]["task_id"] == "b.txt:1"
    assert {env.reset(seed=seed)[1]["task_id"] for seed in range(30)} == {
        "b.txt:0",
        "b.txt:1",
        "sub/a.txt:0",
    }
    with pytest.raises(ValueError, match=r"level must be in \[0, 3\), got 3"):
        env.reset(options={"level": 3})
    with pytest.raises(ValueError, match=r"b\.txt:1 is 5 x 3 cells, the first level 7 x 4"):
        Sokoban(levels=tmp_path, view="rgb").reset(options={"level": 1})


def test_files_without_levels_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Sokoban(levels=tmp_path / "nothing")
    empty = levels_file(tmp_path, "All rights reserved.\n", "LICENSE.txt")
    for path in (empty, tmp_path):
        with pytest.raises(ValueError, match="has no level"):
            Sokoban(levels=path)
    broken = levels_file(tmp_path, "; 0\n####\n#@.#\n####\n", "broken.txt")
    with pytest.raises(ValueError, match=r"broken.txt:0 is no level: 0 boxes and 1 targets"):
        Sokoban(levels=broken)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": (3, 6)}, r"size must be .* got \(3, 6\)"),
        ({"num_boxes": 0}, "num_boxes must be at least 1, got 0"),
        ({"search_depth": 0}, "search_depth must be at least 1"),
        ({"horizon": 0}, "horizon must be at least 1"),
        ({"num_levels": 0}, "num_levels must be at least 1, got 0"),
        ({"num_levels": 4, "levels": "boxoban"}, "num_levels=4 is of generated .*'boxoban' holds"),
        ({"view": "ascii"}, "view must be one of .*, got 'ascii'"),
    ],
)
def test_bad_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Sokoban(**kwargs)


def test_a_room_too_small_for_its_boxes_is_refused():
    with pytest.raises(ValueError, match="no room of 4 x 4 cells has a level with 2 boxes"):
        Sokoban(size=(4, 4), num_boxes=2).reset(seed=0)
    with pytest.raises(ValueError, match="needs numbered levels"):
        Sokoban().reset(options={"level": 0})


def test_pictures_show_each_state_and_nothing_else():
    text, rgb = Sokoban(), Sokoban(view="rgb")
    pictures: dict[str, bytes] = {}
    for seed in range(5):
        seen = [(text.reset(seed=seed)[0], rgb.reset(seed=seed)[0])]
        for action in ("left", "up", "right", "down", "down", "right"):
            if text._is_over:
                break
            seen.append((text.step(action)[0], rgb.step(action)[0]))
        for words, picture in seen:
            assert picture.shape == (6 * TILE_PIXELS, 6 * TILE_PIXELS, 3)
            assert rgb.observation_space.contains(picture)
            assert pictures.setdefault(words, picture.tobytes()) == picture.tobytes()
    assert len(set(pictures.values())) == len(pictures)


def test_a_picture_is_made_of_the_tiles_of_its_symbols(tmp_path):
    path = levels_file(tmp_path)
    words, _ = Sokoban(levels=path).reset()
    picture, _ = Sokoban(levels=path, view="rgb").reset()
    tiles = picture.reshape(4, TILE_PIXELS, 7, TILE_PIXELS, 3).swapaxes(1, 2)
    tile_of: dict[str, bytes] = {}
    symbols = [row.split() for row in words.splitlines()]
    for y, x in itertools.product(range(4), range(7)):
        tile = tiles[y, x].tobytes()
        assert tile_of.setdefault(symbols[y][x], tile) == tile
    assert set(tile_of) == {"#", "_", "O", "X", "√", "P"}
    assert len(set(tile_of.values())) == 6


def test_a_limited_number_of_generated_rooms():
    env = Sokoban(num_levels=3)
    drawn = {env.reset(seed=seed)[0] for seed in range(60)}
    # 60 draws miss one of three rooms with probability 3 (2/3)^60 < 1e-10.
    assert drawn == {env.reset(options={"level": number})[0] for number in range(3)}
    assert len(drawn) == 3
    with pytest.raises(ValueError, match=r"level must be in \[0, 3\), got 3"):
        env.reset(options={"level": 3})


def test_a_state_told_in_words(tmp_path):
    env = Sokoban(levels=levels_file(tmp_path), view="words")
    (before, *_), (after, *_) = play(env, ["right"])
    # Row 1: player in column 1, box in 2, target in 4; row 2: a box on its target in column 4.
    assert before == (
        "wall up left . box right 1 wall up target right 2 target down 1 right 2"
        " . box down 1 right 3 wall down target up 1 target here ."
    )
    assert after == (
        "wall up . box right 1 wall up target right 1 target down 1 right 1"
        " . box down 1 right 2 wall down target up 1 target here ."
    )


def test_words_tell_states_of_a_level_apart():
    drawn, told = Sokoban(horizon=200), Sokoban(horizon=200, view="words")
    for seed in range(5):
        seen = {drawn.reset(seed=seed)[0]: told.reset(seed=seed)[0]}
        moves = np.random.default_rng(seed)
        for _ in range(100):
            action = str(moves.choice(drawn.actions))
            (picture, _, over, *_), (words, *_) = drawn.step(action), told.step(action)
            assert seen.setdefault(picture, words) == words
            if over:
                break
        assert len(set(seen.values())) == len(seen) > 5


def test_words_cover_the_views_told_in_words():
    assert set(SYMBOLS) <= set(Sokoban.words())
    env = Sokoban(size=(8, 8), num_boxes=2, view="words")
    for seed in range(20):
        text, _ = env.reset(seed=seed)
        assert set(text.split()) <= set(Sokoban.words())


def test_pictures_pickle_in_the_middle_of_an_episode():
    env = Sokoban(view="rgb")
    env.reset(seed=4)
    env.step("up")
    copy = pickle.loads(pickle.dumps(env))
    assert np.array_equal(copy.step("left")[0], env.step("left")[0])


def test_boxoban_levels_are_played_and_solved():
    env = Sokoban(levels=shared_data("sokoban/boxoban_unfiltered_test_000.txt"), horizon=100)
    assert env.num_levels == 1000
    for number in range(0, 1000, 100):
        env.reset(options={"level": number})
        assert (env.level.width, env.level.height, len(env.level.boxes)) == (10, 10, 4)
    env.reset(options={"level": 0})
    done = False
    while not done:
        _, _, terminated, truncated, info = env.step(env.expert_action())
        done = terminated or truncated
    assert info["won"]
