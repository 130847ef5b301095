"""Estimators by name, and what each of them reads.

An estimator is a pure function `(StepTable, *, ...) -> Advantages`. The names of its keyword
arguments say which settings it reads, and which further columns of the rows, for ours and for a
user's function alike.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rllib_gigpo.advantages.estimators import gigpo, rloo
from rllib_gigpo.advantages.history import hgpo
from rllib_gigpo.advantages.returns import gae_over_steps, reinforce
from rllib_gigpo.advantages.scores import Advantages
from rllib_gigpo.advantages.table import StepTable

Estimator = Callable[..., Advantages]

ESTIMATORS: dict[str, Estimator] = {
    "gigpo": gigpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "gae": gae_over_steps,
    "hgpo": hgpo,
}

# Columns [N]: the response's length, a critic's value of the state, and that of the state after
# a truncated trajectory (on that trajectory's last row, 0 elsewhere).
COLUMNS = ("response_tokens", "value", "bootstrap")
SETTINGS = (
    "omega",
    "episode_weight",
    "gamma",
    "lambda_",
    "f_norm",
    "group_mean_over",
    "history_length",
    "history_alpha",
    "history_base_group",
    "invalid_action_penalty",
    "penalty_scope",
)


def find_estimator(name: str | Estimator) -> Estimator:
    """Return the estimator of a name; a function is its own.

    Raises:
        ValueError: No estimator has this name.
    """
    if callable(name):
        return name
    if not isinstance(name, str) or name not in ESTIMATORS:
        raise ValueError(
            f"estimator={name!r}: expected one of {', '.join(map(repr, ESTIMATORS))}, or a "
            "function (StepTable, *, settings...) -> Advantages"
        )
    return ESTIMATORS[name]


def settings_of(estimator: Estimator) -> tuple[str, ...]:
    """Return the names of the settings that an estimator reads."""
    return tuple(name for name in _read_by(estimator) if name in SETTINGS)


def needs_critic(estimator: Estimator) -> bool:
    """Whether an estimator reads values."""
    return "value" in _read_by(estimator)


def _read_by(estimator: Estimator) -> tuple[str, ...]:
    """Return the names of an estimator's keyword arguments.

    Raises:
        ValueError: One is neither a setting nor a column.
    """
    names = tuple(inspect.signature(estimator).parameters)[1:]
    for name in names:
        if name not in (*SETTINGS, *COLUMNS):
            raise ValueError(
                f"the estimator {getattr(estimator, '__name__', estimator)!r} asks for {name!r}, "
                f"expected settings among {', '.join(SETTINGS)} or columns among "
                f"{', '.join(COLUMNS)}"
            )
    return names


def estimate(
    estimator: Estimator,
    table: StepTable,
    *,
    settings: Mapping[str, Any],
    columns: Mapping[str, Any],
) -> Advantages:
    """Compute advantages with what the estimator reads.

    Args:
        estimator: What `find_estimator` returned.
        table: The rows [N].
        settings: Values of `SETTINGS`.
        columns: Those of `COLUMNS` that there are, each [N].
    """
    given = {**settings, **columns}
    return estimator(table, **{name: given[name] for name in _read_by(estimator)})
