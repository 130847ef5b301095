"""`textworld:<game file>`: games made with TextWorld."""

from __future__ import annotations

import glob
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.adapters.base import AdapterEnv, Turn
from envs.adapters.naming import spelled

# The status line below the prompt holds the score and the number of moves.
_PROMPT = re.compile(r"\n*>\s*(?:-= .* =-\s*-?\d+/\d+)?\s*\Z")
_SUFFIXES = (".z8", ".ulx")


class TextWorldGame(AdapterEnv):
    """One or several games of TextWorld (Côté et al. 2018, arXiv 1806.11532).

    The observation is the answer to the last command, at first the description of the room. The
    anchor is the description of the room and what is carried, which tells states apart better than
    the answer does. The reward is the change of the score. Commands are read in any case;
    one that is not admissible reaches no game and is flagged.

    Args:
        target: A game file (.z8 or .ulx with the .json beside it, as `tw-make` writes them), a
            folder, or a pattern such as `games/*.z8`. The seed chooses among several.
        horizon: Most commands of an episode.
        anchor: "state" as above, or "observation".

    Raises:
        FileNotFoundError: There is no such game.
        ImportError: The `textworld` package is not installed.
    """

    def __init__(self, *, target: str = "", horizon: int = 50, anchor: str = "state"):
        if anchor not in ("state", "observation"):
            raise ValueError(f"anchor must be 'state' or 'observation', got {anchor!r}")
        super().__init__(horizon=horizon, examples=("look", "inventory"))
        self.target = target
        self.anchor = anchor
        self._files = _games(target)
        self._game: Any = None
        self._loaded: str | None = None

    def task_ids(self) -> list[str]:
        """Return the names of the games; any goes to `reset` as the option `task_id`."""
        return [Path(file).name for file in self._files]

    def _start(self, seed: int, options: Mapping[str, Any]) -> Turn:
        file = self._files[seed % len(self._files)]
        if "task_id" in options:
            names = self.task_ids()
            if options["task_id"] not in names:
                raise ValueError(f"task_id {options['task_id']!r} is not one of {names}")
            file = self._files[names.index(options["task_id"])]
        if file != self._loaded:
            self._release()
            self._game = _open(file)
            self._loaded = file
        self._game.seed(seed)
        state = self._game.reset()
        self._task_id = Path(file).name
        self._take(state)
        return Turn(_tidy(state.description), info=self._told_now(_tidy(state.description)))

    def _act(self, action: str) -> Turn:
        typed = " ".join(action.split())
        command = spelled(typed, self._admissible)
        if command is None:
            answer = f"{typed!r} is not possible now."
            return Turn(answer, info={**self._told_now(answer), "is_action_valid": False})
        before = self._score
        state, _, done = self._game.step(command)
        self._take(state)
        answer = _tidy(state.feedback)
        info = {**self._told_now(answer), "is_action_valid": True}
        return Turn(answer, float(self._score - before), bool(done), info=info)

    def _release(self) -> None:
        if self._game is not None:
            self._game.close()
        self._game = self._loaded = None

    def _take(self, state: Any) -> None:
        self._admissible = list(state.admissible_commands)
        self._score = int(state.score or 0)
        self._won = bool(state.won)
        self._task = " ".join(state.objective.split())
        self._state = f"{_tidy(state.description)}\n{_tidy(state.inventory)}"

    def _told_now(self, observation: str) -> dict[str, Any]:
        return {
            "task": self._task,
            "task_id": self._task_id,
            "admissible_actions": list(self._admissible),
            "anchor": self._state if self.anchor == "state" else observation,
            "won": self._won,
        }


def _tidy(text: str) -> str:
    return re.sub(r"\n{2,}", "\n", _PROMPT.sub("", text)).strip()


def _games(target: str) -> list[str]:
    pattern = str(Path(target) / "*") if Path(target).is_dir() else target
    found = sorted(file for file in glob.glob(pattern) if file.endswith(_SUFFIXES))
    if not found:
        raise FileNotFoundError(
            f"textworld:{target} names no game: expected a {' or '.join(_SUFFIXES)} file, a folder "
            "or a pattern; TextWorld's command tw-make makes games"
        )
    return found


def _open(file: str) -> Any:
    try:
        import textworld
    except ImportError as error:
        raise ImportError(
            f"textworld: needs the textworld package ({error}); install it with "
            "`pip install -e '.[textworld]'` in rllib-gigpo's folder"
        ) from error
    asked = {"description", "inventory", "admissible_commands", "won", "score", "objective"}
    with warnings.catch_warnings():
        # The interpreter knows the score of published games alone; TextWorld counts its own.
        warnings.simplefilter("ignore")
        return textworld.start(file, request_infos=textworld.EnvInfos(**dict.fromkeys(asked, True)))
