"""The parts advantage estimators are made of: returns, group statistics, GAE, whitening.

Every function takes plain arrays with one entry per row, in any row order. Groups and trajectories
are given as integer labels. No function loops over rows.

Shapes: N rows, G groups, E trajectories.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

FNorm = Literal["std", "none"]

STD_EPS = 1e-6
WHITEN_EPS = 1e-8
_CELLS_PER_ROW = 64


class Gae(NamedTuple):
    """Generalised advantages and the targets of the value function, each of shape [N]."""

    advantage: FloatArray
    value_target: FloatArray


def dense_ids(*columns: IntArray) -> IntArray:
    """Number the distinct tuples of the columns 0, 1, ... in ascending order.

    Columns of small ranges are counted in a table, others sorted; the ids are the same.

    Args:
        columns: Integer arrays of shape [N].

    Returns:
        Ids [N], equal exactly where every column is equal.
    """
    if not len(columns[0]):
        return np.zeros(0, dtype=np.int64)
    lows = [int(column.min()) for column in columns]
    spans = [int(column.max()) - low + 1 for column, low in zip(columns, lows, strict=True)]
    if math.prod(spans) <= _CELLS_PER_ROW * len(columns[0]):
        cell = np.zeros_like(columns[0])
        for column, low, span in zip(columns, lows, spans, strict=True):
            cell = cell * span + (column - low)
        taken = np.zeros(math.prod(spans), dtype=bool)
        taken[cell] = True
        return (np.cumsum(taken) - 1)[cell]
    order = np.lexsort(columns[::-1])
    changed = np.zeros(len(order), dtype=bool)
    for column in columns:
        ordered = column[order]
        changed[1:] |= ordered[1:] != ordered[:-1]
    ids = np.empty(len(order), dtype=np.int64)
    ids[order] = np.cumsum(changed)
    return ids


def group_sums(ids: IntArray, values: FloatArray) -> FloatArray:
    """Add up the values [N] of every group, in row order; ids [N] are 0..G-1.

    Returns:
        Sums [G].
    """
    return np.bincount(ids, weights=values).astype(np.float64, copy=False)


def discounted_returns(
    reward: FloatArray, trajectory: IntArray, step: IntArray, gamma: float
) -> FloatArray:
    """Sum each row's reward and the later ones of its trajectory, discounted.

    G_t = r_t + gamma G_{t+1} (GiGPO, arXiv 2505.10978, Eq. 5).

    Args:
        reward: Rewards [N].
        trajectory: Trajectory labels [N].
        step: Order inside a trajectory [N]; gaps are allowed, repeats are not.
        gamma: Discount per row of the trajectory, in [0, 1].

    Returns:
        Returns-to-go [N].

    Raises:
        ValueError: A reward is not finite, a (trajectory, step) pair repeats, or gamma is outside
            [0, 1].
    """
    check_unit_interval("gamma", gamma)
    check_finite("reward", reward)
    order, ends, lengths = _trajectory_order(trajectory, step)
    returns = np.empty(len(order))
    returns[order] = _backward_scan(reward[order], ends, lengths, gamma)
    return returns


def group_normalize(
    values: FloatArray,
    group_ids: IntArray,
    f_norm: FNorm,
    *,
    weights: FloatArray | None = None,
    resolution: float = 0.0,
) -> FloatArray:
    """Centre the values of each group and divide them by F (GiGPO Eqs. 3 and 7).

    With weights w of sum W, the mean is sum(w x) / W, the variance sum(w (x - mean)^2) / (W - 1).

    Args:
        values: Values [N].
        group_ids: Group labels [N].
        f_norm: "std": F is the unbiased standard deviation + 1e-6. "none": F is 1.
        weights: Positive weights [N], how many members each value stands for; default one each.
        resolution: A group whose values span no more than this counts as equal, so that the
            rounding noise of a sum is not divided by 1e-6.

    Returns:
        Normalised values [N]. A group of one, and a group of equal values, is exactly 0.

    Raises:
        ValueError: A value is not finite or `f_norm` is unknown.
    """
    check_choice("f_norm", f_norm, ("std", "none"))
    check_finite("values", values)
    ids = dense_ids(group_ids)
    weights = np.ones(len(ids)) if weights is None else weights
    centred, members = _centre(values, ids, weights, resolution)
    if f_norm == "none":
        return centred
    return centred / (_unbiased_std(centred, ids, weights, members) + STD_EPS)[ids]


def leave_one_out(
    values: FloatArray,
    group_ids: IntArray,
    *,
    weights: FloatArray | None = None,
    resolution: float = 0.0,
) -> FloatArray:
    """Subtract from each value the mean of the other members of its group (RLOO).

    For a group of total weight W this is W / (W - 1) (x - mean). Source: Ahmadian et al., arXiv
    2402.14740.

    Args:
        values: Values [N].
        group_ids: Group labels [N].
        weights: Positive weights [N], as in `group_normalize`; one unit of weight is left out.
        resolution: As in `group_normalize`.

    Returns:
        Advantages [N]; a group of one is exactly 0.

    Raises:
        ValueError: A value is not finite.
    """
    check_finite("values", values)
    ids = dense_ids(group_ids)
    weights = np.ones(len(ids)) if weights is None else weights
    centred, members = _centre(values, ids, weights, resolution)
    return centred * _ratio_or_zero(members, members - 1)[ids]


def whiten(
    values: FloatArray, *, weights: FloatArray | None = None, shift_mean: bool = True
) -> FloatArray:
    """Scale values to unit variance over the whole batch and, by default, to zero mean.

    Args:
        values: Values [N].
        weights: Positive weights [N], for instance a row's response tokens where the statistics
            are to be taken over tokens; default one each.
        shift_mean: Whether the mean becomes 0; otherwise it stays as it is.

    Returns:
        (x - mean) / (unbiased std + 1e-8) [N], plus the mean where it is kept.

    Raises:
        ValueError: A value is not finite.
    """
    check_finite("values", values)
    ids = np.zeros(len(values), dtype=np.int64)
    weights = np.ones(len(values)) if weights is None else weights
    centred, members = _centre(values, ids, weights, 0.0)
    scaled = centred / (_unbiased_std(centred, ids, weights, members) + WHITEN_EPS)[ids]
    return scaled if shift_mean else scaled + (values - centred)


def gae(
    reward: FloatArray,
    value: FloatArray,
    trajectory: IntArray,
    step: IntArray,
    *,
    gamma: float,
    lambda_: float,
    bootstrap: FloatArray | None = None,
) -> Gae:
    """Estimate advantages across the environment steps of a trajectory (GAE).

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1}. Source: Schulman
    et al., arXiv 1506.02438, Eqs. 11-16.

    Args:
        reward: Rewards [N].
        value: V of each row's state [N].
        trajectory: Trajectory labels [N].
        step: Order inside a trajectory [N]; gaps are allowed, repeats are not.
        gamma: Discount per row of the trajectory, in [0, 1].
        lambda_: Trace decay, in [0, 1].
        bootstrap: V of the state after a truncated trajectory, on that trajectory's last row [N],
            and 0 on every other row; default all 0 (every trajectory terminated).

    Returns:
        Advantages and value targets (advantage + value), each [N].

    Raises:
        ValueError: An input is not finite, a (trajectory, step) pair repeats, a bootstrap value
            stands on a row that is not a trajectory's last, or `gamma` or `lambda_` is outside
            [0, 1].
    """
    check_unit_interval("gamma", gamma)
    check_unit_interval("lambda_", lambda_)
    bootstrap = np.zeros(len(reward)) if bootstrap is None else bootstrap
    for name, column in (("reward", reward), ("value", value), ("bootstrap", bootstrap)):
        check_finite(name, column)
    order, ends, lengths = _trajectory_order(trajectory, step)
    now, after = value[order], bootstrap[order]
    inner = np.ones(len(order), dtype=bool)
    inner[ends - 1] = False
    if after[inner].any():
        raise ValueError(
            "bootstrap has a value on a row that is not the last of its trajectory: set it on the "
            "last row of each truncated trajectory and leave 0 elsewhere."
        )
    after[inner] = now[1:][inner[:-1]]
    delta = reward[order] + gamma * after - now
    advantage = np.empty(len(order))
    advantage[order] = _backward_scan(delta, ends, lengths, gamma * lambda_)
    return Gae(advantage=advantage, value_target=advantage + value)


def check_finite(name: str, column: FloatArray) -> None:
    """Raise a ValueError that names the first row of the column [N] that is not finite."""
    bad = np.flatnonzero(~np.isfinite(column))
    if len(bad):
        raise ValueError(
            f"{name} of row {bad[0]} is {column[bad[0]]}, expected a finite number: drop or "
            "replay the episode it comes from, or mend the environment."
        )


def check_unit_interval(name: str, value: float) -> None:
    """Raise a ValueError unless the value is in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}, expected a number from 0 to 1.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}.")


