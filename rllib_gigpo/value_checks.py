"""Checks of one value each: a sentence that names the setting, the value and what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# Tune's samplers and NumPy arrays give NumPy numbers.
WHOLE_TYPES = (int, np.integer)
NUMBER_TYPES = (int, float, np.integer, np.floating)

# What holds them: random states take seeds of 32 bits, rows task seeds of 64, and the learner
# computes in 32-bit floating point.
LARGEST_COUNT = 2**31 - 1
LARGEST_SEED = 2**32 - 1
LARGEST_TASK_SEED = 2**63 - 1
_LARGEST_NUMBER = 1e30


def is_whole(value: Any, least: int = 0, most: int = LARGEST_COUNT) -> bool:
    """Whether a value is a whole number in a range; True and False are none."""
    return (
        isinstance(value, WHOLE_TYPES)
        and not isinstance(value, bool)
        and least <= int(value) <= most
    )


def is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether a value is a finite number in a range; True and False are none."""
    if not isinstance(value, NUMBER_TYPES) or isinstance(value, bool):
        return False
    # A whole number may be too large for a float.
    if not -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER:
        return False
    return bool(low <= value <= high)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuse a value that is not among the choices."""
    # An array or a list would compare element by element.
    if not isinstance(value, str | bool | None) or value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def check_whole(name: str, value: Any, least: int, most: int = LARGEST_COUNT) -> None:
    """Refuse what is no whole number of at least `least`."""
    if not is_whole(value, least, most):
        is_large = isinstance(value, int) and value > most
        limit = f" and at most {most}" if is_large else ""
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}{limit}")


def check_range(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Refuse what is no finite number from `low` to `high`."""
    if not is_number(value, low, high):
        bound = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise ValueError(f"{name}={value!r}: expected a finite number {bound}{_limit(value)}")


def check_resource(name: str, value: Any) -> None:
    """Refuse what Ray cannot reserve: above 1 it gives whole CPUs and GPUs only."""
    check_range(name, value, 0.0)
    if value > 1 and value != int(value):
        raise ValueError(
            f"{name}={value!r}: above 1 Ray gives whole ones only; use a whole number, or a "
            "fraction below 1"
        )


def check_mapping(name: str, value: Any) -> None:
    """Refuse what is no mapping from names."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{name}={value!r}: expected a dict from names to values")


def _limit(value: Any) -> str:
    is_large = isinstance(value, NUMBER_TYPES) and _LARGEST_NUMBER < value < math.inf
    return f" and at most {_LARGEST_NUMBER:g}" if is_large else ""
