"""The learner: scores rows, computes all advantages, takes the optimizer steps.

Every learner computes the advantages of all rows from their scalar columns (about a millisecond)
and trains on the rows whose tokens it holds. Losses are sums over rows divided by the totals of
the whole optimizer step, so gradients of learners and of micro-batches simply add up: their number
does not change the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from ray.rllib.core import ALL_MODULES
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.annotations import override

from rllib_gigpo.advantages import Advantages, gigpo
from rllib_gigpo.distributed import sum_gradients, sum_over_learners
from rllib_gigpo.engines.packing import PackedTensors, checksums, unpack
from rllib_gigpo.engines.packing import pack as pack_tensors
from rllib_gigpo.engines.published import Published
from rllib_gigpo.losses import (
    clipped_surrogate,
    correction_weights,
    kl_estimate,
    token_log_ratio,
    token_weights,
)
from rllib_gigpo.module import CausalLMModule
from rllib_gigpo.rows import Columns, complete_batch, object_array, step_table
from rllib_gigpo.sequences import MicroBatch, ResponseLogps, pack

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

PHASES = ("old_logp", "ref_logp", "advantages", "update")

_STATE_KEY = "gigpo_optimizer_steps"


class Totals(NamedTuple):
    """Sums over the tokens of an update, float64; they add up over micro-batches and learners."""

    tokens: float = 0.0
    loss: float = 0.0
    ratio: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    engine_gap: float = 0.0
    correction: float = 0.0
    corrected: float = 0.0

    def __add__(self, other: Totals) -> Totals:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add field by field."""
        return Totals(*(a + b for a, b in zip(self, other, strict=True)))


