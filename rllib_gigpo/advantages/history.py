"""HGPO: step advantages from nested groups of equal recent history (arXiv 2602.22817).

Level k groups the rows of one (group, agent) pair whose last k anchor states are equal: the row's
own and the k - 1 before it in its trajectory. Level 1 is GiGPO's anchor group, and every further
level splits the groups of the one before.

Shapes: N rows, K levels.
"""

import numpy as np
from numpy.typing import NDArray

from rllib_gigpo.advantages.estimators import episode_advantage
from rllib_gigpo.advantages.parts import (
    FloatArray,
    FNorm,
    IntArray,
    dense_ids,
    group_normalize,
)
from rllib_gigpo.advantages.scores import (
    Advantages,
    PenaltyScope,
    Scores,
    check_at_least_zero,
    in_table_order,
    score_rows,
)
from rllib_gigpo.advantages.table import StepTable


def hgpo(
    table: StepTable,
    *,
    gamma: float = 0.95,
    f_norm: FNorm = "std",
    history_length: int = 2,
    history_alpha: float = 1.0,
    history_base_group: bool = False,
    invalid_action_penalty: float = 0.0,
    penalty_scope: PenaltyScope = "return",
) -> Advantages:
    """Average a row's advantages in its nested history groups, long histories weighing more.

        A_k = (G_t - mean G) / F   in the row's group of level k = 1 ... history_length + 1
        A   = sum_k w_k A_k,  w_k = (k + 1)^alpha / sum_j (j + 1)^alpha

    The sums run over the levels whose A_k is not 0: a row alone in its group, or among equals, has
    nothing to say there. F is the unbiased deviation + 1e-6 of `f_norm="std"`, as everywhere in
    this package (the authors' code takes the biased one), or 1.

    Args:
        table: The rows [N].
        gamma: As in `gigpo`.
        f_norm: As in `gigpo`.
        history_length: Earlier states that a group may share, at least 0; what the agent's memory
            shows. 0 is GiGPO's step advantage alone.
        history_alpha: Exponent of the weights, at least 0; 0 weighs all levels alike.
        history_base_group: Whether the episode advantage A_E (Eq. 3 of GiGPO) takes part as the
            level k = 0.
        invalid_action_penalty: As in `gigpo`.
        penalty_scope: As in `gigpo`.

    Returns:
        Advantages of every row; `step` is what the history levels give, before A_E where it takes
        part.

    Raises:
        ValueError: As in `gigpo`, or `history_length` or `history_alpha` is below 0.
    """
    check_at_least_zero("history_alpha", history_alpha)
    if history_length < 0:
        raise ValueError(f"history_length is {history_length}, expected a number of at least 0.")
    scores = score_rows(
        table,
        gamma=gamma,
        invalid_action_penalty=invalid_action_penalty,
        penalty_scope=penalty_scope,
    )
    levels = [
        group_normalize(scores.step_return, ids, f_norm, resolution=scores.resolution)
        for ids in history_groups(scores, history_length + 1)
    ]
    depths = np.arange(2.0, history_length + 3.0)
    step = _weighted(np.array(levels), depths**history_alpha)
    if not history_base_group:
        return in_table_order(scores, step, step=step)
    episode = episode_advantage(scores, f_norm)
    total = _weighted(
        np.array([episode, *levels]), np.concatenate([np.ones(1), depths**history_alpha])
    )
    return in_table_order(scores, total, episode=episode, step=step)


def history_groups(scores: Scores, levels: int) -> list[IntArray]:
    """Return the group ids [N] of each level, in canonical order.

    A row with fewer earlier states than a level asks for is alone there.
    """
    has_previous = np.zeros(len(scores.order), dtype=bool)
    has_previous[1:] = scores.trajectory[1:] == scores.trajectory[:-1]
    own = np.arange(len(scores.order))
    groups = [scores.anchor]
    for _ in range(levels - 1):
        ids = groups[-1]
        # Sharing k + 1 states is sharing the last k, and the last k of the row before. A row
        # without one before it gets a negative number of its own.
        before = np.where(has_previous, np.roll(ids, 1), -1 - own)
        groups.append(dense_ids(ids, before))
    return groups


def _weighted(levels: FloatArray, weights: NDArray[np.floating]) -> FloatArray:
    """Average the levels [K, N] over those that are not 0, with weights [K]."""
    shares = weights[:, None] * (levels != 0.0)
    total = shares.sum(axis=0)
    return np.divide(
        (shares * levels).sum(axis=0), total, out=np.zeros(levels.shape[1]), where=total > 0.0
    )
