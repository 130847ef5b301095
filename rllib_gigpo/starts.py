"""Whether the episodes of a group begin in the same state, and where two of them do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_gigpo.observations import state_key

_PARTS = ("observation", "task", "task_id")
_EXCERPT = 120


def start_of(
    observations: Mapping[Any, Any], infos: Mapping[Any, Mapping[str, Any]]
) -> dict[Any, tuple]:
    """Return what tells initial states apart; observations alone may show a part of the state."""
    told = {agent: infos.get(agent, {}) for agent in observations}
    return {
        agent: (state_key(observation), told[agent].get("task"), told[agent].get("task_id"))
        for agent, observation in observations.items()
    }


def difference(first: Mapping[Any, tuple], second: Mapping[Any, tuple]) -> str:
    """Say where two different results of `start_of` differ, with what each shows there."""
    if set(first) != set(second):
        return f"agents {sorted(map(str, first))} and {sorted(map(str, second))} begin"
    agent = next(agent for agent in first if first[agent] != second[agent])
    pairs = zip(_PARTS, first[agent], second[agent], strict=True)
    part, one, other = next((part, a, b) for part, a, b in pairs if a != b)
    whose = "" if len(first) == 1 else f" of agent {agent!r}"
    return f"the {part}{whose} was {_excerpts(one, other)}"


def _excerpts(first: Any, second: Any) -> str:
    """Return two different values, of long texts the part where they begin to differ."""
    if not (isinstance(first, str) and isinstance(second, str)):
        return f"{first!r} and {second!r}"
    start = next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    start = max(0, start - _EXCERPT // 2) if max(len(first), len(second)) > _EXCERPT else 0
    where = f" (from character {start})" if start else ""
    return f"{first[start:][:_EXCERPT]!r} and {second[start:][:_EXCERPT]!r}{where}"
