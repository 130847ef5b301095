"""From scored rows to advantages: the step between the scoring passes and the minibatches.

Every learner holds the scalars of all rows and the tokens of its own. What only the owner of a row
knows (its values, its KL) is one number per row or a few sums, gathered from all learners; from
there on all learners compute the same.

Shapes: N rows, T response tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rllib_gigpo.advantages import (
    Advantages,
    StepTable,
    episode_scores,
    estimate,
    gae_over_tokens,
    overlong_cost,
    pool_agents,
    settings_of,
    whiten,
)
from rllib_gigpo.advantages.parts import WHITEN_EPS
from rllib_gigpo.losses import KlEstimator, kl_estimate
from rllib_gigpo.rows import Columns, object_array, step_table

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

# From numbers that each learner knows a part of, 0 elsewhere, to their sums over all learners.
Gather = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Credit:
    """What came of an update's rows.

    Attributes:
        advantages: Of every row. Where tokens have advantages of their own, `total` is their mean
            over the row.
        kl: Mean KL to the reference per response token, where it enters the reward.
        explained_variance: Share of the variance of the critic's targets that its values explain,
            where it values states.
    """

    advantages: Advantages
    kl: float | None = None
    explained_variance: float | None = None


def assign_credit(config: GiGPOConfig, rows: Columns, kl_coeff: float, gather: Gather) -> Credit:
    """Add the columns `advantage` and, with a critic, `value_target`.

    Args:
        config: The settings.
        rows: All rows. The owner of a row has its `old_logps`, with a reference its `ref_logps`,
            with a critic its `old_values` and `next_value`; None or 0 on the others.
        kl_coeff: The KL coefficient that is in force.
        gather: Sums over learners.

    Returns:
        The advantages, and what was seen on the way.
    """
    held = np.flatnonzero([ids is not None for ids in rows["prompt_ids"]])
    table = step_table(rows)
    table = table._replace(reward=table.reward - _overlong(config, rows))
    if config.normalize_over == "policy":
        table = pool_agents(table)
    kl, token_kl = None, None
    if config.kl_in == "reward" and kl_coeff > 0:
        token_kl = _token_kl(rows, held, config.kl_estimator)
        row_kl = gather(_scattered(token_kl, held, len(table.reward)))
        kl = float(row_kl.sum() / rows["num_response_tokens"].sum())
        if not config.has_token_advantages:
            table = table._replace(reward=table.reward - kl_coeff * row_kl)
    if config.has_token_advantages:
        costs = None if token_kl is None else [kl_coeff * cost for cost in token_kl]
        return Credit(_token_level(config, rows, table, held, costs, gather), kl)
    columns: dict[str, Any] = {"response_tokens": rows["num_response_tokens"]}
    if config.critic is not None:
        first = [rows["old_values"][row][:1] for row in held]
        columns["value"] = gather(_scattered(first, held, len(table.reward)))
        columns["bootstrap"] = gather(rows["next_value"])
    found = estimate(config.advantage_estimator, table, settings=_settings(config), columns=columns)
    explained = None
    if config.critic is not None:
        rows["value_target"] = found.total + columns["value"]
        explained = explained_variance(rows["value_target"], columns["value"])
    if config.whiten_advantages:
        found = found._replace(total=whiten(found.total, weights=rows["num_response_tokens"]))
    rows["advantage"] = found.total
    return Credit(found, kl, explained)


def explained_variance(target: np.ndarray, value: np.ndarray) -> float:
    """Return 1 - Var(target - value) / Var(target); 0 where the targets are all equal."""
    spread = float(np.var(target))
    return 1.0 - float(np.var(target - value)) / spread if spread > 0 else 0.0


def _settings(config: GiGPOConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in settings_of(config.advantage_estimator)}


def _overlong(config: GiGPOConfig, rows: Columns) -> np.ndarray:
    return overlong_cost(
        rows["num_response_tokens"],
        max_tokens=config.max_response_tokens,
        buffer=config.overlong_buffer,
        penalty=config.overlong_penalty,
    )


def _token_kl(rows: Columns, held: np.ndarray, estimator: KlEstimator) -> list[np.ndarray]:
    """Return the KL of every response token of the held rows, float64 [T] each."""
    return [
        kl_estimate(old, reference, torch.ones(len(old), dtype=torch.bool), estimator)
        .double()
        .numpy()
        for old, reference in (
            (torch.from_numpy(rows["old_logps"][row]), torch.from_numpy(rows["ref_logps"][row]))
            for row in held
        )
    ]


def _scattered(parts: Sequence[np.ndarray], held: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the sums of the held rows' parts at their places, float64 [N], 0 elsewhere."""
    whole = np.zeros(num_rows)
    whole[held] = [float(np.sum(part, dtype=np.float64)) for part in parts]
    return whole


def _token_level(
    config: GiGPOConfig,
    rows: Columns,
    table: StepTable,
    held: np.ndarray,
    costs: Sequence[np.ndarray] | None,
    gather: Gather,
) -> Advantages:
    """Advantages and targets of every token of the held rows."""
    scores = episode_scores(
        table,
        invalid_action_penalty=config.invalid_action_penalty,
        penalty_scope=config.penalty_scope,
    )
    found = gae_over_tokens(
        scores[held],
        [rows["old_values"][row] for row in held],
        costs,
        gamma=config.gamma,
        lambda_=config.lambda_,
    )
    advantages = found.advantage
    if config.whiten_advantages:
        advantages = whiten_over_learners(advantages, gather)
    for name, parts in (("advantage", advantages), ("value_target", found.value_target)):
        whole: list[np.ndarray | None] = [None] * len(scores)
        for row, part in zip(held, parts, strict=True):
            whole[row] = part
        rows[name] = object_array(whole)
    means = [np.mean(part, keepdims=True) for part in advantages]
    none = np.zeros(len(scores))
    return Advantages(
        total=gather(_scattered(means, held, len(scores))),
        episode=none,
        step=none,
        step_return=scores,
        step_group_size=np.ones(len(scores), dtype=np.int64),
    )


def whiten_over_learners(parts: Sequence[np.ndarray], gather: Gather) -> list[np.ndarray]:
    """Scale tokens to mean 0 and deviation 1 over all learners.

    Args:
        parts: This learner's tokens, [T] per row.
        gather: Sums over learners.

    Returns:
        (x - mean) / (unbiased deviation + 1e-8), [T] per row.
    """
    flat = np.concatenate([*parts, np.zeros(0)])
    count, total = gather(np.array([len(flat), flat.sum()], dtype=np.float64))
    mean = total / count
    (squares,) = gather(np.array([np.square(flat - mean).sum()]))
    deviation = np.sqrt(squares / (count - 1.0)) if count > 1 else 0.0
    return [(part - mean) / (deviation + WHITEN_EPS) for part in parts]
