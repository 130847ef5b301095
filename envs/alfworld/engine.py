"""What the environment asks of an engine that plays ALFWorld's text games."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from envs.alfworld.games import Game

NOTHING_HAPPENS = "Nothing happens."


class Turn(NamedTuple):
    """What an engine says after a reset or a command.

    Attributes:
        feedback: The engine's text, unchanged.
        admissible: The commands that will change or report something, sorted.
        won: Whether the goal holds.
    """

    feedback: str
    admissible: list[str]
    won: bool


class Engine(Protocol):
    """Plays one episode of one game at a time."""

    def reset(self, game: Game) -> Turn:
        """Start an episode of `game`."""
        ...

    def step(self, command: str) -> Turn:
        """Carry out a command; one that is not admissible gets `NOTHING_HAPPENS`."""
        ...

    def inventory(self) -> str:
        """Return what the command `inventory` would answer now, without playing it."""
        ...

    def close(self) -> None:
        """Free what the engine holds; it may be called again."""
        ...
