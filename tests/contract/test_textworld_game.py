"""TextWorld's games: real ones, made by TextWorld for the test."""

import re

import pytest

from envs.adapters.textworld import TextWorldGame
from tests.textworld_games import two_games


@pytest.fixture
def games():
    return two_games()


def test_a_game_is_won_by_the_commands_of_its_quest(games):
    import textworld

    env = TextWorldGame(target=str(games / "game_1.z8"))
    observation, info = env.reset(seed=0)
    game = textworld.Game.load(str(games / "game_1.json"))
    assert observation.startswith("-= ")
    assert info["task"] == " ".join(game.objective.split())
    assert info["won"] is False
    total = 0.0
    for command in game.metadata["walkthrough"]:
        assert command in info["admissible_actions"]
        observation, reward, terminated, truncated, info = env.step(command)
        total += reward
    assert (terminated, truncated, info["won"]) == (True, False, True)
    assert total == game.max_score
    assert info["admissible_actions"] == []
    env.close()
    env.close()


def test_answers_have_neither_banner_nor_prompt_nor_counter(games):
    env = TextWorldGame(target=str(games / "game_1.z8"))
    observation, info = env.reset(seed=0)
    texts = [observation]
    for command in info["admissible_actions"]:
        env.reset(seed=0)
        texts.append(env.step(command)[0])
        texts.append(env.step("look")[0])
    for text in texts:
        assert not re.search(r"\$\$|>|\d+/\d+|\n\n", text)
        assert text == text.strip() != ""
    env.close()


def test_the_anchor_is_room_and_inventory_or_the_answer(games):
    env = TextWorldGame(target=str(games / "game_1.z8"))
    start, info = env.reset(seed=0)
    assert info["anchor"].startswith(start)
    observation, *_, looked = env.step("inventory")
    assert observation != start
    assert looked["anchor"] == info["anchor"]
    env.close()
    env = TextWorldGame(target=str(games / "game_1.z8"), anchor="observation")
    start, info = env.reset(seed=0)
    assert info["anchor"] == start
    env.close()


def test_a_command_that_is_not_admissible_reaches_no_game(games):
    env = TextWorldGame(target=str(games / "game_1.z8"))
    _, before = env.reset(seed=0)
    observation, reward, terminated, _, info = env.step("fly away")
    assert observation == "'fly away' is not possible now."
    assert (reward, terminated, info["is_action_valid"]) == (0.0, False, False)
    assert info["admissible_actions"] == before["admissible_actions"]
    env.close()


def test_the_seed_chooses_among_the_games_of_a_folder(games):
    env = TextWorldGame(target=str(games))
    assert env.task_ids() == ["game_1.z8", "game_2.z8"]
    assert {env.reset(seed=seed)[1]["task_id"] for seed in range(6)} == set(env.task_ids())
    assert env.reset(options={"task_id": "game_2.z8"})[1]["task_id"] == "game_2.z8"
    with pytest.raises(ValueError, match=r"task_id 'x' is not one of \['game_1.z8'"):
        env.reset(options={"task_id": "x"})
    env.close()
    assert TextWorldGame(target=str(games / "*_2.z8")).task_ids() == ["game_2.z8"]


def test_arguments_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"names no game: expected a \.z8 or \.ulx file"):
        TextWorldGame(target=str(tmp_path))
    with pytest.raises(ValueError, match="anchor must be 'state' or 'observation', got 'x'"):
        TextWorldGame(target=str(tmp_path), anchor="x")
