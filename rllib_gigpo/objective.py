"""The loss of an optimizer step, put together from the parts of `losses.py` and `critic.py`.

    term  = clipped surrogate * correction weight + c_KL * KL - c_H * entropy      per token
    loss  = sum(weight * term) + c_V * sum(value weight * value loss)

The weights divide by the totals of the whole step over all learners and micro-batches, so that
micro-batches simply add up.

Shapes: N rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from rllib_gigpo.correction import RolloutCorrection
from rllib_gigpo.critic import value_loss
from rllib_gigpo.losses import (
    Aggregation,
    KlEstimator,
    RatioLevel,
    clipped_surrogate,
    correction_weights,
    kl_estimate,
    sequence_log_ratio,
    token_log_ratio,
    token_weights,
)
from rllib_gigpo.sequences import ResponseLogps


class Totals(NamedTuple):
    """Sums over the tokens of an update, float64; they add up over micro-batches and learners.

    Attributes:
        tokens: Response tokens.
        loss: The loss, already divided by the step's totals.
        ratio: Ratios.
        clipped_low: Tokens whose ratio was cut from below.
        clipped_high: From above.
        dual_clipped: Held at the dual bound.
        kl: KL to the reference.
        entropy: Entropies.
        engine_gap: Distances of old and engine log-probabilities.
        correction: Correction weights.
        corrected: Tokens whose weight was cut.
        value_loss: The critic's loss, already divided by the step's totals.
    """

    tokens: float = 0.0
    loss: float = 0.0
    ratio: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    dual_clipped: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    engine_gap: float = 0.0
    correction: float = 0.0
    corrected: float = 0.0
    value_loss: float = 0.0

    def __add__(self, other: Totals) -> Totals:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add field by field."""
        return Totals(*(a + b for a, b in zip(self, other, strict=True)))


class StepTotals(NamedTuple):
    """What an optimizer step holds, over all learners and micro-batches.

    Attributes:
        tokens: Response tokens.
        rows: Rows.
        kl_coeff: The KL coefficient that is in force; 0 leaves the KL out.
    """

    tokens: float
    rows: float
    kl_coeff: float


class Evaluated(NamedTuple):
    """A micro-batch's share of the loss, what it adds to the totals, and its largest values."""

    loss: torch.Tensor
    totals: Totals
    largest: dict[str, float]


@dataclass(frozen=True)
class Objective:
    """What the loss is made of.

    Attributes:
        ratio_level: PPO's ratio of each "token", or of the "sequence" (GSPO).
        clip_low: Distance of the lower clip bound from 1.
        clip_high: Of the upper one.
        dual_clip: Bound of the loss of negative advantages, or None.
        aggregation: How token losses become one number.
        norm_tokens: The constant of "seq_mean_token_sum_norm".
        kl_estimator: Estimator of the KL in the loss; None: there is none in the loss.
        entropy_coeff: Weight of the entropy bonus.
        correction: Rollout correction, or None.
        vf_clip_param: How far a value may move, or None.
        vf_loss_coeff: Weight of the critic's loss.
        value_level: Where the critic's values count: at the last prompt token of a row ("step"),
            or before each response token ("token").
    """

    ratio_level: RatioLevel = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = "token_mean"
    norm_tokens: float | None = None
    kl_estimator: KlEstimator | None = None
    entropy_coeff: float = 0.0
    correction: RolloutCorrection | None = None
    vf_clip_param: float | None = None
    vf_loss_coeff: float = 1.0
    value_level: Literal["step", "token"] = "step"

    def evaluate(
        self, batch: Mapping[str, torch.Tensor], out: ResponseLogps, step: StepTotals
    ) -> Evaluated:
        """Return a micro-batch's share of the loss of its optimizer step.

        Args:
            batch: `advantage` [N] or [N, T], `old_logps` [N, T]; `ref_logps` with a KL in the loss,
                `response_logps` where the engine gave them, `old_values` and `value_target` [N, T]
                with a critic.
            out: What the module says of the rows, values with a critic.
            step: Totals of the optimizer step.
        """
        mask, old = out.mask, batch["old_logps"]
        engine = batch.get("response_logps", old)
        log_ratio = (
            token_log_ratio(out.logps, old, mask)
            if self.ratio_level == "token"
            else sequence_log_ratio(out.logps, old, mask)
        )
        surrogate = clipped_surrogate(
            log_ratio,
            batch["advantage"],
            mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        weight, cut = self._correct(old, engine, mask)
        term = surrogate.loss if self.correction is None else surrogate.loss * weight
        kl = torch.zeros_like(term)
        if step.kl_coeff > 0 and self.kl_estimator is not None:
            kl = kl_estimate(out.logps, batch["ref_logps"], mask, self.kl_estimator)
            term = term + step.kl_coeff * kl
        if self.entropy_coeff > 0:
            term = term - self.entropy_coeff * out.entropy
        weights = token_weights(
            mask,
            self.aggregation,
            total_rows=step.rows,
            total_tokens=step.tokens,
            norm_tokens=self.norm_tokens,
        )
        loss = (weights * term).sum()
        critic = self._critic_loss(batch, out, step)
        with torch.no_grad():
            gap = (old - engine).abs() * mask
            ratio = log_ratio.exp() * mask
            sums = {
                "tokens": mask,
                "loss": loss,
                "ratio": ratio,
                "clipped_low": surrogate.clipped_low,
                "clipped_high": surrogate.clipped_high,
                "dual_clipped": surrogate.dual_clipped,
                "kl": kl,
                "entropy": out.entropy,
                "engine_gap": gap,
                "correction": weight,
                "corrected": cut,
                "value_loss": critic,
            }
            numbers = torch.stack([part.double().sum() for part in sums.values()]).tolist()
            largest = {"ratio": ratio, "correction": weight, "engine_logp_gap": gap}
        return Evaluated(
            loss=loss + self.vf_loss_coeff * critic,
            totals=Totals(**dict(zip(sums, numbers, strict=True))),
            largest={name: float(values.max()) for name, values in largest.items()},
        )

    def _correct(
        self, old: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return correction weights [N, T] and where they were cut."""
        if self.correction is None:
            return mask.float(), torch.zeros_like(mask)
        weight = correction_weights(
            old,
            engine,
            mask,
            level=self.correction.level,
            mode=self.correction.mode,
            upper=self.correction.upper,
            lower=self.correction.lower,
        )
        return weight, mask & ((weight == 0) | (weight == self.correction.upper))

    def _critic_loss(
        self, batch: Mapping[str, torch.Tensor], out: ResponseLogps, step: StepTotals
    ) -> torch.Tensor:
        """Return the critic's share of the step's mean loss: over rows, or over tokens."""
        if out.values is None:
            return torch.zeros((), device=out.mask.device)
        counts, total = out.mask, step.tokens
        if self.value_level == "step":
            counts, total = torch.zeros_like(out.mask), step.rows
            counts[:, 0] = True
        losses = value_loss(
            out.values, batch["old_values"], batch["value_target"], counts, clip=self.vf_clip_param
        )
        return losses.sum() / total
