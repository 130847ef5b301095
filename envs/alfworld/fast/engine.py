"""The fast engine: plays compiled games."""

from __future__ import annotations

from functools import lru_cache

from envs.alfworld.engine import NOTHING_HAPPENS, Turn
from envs.alfworld.fast.compile import CompiledGame
from envs.alfworld.games import Game, load_game

_MAX_GAMES = 64


@lru_cache(maxsize=_MAX_GAMES)
def compiled(game: Game) -> CompiledGame:
    """Return a game ready to play; the last 64 stay in memory."""
    return CompiledGame(load_game(game))


class FastEngine:
    """Plays ALFWorld's games without the `alfworld` package.

    Texts, admissible commands and success equal the reference engine's. An episode is one integer;
    everything else is shared by all episodes of a game in the process.
    """

    def __init__(self):
        self._game: CompiledGame | None = None
        self._state = 0
        self._won = False

    def reset(self, game: Game) -> Turn:
        """Start an episode of `game`."""
        self._game = compiled(game)
        self._state = self._game.initial
        self._won = self._game.is_won(self._state)
        return Turn(self._game.intro, self._game.admissible(self._state), self._won)

    def step(self, command: str) -> Turn:
        """Carry out a command."""
        game = self._game
        assert game is not None, "reset() comes before step()"
        operator = game.operator(self._state, command.strip())
        if operator is None:
            return Turn(NOTHING_HAPPENS, game.admissible(self._state), self._won)
        self._state = operator.apply(self._state)
        if game.may_win(operator):
            self._won = game.is_won(self._state)
        return Turn(game.feedback(operator, self._state), game.admissible(self._state), self._won)

    def inventory(self) -> str:
        """Return what the command `inventory` would answer now, without playing it."""
        assert self._game is not None, "reset() comes before inventory()"
        return self._game.inventory(self._state)

    def close(self) -> None:
        """Forget the episode."""
        self._game = None
