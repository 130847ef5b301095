"""What an update reports of a module: from its sums to named numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from rllib_gigpo.credit import Credit
from rllib_gigpo.objective import Totals


class UpdateLog:
    """What an update has come to so far, per module.

    Args:
        phases: What its time is divided into.

    Attributes:
        seconds: Wall-clock per phase.
        totals: Sums over the tokens that were computed, over all learners and optimizer steps.
        largest: Largest values by name, of the tokens of this learner.
        gradient_norms: Per optimizer step, of the policy and, where there is one, the critic.
        skipped: Optimizer steps that were left out.
    """

    def __init__(self, phases: Iterable[str]):
        self.seconds = dict.fromkeys(phases, 0.0)
        self.totals: dict[str, Totals] = {}
        self.largest: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self.gradient_norms: defaultdict[str, list[list[float]]] = defaultdict(list)
        self.skipped: defaultdict[str, int] = defaultdict(int)

    def add(self, module_id: str, sums: Totals) -> None:
        """Add the sums of an optimizer step."""
        self.totals[module_id] = self.totals.get(module_id, Totals()) + sums

    def add_largest(self, module_id: str, found: Mapping[str, float]) -> None:
        """Take over what is larger than before."""
        largest = self.largest[module_id]
        for name, value in found.items():
            largest[name] = max(largest.get(name, 0.0), value)


def report_values(
    credit: Credit, sums: Totals, *, gradient_norms: np.ndarray, kl_coeff: float
) -> dict[str, float]:
    """Return the numbers that an update reports.

    Args:
        credit: Advantages of all rows.
        sums: Sums over the tokens that were computed, over all learners and optimizer steps.
        gradient_norms: Per optimizer step, of the policy and, where there is one, the critic
            [steps, 1 or 2].
        kl_coeff: The KL coefficient of the update.
    """
    advantages = credit.advantages
    # Where not one row had to be computed, there is no ratio, KL or entropy to tell.
    tokens = sums.tokens or math.nan
    norms = gradient_norms.mean(axis=0)
    values = {
        "ratio_mean": sums.ratio / tokens,
        "correction_mean": sums.correction / tokens,
        "correction_cut_fraction": sums.corrected / tokens,
        "clip_low_fraction": sums.clipped_low / tokens,
        "clip_high_fraction": sums.clipped_high / tokens,
        "dual_clip_fraction": sums.dual_clipped / tokens,
        "kl": sums.kl / tokens if credit.kl is None else credit.kl,
        "kl_coeff": kl_coeff,
        "entropy": sums.entropy / tokens,
        "engine_logp_gap": sums.engine_gap / tokens,
        "policy_loss": sums.loss / len(gradient_norms),
        "gradient_norm": float(norms[0]),
        "num_rows": len(advantages.total),
        "nonzero_advantage_share": float(np.mean(advantages.total != 0)),
        "nonzero_step_advantage_share": float(np.mean(advantages.step != 0)),
        "advantage_std": float(np.std(advantages.total)),
    }
    if len(norms) > 1:
        values["vf_loss"] = sums.value_loss / len(gradient_norms)
        values["critic_gradient_norm"] = float(norms[1])
    if credit.explained_variance is not None:
        values["vf_explained_var"] = credit.explained_variance
    return values


def check_skipped(counts: Mapping[str, float], limit: int) -> None:
    """Stop a run whose optimizer steps are left out one after the other.

    Args:
        counts: Per module, steps that were left out since the last one that was taken.
        limit: `training(max_skipped_steps=...)`.

    Raises:
        RuntimeError: One has reached the limit.
    """
    for module_id, count in counts.items():
        if count >= limit:
            raise RuntimeError(
                f"the last {count:.0f} optimizer steps of module {module_id!r} were left out "
                f"because their gradients were not finite (max_skipped_steps={limit}); its weights "
                "are those of before: look at the rows of the last iteration, lower lr, or restore "
                "an earlier checkpoint"
            )
