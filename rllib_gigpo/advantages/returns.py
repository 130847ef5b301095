"""Advantages without groups: REINFORCE's returns, and a critic's (GAE).

Shapes: N rows, T tokens of a response.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from rllib_gigpo.advantages.parts import FloatArray, gae
from rllib_gigpo.advantages.scores import Advantages, PenaltyScope, in_table_order, score_rows
from rllib_gigpo.advantages.table import StepTable

GaeLevel = Literal["step", "token"]


class TokenGae(NamedTuple):
    """Advantages and value targets of every token, one float64 array [T] per row."""

    advantage: list[FloatArray]
    value_target: list[FloatArray]


def reinforce(
    table: StepTable,
    *,
    gamma: float = 1.0,
    invalid_action_penalty: float = 0.0,
    penalty_scope: PenaltyScope = "return",
) -> Advantages:
    """Take the return-to-go of a row as its advantage (REINFORCE).

    Whitened over the batch it is REINFORCE++ (arXiv 2501.03262), whose steps are tokens; here they
    are environment steps, so that every token of a response has the return of its own step.

    Args:
        table: The rows [N].
        gamma: Discount per step of a trajectory, in [0, 1].
        invalid_action_penalty: As in `gigpo`.
        penalty_scope: As in `gigpo`.

    Returns:
        Advantages of every row.

    Raises:
        ValueError: As in `gigpo`.
    """
    scores = score_rows(
        table,
        gamma=gamma,
        invalid_action_penalty=invalid_action_penalty,
        penalty_scope=penalty_scope,
    )
    return in_table_order(scores, scores.step_return)


def gae_over_steps(
    table: StepTable,
    *,
    value: FloatArray,
    bootstrap: FloatArray | None = None,
    gamma: float = 1.0,
    lambda_: float = 1.0,
    invalid_action_penalty: float = 0.0,
) -> Advantages:
    """Estimate advantages across the steps of an episode with a critic (PPO; see `parts.gae`).

    V of a state is taken at the last prompt token, before anything is said. The penalty lowers the
    reward of the invalid step. The critic's targets are the advantages plus the values.

    Args:
        table: The rows [N].
        value: V of each row's state [N].
        bootstrap: V of the state after a truncated trajectory, on its last row [N], 0 elsewhere.
        gamma: Discount per step of a trajectory, in [0, 1].
        lambda_: Trace decay, in [0, 1].
        invalid_action_penalty: As in `gigpo`.

    Returns:
        Advantages of every row.

    Raises:
        ValueError: As in `gigpo`, or as in `parts.gae`.
    """
    scores = score_rows(
        table,
        gamma=gamma,
        invalid_action_penalty=invalid_action_penalty,
        penalty_scope="return",
    )
    found = gae(
        scores.reward,
        np.asarray(value, dtype=np.float64)[scores.order],
        scores.trajectory,
        scores.step,
        gamma=gamma,
        lambda_=lambda_,
        bootstrap=None if bootstrap is None else np.asarray(bootstrap)[scores.order],
    )
    return in_table_order(scores, found.advantage)


def episode_scores(
    table: StepTable, *, invalid_action_penalty: float = 0.0, penalty_scope: PenaltyScope = "return"
) -> FloatArray:
    """Return the undiscounted return of each row's trajectory [N], with the penalty."""
    scores = score_rows(
        table,
        gamma=1.0,
        invalid_action_penalty=invalid_action_penalty,
        penalty_scope=penalty_scope,
    )
    back = np.empty_like(scores.order)
    back[scores.order] = np.arange(len(back))
    return scores.episode_score[back]


def gae_over_tokens(
    score: FloatArray,
    values: Sequence[FloatArray],
    costs: Sequence[FloatArray] | None = None,
    *,
    gamma: float = 1.0,
    lambda_: float = 1.0,
) -> TokenGae:
    """Estimate advantages inside each response alone, as verl-agent's PPO does.

    Every response is an episode of tokens: its last token earns the row's score, and after it comes
    value 0. No credit passes from one environment step to another but through that score.

    Args:
        score: What a response earns [N], in verl-agent the return of the whole episode.
        values: V before each token, [T] per row.
        costs: Taken off each token's reward, [T] per row (the KL, where it enters the reward).
        gamma: Discount per token, in [0, 1].
        lambda_: Trace decay per token, in [0, 1].

    Returns:
        Advantages and value targets of every token.

    Raises:
        ValueError: A number is not finite, or a discount is out of range.
    """
    if len(score) == 0:
        return TokenGae([], [])
    lengths = np.array([len(value) for value in values])
    row = np.repeat(np.arange(len(lengths)), lengths)
    ends = np.cumsum(lengths)
    reward = np.zeros(len(row)) if costs is None else -np.concatenate(costs).astype(np.float64)
    reward[ends - 1] += score
    value = np.concatenate(values).astype(np.float64)
    found = gae(reward, value, row, np.arange(len(row)), gamma=gamma, lambda_=lambda_)
    return TokenGae(
        np.split(found.advantage, ends[:-1]),
        np.split(found.value_target, ends[:-1]),
    )
