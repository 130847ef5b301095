"""The fast ALFWorld engine answers as the reference does, step by step."""

from __future__ import annotations

import json
import random
import tarfile
from importlib.resources import files

import pytest

from benchmarks.alfworld_parity import compare, random_command, spread
from envs.alfworld.fast.compile import CompiledGame
from envs.alfworld.fast.engine import FastEngine
from envs.alfworld.games import Game, list_games, load_game
from envs.alfworld.textworld_engine import TextWorldEngine
from tests.missing import skip_or_fail
from tests.shared_data import shared_data

GAMES = 12
# Lets both verb forms together stay below 90 s: the reference takes a second to reset a game.
RANDOM_STEPS = 10
FORMS = ("move", "put")


@pytest.fixture(scope="module")
def reference():
    try:
        engine = TextWorldEngine()
    except ImportError as error:
        skip_or_fail(str(error))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the unpacked real games by verb form."""
    archives = {form: shared_data(f"alfworld/games_valid_train_{form}.tar.xz") for form in FORMS}
    unpacked = {form: tmp_path_factory.mktemp(form) for form in FORMS}
    for form, archive in archives.items():
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked[form], filter="data")
    return unpacked


def check(reference: TextWorldEngine, games: list[Game], random_steps: int) -> None:
    for seed, game in enumerate(games):
        result = compare(reference, FastEngine(), game, random_steps, seed)
        assert not result.difference
        assert result.won
        assert result.steps >= random_steps


@pytest.mark.parametrize("form", FORMS)
def test_real_games_play_as_on_the_reference(reference, folders, form):
    games = spread(list_games("real", "valid_train", None, folders[form]), GAMES)
    assert len({game.task_type for game in games}) == 6
    check(reference, games, RANDOM_STEPS)


@pytest.mark.parametrize("split", ["train", "valid_unseen_put"])
def test_shipped_games_play_as_on_the_reference(reference, split):
    check(reference, spread(list_games("shipped", split, None, None), 2), 20)


@pytest.mark.parametrize("form", FORMS)
def test_recorded_walkthroughs_win(folders, form):
    games = {game.task_id: game for game in list_games("real", "valid_train", None, folders[form])}
    walkthroughs = json.loads(shared_data("alfworld/walkthroughs.json").read_text())
    assert walkthroughs
    for task_id, commands in walkthroughs.items():
        engine = FastEngine()
        turn = engine.reset(games[task_id])
        for command in commands:
            assert not turn.won
            turn = engine.step(_in_form(command, form))
        assert turn.won, task_id


def _in_form(command: str, form: str) -> str:
    if form == "move" or not command.startswith("move "):
        return command
    thing, receptacle = command.removeprefix("move ").split(" to ")
    return f"put {thing} in/on {receptacle}"


def test_shipped_rules_and_texts_are_those_of_the_package():
    """The package's own domain and grammar, put in place of ours, change nothing."""
    pytest.importorskip("alfworld", reason="needs the alfworld package")
    package = files("alfworld") / "data"
    for seed, game in enumerate(spread(list_games("shipped", "train", None, None), 6)):
        data = load_game(game)
        theirs = {
            **data,
            "pddl_domain": (package / "alfred.pddl").read_text(),
            "grammar": (package / "alfred.twl2").read_text(),
        }
        ours, other = CompiledGame(data), CompiledGame(theirs)
        states = [ours.initial, other.initial]
        rng = random.Random(seed)
        for _ in range(100):
            assert ours.admissible(states[0]) == other.admissible(states[1])
            command = random_command(ours.admissible(states[0]), rng)
            found = ours.operator(states[0], command), other.operator(states[1], command)
            assert (found[0] is None) == (found[1] is None)
            if found[0] is not None and found[1] is not None and command != "help":
                states = [found[0].apply(states[0]), found[1].apply(states[1])]
                assert ours.feedback(found[0], states[0]) == other.feedback(found[1], states[1])
                assert ours.is_won(states[0]) == other.is_won(states[1])
