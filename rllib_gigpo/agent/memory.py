"""Memories: what of the past, and of what is known besides, an agent sees in its next prompt.

A memory is any object with the two methods of `Memory`; one that depends on the prompt it is going
to stand in has a third, `Attentive.look`. The rollouts deep-copy the profile's memory once per
episode, so a memory may simply hold lists.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


class Memory(Protocol):
    """The memory contract."""

    def add(self, observation: str, action: str, info: Mapping[str, Any]) -> None:
        """Take in one step: what was seen, what was done, and what the environment answered.

        Args:
            observation: The observation that the agent acted on.
            action: The action text that it sent to the environment.
            info: The environment's info dict after the step; where the policy wrote itself a note
                (`Action.note`), also "note".
        """
        ...

    def render(self, drop: int = 0) -> tuple[str, int]:
        """Return the text for the prompt and the number of entries (steps, events, ...) it shows.

        Prompts that are too long are tried again with one entry less, until there is none: a
        memory keeps any limit if each `drop` shortens its text and the last leaves it empty.

        Args:
            drop: Leave out this many entries, the oldest or least wanted first.
        """
        ...


@runtime_checkable
class Attentive(Protocol):
    """A memory that looks at the task and the observation before it is rendered."""

    def look(self, task: str, observation: str) -> None:
        """Take in what the coming prompt is about.

        Args:
            task: The task text.
            observation: The current observation.
        """
        ...


def look(memory: Memory, task: str, observation: str) -> None:
    """Let a memory look at what the coming prompt is about, where it wants to."""
    if isinstance(memory, Attentive):
        memory.look(task, observation)


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


class Joined:
    """Several memories in one, their texts below each other.

    Where a prompt is too long, the last memory gives way first: name the most precious one first.

    Args:
        *memories: The memories, in the order of their texts.
    """

    def __init__(self, *memories: Memory):
        self._memories = memories

    def add(self, observation: str, action: str, info: Mapping[str, Any]) -> None:
        """Let all memories take in the step."""
        for memory in self._memories:
            memory.add(observation, action, info)

    def look(self, task: str, observation: str) -> None:
        """Let those look that want to."""
        for memory in self._memories:
            look(memory, task, observation)

    def render(self, drop: int = 0) -> tuple[str, int]:
        """Return all texts, without the last `drop` entries counted from the last memory on."""
        texts, shown = [], 0
        for memory in reversed(self._memories):
            text, entries = memory.render()
            if drop:
                dropped = min(drop, entries)
                text, entries = memory.render(dropped)
                drop -= dropped
            if entries:
                texts.insert(0, text)
                shown += entries
        return "\n".join(texts), shown
