"""ALFWorld: household tasks played as text, with sparse reward and a horizon of 50 steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import gymnasium

from envs.alfworld.engine import NOTHING_HAPPENS, Engine, Turn
from envs.alfworld.games import Game, list_games
from envs.spaces import TextSpace

ANCHORS = ("observation", "observation+inventory", "observation+admissible")
SUCCESS_REWARD = 10.0
_TASK_PREFIX = "Your task is to: "


def _textworld_engine() -> Engine:
    from envs.alfworld.textworld_engine import TextWorldEngine

    return TextWorldEngine()


_ENGINES = {"textworld": _textworld_engine}


class ALFWorld(gymnasium.Env[str, str]):
    """The text games of ALFWorld (Shridhar et al. 2021, arXiv 2010.03768).

    The agent walks between the receptacles of one home, takes, cleans, heats, cools and places
    objects, and gets 10 when the goal sentence holds, otherwise 0. A command that is not
    admissible changes nothing and costs a step.

    The first observation is the description of the room; each later one is the answer to the last
    command. `info` holds `task` (the goal sentence), `admissible_actions` (all commands that the
    engine offers, `help` included), `won`, `is_action_valid`, `anchor`, `task_id` (path of the
    game below `json_2.1.*`) and `task_type`.

    Args:
        games: `"real"`: game files in the folder of the environment variable ALFWORLD_DATA.
            `"shipped"`: the small games that come with this package.
        split: Folder below `json_2.1.*` whose games are played: `train`, `valid_seen`,
            `valid_unseen` or any other. The shipped games have the same three, and each again with
            `_put` at its end for the older commands ("put X in/on Y").
        task_types: Which of the six task types (`envs.alfworld.TASK_TYPES`) to play; None: all.
        max_steps: Steps until the episode is truncated.
        anchor: What `info["anchor"]` says about the state. `"observation"`: the observation alone.
            `"observation+inventory"`: also what the agent carries. `"observation+admissible"`:
            also the admissible commands. Observations alone repeat most, and merge states that
            differ.
        engine: `"textworld"`: the package's own engine.
        data_dir: Where the real games are, in place of ALFWORLD_DATA.

    Raises:
        ValueError: An argument is none of its values, or the split has no such game.
        FileNotFoundError: `games="real"` and there is no data.
        ImportError: The engine's package is not installed.
    """

    def __init__(
        self,
        *,
        games: str = "real",
        split: str = "train",
        task_types: Sequence[str] | None = None,
        max_steps: int = 50,
        anchor: str = "observation",
        engine: str = "textworld",
        data_dir: str | os.PathLike | None = None,
    ):
        if anchor not in ANCHORS:
            raise ValueError(f"anchor must be one of {', '.join(ANCHORS)}; got {anchor!r}")
        if engine not in _ENGINES:
            raise ValueError(f"engine must be one of {', '.join(_ENGINES)}; got {engine!r}")
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        self.observation_space = TextSpace()
        self.action_space = TextSpace(["look", "inventory"])
        self._games = list_games(games, split, task_types, data_dir)
        self._max_steps = max_steps
        self._anchor = anchor
        self._engine_name = engine
        self._engine: Engine | None = _ENGINES[engine]()
        self._game: Game | None = None
        self._task = ""
        self._admissible: list[str] = []
        self._commands: list[str] = []

    def task_ids(self) -> list[str]:
        """Return the ids of all games of this split, sorted; any goes to `reset` as an option."""
        return [game.task_id for game in self._games]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: Draws the game; the same seed draws the same game on every machine that holds
                the same files.
            options: `{"task_id": id}` plays that game of `task_ids()` in place of a drawn one.

        Raises:
            ValueError: `task_id` is not in this split.
        """
        super().reset(seed=seed)
        game = self._games[int(self.np_random.integers(len(self._games)))]
        if options and "task_id" in options:
            game = self._named(options["task_id"])
        return self._start(game)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out a command.

        Raises:
            RuntimeError: `reset` was not called before.
        """
        if self._engine is None or self._game is None:
            raise RuntimeError("this ALFWorld has no running episode; call reset() before step()")
        valid = action.strip() in self._admissible
        turn = self._engine.step(action)
        self._commands.append(action)
        self._admissible = turn.admissible
        info = self._info(turn, turn.feedback, valid and turn.feedback != NOTHING_HAPPENS)
        truncated = not turn.won and len(self._commands) >= self._max_steps
        return turn.feedback, SUCCESS_REWARD * turn.won, turn.won, truncated, info

    def close(self) -> None:
        """Free the engine; a later `reset` starts a new one."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._game = None

    def _named(self, task_id: str) -> Game:
        for game in self._games:
            if game.task_id == task_id:
                return game
        raise ValueError(
            f"task_id {task_id!r} is not one of this split's {len(self._games)} games; task_ids()"
            " lists them"
        )

    def _start(self, game: Game) -> tuple[str, dict[str, Any]]:
        if self._engine is None:
            self._engine = _ENGINES[self._engine_name]()
        turn = self._engine.reset(game)
        self._game, self._commands, self._admissible = game, [], turn.admissible
        # The feedback of a reset is a banner, the room and the goal, in three paragraphs.
        _, room, goal = turn.feedback.split("\n\n", 2)
        self._task = goal.removeprefix(_TASK_PREFIX).strip()
        return room, self._info(turn, room, True)

    def _info(self, turn: Turn, observation: str, valid: bool) -> dict[str, Any]:
        assert self._game is not None
        return {
            "task": self._task,
            "admissible_actions": list(turn.admissible),
            "won": turn.won,
            "is_action_valid": valid,
            "anchor": self._anchor_of(observation, turn),
            "task_id": self._game.task_id,
            "task_type": self._game.task_type,
        }

    def _anchor_of(self, observation: str, turn: Turn) -> str:
        if self._anchor == "observation+inventory":
            assert self._engine is not None
            return f"{observation}\n{self._engine.inventory()}"
        if self._anchor == "observation+admissible":
            return "\n".join([observation, *turn.admissible])
        return observation

    def __getstate__(self) -> dict[str, Any]:
        # An engine may hold a library; the game and the commands so far say the same.
        return {**self.__dict__, "_engine": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._engine = _ENGINES[self._engine_name]()
        if self._game is not None:
            self._engine.reset(self._game)
            for command in self._commands:
                self._engine.step(command)
