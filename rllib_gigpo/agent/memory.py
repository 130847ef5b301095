"""Memories: what of the past an agent sees in its next prompt.

A memory is any object with the two methods of `Memory`. The rollouts deep-copy the profile's
memory once per episode, so a memory may simply hold lists.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class Memory(Protocol):
    """The memory contract."""

    def add(self, observation: str, action: str, info: Mapping[str, Any]) -> None:
        """Take in one step: what was seen, what was done, and what the environment answered.

        Args:
            observation: The observation that the agent acted on.
            action: The action text that it sent to the environment.
            info: The environment's info dict after the step.
        """
        ...

    def render(self, drop: int = 0) -> tuple[str, int]:
        """Return the history text and the number of steps it shows.

        Args:
            drop: Leave out this many of the oldest shown entries, for prompts that are too long.
        """
        ...


class NoMemory:
    """Remembers nothing: for environments whose observation is the whole state."""

    def add(self, observation: str, action: str, info: Mapping[str, Any]) -> None:
        """Forget the step."""

    def render(self, drop: int = 0) -> tuple[str, int]:
        """Return no text and no steps."""
        return "", 0


class LastSteps:
    """Shows the last k (observation, action) pairs, one numbered line each.

    Args:
        k: How many steps are shown, at least 1.

    Raises:
        ValueError: k below 1.
    """

    def __init__(self, k: int = 2):
        if k < 1:
            raise ValueError(f"LastSteps(k={k}): k must be at least 1; use NoMemory() for none")
        self.k = k
        self._steps: list[tuple[str, str]] = []
        self._seen = 0

    def add(self, observation: str, action: str, info: Mapping[str, Any]) -> None:
        """Keep the step and let go of the one that falls out of the window."""
        self._steps = [*self._steps, (observation, action)][-self.k :]
        self._seen += 1

    def render(self, drop: int = 0) -> tuple[str, int]:
        """Return the numbered lines of the window, oldest first."""
        shown = self._steps[drop:]
        first = self._seen - len(shown) + 1
        lines = (
            f"[Observation {first + i}: '{observation}', Action {first + i}: '{action}']"
            for i, (observation, action) in enumerate(shown)
        )
        return "\n".join(lines), len(shown)
