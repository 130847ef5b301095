"""From a batch of rows to the minibatches of an update: checked, scored, with advantages, drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rllib_gigpo.credit import Credit, assign_credit
from rllib_gigpo.module import CausalLMModule
from rllib_gigpo.rows import Columns
from rllib_gigpo.scoring import InStep, held_rows, score_next_states, score_rows

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig


def check_batch(
    batch: MultiAgentBatch, module_ids: Collection[str], *, is_distributed: bool
) -> None:
    """Make sure that a batch is one that this learner can train on.

    Args:
        batch: The batch.
        module_ids: The learner's modules.
        is_distributed: Whether there are other learners.

    Raises:
        ValueError: Rows of an unknown module, or a batch that RLlib has split.
    """
    unknown = sorted(set(batch.policy_batches) - set(module_ids))
    if unknown:
        raise ValueError(
            f"the batch holds rows of {unknown}, but this learner has the modules "
            f"{sorted(module_ids)}: name the policies in multi_agent(policies=...)"
        )
    if is_distributed and any("learner" not in rows for rows in batch.policy_batches.values()):
        raise ValueError(
            "RLlib's own way to split a batch would tear groups apart: with several learners "
            "call learner_group.update(training_data=RowData(batch, config.minibatch_plan))"
        )


def prepare_rows(
    config: GiGPOConfig,
    module: CausalLMModule,
    rows: Columns,
    *,
    kl_coeff: float,
    in_step: InStep,
    over_learners: Callable[[np.ndarray], np.ndarray],
    timed: Callable[[str], AbstractContextManager[None]],
) -> Credit:
    """Add what the loss reads: log-probabilities, values, advantages, value targets.

    Args:
        config: The module's settings.
        module: The module.
        rows: All rows of the module; changed where they stand.
        kl_coeff: The KL coefficient of this update.
        in_step: Adds empty micro-batches where all learners must make as many passes.
        over_learners: Sums arrays over all learners.
        timed: Measures a phase: "old_logp", "ref_logp", "advantages".

    Returns:
        The advantages of all rows, and what they were made from.
    """
    has_critic = config.critic is not None
    passes: dict[str, Any] = {"token_budget": config.micro_batch_tokens, "in_step": in_step}
    with timed("old_logp"):
        if config.old_logp == "recompute" or has_critic:
            scored = score_rows(module, rows, values=has_critic, **passes)
            rows["old_logps"] = scored.logps
            if has_critic:
                rows["old_values"] = scored.values
        if config.old_logp == "engine":
            rows["old_logps"] = rows["response_logps"]
        if config.keeps_last_prompts:
            rows["next_value"] = score_next_states(module, rows, **passes)
    with timed("ref_logp"):
        if config.kl_coeff > 0:
            rows["ref_logps"] = score_rows(module, rows, reference=True, **passes).logps
    with timed("advantages"):
        return assign_credit(config, rows, kl_coeff, over_learners)


def minibatches(
    config: GiGPOConfig,
    settings_of: Callable[[str], GiGPOConfig],
    rows: Mapping[str, Columns],
    iteration: int,
) -> Iterator[MultiAgentBatch]:
    """Yield the rows of every optimizer step that this learner works on.

    Args:
        config: The algorithm's settings.
        settings_of: Those of a module.
        rows: Per module, all of its rows, prepared.
        iteration: The iteration, which decides what is drawn.
    """
    for epoch in range(config.num_epochs):
        plans = {
            module_id: config.minibatch_plan.draw(len(module_rows["group"]), iteration, epoch)
            for module_id, module_rows in rows.items()
        }
        for number in range(max(map(len, plans.values()))):
            chosen = {m: plan[number] for m, plan in plans.items() if number < len(plan)}
            mine = {m: step_rows(settings_of(m), rows[m], drawn) for m, drawn in chosen.items()}
            env_steps = sum(len(module_rows["step"]) for module_rows in mine.values())
            yield MultiAgentBatch(mine, env_steps=env_steps)


def step_rows(config: GiGPOConfig, rows: Columns, drawn: np.ndarray) -> SampleBatch:
    """Rows of one optimizer step that this learner works on, with the step's totals.

    Rows without advantage count in the totals; where nothing else draws on them (no KL in the
    loss, no entropy, no critic) their forward pass is left out, which does not change the gradient.

    Args:
        config: The module's settings.
        rows: All rows of the module.
        drawn: Numbers of the rows of the step, over all learners.
    """
    mine = held_rows(rows, drawn)
    has_kl = config.kl_coeff > 0 and config.kl_in == "loss"
    if not has_kl and config.entropy_coeff == 0 and config.critic is None:
        mine = mine[rows["advantage"][mine] != 0.0]
    columns = {name: rows[name][mine] for name in rows}
    columns["step_tokens"] = np.full(len(mine), rows["num_response_tokens"][drawn].sum())
    columns["step_rows"] = np.full(len(mine), len(drawn))
    return SampleBatch(columns)
