"""Random configurations: every setting of GiGPOConfig with values right, borderline and wrong.

A configuration is a list of changes to `tests.tiny_runs.tiny_config`, so that a failing example can
be read and repeated: `apply([("omega", 0.5), ("critic", "head")])`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from ray.rllib.callbacks.callbacks import RLlibCallback

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.agent import AgentProfile, ChatTemplate, Joined, LastSteps, NoMemory, TagParser
from rllib_gigpo.agent.profiles.key_door import profile
from rllib_gigpo.correction import RolloutCorrection
from rllib_gigpo.lora import LoRASettings
from rllib_gigpo.presets import PRESETS
from tests.tiny_runs import SHAPE, tiny_config

Change = tuple[str, Any]


class Odd:
    """An object that no setting can mean."""

    def __repr__(self) -> str:
        return "Odd()"


class Quiet(RLlibCallback):
    """Callbacks that do nothing."""


class Steppish(RLlibCallback):
    """Callbacks that nothing would call."""

    def on_episode_step(self, **facts: Any) -> None: ...


def encode_lengths(texts: Iterable[str]) -> np.ndarray:
    """An encoder of texts, for anchors by embedding."""
    return np.array([[1.0, float(len(text))] for text in texts])


def odd_estimator(table: Any, *, colour: float) -> Any:
    """An estimator that asks for a setting which does not exist."""


# What no setting takes in every place: kinds of values that users and their files produce.
STRANGE = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3.5,
    -0.5,
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    10**30,
    10**400,
    "",
    "x",
    "auto",
    b"x",
    [],
    [1],
    (1, 2),
    (0.2,),
    {},
    {"a": 1},
    {1: 2},
    {"x"},
    Odd(),
    lambda: 1,
    np.float64(0.5),
    np.int64(3),
    np.bool_(True),
    np.array([1, 2]),
    np.array([0.5]),
    Path("x"),
]


def _profile(**changes: Any) -> AgentProfile:
    own = profile()
    return AgentProfile(**{**{f: getattr(own, f) for f in own.__dataclass_fields__}, **changes})


PROFILES = [
    None,
    _profile(memory=NoMemory()),
    _profile(memory=LastSteps(1)),
    _profile(memory=Joined(LastSteps(1), LastSteps(3)), stop=()),
    _profile(parser=TagParser(require_think=True, fallback_chars=0), validity="parser"),
    _profile(anchor=lambda observation, info: len(observation)),
    AgentProfile(ChatTemplate("{task} {observation} {admissible_actions}"), respond="{action}"),
]

NUMBERS = [0.0, 1e-12, 0.3, 1.0, 2.0]
SHARES = [0.0, 0.5, 1.0]

# Values of each setting that make sense for a tiny run, borderline ones among them.
SENSIBLE: dict[str, list[Any]] = {
    # training
    "num_groups": [1, 2, 3],
    "group_size": [1, 2, 3],
    "anchor": ["exact", "similarity", "embedding"],
    "similarity_threshold": [1e-6, 0.5, 1.0],
    "similarity_measure": ["rapidfuzz", "difflib_reference"],
    "anchor_encoder": [None, encode_lengths],
    "dynamic_sampling": [True, False],
    "max_sampling_rounds": [1, 2],
    "estimator": ["gigpo", "rloo", "reinforce", "gae", "hgpo", odd_estimator, "ppo"],
    "omega": NUMBERS,
    "episode_weight": NUMBERS,
    "gamma": SHARES,
    "lambda_": SHARES,
    "f_norm": ["std", "none"],
    "group_mean_over": ["episodes", "steps"],
    "normalize_over": ["agent", "policy"],
    "whiten_advantages": [True, False],
    "history_length": [0, 1, 2, 50],
    "history_alpha": NUMBERS,
    "history_base_group": [True, False],
    "invalid_action_penalty": NUMBERS,
    "penalty_scope": ["return", "step"],
    "overlong_buffer": SHARES,
    "overlong_penalty": NUMBERS,
    "critic": [None, "head", "model"],
    "gae_level": ["step", "token"],
    "critic_lr": [0.0, 1e-3],
    "vf_clip_param": [None, 1e-9, 0.5],
    "vf_loss_coeff": NUMBERS,
    "ratio_level": ["token", "sequence"],
    "clip_param": [0.2, 1e-9, (0.2, 0.28), [0.5, 5.0], 0.999],
    "dual_clip": [None, 1.1, 3.0],
    "aggregation": [
        "token_mean",
        "seq_mean_token_sum",
        "seq_mean_token_mean",
        "seq_mean_token_sum_norm",
    ],
    "kl_coeff": NUMBERS,
    "kl_estimator": ["k1", "k2", "k3"],
    "kl_in": ["loss", "reward"],
    "kl_target": [None, 0.1],
    "kl_horizon": [1, 100],
    "entropy_coeff": NUMBERS,
    "old_logp": ["recompute", "engine"],
    "max_staleness": [0, 1],
    "rollout_correction": [
        None,
        "auto",
        RolloutCorrection(),
        RolloutCorrection("sequence", "mask", 3.0, 0.5),
    ],
    "num_epochs": [1, 2],
    "minibatch_size": [None, 1, 5, 256],
    "num_minibatches": [None, 1, 3, 100],
    "micro_batch_tokens": [1, 64, 4096],
    "lr": [0.0, 1e-3, 1.0],
    "lr_warmup_steps": [0, 3],
    "optimizer_name": ["adamw", "sgd"],
    "adam_betas": [(0.9, 0.99), [0.0, 0.0]],
    "weight_decay": NUMBERS,
    "grad_clip": [None, 1e-9, 1.0],
    # learners
    "sharding": ["replicate", "fsdp"],
    "offload_to_cpu": [True, False],
    "activation_checkpointing": [True, False],
    "use_liger_kernel": [True, False],
    # llm
    "dtype": ["float32", "bfloat16"],
    "lora": [
        None,
        LoRASettings(rank=1),
        LoRASettings(rank=2, alpha=1, targets=("q_proj",), dropout=0.5),
        LoRASettings(targets=("no_such_layer",)),
    ],
    "freeze_vision_tower": [True, False],
    "base_dtype": ["float32", "bfloat16"],
    "llm_model": ["tiny", "tiny-vision", "no/such-folder"],
    "llm_options": [
        SHAPE,
        {**SHAPE, "tie": False},
        {"hidden_size": 30, "num_heads": 4},
        {**SHAPE, "max_position_embeddings": 16},
    ],
    "max_prompt_tokens": [1, 48, 64, 4096],
    "max_response_tokens": [1, 6],
    "temperature": [1e-3, 0.7, 100.0],
    "eval_temperature": [0.0, 1.0],
    "top_p": [1e-6, 0.5, 1.0],
    "top_k": [0, 1, 1000],
    "max_num_seqs": [1, 2, 256],
    # agent
    "profile": PROFILES,
    "on_long_prompt": ["error", "end_episode", "shorten_observation"],
    "max_episode_steps": [None, 1, 4],
    # engines
    "engine": ["transformers", "vllm"],
    "num_engines": [1, 2],
    "engine_num_gpus": [0.0, 0.5, 1.5],
    "engine_num_cpus": [1.0, 0.0, 1.5],
    "engine_sleep": [True, False],
    "engine_options": [{}, {"block_size": 16}, {"colour": 1}, {"dtype": "x"}],
    "weight_sync": ["auto", "ray", "nccl", "ipc"],
    "probe_tolerance": [None, 0.0, 10.0],
    # stepping
    "step_threads": [0, 1, 4],
    "start_timeout_s": [None, 60.0],
    "step_timeout_s": [None, 60.0],
    "episode_timeout_s": [None, 60.0],
    "on_env_failure": ["raise", "replay", "drop"],
    "max_replays": [1, 2],
    "max_dropped_share": SHARES,
    "max_abandoned_threads": [0, 8],
    "lockstep": [True, False],
    # evaluation
    "evaluation_interval": [None, 0, 1],
    "evaluation_duration": [1, 2],
    "evaluation_task_seeds": [None, [3], (1, 5), np.array([1, 2]), []],
    "evaluation_samples_per_task": [1, 2],
    "evaluation_parallel_to_training": [True, False],
    "evaluation_config": [None, {}, {"eval_temperature": 1.0}, {"omgea": 1}],
    # recording
    "record_every": [0, 1],
    "record_groups": [None, 1],
    "price_per_hour": [None, 0, 1.5],
    "trackers": [(), [], ["wandbb"]],
    # environment and team
    "env": ["KeyDoor", "KeyDor", "KeyDoorTeam"],
    "env_config": [{}, {"size": 3, "horizon": 2}, {"siez": 3}, {"size": "large"}, {"horizon": 0}],
    "policies": [{"default_policy"}, {"a", "b"}],
    "policies_to_train": [None, ["default_policy"], ["nobody"], []],
    "algorithm_config_overrides_per_module": [
        {},
        {"default_policy": {"omega": 0.5, "lr": 1e-4}},
        {"default_policy": {"omega": "much"}},
        {"default_policy": {}},
        {"default_policy": None},
        {"default_policy": {"num_groups": 3}},
        {"nobody": {"lr": 0.1}},
    ],
    # watchdog and faults
    "watch": [True, False],
    "watch_signals": [(), ("repetition",), ["kl", "length"], ["mood"]],
    "watch_patience": [1, 3],
    "on_collapse": ["warn", "stop", "rollback", "log"],
    "best_every": [1, 5],
    "max_rollbacks": [0, 1],
    "rollback_lr_factor": [0.5, 1.0],
    "max_skipped_steps": [1, 10],
    "heartbeat_timeout_s": [None, 60.0],
    # RLlib's own
    "num_env_runners": [0, 1],
    "num_learners": [0, 1],
    "num_gpus_per_learner": [0],
    "num_cpus_per_env_runner": [1, 0.5],
    "grad_clip_by": ["global_norm", "value"],
    "seed": [None, 0, 2**32 - 1],
    "callbacks_class": [Quiet, [Quiet], Steppish],
    "min_time_s_per_iteration": [None, 0, 60],
    "min_sample_timesteps_per_iteration": [None, 0, 100],
    "min_train_timesteps_per_iteration": [None, 0, 100],
    "explore": [True, False],
    "train_batch_size": [32, 64],
    "observation_filter": ["NoFilter", "MeanStdFilter"],
}
# How the sentences name a setting that its method calls otherwise.
SPOKEN = {
    "llm_model": ("model",),
    "llm_options": ("options", "tiny model"),
    "env": ("environment",),
    "env_config": ("environment", "env_config", "KeyDoor"),
    "policies": ("policies", "policy"),
    "callbacks_class": ("callbacks",),
    "enable_rl_module_and_learner": ("api_stack",),
    "enable_env_runner_and_connector_v2": ("api_stack",),
    "framework_str": ("framework",),
    "train_batch_size": ("train_batch_size",),
    "lora": ("lora", "LoRA"),
    "watch_signals": ("watchdog(signals",),
    "engine_options": ("engine_options", "of the vLLM engines"),
    "algorithm_config_overrides_per_module": ("overrides_per_module", "default_policy"),
    "evaluation_config": ("evaluation_config", "no setting"),
    "max_prompt_tokens": ("max_prompt_tokens", "max_model_len"),
    "estimator": ("estimator", "critic"),
}
OWN = tuple(SENSIBLE)


def sensible_changes() -> st.SearchStrategy[list[Change]]:
    """A preset's settings and up to six others, each by itself sensible."""
    presets = st.sampled_from([None, *PRESETS]).map(_preset_changes)
    changes = st.lists(
        st.sampled_from(OWN).flatmap(
            lambda name: st.tuples(st.just(name), st.sampled_from(SENSIBLE[name]))
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda change: change[0],
    )
    return st.tuples(presets, changes).map(lambda pair: [*pair[0], *pair[1]])


def any_changes() -> st.SearchStrategy[list[Change]]:
    """The same, with one or two values that may be of any kind."""
    strange = st.lists(
        st.tuples(st.sampled_from(OWN), st.sampled_from(STRANGE)), min_size=1, max_size=2
    )
    return st.tuples(sensible_changes(), strange).map(lambda pair: [*pair[0], *pair[1]])


def _preset_changes(name: str | None) -> list[Change]:
    if name is None:
        return []
    settings: Mapping[str, Any] = PRESETS[name].settings
    return [(key, value) for key, value in settings.items() if key != "num_groups"]


def apply(changes: Iterable[Change]) -> GiGPOConfig:
    """The tiny run with these settings; the run folder stays off unless one of them asks."""
    config = tiny_config()
    config.record = False
    for name, value in changes:
        setattr(config, name, value)
    return config


def names_one_of(message: str, changes: Iterable[Change]) -> bool:
    """Whether a message names one of the settings that were changed."""
    spoken = [part for name, _ in changes for part in SPOKEN.get(name, (name.strip("_"),))]
    return any(name in message for name in spoken)
