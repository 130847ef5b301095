"""What estimators share: the advantages they return, and rows scored in canonical order.

Shapes: N rows, E trajectories.
"""

from typing import Literal, NamedTuple

import numpy as np

from rllib_gigpo.advantages.parts import (
    BoolArray,
    FloatArray,
    IntArray,
    check_choice,
    dense_ids,
    discounted_returns,
    group_sums,
)
from rllib_gigpo.advantages.table import StepTable, canonical

GroupMeanOver = Literal["episodes", "steps"]
PenaltyScope = Literal["return", "step"]


def rounding_of_returns(length: int, magnitude: float) -> float:
    """Return the bound on the rounding error of a return; closer returns count as equal.

    Args:
        length: Steps of the longest trajectory.
        magnitude: Largest sum of a trajectory's absolute rewards.
    """
    return 2.0 * float(np.finfo(np.float64).eps) * length * magnitude


class Advantages(NamedTuple):
    """What an estimator says of every row, each of shape [N], in the row order of the table.

    Attributes:
        total: The advantage the loss uses.
        episode: The episode level, A_E.
        step: The step level, A_S, before the factor omega.
        step_return: Discounted return-to-go, with the penalty by its scope.
        step_group_size: Number of rows in the row's anchor group.
    """

    total: FloatArray
    episode: FloatArray
    step: FloatArray
    step_return: FloatArray
    step_group_size: IntArray


class Scores(NamedTuple):
    """Scores and groups of every row [N] in canonical order, shared by the estimators.

    Attributes:
        order: Row of the table at each place of the canonical order.
        trajectory: Trajectory id.
        step: Position in the trajectory.
        group: Episode-group id.
        anchor: Anchor-group id.
        reward: The row's reward, with the penalty where its scope is "return".
        episode_score: R of the row's trajectory, with the penalty by its scope.
        step_return: G_t, with the penalty by its scope.
        weight: Weight of the row in the episode-level statistics.
        alone: Whether the row's trajectory is the only one of its group.
        resolution: Bound on the rounding error of a return; closer returns count as equal.
    """

    order: IntArray
    trajectory: IntArray
    step: IntArray
    group: IntArray
    anchor: IntArray
    reward: FloatArray
    episode_score: FloatArray
    step_return: FloatArray
    weight: FloatArray
    alone: BoolArray
    resolution: float


def score_rows(
    table: StepTable,
    *,
    gamma: float,
    invalid_action_penalty: float,
    penalty_scope: PenaltyScope,
    group_mean_over: GroupMeanOver = "episodes",
) -> Scores:
    """Check the table, put it in canonical order and score every row.

    Args:
        table: The rows [N].
        gamma: Discount per step of a trajectory.
        invalid_action_penalty: What an invalid action costs, at least 0.
        penalty_scope: Where it is taken off (see `rllib_gigpo.advantages.estimators`).
        group_mean_over: What the statistics of episodes count (see there).

    Raises:
        ValueError: A setting is out of range, or the table breaks one of its rules.
    """
    check_choice("group_mean_over", group_mean_over, ("episodes", "steps"))
    check_choice("penalty_scope", penalty_scope, ("return", "step"))
    check_at_least_zero("invalid_action_penalty", invalid_action_penalty)
    order, rows = canonical(table)
    trajectory = dense_ids(rows.episode, rows.agent)
    group = dense_ids(rows.group, rows.agent)
    cost = np.where(rows.valid, 0.0, invalid_action_penalty)
    reward = rows.reward - cost if penalty_scope == "return" else rows.reward
    row_cost = cost if penalty_scope == "step" else np.zeros(len(order))

    length = np.bincount(trajectory)
    share = 1.0 / length[trajectory]
    returns = group_sums(trajectory, reward)
    mates = group_sums(group, share)
    magnitude = group_sums(trajectory, np.abs(rows.reward) + cost).max(initial=0.0)
    return Scores(
        order=order,
        trajectory=trajectory,
        step=rows.step,
        group=group,
        anchor=dense_ids(group, rows.anchor),
        reward=reward,
        episode_score=returns[trajectory] - row_cost,
        step_return=discounted_returns(reward, trajectory, rows.step, gamma) - row_cost,
        weight=share if group_mean_over == "episodes" else np.ones(len(order)),
        alone=mates[group] < 1.5,
        resolution=rounding_of_returns(length.max(initial=0), magnitude),
    )


def in_table_order(
    scores: Scores,
    total: FloatArray,
    *,
    episode: FloatArray | None = None,
    step: FloatArray | None = None,
) -> Advantages:
    """Put columns [N] from the canonical order back in the row order of the table.

    A level that an estimator does not have is reported as 0.
    """
    back = np.empty_like(scores.order)
    back[scores.order] = np.arange(len(back))
    sizes = np.bincount(scores.anchor)[scores.anchor]
    none = np.zeros(len(back))
    return Advantages(
        total=total[back],
        episode=(none if episode is None else episode)[back],
        step=(none if step is None else step)[back],
        step_return=scores.step_return[back],
        step_group_size=sizes[back],
    )


def check_at_least_zero(name: str, value: float) -> None:
    """Raise a ValueError unless the value is finite and at least 0."""
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{name} is {value}, expected a finite number of at least 0.")
