"""Checks of the settings that RLlib itself has: of those that are read, and those that are not.

RLlib looks at few of its settings before it starts, and tells several faults in many lines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils import force_list

from rllib_gigpo.value_checks import (
    check_choice,
    check_mapping,
    check_range,
    check_resource,
    check_whole,
    is_number,
)

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

_WHOLE = {
    "num_env_runners": 0,
    "num_learners": 0,
    "evaluation_num_env_runners": 0,
    "evaluation_duration": 1,
    "local_gpu_idx": 0,
    "max_num_env_runner_restarts": 0,
    "metrics_num_episodes_for_smoothing": 1,
    "num_consecutive_env_runner_failures_tolerance": 0,
}
# With one of these `train()` makes several updates, and writes down the last one alone.
_LEAST = (
    "min_time_s_per_iteration",
    "min_sample_timesteps_per_iteration",
    "min_train_timesteps_per_iteration",
)
_SECONDS = (
    "delay_between_env_runner_restarts_s",
    "env_runner_health_probe_timeout_s",
    "env_runner_restore_timeout_s",
)
_RESOURCES = (
    "num_cpus_for_main_process",
    "num_cpus_per_env_runner",
    "num_gpus_per_env_runner",
    "num_gpus_per_learner",
)
_SWITCHES = (
    "checkpoint_trainable_policies_only",
    "create_local_env_runner",
    "evaluation_parallel_to_training",
    "export_native_model_files",
    "ignore_env_runner_failures",
    "log_gradients",
    "log_sys_usage",
    "restart_failed_env_runners",
    "validate_env_runners_after_construction",
)
_MAPPINGS = (
    "custom_resources_for_main_process",
    "custom_resources_per_env_runner",
    "custom_resources_per_learner",
    "env_config",
    "learner_config_dict",
)
_PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_LEVELS = ("DEBUG", "INFO", "WARN", "WARNING", "ERROR")

_SAMPLED = "num_groups and group_size decide how much is sampled"
_PLAYED = "episodes are played to their end"
_TEXT = "observations and actions are texts, which agent(profile=...) reads and writes"
_DRAWN = "temperature and eval_temperature decide how responses are drawn"
_ONLINE = "GiGPO learns from the episodes that it plays; record_every writes them down"
_OLD = "it is of RLlib's old API stack"
_MODEL = "llm(model=...) decides"
_OPTIMIZER = "optimizer_name, adam_betas and weight_decay decide"
# Settings that mean nothing here, and what does.
_UNUSED = {
    "train_batch_size": _SAMPLED,
    "_train_batch_size_per_learner": _SAMPLED,
    "num_envs_per_env_runner": "all episodes of an EnvRunner run at once",
    "gym_env_vectorize_mode": "all episodes of an EnvRunner run at once",
    "remote_worker_envs": "step_threads runs environments beside each other",
    "rollout_fragment_length": _PLAYED,
    "batch_mode": _PLAYED,
    "sample_timeout_s": "step_timeout_s and episode_timeout_s limit environments",
    "evaluation_sample_timeout_s": "step_timeout_s and episode_timeout_s limit environments",
    "evaluation_duration_unit": "evaluation_duration counts tasks",
    "restart_failed_sub_environments": "on_env_failure decides",
    "observation_filter": _TEXT,
    "preprocessor_pref": _TEXT,
    "compress_observations": _TEXT,
    "clip_rewards": _TEXT,
    "normalize_actions": _TEXT,
    "clip_actions": _TEXT,
    "observation_fn": _TEXT,
    "render_env": "`rllib-gigpo view` shows what was played",
    "_env_to_module_connector": _TEXT,
    "_module_to_env_connector": _TEXT,
    "_learner_connector": "advantages are estimator=...'s, and rows are built by rllib_gigpo.rows",
    "explore": _DRAWN,
    "exploration_config": _DRAWN,
    "model": _MODEL,
    "optimizer": _OPTIMIZER,
    "shuffle_batch_per_epoch": "minibatches are always drawn anew",
    "torch_skip_nan_gradients": "a step whose gradient is not finite is always left out",
    "count_steps_by": "environment steps are counted",
    "input_": _ONLINE,
    "input_read_batch_size": _ONLINE,
    "output": _ONLINE,
    "offline_data_class": _ONLINE,
    "prelearner_class": _ONLINE,
    "prelearner_buffer_class": _ONLINE,
    "offline_evaluation_interval": _ONLINE,
    "num_offline_eval_runners": _ONLINE,
    "off_policy_estimation_methods": _ONLINE,
    "ignore_final_observation": _ONLINE,
    "num_gpus": "num_gpus_per_learner and engine_num_gpus decide",
    "num_aggregator_actors_per_learner": "rows go to the learners at once",
    "torch_compile_learner": "updates are not compiled",
    "torch_compile_worker": "engine_options decide how vLLM compiles",
    "torch_ddp_kwargs": "learners sum their gradients themselves",
    "episodes_to_numpy": _TEXT,
}


def check_rllib(config: GiGPOConfig) -> Iterator[Callable[[], Any]]:
    """Yield the checks of RLlib's settings, each raising ValueError or yielding faults."""
    for name, least in _WHOLE.items():
        yield partial(check_whole, name, getattr(config, name), least)
    for name in _SECONDS:
        yield partial(check_range, name, getattr(config, name), 0.0)
    for name in _RESOURCES:
        yield partial(check_resource, name, getattr(config, name))
    cpus = config.num_cpus_per_learner
    if not (isinstance(cpus, str) and cpus == "auto"):
        yield partial(check_resource, "num_cpus_per_learner", cpus)
    for name in _SWITCHES:
        yield partial(check_choice, name, getattr(config, name), (True, False))
    for name in _MAPPINGS:
        yield partial(check_mapping, name, getattr(config, name))
    if config.evaluation_interval is not None:
        yield partial(check_whole, "evaluation_interval", config.evaluation_interval, 0)
    if config.evaluation_config is not None and not isinstance(
        config.evaluation_config, AlgorithmConfig
    ):
        yield partial(check_mapping, "evaluation_config", config.evaluation_config)
    yield partial(check_choice, "log_level", config.log_level, _LEVELS)
    yield partial(check_choice, "placement_strategy", config.placement_strategy, _PLACEMENTS)
    for name in _LEAST:
        yield partial(_check_one_update, name, getattr(config, name))
    for check in (_check_stack, _check_classes, _check_policies, _check_unused, _check_local):
        yield partial(check, config)


