"""What the four games share: the course of an episode, views and rewards."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal, NamedTuple, get_args

import gymnasium
import numpy as np

from envs.spaces import TextSpace, image_space

View = Literal["text", "rgb"]
Reward = Literal["paper", "rl4vlm"]
SIDE = 300


class Card(NamedTuple):
    """A card: rank "A", "2" to "10", "J", "Q" or "K"; suit "H", "S", "D" or "C"."""

    rank: str
    suit: str


class Outcome(NamedTuple):
    """What an action came to.

    Attributes:
        reward: In the original convention of the game.
        is_end: Whether the game is over.
        is_cut: Whether the episode is cut short.
    """

    reward: float = 0.0
    is_end: bool = False
    is_cut: bool = False


class CardGame(gymnasium.Env[str | np.ndarray, str]):
    """One game. An action that it does not know does nothing, costs a step, and is flagged.

    Args:
        horizon: Step limit, at least 1.
        view: "text", or "rgb": a picture, uint8 [300, 300, 3].
        reward: "rl4vlm": the game's own. "paper": 0 in place of every negative reward.

    Raises:
        ValueError: An argument is out of its range.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it without ClassVar
    actions: tuple[str, ...]
    task: str

    def __init__(self, horizon: int, view: View, reward: Reward):
        if horizon < 1:
            raise ValueError(f"horizon must be at least 1 step, got {horizon}")
        for name, value, allowed in (("view", view, View), ("reward", reward, Reward)):
            if value not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}, got {value!r}")
        self.horizon = horizon
        self.view = view
        self.reward = reward
        self.observation_space: gymnasium.Space[Any] = (
            image_space(SIDE, SIDE) if view == "rgb" else TextSpace()
        )
        self.action_space = TextSpace(self.actions)
        self._is_over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str | np.ndarray, dict[str, Any]]:
        """Start an episode; the seed fixes all draws, those of later steps too."""
        super().reset(seed=seed)
        self._task_id = self._deal()
        self._won = False
        self._steps = 0
        self._is_over = False
        return self._observation(), self._info()

    def step(self, action: str) -> tuple[str | np.ndarray, float, bool, bool, dict[str, Any]]:
        """Play one action.

        Raises:
            RuntimeError: No episode is running.
        """
        self._require_episode("step")
        is_valid = action in self.actions
        outcome = self._play(action) if is_valid else Outcome()
        self._won = outcome.reward > 0
        self._steps += 1
        truncated = not outcome.is_end and (outcome.is_cut or self._steps >= self.horizon)
        self._is_over = outcome.is_end or truncated
        reward = outcome.reward if self.reward == "rl4vlm" else max(0.0, outcome.reward)
        info = self._info()
        info["is_action_valid"] = is_valid
        return self._observation(), reward, outcome.is_end, truncated, info

    @abstractmethod
    def _deal(self) -> str:
        """Draw a new game and return its task id."""

    @abstractmethod
    def _play(self, action: str) -> Outcome:
        """Carry out a known action."""

    @abstractmethod
    def _text(self) -> str:
        """Return the text view."""

    @abstractmethod
    def _picture(self) -> np.ndarray:
        """Return the picture."""

    def _draw_card(self, rank: str) -> Card:
        return Card(rank, "HSDC"[int(self.np_random.integers(4))])

    def _observation(self) -> str | np.ndarray:
        return self._picture() if self.view == "rgb" else self._text()

    def _info(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "task_id": self._task_id,
            "admissible_actions": [] if self._is_over else list(self.actions),
            "won": self._won,
        }

    def _require_episode(self, method: str) -> None:
        if self._is_over:
            raise RuntimeError(f"no episode is running; call reset() before {method}()")
