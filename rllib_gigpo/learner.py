"""The learner: scores rows, computes all advantages, takes the optimizer steps.

Every learner computes the advantages of all rows from their scalar columns (about a millisecond)
and trains on the rows whose tokens it holds. Losses are sums over rows divided by the totals of
the whole optimizer step, so gradients of learners and of micro-batches simply add up: their number
does not change the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ray.rllib.core import ALL_MODULES, COMPONENT_RL_MODULE
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.annotations import override

from rllib_gigpo.advantages import Advantages, adapted_kl_coeff
from rllib_gigpo.credit import Credit
from rllib_gigpo.distributed import (
    clip_gradients,
    in_step,
    sum_gradients,
    sum_over_learners,
)
from rllib_gigpo.engines.packing import Checksums, PackedTensors
from rllib_gigpo.engines.published import Published
from rllib_gigpo.grouped_learner import GroupedLearner
from rllib_gigpo.learner_report import UpdateLog, report_values
from rllib_gigpo.module import CausalLMModule, place
from rllib_gigpo.objective import StepTotals, Totals
from rllib_gigpo.optimizers import (
    Parameters,
    build_optimizer,
    own_part,
    set_learning_rates,
    whole_state,
    with_own_options,
)
from rllib_gigpo.out_of_memory import naming_memory
from rllib_gigpo.publishing import checksums_of, packed_weights, publish
from rllib_gigpo.rows import Columns, complete_batch
from rllib_gigpo.scoring import loss_inputs, pack_rows
from rllib_gigpo.seeding import derive_seed
from rllib_gigpo.sequences import MicroBatch, ResponseLogps, nothing_of, pack
from rllib_gigpo.update_rows import check_batch, minibatches, prepare_rows

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig
    from rllib_gigpo.encoding import Encoded

PHASES = ("old_logp", "ref_logp", "advantages", "update")

_STATE_KEY = "gigpo_optimizer_steps"
_KL_KEY = "gigpo_kl_coeffs"
_LR_KEY = "gigpo_lr_factor"
_SKIPPED_KEY = "gigpo_skipped_in_a_row"


class GiGPOTorchLearner(GroupedLearner):
    """Learner of GiGPO and its relatives.

    Attributes:
        advantages: Per module, the advantages used by the last update, for tests and reports.
    """

    config: GiGPOConfig

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.advantages: dict[str, Advantages] = {}
        self._credit: dict[str, Credit] = {}
        self._kl_coeffs: dict[str, float] = {}
        self._optimizer_steps: dict[str, int] = {}
        self._lr_factor = 1.0
        self._log = UpdateLog(PHASES)
        self._sums = Totals()
        self._skipped_in_a_row: dict[str, int] = {}
        self._gathered_optimizers: dict[str, Any] | None = None
        self._own_settings: dict[str, GiGPOConfig] = {}

    def _settings(self, module_id: str) -> GiGPOConfig:
        """Return a policy's settings, read once per update."""
        if module_id not in self._own_settings:
            self._own_settings[module_id] = self.config.get_config_for_module(module_id)
        return self._own_settings[module_id]

    # Optimizers ------------------------------------------------------------------------------

    @override(TorchLearner)
    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Give the optimizer the trained parameters only; the reference stays out."""
        config = config or self.config.get_config_for_module(module_id)
        groups = self._parameter_groups(module_id)
        optimizer = build_optimizer(groups, config)
        parameters = [parameter for group in groups for parameter in group]
        self.register_optimizer(module_id=module_id, optimizer=optimizer, params=parameters)

    def _parameter_groups(self, module_id: str) -> list[Parameters]:
        """Return the policy's trained parameters and, where there is one, the critic's own."""
        module = self._language_model(module_id)
        groups = [module.policy_parameters()]
        return groups if module.critic is None else [*groups, module.critic_parameters()]

    def _language_model(self, module_id: str) -> CausalLMModule:
        module = self.module[module_id].unwrapped()
        if not isinstance(module, CausalLMModule):
            raise TypeError(
                f"module {module_id!r} is a {type(module).__name__}: GiGPO trains CausalLMModule"
            )
        return module

    @override(TorchLearner)
    def _map_module_to_device(self, module: Any) -> None:
        """Put the modules where this learner computes, or its share of them."""
        modules = [module[module_id].unwrapped() for module_id in list(module.keys())]
        if not self._is_sharded:
            place(modules, self._device)
            return
        for each in modules:
            each.shard(torch.device(self._device), offload_to_cpu=self.config.offload_to_cpu)

    @property
    def _is_sharded(self) -> bool:
        return self.config.sharding == "fsdp"

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
        self._log = UpdateLog(PHASES)
        self._own_settings = {}

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
        check_batch(batch, self.module.keys(), is_distributed=self.distributed)
        rows = {
            module_id: complete_batch(SampleBatch(dict(module_rows)))
            for module_id, module_rows in batch.policy_batches.items()
            if self.should_module_be_updated(module_id, batch) and len(module_rows) > 0
        }
        if not rows:
            raise ValueError("the batch holds no row of a module that is to be trained")
        for module_id, module_rows in rows.items():
            self._prepare(module_id, module_rows)
        if any(lora and lora.dropout for lora in (self._settings(m).lora for m in rows)):
            # Torch's generator decides what is dropped: a run that is resumed drops the same.
            seed = derive_seed(self.config.root_seed, "dropout", iteration, self._learner_index)
            torch.manual_seed(seed)
        return minibatches(self.config, self._settings, rows, iteration)

    def _prepare(self, module_id: str, rows: Columns) -> None:
        """Add what the loss reads, and keep the advantages."""
        credit = prepare_rows(
            self._settings(module_id),
            self._language_model(module_id),
            rows,
            kl_coeff=self._kl_coeff(module_id),
            in_step=self._in_step,
            over_learners=self._over_learners,
            timed=self._timed,
        )
        self._language_model(module_id).end_reference_passes()
        self._credit[module_id] = credit
        self.advantages[module_id] = credit.advantages

    def _in_step(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Let all learners make the same number of passes, where they must."""
        return in_step(micro_batches) if self._is_sharded else micro_batches

    def _kl_coeff(self, module_id: str) -> float:
        """The KL coefficient: the setting, or what an adaptive one has come to."""
        return self._kl_coeffs.get(module_id, self._settings(module_id).kl_coeff)

    def _over_learners(self, values: np.ndarray) -> np.ndarray:
        if not self.distributed:
            return values
        return np.array(sum_over_learners(values.tolist()))

    @override(TorchLearner)
    def _uncompiled_update(
        self, batch: dict[str, SampleBatch], **kwargs: Any
    ) -> tuple[dict, dict[str, float], dict]:
        """Take one optimizer step per module."""
        losses = {}
        with self._timed("update"):
            for module_id, rows in batch.items():
                optimizer = self.get_optimizer(module_id)
                try:
                    sums = self._accumulate(module_id, rows)
                    self._step(module_id, optimizer)
                finally:
                    # Kept until the next update, they would lie beside an engine's cache.
                    optimizer.zero_grad(set_to_none=True)
                self._log.add(module_id, sums)
                vf_loss_coeff = self._settings(module_id).vf_loss_coeff
                losses[module_id] = sums.loss + vf_loss_coeff * sums.value_loss
        return {}, losses, {}

    def _accumulate(self, module_id: str, rows: Columns) -> Totals:
        """Add the gradients of all micro-batches; return their sums over all learners."""
        self._sums = Totals()
        config, module = self._settings(module_id), self._language_model(module_id)
        everything = np.arange(len(rows["advantage"]))
        packed = pack_rows(rows, everything, config.micro_batch_tokens)
        for micro_batch in self._in_step(packed):
            fwd_out = module.score(
                micro_batch,
                entropy_grad=config.entropy_coeff > 0,
                values=config.critic is not None,
            )
            if len(micro_batch.rows) == 0:
                nothing_of(fwd_out).backward()
                continue
            self.compute_loss_for_module(
                module_id=module_id,
                config=config,
                batch=loss_inputs(rows, micro_batch, fwd_out.mask),
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
            batch: What `Objective.evaluate` reads, and the step's totals `step_tokens`,
                `step_rows`.
            fwd_out: What `CausalLMModule.score` returned for the rows.
        """
        step = StepTotals(
            tokens=float(batch["step_tokens"][0]),
            rows=float(batch["step_rows"][0]),
            kl_coeff=self._kl_coeff(module_id),
        )
        found = config.objective.evaluate(batch, fwd_out, step)
        self._sums += found.totals
        self._log.add_largest(module_id, found.largest)
        return found.loss

    def _step(self, module_id: str, optimizer: torch.optim.Optimizer) -> None:
        """Sum the gradients over learners, clip them, and step.

        A gradient that is not finite would destroy the weights: the step is left out and counted.
        Norms are taken after the sum over learners, so that all of them leave it out.
        """
        groups = self._parameter_groups(module_id)
        for parameter in (parameter for group in groups for parameter in group):
            if parameter.grad is None:
                # Not one row held here has an advantage. The optimizer passes over parameters
                # without gradient, but a gradient of 0 still moves them by momentum and decay.
                parameter.grad = torch.zeros_like(parameter)
        if self.distributed:
            sum_gradients([parameter for group in groups for parameter in group])
        config = self._settings(module_id)
        limit = float("inf") if config.grad_clip is None else config.grad_clip
        # A critic's large gradients are not to shorten the policy's.
        norms = [clip_gradients(group, limit) for group in groups]
        self._log.gradient_norms[module_id].append(norms)
        if not all(map(math.isfinite, norms)):
            self._log.skipped[module_id] += 1
            self._skipped_in_a_row[module_id] = self._skipped_in_a_row.get(module_id, 0) + 1
            return
        self._skipped_in_a_row[module_id] = 0
        number = self._optimizer_steps.get(module_id, 0) + 1
        self._optimizer_steps[module_id] = number
        set_learning_rates(optimizer, config, number, self._lr_factor)
        optimizer.step()

    def set_lr_factor(self, factor: float) -> None:
        """Multiply all learning rates from now on, in runs that go on from a checkpoint too."""
        self._lr_factor = factor

    # Reports ---------------------------------------------------------------------------------

    @override(TorchLearner)
    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Log what the update did."""
        super().after_gradient_based_update(timesteps=timesteps)
        for phase, seconds in self._log.seconds.items():
            self.metrics.log_value((ALL_MODULES, f"seconds_{phase}"), seconds, window=1)
        for module_id, sums in self._log.totals.items():
            values = report_values(
                self._credit[module_id],
                sums,
                gradient_norms=np.array(self._log.gradient_norms[module_id]),
                kl_coeff=self._kl_coeff(module_id),
            )
            values["skipped_steps"] = self._log.skipped[module_id]
            values["skipped_steps_in_a_row"] = self._skipped_in_a_row.get(module_id, 0)
            values["optimizer_steps"] = self._optimizer_steps.get(module_id, 0)
            for name, value in values.items():
                self.metrics.log_value((module_id, name), value, window=1)
            for name in ("ratio", "correction", "engine_logp_gap"):
                largest = self._log.largest[module_id].get(name, 0.0)
                # Each learner knows its own rows; RLlib takes the largest of all learners.
                self.metrics.log_value((module_id, f"{name}_max"), largest, reduce="max", window=1)
            # A coefficient that has become NaN would stay so.
            if self.config.kl_target is not None and math.isfinite(values["kl"]):
                self._kl_coeffs[module_id] = adapted_kl_coeff(
                    self._kl_coeff(module_id),
                    values["kl"],
                    target=self.config.kl_target,
                    horizon=self.config.kl_horizon,
                    num_rows=len(self.advantages[module_id].total),
                )
        self.release_memory()

    def release_memory(self) -> None:
        """Give device memory that is not in use back, where engines wake on the same device.

        PyTorch keeps freed memory for itself; vLLM asks the device for what its engines need.
        """
        if self.config.engine_sleep and torch.cuda.is_initialized():
            torch.cuda.ipc_collect()  # what engines have opened by "ipc" and let go of
            torch.cuda.empty_cache()

    @override(Learner)
    def _log_metrics(self, batch: MultiAgentBatch) -> None:
        """Count the rows trained; RLlib's counters refuse a step in which this learner has none."""
        if batch.env_steps() > 0:
            super()._log_metrics(batch)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with naming_memory(phase, self.config):
            yield
        self._log.seconds[phase] += time.perf_counter() - start

    # State -----------------------------------------------------------------------------------

    def packed_weights(self) -> dict[str, PackedTensors]:
        """Per module, the policy's weights in the engines' dtype, an adapter merged in."""
        return {
            m: packed_weights(self._language_model(m), self._dtype) for m in self.config.module_ids
        }

    def published(
        self, version: int, known: Mapping[str, Checksums] = MappingProxyType({})
    ) -> dict[str, Published]:
        """Per module, what engines are to serve: the adapter where one trains, else all weights.

        Args:
            version: The weights' version.
            known: Checksums of what engines have of some modules; these are left out unless they
                have changed.
        """
        parcels = {}
        for module_id in self.config.module_ids:
            module = self._language_model(module_id)
            if module_id in known and self._is_known(module, known[module_id]):
                continue
            parcels[module_id] = publish(module, self._dtype, version)
        return parcels

    def _is_known(self, module: CausalLMModule, known: Checksums) -> bool:
        is_same = checksums_of(module, self._dtype, is_sharded=self._is_sharded) == known
        # Whole tensors of a sharded module are the first learner's alone; all must do the same.
        return sum_over_learners([float(is_same)])[0] > 0 if self._is_sharded else is_same

    @property
    def _dtype(self) -> torch.dtype:
        """The type in which engines hold the weights."""
        return getattr(torch, self.config.dtype)

    def response_logps(
        self, module_id: str, prompt: Encoded, response_ids: np.ndarray
    ) -> np.ndarray:
        """Log-probabilities of one response under the current policy, float32 [T]."""
        (batch,) = pack([prompt.ids], [response_ids], token_budget=1, images=[prompt.images])
        with torch.no_grad():
            return self._language_model(module_id).score(batch).logps[0].float().cpu().numpy()

    def gather_state(self) -> None:
        """Hold modules and optimizers of sharded learners whole, for `get_state` to return.

        All learners must do so at once; RLlib then asks the first one alone.
        """
        for module_id in self.config.module_ids:
            self._language_model(module_id).gather()
        self._gathered_optimizers = {
            name: {
                "module_id": self._optimizer_name_to_module[name],
                "state": whole_state(optimizer),
            }
            for name, optimizer in self._named_optimizers.items()
        }

    def release_state(self) -> None:
        """Let go of what `gather_state` held."""
        for module_id in self.config.module_ids:
            self._language_model(module_id).release()
        self._gathered_optimizers = None

    @override(TorchLearner)
    def _get_optimizer_state(self) -> dict[str, Any]:
        if self._gathered_optimizers is not None:
            return self._gathered_optimizers
        return super()._get_optimizer_state()

    @override(TorchLearner)
    def _set_optimizer_state(self, state: dict[str, Any]) -> None:
        super()._set_optimizer_state(
            {
                name: {**saved, "state": self._fitted(optimizer, saved["state"])}
                for name, saved in state.items()
                if (optimizer := self._named_optimizers.get(name)) is not None
            }
        )

    def _fitted(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        state = with_own_options(optimizer, state)
        return own_part(optimizer, state) if self._is_sharded else state

    @override(Learner)
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state; the optimizer steps taken decide the warm-up."""
        return {
            **super().get_state(*args, **kwargs),
            _STATE_KEY: dict(self._optimizer_steps),
            _KL_KEY: dict(self._kl_coeffs),
            _LR_KEY: self._lr_factor,
            _SKIPPED_KEY: dict(self._skipped_in_a_row),
        }

    @override(Learner)
    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a state; which policies are trained is for the settings of this run to say."""
        if COMPONENT_RL_MODULE in state:
            # RLlib takes weights only where their number is above the learner's, or 0: it would
            # leave later weights in place, beside the earlier state of the optimizer.
            self._weights_seq_no = 0
        super().set_state({k: v for k, v in state.items() if k != "should_module_be_updated"})
        if _STATE_KEY in state:
            self._optimizer_steps = dict(state[_STATE_KEY])
        self._kl_coeffs = dict(state.get(_KL_KEY, self._kl_coeffs))
        self._lr_factor = state.get(_LR_KEY, self._lr_factor)
        self._skipped_in_a_row = dict(state.get(_SKIPPED_KEY, self._skipped_in_a_row))