def _trajectory_order(trajectory: IntArray, step: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the row order by (trajectory, step) [N] and, in it, ends and lengths [E]."""
    order = np.lexsort((step, trajectory))
    label, position = trajectory[order], step[order]
    same = label[1:] == label[:-1]
    repeats = np.flatnonzero(same & (position[1:] == position[:-1]))
    if len(repeats):
        raise ValueError(
            f"trajectory {label[repeats[0]]} has step {position[repeats[0]]} twice, expected each "
            "environment step once: do not copy rows into a batch before the advantages."
        )
    ends = np.append(np.flatnonzero(~same) + 1, len(order)) if len(order) else order
    return order, ends, np.diff(ends, prepend=0)


def _backward_scan(
    values: FloatArray, ends: IntArray, lengths: IntArray, factor: float
) -> FloatArray:
    """Compute y_t = x_t + factor y_{t+1} in every trajectory of values [N] in trajectory order.

    All trajectories go back one step together, the longest first, so the Python loop runs over the
    steps of the longest trajectory and no padding is stored.
    """
    scanned = values.astype(np.float64)
    longest_first = np.argsort(-lengths, kind="stable")
    last, length = ends[longest_first] - 1, lengths[longest_first]
    for back in range(1, int(lengths.max(initial=0))):
        rows = last[: np.searchsorted(-length, -back, side="left")] - back
        scanned[rows] += factor * scanned[rows + 1]
    return scanned


def _centre(
    values: FloatArray, ids: IntArray, weights: FloatArray, resolution: float
) -> tuple[FloatArray, FloatArray]:
    """Return values minus the weighted mean of their group [N] and the weight of each group [G].

    The smallest value of the group is taken off first: equal values then give exactly 0, and a
    large common offset costs no precision.
    """
    members = group_sums(ids, weights)
    lowest = np.full(len(members), np.inf)
    np.minimum.at(lowest, ids, values)
    above = values - lowest[ids]
    span = np.zeros(len(members))
    np.maximum.at(span, ids, above)
    above[span[ids] <= resolution] = 0.0
    return above - (group_sums(ids, weights * above) / members)[ids], members


def _unbiased_std(
    centred: FloatArray, ids: IntArray, weights: FloatArray, members: FloatArray
) -> FloatArray:
    """Return the weighted standard deviation of each group [G], with W - 1 below the sum."""
    return np.sqrt(_ratio_or_zero(group_sums(ids, weights * centred**2), members - 1))


def _ratio_or_zero(numerator: FloatArray, degrees: FloatArray) -> FloatArray:
    """Divide by the degrees of freedom [G]; 0 where a group has a single member, up to rounding."""
    return np.divide(numerator, degrees, out=np.zeros(len(degrees)), where=degrees > 1e-9)
