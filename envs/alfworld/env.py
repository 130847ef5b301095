"""ALFWorld: household tasks played as text, with sparse reward and a horizon of 50 steps."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from envs.alfworld.engine import Engine, Turn
from envs.alfworld.fast.engine import FastEngine, compiled
from envs.alfworld.fast.expert import Expert
from envs.alfworld.games import Game, list_games
from envs.spaces import TextSpace

ANCHORS = ("observation", "observation+inventory", "observation+admissible")
SUCCESS_REWARD = 10.0
_TASK_PREFIX = "Your task is to: "


def _textworld_engine() -> Engine:
    # Imported here: only this engine needs the alfworld package.
    from envs.alfworld.textworld_engine import TextWorldEngine

    return TextWorldEngine()


_ENGINES: dict[str, Callable[[], Engine]] = {"fast": FastEngine, "textworld": _textworld_engine}


class ALFWorld(gymnasium.Env[str, str]):
    """The text games of ALFWorld (Shridhar et al. 2021, arXiv 2010.03768).

    The agent walks between the receptacles of one home, takes, cleans, heats, cools and places
    objects, and gets 10 when the goal sentence holds, otherwise 0. A command that is not
    admissible changes nothing and costs a step.

    The first observation is the description of the room; each later one is the answer to the last
    command. `info` holds `task` (the goal sentence), `admissible_actions` (all commands that the
    engine offers, `help` included), `won`, `is_action_valid` (after a step), `anchor`, `task_id`
    (path of the game below `json_2.1.*`) and `task_type`.

    Args:
        games: `"real"`: game files in the folder of the environment variable ALFWORLD_DATA.
            `"shipped"`: the small games that come with this package.
        split: Folder below `json_2.1.*` whose games are played: `train`, `valid_seen`,
            `valid_unseen` or any other. The shipped games have the same three, and each again with
            `_put` at its end for the older commands ("put X in/on Y").
        task_types: Which of the six task types (`envs.alfworld.TASK_TYPES`) to play; None: all.
        horizon: Steps until the episode is truncated.
        anchor: What `info["anchor"]` says about the state. `"observation"`: the observation alone.
            `"observation+inventory"`: also what the agent carries. `"observation+admissible"`:
            also the admissible commands. Observations alone repeat most, and merge states that
            differ.
        engine: `"fast"`: this package's engine; it gives the same texts, admissible commands and
            success as the reference some thousand times faster. `"textworld"`: the reference, the
            packages `alfworld` and `textworld` (`pip install -e '.[alfworld]'` in rllib-gigpo's
            folder).
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
        horizon: int = 50,
        anchor: str = "observation",
        engine: str = "fast",
        data_dir: str | os.PathLike | None = None,
    ):
        if anchor not in ANCHORS:
            raise ValueError(f"anchor must be one of {', '.join(ANCHORS)}; got {anchor!r}")
        if engine not in _ENGINES:
            raise ValueError(f"engine must be one of {', '.join(_ENGINES)}; got {engine!r}")
        if horizon < 1:
            raise ValueError(f"horizon must be at least 1, got {horizon}")
        self.observation_space = TextSpace()
        self.action_space = TextSpace(["look", "inventory"])
        self.horizon = horizon
        self._listing = (games, split, None if task_types is None else tuple(task_types), data_dir)
        self._games = list_games(*self._listing)
        self._anchor = anchor
        self._engine_name = engine
        self._engine: Engine | None = _ENGINES[engine]()
        self._game: Game | None = None
        self._commands: list[str] = []
        self._admissible: list[str] = []
        self._task = ""
        self._is_over = True
        self._expert: Expert | None = None

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
            game = self._find(options["task_id"])
        self._engine = self._engine or _ENGINES[self._engine_name]()
        turn = self._engine.reset(game)
        # The first text is a banner, the room and the goal, in three paragraphs.
        _, room, goal = turn.feedback.split("\n\n", 2)
        self._game = game
        self._task = goal.removeprefix(_TASK_PREFIX).strip()
        self._commands = []
        self._admissible = turn.admissible
        self._is_over = False
        self._expert = None
        return room, self._info(room, turn)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out a command.

        Raises:
            RuntimeError: No episode is running.
        """
        engine = self._running_engine("step")
        is_valid = action.strip() in self._admissible
        turn = engine.step(action)
        self._commands.append(action)
        self._admissible = turn.admissible
        truncated = not turn.won and len(self._commands) >= self.horizon
        self._is_over = turn.won or truncated
        info = self._info(turn.feedback, turn)
        info["is_action_valid"] = is_valid
        return turn.feedback, SUCCESS_REWARD * turn.won, turn.won, truncated, info

    def expert_action(self) -> str:
        """Return the next command of a shortest plan, from the full state of the game.

        Raises:
            RuntimeError: No episode is running.
        """
        self._running_engine("expert_action")
        if self._expert is None:
            assert self._game is not None
            self._expert = Expert(compiled(self._game))
        return self._expert.next_command(self._commands)

    def close(self) -> None:
        """Free the engine; a later `reset` starts a new one."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._is_over = True

    def _running_engine(self, method: str) -> Engine:
        if self._is_over or self._engine is None:
            raise RuntimeError(f"no episode is running; call reset() before {method}()")
        return self._engine

    def _find(self, task_id: str) -> Game:
        place = bisect.bisect_left(self._games, task_id, key=lambda game: game.task_id)
        if place == len(self._games) or self._games[place].task_id != task_id:
            raise ValueError(
                f"task_id {task_id!r} is not one of this split's {len(self._games)} games;"
                " task_ids() lists them"
            )
        return self._games[place]

    def _info(self, observation: str, turn: Turn) -> dict[str, Any]:
        assert self._game is not None
        return {
            "task": self._task,
            "admissible_actions": list(turn.admissible),
            "won": turn.won,
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
        # Engines are rebuilt from the commands so far, game lists from the files that are there.
        return {**self.__dict__, "_engine": None, "_expert": None, "_games": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._games = list_games(*self._listing)
        self._engine = _ENGINES[self._engine_name]()
        if self._game is not None:
            self._game = self._find(self._game.task_id)
            self._engine.reset(self._game)
            for command in self._commands:
                self._engine.step(command)