def _check_one_update(name: str, value: Any) -> None:
    if value is not None and not is_number(value, 0.0, 0.0):
        raise ValueError(
            f"reporting({name}={value!r}): expected None or 0, since an iteration is one update, "
            "and what more of them did would not be recorded; leave it out, and give "
            "evaluation_interval and checkpoints in iterations"
        )


def _check_stack(config: GiGPOConfig) -> Iterator[str]:
    for name in ("enable_rl_module_and_learner", "enable_env_runner_and_connector_v2"):
        if getattr(config, name) is not True:
            yield (
                f"api_stack({name}={getattr(config, name)!r}) turns RLlib's new API stack off: "
                "GiGPO runs on it only; leave it on"
            )
            return
    if not isinstance(config.framework_str, str) or config.framework_str != "torch":
        yield f"framework={config.framework_str!r}: GiGPO runs on 'torch' only"
    if not isinstance(config.grad_clip_by, str) or config.grad_clip_by != "global_norm":
        yield f"grad_clip_by={config.grad_clip_by!r}: GiGPO clips by 'global_norm' only"


def _check_classes(config: GiGPOConfig) -> Iterator[str]:
    runner: Any = config.env_runner_cls
    if not (isinstance(runner, type) and issubclass(runner, EnvRunner)):
        yield f"env_runner_cls={runner!r}: expected LLMEnvRunner or a subclass of it"
    evaluate = config.custom_evaluation_function
    if evaluate is not None and not callable(evaluate):
        yield (
            f"custom_evaluation_function={evaluate!r}: expected a function (algorithm, eval "
            "EnvRunners) -> (results, environment steps, agent steps)"
        )
    for cls in force_list(config.callbacks_class):
        made = cls if isinstance(cls, type) else getattr(cls, "func", None)
        if not (isinstance(made, type) and issubclass(made, RLlibCallback)):
            yield (
                f"callbacks({cls!r}): expected a subclass of RLlibCallback, or a list of them; "
                "single functions are set by name, as in callbacks(on_train_result=...)"
            )


