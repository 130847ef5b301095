"""What environments share whose agents take turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.error import ResetNeeded

TeamStep = tuple[
    dict[str, str],
    dict[str, float],
    dict[str, bool],
    dict[str, bool],
    dict[str, dict[str, Any]],
]
"""Observations, rewards, terminated, truncated and infos of a step, by agent."""


def move_of(mover: str | None, actions: Mapping[str, str]) -> tuple[str, str]:
    """Return the agent whose turn it is, and its action.

    Args:
        mover: That agent; None where no episode is running.
        actions: Actions by agent, as they came.

    Raises:
        ResetNeeded: No episode is running.
        ValueError: Another agent acted, or more than one.
    """
    if mover is None:
        raise ResetNeeded("no episode is running; call reset() first")
    if list(actions) != [mover]:
        raise ValueError(f"it is the turn of {mover}, got actions of {sorted(actions)}")
    return mover, actions[mover]
