"""Sokoban as gym-sokoban scores it, with the paper's room of 6 x 6 cells and one box."""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Any, Literal, get_args

import gymnasium
import numpy as np

from envs.sokoban.draw import (
    SYMBOLS,
    TILE_PIXELS,
    draw_image,
    draw_text,
    level_codes,
    state_codes,
)
from envs.sokoban.files import open_levels
from envs.sokoban.generate import generate_level
from envs.sokoban.level import Level, format_level
from envs.sokoban.solver import Solver
from envs.sokoban.words import VOCABULARY, tell
from envs.spaces import TextSpace, image_space

View = Literal["text", "words", "rgb"]

_TASK = "Push every box onto a target."
_MOVES = ("up", "down", "left", "right")
_LARGEST_DISTANCE = 9  # that the tiny model has a word for
_STEP_REWARD, _BOX_REWARD, _SOLVED_REWARD = -0.1, 1.0, 10.0


class Sokoban(gymnasium.Env[str | np.ndarray, str]):
    """Push every box onto a target; boxes are pushed one at a time and never pulled.

    Each step costs 0.1. A box that is pushed onto a target gives 1, one that is pushed off it takes
    1, and the last one on gives 10 more and ends the episode. A move against a wall, or against a
    box that does not give way, stays in place. An action that is not one of the four moves does
    nothing, costs a step and its 0.1, and sets `info["is_action_valid"]` to False. Episodes are
    truncated after `horizon` steps.

    Observations:
        `view="text"`: rows of symbols separated by blanks: wall `#`, floor `_`, target `O`, box
        `X`, box on a target `√`, player `P`, player on a target `S`.
        `view="words"`: where boxes and targets lie and which walls touch the player and the boxes,
        told as in `envs.sokoban.words`, for models too small to read a drawn room. Other walls are
        not told.
        `view="rgb"`: a picture, uint8 [16 * rows, 16 * columns, 3].

    Info: `task`, `task_id` (equal for equal levels), `admissible_actions` (empty once the episode
    has ended), `won`, `boxes_on_target`, and after a step `is_action_valid`.

    Args:
        size: Columns and rows of generated rooms, walls included, each at least 4.
        num_boxes: Boxes of generated rooms, at least 1.
        search_depth: Most moves between a generated level and its solution; the horizon bounds it
            too, so every generated level can be won.
        num_levels: How many different rooms are generated, at least 1; None: a new one for nearly
            every seed.
        levels: File of levels in Boxoban's format, or a folder of such `.txt` files, in place of
            generated rooms. Many of them need more than the default horizon.
        horizon: Step limit, at least 1.
        view: "text", "words" or "rgb". For "rgb", all levels of the files are to be of one size.

    Raises:
        FileNotFoundError: `levels` does not exist or has no levels.
        ValueError: An argument is out of its range, or a file holds no level.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it without ClassVar
    actions: tuple[str, ...] = _MOVES

    def __init__(
        self,
        *,
        size: tuple[int, int] = (6, 6),
        num_boxes: int = 1,
        search_depth: int = 30,
        num_levels: int | None = None,
        levels: str | os.PathLike | None = None,
        horizon: int = 15,
        view: View = "text",
    ):
        if len(size) != 2 or min(size) < 4:
            raise ValueError(f"size must be (columns, rows), each at least 4, got {size}")
        for name, value in (
            ("num_boxes", num_boxes),
            ("search_depth", search_depth),
            ("horizon", horizon),
            ("num_levels", num_levels),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if levels is not None and num_levels is not None:
            raise ValueError(
                f"num_levels={num_levels} is of generated rooms, and levels={os.fspath(levels)!r} "
                "holds its own: leave one of them out"
            )
        if view not in get_args(View):
            raise ValueError(f"view must be one of {get_args(View)}, got {view!r}")
        self.size = (int(size[0]), int(size[1]))
        self.num_boxes = num_boxes
        self.search_depth = search_depth
        self.horizon = horizon
        self.view = view
        self._levels = None if levels is None else open_levels(os.fspath(levels))
        self.num_levels = num_levels if self._levels is None else len(self._levels)
        shown = self._levels[0] if self._levels else None
        self._columns, self._rows = (shown.width, shown.height) if shown else self.size
        self.observation_space: gymnasium.Space[Any] = (
            image_space(self._rows * TILE_PIXELS, self._columns * TILE_PIXELS)
            if view == "rgb"
            else TextSpace()
        )
        self.action_space = TextSpace(self.actions)
        self._is_over = True

    @classmethod
    def words(cls) -> list[str]:
        """Return every symbol of the text view, every word of the other one and every action."""
        distances = [str(number) for number in range(1, _LARGEST_DISTANCE + 1)]
        return [*SYMBOLS, *cls.actions, *VOCABULARY, *distances]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str | np.ndarray, dict[str, Any]]:
        """Start an episode; `options={"level": n}` chooses level n in [0, `num_levels`).

        Raises:
            ValueError: The level does not exist, or is of another size than the pictures; or there
                is no room of the wanted kind.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(self.num_levels or 2**62))
        chosen = (options or {}).get("level")
        if self.num_levels is None and chosen is not None:
            raise ValueError(
                "options={'level': ...} needs numbered levels: set levels or num_levels"
            )
        self._level, self._task_id = self._open(drawn if chosen is None else chosen)
        self._solver: Solver | None = None
        self._plan: list[str] = []
        self._is_given_up = False
        self._base = level_codes(self._level)
        self._steps_of = self._level.steps
        self._boxes = set(self._level.boxes)
        self._player = self._level.player
        self._on_target = len(self._level.boxes & self._level.targets)
        self._steps = 0
        self._is_over = False
        return self._observation(), self._info()

    def step(self, action: str) -> tuple[str | np.ndarray, float, bool, bool, dict[str, Any]]:
        """Play one move.

        Raises:
            RuntimeError: No episode is running.
        """
        self._require_episode("step")
        before = self._on_target
        is_valid = action in self._steps_of
        if is_valid:
            self._plan = self._plan[1:] if self._plan[:1] == [action] else []
            self._move(self._steps_of[action])
        self._steps += 1
        won = self._won
        reward = _STEP_REWARD + _BOX_REWARD * (self._on_target - before) + _SOLVED_REWARD * won
        truncated = not won and self._steps >= self.horizon
        self._is_over = won or truncated
        info = self._info()
        info["is_action_valid"] = is_valid
        return self._observation(), reward, won, truncated, info

    def expert_action(self) -> str:
        """Return the first move of a shortest solution from here.

        Where there is none, or the search gives up after 50,000 states, it is "up" from then on:
        nothing better is known.

        Raises:
            RuntimeError: No episode is running.
        """
        self._require_episode("expert_action")
        if not self._plan and not self._is_given_up:
            if self._solver is None:
                self._solver = Solver(self._level)
            found = self._solver.solve(frozenset(self._boxes), self._player)
            self._plan = found.moves or []
            # A lost position stays lost, and a search that was too long would be so at every step.
            self._is_given_up = not self._plan
        return self.actions[0] if self._is_given_up else self._plan[0]

    @property
    def level(self) -> Level:
        """The level of the episode as it started."""
        return self._level

    @property
    def _won(self) -> bool:
        return self._on_target == len(self._boxes)

    def _open(self, number: int) -> tuple[Level, str]:
        if self.num_levels is not None and not 0 <= number < self.num_levels:
            raise ValueError(f"level must be in [0, {self.num_levels}), got {number}")
        if self._levels is None:
            depth = min(self.search_depth, self.horizon)
            level = generate_level(number, *self.size, self.num_boxes, depth)
            digest = blake2b(format_level(level).encode(), digest_size=8).hexdigest()
            return level, f"{level.width}x{level.height}-{self.num_boxes}-{digest}"
        level = self._levels[number]
        if self.view == "rgb" and (level.width, level.height) != (self._columns, self._rows):
            raise ValueError(
                f"{self._levels.name(number)} is {level.width} x {level.height} cells, the first "
                f"level {self._columns} x {self._rows}: pictures need levels of one size"
            )
        return level, self._levels.name(number)

    def _move(self, step: int) -> None:
        ahead = self._player + step
        if ahead not in self._level.floor:
            return
        if ahead in self._boxes:
            beyond = ahead + step
            if beyond not in self._level.floor or beyond in self._boxes:
                return
            self._boxes.remove(ahead)
            self._boxes.add(beyond)
            targets = self._level.targets
            self._on_target += (beyond in targets) - (ahead in targets)
        self._player = ahead

    def _observation(self) -> str | np.ndarray:
        if self.view == "words":
            return tell(self._level, self._boxes, self._player)
        codes = state_codes(self._base, self._boxes, self._player)
        draw = draw_image if self.view == "rgb" else draw_text
        return draw(codes, self._level.width)

    def _info(self) -> dict[str, Any]:
        return {
            "task": _TASK,
            "task_id": self._task_id,
            "admissible_actions": [] if self._is_over else list(self.actions),
            "won": self._won,
            "boxes_on_target": self._on_target,
        }

    def _require_episode(self, method: str) -> None:
        if self._is_over:
            raise RuntimeError(f"no episode is running; call reset() before {method}()")
