"""NumberLine: walk from one number to another."""

from __future__ import annotations

import numpy as np

from envs.gym_cards.game import CardGame, Outcome, View


class NumberLine(CardGame):
    """A current and a target number between 0 and `max_position`; "+" and "-" move by one.

    Reaching the target gives 1 and ends the episode. A move that does not come closer, one that is
    stopped at an end included, gives -1; any other 0. Both conventions of the other games agree on
    that. Episodes are truncated after `horizon` steps.

    Observations: `Target: 4` and `Current: 1`, as two lines of text or written in a picture.

    Info: `task`, `task_id`, `admissible_actions`, `won`, and after a step `is_action_valid`.

    Args:
        max_position: Largest number, at least 2.
        horizon: Step limit, at least 1.
        view: "text", or "rgb": a picture, uint8 [300, 300, 3].

    Raises:
        ValueError: An argument is out of its range.
    """

    actions = ("-", "+")
    task = "Bring the current number to the target."

    def __init__(self, *, max_position: int = 5, horizon: int = 10, view: View = "text"):
        super().__init__(horizon, view, "rl4vlm")
        if max_position < 2:
            raise ValueError(f"max_position must be at least 2, got {max_position}")
        self.max_position = max_position

    @classmethod
    def words(cls) -> list[str]:
        """Return every word of the text view, with numbers up to 9, and every action."""
        return ["Target:", "Current:", *map(str, range(10)), *cls.actions]

    def expert_action(self) -> str:
        """Return the move towards the target."""
        self._require_episode("expert_action")
        return "+" if self._current < self._target else "-"

    def _deal(self) -> str:
        self._current, self._target = self.np_random.integers(
            self.max_position + 1, size=2
        ).tolist()
        if self._current == self._target:
            self._target = (self._target + 1) % self.max_position
        return f"{self._current} to {self._target}"

    def _play(self, action: str) -> Outcome:
        before = abs(self._target - self._current)
        moved = self._current + (1 if action == "+" else -1)
        self._current = min(max(moved, 0), self.max_position)
        after = abs(self._target - self._current)
        if after == 0:
            return Outcome(1.0, is_end=True)
        return Outcome(0.0 if after < before else -1.0)

    def _text(self) -> str:
        return f"Target: {self._target}\nCurrent: {self._current}"

    def _picture(self) -> np.ndarray:
        from envs.gym_cards.draw import draw_numbers

        return draw_numbers(self._target, self._current)
