"""The reference engine: the `alfworld` and `textworld` packages themselves."""

from __future__ import annotations

import sys
import threading
from typing import Any

from envs.alfworld.engine import Turn
from envs.alfworld.games import Game, load_game

# The planner's translator keeps its options in module globals and captures standard output.
_TRANSLATOR = threading.Lock()
# Each game object loads a copy of the planner's library, which crashes when unloaded: reuse them.
_IDLE: list[Any] = []


class TextWorldEngine:
    """TextWorld's PDDL engine with ALFWorld's object names.

    A step takes some 50 ms and a reset about a second, most of it in the translation of the
    problem and in deriving each admissible command from the grammar.

    Raises:
        ImportError: The `alfworld` package is not installed.
    """

    def __init__(self):
        try:
            import textworld
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
            from textworld.envs.pddl import PddlEnv
        except ImportError as error:
            raise ImportError(
                f'engine="textworld" needs the alfworld package ({error}); install it with'
                " `pip install -e '.[alfworld]'` in rllib-gigpo's folder"
            ) from error
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        try:
            self._env: Any = _IDLE.pop()
        except IndexError:
            self._env = AlfredDemangler(PddlEnv(infos))
        self._loaded: Game | None = None

    def reset(self, game: Game) -> Turn:
        """Start an episode of `game`."""
        with _TRANSLATOR:
            argv = sys.argv
            try:
                if game != self._loaded:
                    self._env.load(load_game(game))
                    self._loaded = game
                return self._turn(self._env.reset())
            finally:
                sys.argv = argv  # the translator overwrites it

    def step(self, command: str) -> Turn:
        """Carry out a command."""
        state, _, _ = self._env.step(command)
        return self._turn(state)

    def inventory(self) -> str:
        """Return what the command `inventory` would answer now, without playing it."""
        game = self._env.unwrapped
        context = {
            "state": game._pddl_state,
            "facts": list(game._pddl_state.facts),
            "variables": {},
            "mapping": {},
            "entity_infos": game._entity_infos,
        }
        return game._logic.grammar.derive("#inventory.feedback#", context)

    def close(self) -> None:
        """Leave the game object to the next engine of this process."""
        if self._env is not None:
            _IDLE.append(self._env)
            self._env = None

    @staticmethod
    def _turn(state: Any) -> Turn:
        return Turn(state.feedback, list(state["admissible_commands"]), bool(state["won"]))
