"""Key events: what must not be forgotten for the rest of the episode."""

from collections.abc import Callable, Mapping
from typing import Any

Mark = Callable[[str, str, Mapping[str, Any]], str | None]


def told_by_environment(observation: str, action: str, info: Mapping[str, Any]) -> str | None:
    """Return the event that the environment marks as `info["event"]`."""
    return info.get("event")


class KeyEvents:
    """Keeps marked events for the whole episode, each once, with the step at which it came.

    Args:
        mark: From (observation, action, info after the step) to the event's text, or None for a
            step without one; by default the environment's own `info["event"]`.
        limit: Most events that are kept; the oldest gives way, so that an episode of any length
            needs no more memory.

    Raises:
        ValueError: The limit is below 1.
    """

    def __init__(self, mark: Mark = told_by_environment, limit: int = 32):
        if limit < 1:
            raise ValueError(f"KeyEvents(limit={limit}): at least one event must be kept")
        self.mark = mark
        self.limit = limit
        self._events: dict[str, int] = {}
        self._steps = 0

    def add(self, observation: str, action: str, info: Mapping[str, Any]) -> None:
        """Keep the step's event, if it has one."""
        self._steps += 1
        event = self.mark(observation, action, info)
        if event and event not in self._events:
            self._events[event] = self._steps
            if len(self._events) > self.limit:
                del self._events[next(iter(self._events))]

    def render(self, drop: int = 0) -> tuple[str, int]:
        """Return the events, oldest first."""
        shown = list(self._events.items())[drop:]
        lines = (f"- step {step}: {event}" for event, step in shown)
        return "\n".join(("Key events:", *lines)) if shown else "", len(shown)