class GiGPOTorchLearner(TorchLearner):
    """Learner of GiGPO and its relatives.

    Attributes:
        advantages: Per module, the advantages used by the last update, for tests and reports.
    """

    config: GiGPOConfig

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.advantages: dict[str, Advantages] = {}
        self._optimizer_steps: dict[str, int] = {}
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._sums = Totals()
        self._totals: dict[str, Totals] = {}
        self._largest: dict[tuple[str, str], float] = {}
        self._gradient_norms: dict[str, list[float]] = {}
        self._skipped: dict[str, int] = {}

    # Optimizers ------------------------------------------------------------------------------

    @override(TorchLearner)
    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Give the optimizer the trained parameters only; the reference stays out."""
        config = config or self.config
        parameters = self._trained_parameters(module_id)
        if config.optimizer_name == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                parameters,
                lr=config.lr,
                betas=tuple(config.adam_betas),
                weight_decay=config.weight_decay,
            )
        else:
            optimizer = torch.optim.SGD(parameters, lr=config.lr)
        self.register_optimizer(module_id=module_id, optimizer=optimizer, params=parameters)

    def _trained_parameters(self, module_id: str) -> list[torch.nn.Parameter]:
        module = self._language_model(module_id)
        return [p for p in module.parameters() if p.requires_grad]

    def _language_model(self, module_id: str) -> CausalLMModule:
        module = self.module[module_id].unwrapped()
        if not isinstance(module, CausalLMModule):
            raise TypeError(
                f"module {module_id!r} is a {type(module).__name__}: GiGPO trains CausalLMModule"
            )
        return module

    @override(TorchLearner)
    def _make_modules_ddp_if_necessary(self) -> None:
        """Leave modules unwrapped.

        Gradients are summed once per optimizer step, after all micro-batches, so learners may have
        different numbers of them.
        """

    # One update ------------------------------------------------------------------------------

    @override(Learner)
    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Start the sums of this update."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._totals, self._largest, self._gradient_norms = {}, {}, {}
        self._skipped = {}

    @override(Learner)
    def _create_iterator_if_necessary(
        self, *, training_data: TrainingData, iteration: int = 0, **kwargs: Any
    ) -> Iterable[MultiAgentBatch]:
        """Score the rows, compute their advantages, and yield the minibatches."""
        batch = training_data.batch
        if isinstance(batch, SampleBatch):
            batch = batch.as_multi_agent()
        if batch is None:
            raise ValueError("GiGPO learns from rows: pass a SampleBatch or MultiAgentBatch")
        self._check_batch(batch)
        rows = {
            module_id: complete_batch(SampleBatch(dict(module_rows)))
            for module_id, module_rows in batch.policy_batches.items()
            if self.should_module_be_updated(module_id, batch) and len(module_rows) > 0
        }
        if not rows:
            raise ValueError("the batch holds no row of a module that is to be trained")
        for module_id, module_rows in rows.items():
            self._prepare(module_id, module_rows)
        return self._minibatches(rows, iteration)

    def _check_batch(self, batch: MultiAgentBatch) -> None:
        unknown = sorted(set(batch.policy_batches) - set(self.module.keys()))
        if unknown:
            raise ValueError(
                f"the batch holds rows of {unknown}, but this learner has the modules "
                f"{sorted(self.module.keys())}: name the policies in multi_agent(policies=...)"
            )
        if self.distributed and any("learner" not in r for r in batch.policy_batches.values()):
            raise ValueError(
                "RLlib's own way to split a batch would tear groups apart: with several learners "
                "call learner_group.update(training_data=RowData(batch, config.minibatch_plan))"
            )

    def _prepare(self, module_id: str, rows: Columns) -> None:
        """Add the columns `advantage`, `old_logps`, `ref_logps`."""
        config = self.config
        with self._timed("advantages"):
            self.advantages[module_id] = gigpo(
                step_table(rows),
                omega=config.omega,
                gamma=config.gamma,
                f_norm=config.f_norm,
                group_mean_over=config.group_mean_over,
                invalid_action_penalty=config.invalid_action_penalty,
                penalty_scope=config.penalty_scope,
            )
            rows["advantage"] = self.advantages[module_id].total
        with self._timed("old_logp"):
            if config.old_logp == "engine":
                rows["old_logps"] = rows["response_logps"]
            else:
                rows["old_logps"] = self._score(module_id, rows, reference=False)
        with self._timed("ref_logp"):
            if config.kl_coeff > 0:
                rows["ref_logps"] = self._score(module_id, rows, reference=True)

    def _score(self, module_id: str, rows: Columns, *, reference: bool) -> np.ndarray:
        """Log-probabilities of the rows held here, as an object array [N] of float32 [T]."""
        held = _held(rows, np.arange(len(rows["group"])))
        found: list[np.ndarray | None] = [None] * len(rows["group"])
        module = self._language_model(module_id)
        with torch.no_grad():
            for micro_batch in self._pack(rows, held):
                scored = module.score(micro_batch, reference=reference)
                logps, mask = scored.logps.float().cpu(), scored.mask.cpu()
                for place, row in enumerate(held[micro_batch.rows.numpy()]):
                    found[row] = logps[place][mask[place]].numpy()
        return object_array(found)

    def _pack(self, rows: Columns, chosen: np.ndarray) -> list[MicroBatch]:
        return pack(
            rows["prompt_ids"][chosen], rows["response_ids"][chosen], self.config.micro_batch_tokens
        )

    def _minibatches(
        self, rows: dict[str, SampleBatch], iteration: int
    ) -> Iterator[MultiAgentBatch]:
        for epoch in range(self.config.num_epochs):
            plans = {
                module_id: self.config.minibatch_plan.draw(
                    len(module_rows["group"]), iteration, epoch
                )
                for module_id, module_rows in rows.items()
            }
            for number in range(max(map(len, plans.values()))):
                chosen = {m: plan[number] for m, plan in plans.items() if number < len(plan)}
                mine = {m: self._step_rows(rows[m], drawn) for m, drawn in chosen.items()}
                env_steps = sum(len(module_rows["step"]) for module_rows in mine.values())
                yield MultiAgentBatch(mine, env_steps=env_steps)

    def _step_rows(self, rows: Columns, drawn: np.ndarray) -> SampleBatch:
        """Rows of one optimizer step that this learner works on, with the step's totals.

        Rows without advantage count in the totals; where nothing else draws on them (no KL, no
        entropy) their forward pass is left out, which does not change the gradient.
        """
        mine = _held(rows, drawn)
        if self.config.kl_coeff == 0 and self.config.entropy_coeff == 0:
            mine = mine[rows["advantage"][mine] != 0.0]
        columns = {name: rows[name][mine] for name in rows}
        columns["step_tokens"] = np.full(len(mine), rows["num_response_tokens"][drawn].sum())
        columns["step_rows"] = np.full(len(mine), len(drawn))
        return SampleBatch(columns)

    @override(TorchLearner)
    def _uncompiled_update(
        self, batch: dict[str, SampleBatch], **kwargs: Any
    ) -> tuple[dict, dict[str, float], dict]:
        """Take one optimizer step per module."""
        losses = {}
        with self._timed("update"):
            for module_id, rows in batch.items():
                optimizer = self.get_optimizer(module_id)
                optimizer.zero_grad(set_to_none=True)
                sums = self._accumulate(module_id, rows)
                self._step(module_id, optimizer)
                before = self._totals.get(module_id, Totals())
                self._totals[module_id] = before + sums
                losses[module_id] = sums.loss
        return {}, losses, {}

    def _accumulate(self, module_id: str, rows: Columns) -> Totals:
        """Add the gradients of all micro-batches; return their sums over all learners."""
        self._sums = Totals()
        module = self._language_model(module_id)
        for micro_batch in self._pack(rows, np.arange(len(rows["advantage"]))):
            fwd_out = module.score(micro_batch, entropy_grad=self.config.entropy_coeff > 0)
            self.compute_loss_for_module(
                module_id=module_id,
                config=self.config,
                batch=_loss_inputs(rows, micro_batch, fwd_out.mask),
                fwd_out=fwd_out,
            ).backward()
        if self.distributed:
            return Totals(*sum_over_learners(list(self._sums)))
        return self._sums

    @override(Learner)
    def compute_loss_for_module(
        self,
        *,
        module_id: str,
        config: GiGPOConfig,
        batch: dict[str, torch.Tensor],
        fwd_out: ResponseLogps,
    ) -> torch.Tensor:
        """Return this micro-batch's share of the loss of the optimizer step (Eq. 9).

        Args:
            module_id: The module.
            config: Its settings.
            batch: `advantage` [n], `old_logps`, `ref_logps` (with KL), `response_logps` (where the
                engine gave them) and `weight` [n, T].
            fwd_out: What `CausalLMModule.score` returned for the rows.
        """
        logps, mask = fwd_out.logps, fwd_out.mask
        low, high = config.clip_range
        log_ratio = token_log_ratio(logps, batch["old_logps"], mask)
        surrogate = clipped_surrogate(
            log_ratio, batch["advantage"], mask, clip_low=low, clip_high=high
        )
        term, kl = surrogate.loss, torch.zeros_like(surrogate.loss)
        old, engine = batch["old_logps"], batch.get("response_logps", batch["old_logps"])
        weight = mask.float()
        if config.correction is not None:
            correction = config.correction
            weight = correction_weights(
                old,
                engine,
                mask,
                level=correction.level,
                mode=correction.mode,
                upper=correction.upper,
                lower=correction.lower,
            )
            term = term * weight
        if config.kl_coeff > 0:
            kl = kl_estimate(logps, batch["ref_logps"], mask, config.kl_estimator)
            term = term + config.kl_coeff * kl
        if config.entropy_coeff > 0:
            term = term - config.entropy_coeff * fwd_out.entropy
        loss = (batch["weight"] * term).sum()
        with torch.no_grad():
            gap = (old - engine).abs() * mask
            ratio = log_ratio.exp() * mask
            cut = mask & ((weight == 0) | (weight == getattr(config.correction, "upper", None)))
            parts = (
                mask,
                loss,
                ratio,
                surrogate.clipped_low,
                surrogate.clipped_high,
                kl,
                fwd_out.entropy,
                gap,
                weight,
                cut,
            )
            self._sums += Totals(*torch.stack([part.double().sum() for part in parts]).tolist())
            self._keep_largest(module_id, "ratio", ratio)
            self._keep_largest(module_id, "correction", weight)
            self._keep_largest(module_id, "engine_logp_gap", gap)
        return loss

    def _keep_largest(self, module_id: str, name: str, values: torch.Tensor) -> None:
        key = (module_id, name)
        self._largest[key] = max(self._largest.get(key, 0.0), float(values.max()))

    def _step(self, module_id: str, optimizer: torch.optim.Optimizer) -> None:
        """Sum the gradients over learners, clip them, and step.

        A gradient that is not finite would destroy the weights: the step is left out and counted.
        """
        parameters = self._trained_parameters(module_id)
        for parameter in parameters:
            if parameter.grad is None:
                # Not one row held here has an advantage. The optimizer passes over parameters
                # without gradient, but a gradient of 0 still moves them by momentum and decay.
                parameter.grad = torch.zeros_like(parameter)
        if self.distributed:
            sum_gradients(parameters)
        limit = self.config.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
        self._gradient_norms.setdefault(module_id, []).append(float(norm))
        if not torch.isfinite(norm):
            self._skipped[module_id] = self._skipped.get(module_id, 0) + 1
            return
        number = self._optimizer_steps.get(module_id, 0) + 1
        self._optimizer_steps[module_id] = number
        warmup = self.config.lr_warmup_steps
        self._set_optimizer_lr(optimizer, self.config.lr * min(1.0, number / max(1, warmup)))
        optimizer.step()

    # Reports ---------------------------------------------------------------------------------

    @override(TorchLearner)
    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Log what the update did."""
        super().after_gradient_based_update(timesteps=timesteps)
        for phase, seconds in self._seconds.items():
            self.metrics.log_value((ALL_MODULES, f"seconds_{phase}"), seconds, window=1)
        for module_id, sums in self._totals.items():
            advantages = self.advantages[module_id]
            # Where not one row had to be computed, there is no ratio, KL or entropy to tell.
            tokens = sums.tokens or math.nan
            values = {
                "ratio_mean": sums.ratio / tokens,
                "correction_mean": sums.correction / tokens,
                "correction_cut_fraction": sums.corrected / tokens,
                "clip_low_fraction": sums.clipped_low / tokens,
                "clip_high_fraction": sums.clipped_high / tokens,
                "kl": sums.kl / tokens,
                "entropy": sums.entropy / tokens,
                "engine_logp_gap": sums.engine_gap / tokens,
                "policy_loss": sums.loss,
                "gradient_norm": float(np.mean(self._gradient_norms[module_id])),
                "skipped_steps": self._skipped.get(module_id, 0),
                "optimizer_steps": self._optimizer_steps.get(module_id, 0),
                "num_rows": len(advantages.total),
                "nonzero_advantage_share": float(np.mean(advantages.total != 0)),
                "nonzero_step_advantage_share": float(np.mean(advantages.step != 0)),
                "advantage_std": float(np.std(advantages.total)),
            }
            for name, value in values.items():
                self.metrics.log_value((module_id, name), value, window=1)
            for name in ("ratio", "correction", "engine_logp_gap"):
                largest = self._largest.get((module_id, name), 0.0)
                # Each learner knows its own rows; RLlib takes the largest of all learners.
                self.metrics.log_value((module_id, f"{name}_max"), largest, reduce="max", window=1)

    @override(Learner)
    def _log_metrics(self, batch: MultiAgentBatch) -> None:
        """Count the rows trained; RLlib's counters refuse a step in which this learner has none."""
        if batch.env_steps() > 0:
            super()._log_metrics(batch)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start

    # State -----------------------------------------------------------------------------------

    def packed_weights(self) -> dict[str, PackedTensors]:
        """Per module, the policy's weights in the engines' dtype, an adapter merged in."""
        dtype = getattr(torch, self.config.dtype)
        return {
            module_id: pack_tensors(self._language_model(module_id).policy_weights("cpu"), dtype)
            for module_id in self.config.module_ids
        }

    def published(self, version: int) -> dict[str, Published]:
        """Per module, what engines are to serve: the adapter where one trains, else all weights."""
        if self.config.lora is None:
            return {
                module_id: Published("weights", packed, version, checksums(unpack(packed)))
                for module_id, packed in self.packed_weights().items()
            }
        parcels = {}
        for module_id in self.config.module_ids:
            tensors, peft_config = self._language_model(module_id).adapter_weights()
            parcels[module_id] = Published(
                "adapter", pack_tensors(tensors), version, checksums(tensors), peft_config
            )
        return parcels

    def response_logps(
        self, module_id: str, prompt_ids: np.ndarray, response_ids: np.ndarray
    ) -> np.ndarray:
        """Log-probabilities of one response under the current policy, float32 [T]."""
        (batch,) = pack([prompt_ids], [response_ids], token_budget=1)
        with torch.no_grad():
            return self._language_model(module_id).score(batch).logps[0].float().cpu().numpy()

    @override(Learner)
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state; the optimizer steps taken decide the warm-up."""
        return {**super().get_state(*args, **kwargs), _STATE_KEY: dict(self._optimizer_steps)}

    @override(Learner)
    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        super().set_state(state)
        if _STATE_KEY in state:
            self._optimizer_steps = dict(state[_STATE_KEY])


def _held(rows: Columns, chosen: np.ndarray) -> np.ndarray:
    """Return those of the chosen rows whose tokens this learner holds."""
    prompts = rows["prompt_ids"]
    return np.array([row for row in chosen if prompts[row] is not None], dtype=np.int64)


def _loss_inputs(
    rows: Columns, micro_batch: MicroBatch, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the columns of a micro-batch's rows as tensors, on the mask's device."""
    members = micro_batch.rows.numpy()
    inputs = {
        name: _padded(rows[name][members], mask)
        for name in ("old_logps", "ref_logps", "response_logps")
        if name in rows
    }
    inputs["advantage"] = torch.tensor(
        rows["advantage"][members], dtype=torch.float32, device=mask.device
    )
    inputs["weight"] = token_weights(
        mask,
        "token_mean",
        total_rows=float(rows["step_rows"][0]),
        total_tokens=float(rows["step_tokens"][0]),
    )
    return inputs


def _padded(values: np.ndarray, mask: torch.Tensor) -> torch.Tensor:
    """Return float32 [n, T] from n arrays of float32, 0 outside the mask."""
    flat = torch.from_numpy(np.concatenate([np.asarray(v, dtype=np.float32) for v in values]))
    out = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return out.masked_scatter_(mask, flat.to(mask.device))