def _check_policies(config: GiGPOConfig) -> Iterator[str]:
    policies: Any = config.policies
    names = policies if isinstance(policies, Collection) else ()
    if isinstance(policies, str | bytes) or not all(isinstance(name, str) for name in names):
        names = ()
    if not names:
        yield (
            f"multi_agent(policies={policies!r}): expected a set, list or dict of policy names, at "
            "least one"
        )
    if not callable(config.policy_mapping_fn):
        yield (
            f"multi_agent(policy_mapping_fn={config.policy_mapping_fn!r}): expected a function "
            "(agent_id, episode, **kwargs) -> policy name"
        )
    to_train: Any = config.policies_to_train
    is_list = isinstance(to_train, list | tuple | set)
    if not (to_train is None or callable(to_train) or is_list):
        yield (
            f"policies_to_train={to_train!r}: expected a list of policy names, a function "
            "(policy name, batch) -> bool, or None for all"
        )
    own: Any = config.algorithm_config_overrides_per_module
    is_nested = isinstance(own, Mapping) and all(
        isinstance(settings, Mapping | None) for settings in own.values()
    )
    if not is_nested:
        yield (
            f"algorithm_config_overrides_per_module={own!r}: expected a dict from policy names to "
            "dicts of settings"
        )


def _check_unused(config: GiGPOConfig) -> Iterator[str]:
    if config.in_evaluation:  # RLlib itself writes into a config of evaluation
        return
    defaults = type(config)()
    for name, instead in _UNUSED.items():
        value, silent = getattr(config, name), getattr(defaults, name)
        if value is not silent and not _is_same(value, silent):
            shown = f"{name.strip('_')}={value!r}"
            yield f"{shown} has no effect: {instead}; leave it at {silent!r}"


def _is_same(value: Any, silent: Any) -> bool:
    # What compares element by element is no default of RLlib's.
    return type(value) is type(silent) and bool(value == silent)


def _check_local(config: GiGPOConfig) -> Iterator[str]:
    if not config.create_local_env_runner and config.num_env_runners == 0:
        yield (
            "create_local_env_runner=False with num_env_runners=0: there is nobody to play; set "
            "env_runners(num_env_runners=1) or more, or leave create_local_env_runner at True"
        )


def as_sentence(config: GiGPOConfig, error: Exception) -> str:
    """Return what RLlib's own validation complains of, in one line that names settings.

    Args:
        config: The settings that it refused.
        error: What it raised; `TypeError` and the like where it fell over a value.
    """
    told = " ".join(str(error).split("\nTo suppress all validation errors")[0].split())
    changed = sorted(_changed(config))
    if any(name.strip("_") in told for name in changed):
        return told
    named = ", ".join(f"{name.strip('_')}={getattr(config, name)!r}" for name in changed)
    return f"RLlib refuses one of its settings {named}: {type(error).__name__}: {told}"


def _changed(config: GiGPOConfig) -> Iterator[str]:
    defaults = vars(type(config)())
    for name in vars(AlgorithmConfig()):
        value = getattr(config, name)
        is_default = value is defaults.get(name) or _is_same(repr(value), repr(defaults.get(name)))
        if not is_default and name != "policies":
            yield name
