"""Checks of GiGPOConfig: one sentence per fault, naming the setting, the value and the cure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.correction import RolloutCorrection
from rllib_gigpo.engine_checks import check_engine
from rllib_gigpo.family_checks import check_family
from rllib_gigpo.liger import runs_without_gpu
from rllib_gigpo.lora import LoRASettings
from rllib_gigpo.losses import Aggregation
from rllib_gigpo.models.spec import SMOLLM2, TINY, ModelSpec
from rllib_gigpo.presets import PRESETS
from rllib_gigpo.recording.trackers import TRACKERS
from rllib_gigpo.rllib_checks import check_rllib
from rllib_gigpo.team_checks import check_teams
from rllib_gigpo.value_checks import (
    LARGEST_SEED,
    LARGEST_TASK_SEED,
    NUMBER_TYPES,
    check_choice,
    check_mapping,
    check_range,
    check_resource,
    check_whole,
    is_number,
    is_whole,
)
from rllib_gigpo.watchdog import SIGNALS

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

_CHOICES = {
    "f_norm": ("std", "none"),
    "group_mean_over": ("episodes", "steps"),
    "anchor": ("exact", "similarity", "embedding"),
    "similarity_measure": ("rapidfuzz", "difflib_reference"),
    "kl_estimator": ("k1", "k2", "k3"),
    "kl_in": ("loss", "reward"),
    "critic": (None, "head", "model"),
    "gae_level": ("step", "token"),
    "ratio_level": ("token", "sequence"),
    "aggregation": get_args(Aggregation),
    "dynamic_sampling": (True, False),
    "whiten_advantages": (True, False),
    "history_base_group": (True, False),
    "optimizer_name": ("adamw", "sgd"),
    "penalty_scope": ("return", "step"),
    "normalize_over": ("agent", "policy"),
    "old_logp": ("recompute", "engine"),
    "dtype": ("float32", "bfloat16"),
    "base_dtype": ("float32", "bfloat16"),
    "engine": ("transformers", "vllm"),
    "sharding": ("replicate", "fsdp"),
    "offload_to_cpu": (True, False),
    "activation_checkpointing": (True, False),
    "use_liger_kernel": (True, False),
    "weight_sync": ("auto", "ray", "nccl", "ipc"),
    "on_env_failure": ("raise", "replay", "drop"),
    "watch": (True, False),
    "on_collapse": ("warn", "stop", "rollback"),
    "on_long_prompt": ("error", "end_episode", "shorten_observation"),
    "freeze_vision_tower": (True, False),
    "lockstep": (True, False),
    "engine_sleep": (True, False),
    "record": (True, False),
    "algorithm_name": tuple(PRESETS),
}
_WHOLE = {
    "num_groups": 1,
    "group_size": 1,
    "num_epochs": 1,
    "micro_batch_tokens": 1,
    "lr_warmup_steps": 0,
    "max_prompt_tokens": 1,
    "max_response_tokens": 1,
    "top_k": 0,
    "max_num_seqs": 1,
    "step_threads": 0,
    "num_engines": 1,
    "max_replays": 1,
    "max_skipped_steps": 1,
    "watch_patience": 1,
    "best_every": 1,
    "max_rollbacks": 0,
    "max_sampling_rounds": 1,
    "history_length": 0,
    "kl_horizon": 1,
    "max_abandoned_threads": 0,
    "evaluation_samples_per_task": 1,
    "record_every": 0,
}
_WHOLE_OR_NONE = {
    "minibatch_size": 1,
    "num_minibatches": 1,
    "max_episode_steps": 1,
    "record_groups": 1,
}
_RANGES = {
    "gamma": (0.0, 1.0),
    "omega": (0.0, math.inf),
    "episode_weight": (0.0, math.inf),
    "lambda_": (0.0, 1.0),
    "history_alpha": (0.0, math.inf),
    "overlong_buffer": (0.0, 1.0),
    "overlong_penalty": (0.0, math.inf),
    "critic_lr": (0.0, math.inf),
    "vf_loss_coeff": (0.0, math.inf),
    "similarity_threshold": (1e-6, 1.0),
    "kl_coeff": (0.0, math.inf),
    "entropy_coeff": (0.0, math.inf),
    "lr": (0.0, math.inf),
    "weight_decay": (0.0, math.inf),
    "invalid_action_penalty": (0.0, math.inf),
    "eval_temperature": (0.0, math.inf),
    "temperature": (1e-3, math.inf),
    "top_p": (1e-6, 1.0),
    "max_dropped_share": (0.0, 1.0),
    "rollback_lr_factor": (1e-6, 1.0),
}
_NUMBER_OR_NONE = {
    "heartbeat_timeout_s": 1.0,
    "price_per_hour": 0.0,
    "grad_clip": 1e-9,
    "start_timeout_s": 1e-3,
    "step_timeout_s": 1e-3,
    "episode_timeout_s": 1e-3,
    "dual_clip": 1.0 + 1e-9,
    "kl_target": 1e-9,
    "vf_clip_param": 1e-9,
}


def check_settings(config: GiGPOConfig) -> None:
    """Check every setting of GiGPO.

    Raises:
        ValueError: The first fault found.
    """
    for fault in setting_faults(config):
        raise ValueError(fault)


def setting_faults(config: GiGPOConfig) -> Iterator[str]:
    """Yield every fault of the settings, one sentence each."""
    found = 0
    for check in _checks(config):
        try:
            for fault in check() or ():
                found += 1
                yield fault
        except ValueError as error:
            found += 1
            yield str(error)
        except Exception:
            # What reads a setting that was found faulty before may break on it.
            if not found:
                raise


def _checks(config: GiGPOConfig) -> Iterator[Callable[[], Iterator[str] | None]]:
    """Yield the checks; each raises a fault, or yields several."""
    for name, choices in _CHOICES.items():
        yield partial(check_choice, name, getattr(config, name), choices)
    for name, least in _WHOLE.items():
        yield partial(check_whole, name, getattr(config, name), least)
    for name, least in _WHOLE_OR_NONE.items():
        if getattr(config, name) is not None:
            yield partial(check_whole, name, getattr(config, name), least)
    for name, (low, high) in _RANGES.items():
        yield partial(check_range, name, getattr(config, name), low, high)
    for name, least in _NUMBER_OR_NONE.items():
        if getattr(config, name) is not None:
            yield partial(check_range, name, getattr(config, name), least, math.inf)
    if config.seed is not None:
        yield partial(check_whole, "seed", config.seed, 0, LARGEST_SEED)
    for name in ("engine_num_gpus", "engine_num_cpus"):
        yield partial(check_resource, name, getattr(config, name))
    for name in ("llm_options", "engine_options"):
        yield partial(check_mapping, name.removeprefix("llm_"), getattr(config, name))
    yield partial(_check_staleness, config.max_staleness)
    yield partial(_check_correction, config.rollout_correction)
    yield partial(_check_folder, config.record_folder)
    yield partial(_check_clip, config.clip_param)
    yield partial(_check_betas, config.adam_betas)
    yield partial(_check_task_seeds, config.evaluation_task_seeds)
    yield partial(_check_trackers, config.trackers)
    yield partial(_check_signals, config.watch_signals)
    yield from check_rllib(config)
    # Those of settings together come last: they read several.
    together = (
        _check_profile,
        _check_model,
        _check_lora,
        check_engine,
        _check_mapping,
        _check_sharding,
        _check_kernels,
        _check_policies,
        _check_pairs,
        check_family,
        _check_env,
    )
    for check in together:
        yield partial(check, config)


def _check_profile(config: GiGPOConfig) -> None:
    if not isinstance(config.profile, AgentProfile | None):
        raise ValueError(f"profile={config.profile!r}: expected an AgentProfile")


def _check_model(config: GiGPOConfig) -> None:
    spec = ModelSpec(config.llm_model, options=config.llm_options)
    if config.freeze_vision_tower and spec.name in (TINY, SMOLLM2):
        raise ValueError(
            f"freeze_vision_tower=True with model={spec.name!r}: it reads text and has no vision "
            "tower; leave freeze_vision_tower out"
        )


def _check_mapping(config: GiGPOConfig) -> None:
    is_default_mapping = config.policy_mapping_fn is AlgorithmConfig.DEFAULT_POLICY_MAPPING_FN
    if is_default_mapping and DEFAULT_MODULE_ID not in config.module_ids:
        raise ValueError(
            f"multi_agent(policies={sorted(config.policies)}) without policy_mapping_fn: say which "
            "agent uses which policy, for example policy_mapping_fn=lambda agent_id, episode, "
            "**kwargs: 'shared'"
        )


def _check_policies(config: GiGPOConfig) -> Iterator[str]:
    check_teams(config)
    for module_id, own in config.algorithm_config_overrides_per_module.items():
        # Without settings of its own a policy has those of the run, which are checked already.
        faults = setting_faults(config.get_config_for_module(module_id)) if own else ()
        for fault in faults:
            yield f"algorithm_config_overrides_per_module[{module_id!r}]: {fault}"


def _check_env(config: GiGPOConfig) -> None:
    if config.env is None:
        return
    if not isinstance(config.env, str):
        raise ValueError(
            f"environment({config.env!r}): expected a name; register the class first: "
            "register_llm_env('MyEnv', MyEnv), then environment('MyEnv')"
        )
    _ = config.env_spec


def _check_trackers(chosen: Any) -> None:
    is_list = isinstance(chosen, list | tuple)
    if not is_list or not all(callable(one) or _is_one_of(one, TRACKERS) for one in chosen):
        raise ValueError(
            f"trackers={chosen!r}: expected a list of {', '.join(map(repr, TRACKERS))}, or of "
            "callables (content of run.json, run folder) -> tracker"
        )


def _is_one_of(value: Any, names: Collection[str]) -> bool:
    return isinstance(value, str) and value in names


def _check_folder(folder: Any) -> None:
    if folder is not None and (not isinstance(folder, str | Path) or not str(folder)):
        raise ValueError(
            f"recording(folder={folder!r}): expected a path, or None for the trial's folder; it is "
            "the setting record_folder"
        )


def _check_staleness(value: Any) -> None:
    if not is_whole(value, 0, 1):
        raise ValueError(
            f"max_staleness={value!r}: expected 0 (on-policy) or 1 (rollouts one version behind "
            "the learner)"
        )


def _check_correction(correction: Any) -> None:
    is_known = correction is None or _is_one_of(correction, ("auto",))
    if not is_known and not isinstance(correction, RolloutCorrection):
        raise ValueError(
            f"rollout_correction={correction!r}: expected RolloutCorrection(...), 'auto' or None"
        )


def _check_signals(chosen: Any) -> None:
    is_list = isinstance(chosen, Sequence) and not isinstance(chosen, str) and len(chosen) > 0
    if not is_list or not all(signal in SIGNALS for signal in chosen):
        raise ValueError(
            f"watchdog(signals={chosen!r}): expected a list of {', '.join(map(repr, SIGNALS))}; "
            "watchdog(enabled=False) looks at none"
        )


def _check_sharding(config: GiGPOConfig) -> Iterator[str]:
    is_alone = (config.num_learners or 0) < 2 and not config.in_evaluation
    if config.sharding == "fsdp" and is_alone:
        yield (
            f"sharding='fsdp' with num_learners={config.num_learners}: one learner has nobody to "
            "share the model with; set learners(num_learners=2) or more, or sharding='replicate'"
        )
    if (config.num_learners or 0) > 1 and 0 < (config.num_gpus_per_learner or 0) < 1:
        yield (
            f"num_gpus_per_learner={config.num_gpus_per_learner} with "
            f"num_learners={config.num_learners}: NCCL, by which learners add up their gradients, "
            "needs a GPU for each of them; set num_gpus_per_learner=1, or num_learners=1"
        )
    if config.offload_to_cpu and config.sharding != "fsdp":
        yield (
            "offload_to_cpu=True with sharding='replicate': only parts of a sharded model can be "
            "kept on the CPU; set sharding='fsdp'"
        )
    elif config.offload_to_cpu and not config.num_gpus_per_learner:
        yield (
            f"offload_to_cpu=True with num_gpus_per_learner={config.num_gpus_per_learner}: these "
            "learners compute on the CPU, where everything is already; set num_gpus_per_learner=1, "
            "or offload_to_cpu=False"
        )


def _check_kernels(config: GiGPOConfig) -> None:
    if config.use_liger_kernel and not config.num_gpus_per_learner and not runs_without_gpu():
        raise ValueError(
            f"use_liger_kernel=True with num_gpus_per_learner={config.num_gpus_per_learner}: "
            "Liger's kernels need a GPU; set learners(num_gpus_per_learner=1), or "
            "use_liger_kernel=False"
        )


def _check_lora(config: GiGPOConfig) -> Iterator[str]:
    if config.lora is not None and not isinstance(config.lora, LoRASettings):
        yield (f"lora={config.lora!r}: expected LoRASettings(rank=..., alpha=...) or None")
    if config.base_dtype == "bfloat16" and config.lora is None:
        yield (
            "base_dtype='bfloat16' without lora: all weights are trained, and small updates vanish "
            "in bfloat16; set lora=LoRASettings(...), or leave base_dtype='float32' and set "
            "dtype='bfloat16' for faster matrix products"
        )
    if config.base_dtype == "bfloat16" and config.dtype == "float32":
        yield (
            "base_dtype='bfloat16' with dtype='float32': matrix products take the type of the "
            "weights, so they would run in bfloat16; set dtype='bfloat16' too"
        )


def _check_pairs(config: GiGPOConfig) -> Iterator[str]:
    if not config.watch and config.on_collapse != "warn":
        yield (
            f"watchdog(enabled=False, on_collapse={config.on_collapse!r}): without the watchdog "
            "nothing sees a collapse; leave it on, or on_collapse at 'warn'"
        )
    if config.minibatch_size is not None and config.num_minibatches is not None:
        yield (
            f"minibatch_size={config.minibatch_size} and num_minibatches={config.num_minibatches} "
            "are both set: set one of them and the other to None"
        )
    if config.max_staleness > 0 and config.num_env_runners == 0 and not config.in_evaluation:
        yield (
            "max_staleness=1 with num_env_runners=0: rollouts in the learner's own process cannot "
            "run beside it; set env_runners(num_env_runners=1) or more"
        )
    if config.max_staleness > 0 and config.engine_sleep:
        yield (
            "max_staleness=1 with engine_sleep=True: engines that sleep during the update cannot "
            "play beside it; use one of the two"
        )
    correction = config.rollout_correction
    if isinstance(correction, RolloutCorrection) and config.old_logp == "engine":
        yield (
            "rollout_correction with old_logp='engine': the correction is old over engine "
            "log-probabilities, which would then be 1; use old_logp='recompute' or "
            "rollout_correction=None"
        )
    if config.top_p < 1.0 or config.top_k > 0:
        yield (
            f"top_p={config.top_p}, top_k={config.top_k} in training: the learner's "
            "log-probabilities are over the whole vocabulary, and no correction brings back the "
            "tokens that are never drawn, so the gradient would be biased; use top_p=1 and top_k=0"
        )
    if config.old_logp == "engine" and config.dtype == "bfloat16":
        yield (
            "old_logp='engine' with dtype='bfloat16': bf16 log-probabilities differ between engine "
            "and learner by several percent; use old_logp='recompute'"
        )
    if config.evaluation_parallel_to_training:
        yield (
            "evaluation_parallel_to_training=True: an evaluation pins one weight version, so it "
            "cannot run beside an update; set it to False"
        )
    has_own_runners = config.evaluation_interval or config.evaluation_num_env_runners
    if config.evaluation_config and not has_own_runners:
        yield (
            f"evaluation_config={config.evaluation_config!r} is for EnvRunners of evaluation, and "
            "there are none: set evaluation_interval or evaluation_num_env_runners too"
        )
    if config.step_timeout_s is not None and config.step_threads == 0:
        yield (
            f"step_timeout_s={config.step_timeout_s} with step_threads=0: a call in the event loop "
            "cannot be timed out; set step_threads to the number of calls that may run at once"
        )


def _check_clip(value: Any) -> None:
    pair = (value, value) if isinstance(value, NUMBER_TYPES) else value
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2
    if not is_pair or not all(is_number(v) and v > 0 for v in pair) or pair[0] >= 1:
        raise ValueError(
            f"clip_param={value!r}: expected a number above 0, or a pair (low, high) of them with "
            "low below 1"
        )


def _check_betas(value: Any) -> None:
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    if not is_pair or not all(is_number(beta, 0.0) and beta < 1 for beta in value):
        raise ValueError(f"adam_betas={value!r}: expected two numbers from 0 to below 1")


def _check_task_seeds(seeds: Any) -> None:
    if seeds is None:
        return
    is_list = isinstance(seeds, Sequence) and not isinstance(seeds, str | bytes)
    if not is_list or len(seeds) == 0 or not all(is_whole(s, 0, LARGEST_TASK_SEED) for s in seeds):
        raise ValueError(
            f"evaluation_task_seeds={seeds!r}: expected a list of whole numbers of at least 0, or "
            "None for evaluation_duration tasks"
        )
