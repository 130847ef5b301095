"""Episodes on a terminal. What a model or an environment wrote cannot steer the terminal."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rllib_gigpo.games import Game
from rllib_gigpo.observations import state_key
from rllib_gigpo.playing.desk import Asked
from rllib_gigpo.playing.play import Played
from rllib_gigpo.recording.folder import write_bytes
from rllib_gigpo.recording.pictures import png
from rllib_gigpo.vision.pictures import Picture, split_marks

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Return a text with its control characters written out, such as \x1b; lines stay lines."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Screen:
    """Prints prompts, actions and outcomes.

    Args:
        stream: Where to print.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._folder: Path | None = None

    def line(self, text: str = "") -> None:
        """Print one line, or several."""
        print(printable(text), file=self._stream, flush=True)

    def prompt(self, asked: Asked) -> None:
        """Print a prompt, exactly as the model reads it before its chat template."""
        self.line(f"\n--- step {asked.turn}, {asked.agent} " + "-" * 40)
        for message in asked.messages:
            self.line(f"[{message['role']}]")
            parts = split_marks(message["content"], asked.context.pictures)
            for part in parts:
                self.line(f"[picture: {self._saved(part)}]" if isinstance(part, Picture) else part)

    def _saved(self, picture: Picture) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="rllib_gigpo_"))
        path = self._folder / f"{state_key(picture.pixels).hex()}.png"
        write_bytes(path, png(picture.pixels))
        return path

    def outcome(
        self, turn: int, actions: Any, observations: Any, rewards: Any, infos: Any, game: Game
    ) -> None:
        """Print what an environment step came to; a `Watch`."""
        for agent, action in actions.items():
            told = infos.get(agent, {})
            refused = "" if told.get("is_action_valid", True) else ", refused by the environment"
            reward = float(rewards.get(agent, 0.0))
            self.line(f"step {turn - 1}, {agent}: {action!r}, reward {reward:g}{refused}")

    def end(self, played: Played) -> None:
        """Print how an episode ended."""
        won = played.verdict.get("won")
        outcome = "" if won is None else ", won" if won else ", lost"
        how = "cut off" if played.episode.is_truncated else "ended"
        steps = played.episode.env_steps()
        self.line(f"\nthe episode {how} after {steps} steps: return {played.total:g}{outcome}")


def answered(screen: Screen, player: Callable[[Asked], Any]) -> Callable[[Asked], Any]:
    """Return a player whose prompts and responses are printed."""
    import inspect

    async def play(asked: Asked) -> str:
        screen.prompt(asked)
        answer = player(asked)
        response = await answer if inspect.isawaitable(answer) else answer
        screen.line(f"[response]\n{response}")
        return response

    return play
