"""TextWorld's commands in the case that a policy writes, with a game that a test makes up."""

from types import SimpleNamespace

import pytest

from envs.adapters import textworld
from envs.adapters.textworld import TextWorldGame
from rllib_gigpo.agent.profile import default_profile

COMMANDS = ["open Type-A Box", "go north"]


class Game:
    """Says what it was told to do."""

    def __init__(self):
        self.told: list[str] = []

    def seed(self, seed):
        pass

    def reset(self):
        return self._state("A room.")

    def step(self, command):
        self.told.append(command)
        return self._state(f"You {command}."), 0, False

    def close(self):
        pass

    def _state(self, feedback):
        return SimpleNamespace(
            admissible_commands=COMMANDS,
            score=0,
            won=False,
            objective="Open it.",
            description="A room.",
            inventory="Nothing.",
            feedback=feedback,
        )


@pytest.fixture
def game(monkeypatch, tmp_path):
    made = Game()
    monkeypatch.setattr(textworld, "_open", lambda file: made)
    (tmp_path / "one.z8").touch()
    env = TextWorldGame(target=str(tmp_path))
    env.reset(seed=0)
    return env, made


@pytest.mark.parametrize("written", ["open Type-A Box", "open  type-a box", "OPEN TYPE-A BOX"])
def test_a_command_reaches_the_game_as_the_game_spells_it(game, written):
    env, made = game
    action = default_profile().read(f"<think>so</think><action>{written}</action>").text
    *_, info = env.step(action)
    assert info["is_action_valid"] is True
    assert made.told == ["open Type-A Box"]


def test_what_is_not_admissible_reaches_no_game(game):
    env, made = game
    observation, *_, info = env.step("open Type-B Box")
    assert observation == "'open Type-B Box' is not possible now."
    assert (info["is_action_valid"], made.told) == (False, [])
