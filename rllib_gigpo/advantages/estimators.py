"""Advantage estimators over a table of environment steps: GiGPO, GRPO and RLOO.

A row is one environment step of one agent. Rows may come in any order; `step` orders them inside a
trajectory, which is one (episode, agent) pair. Episode groups are (group, agent) pairs and anchor
groups (group, agent, anchor) triples, so two agents never share a baseline.

    G_t = r_t + gamma r_{t+1} + ...          discounted return of a row      (Eq. 5)
    A_E = (R - mean R) / F  in its group     episode advantage               (Eq. 3)
    A_S = (G_t - mean G) / F  at its anchor  step advantage                  (Eqs. 6 and 7)
    A   = A_E + omega A_S                                                    (Eq. 8)

R is the undiscounted return of the trajectory, F the unbiased standard deviation + 1e-6 or 1.
Equation numbers are those of GiGPO, arXiv 2505.10978. Statistics are float64 and taken in a
canonical row order: permuting the rows permutes the result bit for bit.

The invalid-action penalty c lowers, by `penalty_scope`,

*   "return": the reward of the invalid row, before any return is taken; it reaches the trajectory's
    R and the discounted returns of earlier rows.
*   "step": that row alone, undiscounted: its episode score R - c and its step return G_t - c.

The group mean and F of the episode level are weighted over rows, by `group_mean_over`,

*   "episodes": each trajectory has weight 1, spread evenly over its rows. Without a "step" penalty
    this is the plain mean and standard deviation of the N returns. With one, an episode counts with
    the mean score of its rows, F includes the spread between the rows, and A_E weighted so still
    sums to 0 over the group.
*   "steps": each row has weight 1, so long episodes weigh more, as in the authors' framework. This
    baseline depends on the sampled lengths and biases the gradient.

A trajectory alone in its group gets A_E = 0, a row alone at its anchor A_S = 0.

Shapes: N rows, E trajectories.
"""

import numpy as np

from rllib_gigpo.advantages.parts import FloatArray, FNorm, group_normalize, leave_one_out
from rllib_gigpo.advantages.scores import (
    Advantages,
    GroupMeanOver,
    PenaltyScope,
    Scores,
    check_at_least_zero,
    in_table_order,
    score_rows,
)
from rllib_gigpo.advantages.table import StepTable


def gigpo(
    table: StepTable,
    *,
    omega: float = 1.0,
    episode_weight: float = 1.0,
    gamma: float = 0.95,
    f_norm: FNorm = "std",
    group_mean_over: GroupMeanOver = "episodes",
    invalid_action_penalty: float = 0.0,
    penalty_scope: PenaltyScope = "return",
) -> Advantages:
    """Compute GiGPO advantages, A_E + omega A_S (arXiv 2505.10978, Eqs. 3 and 5-8).

    Args:
        table: The rows [N].
        omega: Weight of the step level, at least 0; 0 is GRPO.
        episode_weight: Weight of the episode level, at least 0; 0 is the paper's ablation without
            it.
        gamma: Discount per step of a trajectory for the step level, in [0, 1].
        f_norm: Divide by the unbiased standard deviation + 1e-6 ("std") or by 1 ("none").
        group_mean_over: What the episode-level mean and F count (module docstring).
        invalid_action_penalty: What an invalid action costs, at least 0.
        penalty_scope: Where it is taken off (module docstring).

    Returns:
        Advantages of every row.

    Raises:
        ValueError: A setting is out of range, a column has a wrong shape, a reward is not finite,
            a trajectory has a step twice or lies in two groups.
    """
    check_at_least_zero("omega", omega)
    check_at_least_zero("episode_weight", episode_weight)
    scores = score_rows(
        table,
        gamma=gamma,
        invalid_action_penalty=invalid_action_penalty,
        penalty_scope=penalty_scope,
        group_mean_over=group_mean_over,
    )
    episode = episode_advantage(scores, f_norm)
    step = group_normalize(scores.step_return, scores.anchor, f_norm, resolution=scores.resolution)
    return in_table_order(
        scores, episode_weight * episode + omega * step, episode=episode, step=step
    )


def episode_advantage(scores: Scores, f_norm: FNorm) -> FloatArray:
    """Return A_E of every row [N], in canonical order (Eq. 3)."""
    episode = group_normalize(
        scores.episode_score,
        scores.group,
        f_norm,
        weights=scores.weight,
        resolution=scores.resolution,
    )
    return np.where(scores.alone, 0.0, episode)


def grpo(
    table: StepTable,
    *,
    f_norm: FNorm = "std",
    group_mean_over: GroupMeanOver = "episodes",
    invalid_action_penalty: float = 0.0,
    penalty_scope: PenaltyScope = "return",
) -> Advantages:
    """Compute GRPO advantages over whole episodes (arXiv 2402.03300, Sec. 4.1.2).

    This is GiGPO with omega = 0; with `f_norm="none"` it is the advantage of Dr.GRPO (arXiv
    2503.20783). `step` and `step_return` (undiscounted) are reported and not used in `total`.

    Args:
        table: The rows [N].
        f_norm: As in `gigpo`.
        group_mean_over: As in `gigpo`.
        invalid_action_penalty: As in `gigpo`.
        penalty_scope: As in `gigpo`.

    Returns:
        Advantages of every row.

    Raises:
        ValueError: As in `gigpo`.
    """
    return gigpo(
        table,
        omega=0.0,
        gamma=1.0,
        f_norm=f_norm,
        group_mean_over=group_mean_over,
        invalid_action_penalty=invalid_action_penalty,
        penalty_scope=penalty_scope,
    )


def rloo(
    table: StepTable,
    *,
    group_mean_over: GroupMeanOver = "episodes",
    invalid_action_penalty: float = 0.0,
    penalty_scope: PenaltyScope = "return",
) -> Advantages:
    """Compute RLOO advantages: R minus the mean R of the group's other episodes.

    Source: Ahmadian et al., arXiv 2402.14740. Equals GRPO without std times N / (N - 1).
    `step` is 0; `step_return` (undiscounted) and the group sizes are reported.

    Args:
        table: The rows [N].
        group_mean_over: "episodes" leaves one episode out, "steps" one row.
        invalid_action_penalty: As in `gigpo`.
        penalty_scope: As in `gigpo`.

    Returns:
        Advantages of every row.

    Raises:
        ValueError: As in `gigpo`.
    """
    scores = score_rows(
        table,
        gamma=1.0,
        invalid_action_penalty=invalid_action_penalty,
        penalty_scope=penalty_scope,
        group_mean_over=group_mean_over,
    )
    others = leave_one_out(
        scores.episode_score, scores.group, weights=scores.weight, resolution=scores.resolution
    )
    episode = np.where(scores.alone, 0.0, others)
    return in_table_order(scores, episode, episode=episode)
