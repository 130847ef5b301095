"""What the command line of a tuned example chooses: algorithm, model, LoRA, engine, ablation."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _by_hand import set_by_hand

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.advantages import settings_of
from rllib_gigpo.commands import json_object
from rllib_gigpo.correction import RolloutCorrection
from rllib_gigpo.lora import LoRASettings
from rllib_gigpo.presets import PRESETS, get_preset


@dataclass(frozen=True)
class ModelChoice:
    """A model of the paper or its framework.

    Attributes:
        name: Its id on the Hugging Face hub.
        training: The settings that the authors' scripts change for it.
    """

    name: str
    training: Mapping[str, Any] = field(default_factory=dict)


MODELS = {
    "qwen2.5-1.5b": ModelChoice("Qwen/Qwen2.5-1.5B-Instruct"),
    "qwen2.5-3b": ModelChoice("Qwen/Qwen2.5-3B-Instruct"),
    "qwen2.5-7b": ModelChoice("Qwen/Qwen2.5-7B-Instruct"),
    "qwen3-1.7b": ModelChoice("Qwen/Qwen3-1.7B", {"kl_coeff": 0.0}),
    "qwen2-vl-2b": ModelChoice("Qwen/Qwen2-VL-2B-Instruct"),
    "qwen2.5-vl-3b": ModelChoice("Qwen/Qwen2.5-VL-3B-Instruct"),
    "llama-3.2-1b": ModelChoice("meta-llama/Llama-3.2-1B-Instruct"),
    "llama-3.2-3b": ModelChoice("meta-llama/Llama-3.2-3B-Instruct"),
}

# The authors' LoRA scripts: rank and alpha, and what else they change.
LORA = LoRASettings(rank=64, alpha=64.0)
LORA_TRAINING = {"lr": 3e-6, "kl_coeff": 0.0}

# Steps of environments that wait for servers, at once in each EnvRunner.
SERVER_THREADS = 64

# What is GiGPO's alone: the environment's values of these are not another algorithm's.
_OF_GIGPO = ("omega", "f_norm", "gamma", "anchor", "similarity_threshold")
# What decides how much is played: the environment's number of episodes stays the same.
_OF_GROUPS = ("num_groups", "group_size")
# Arguments of vLLM engines, with their defaults.
_OF_ENGINES = {"num_engines": 1, "gpus_per_engine": 1.0, "engine_options": "{}"}


_HELP_OPTIONS = 'fields of VLLMSettings, such as {"gpu_memory_utilization": 0.6}'
_HELP_SET = 'settings by their names, such as {"lr": 1e-6}, that replace the example\'s'


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add what every tuned example lets one choose."""
    parser.set_defaults(algo="gigpo")
    add = parser.add_argument
    add("--model", default=None, help=f"{', '.join(MODELS)}, or any name, id or folder")
    add("--lora", action="store_true", help="LoRA of rank 64 at 3e-6, as in the authors' scripts")
    add("--omega", type=float, default=None, help="weight of the step advantage (Eq. 8)")
    add("--gamma", type=float, default=None, help="discount of the step returns (Eq. 5)")
    add("--f-norm", default=None, choices=("std", "none"), help="F of the advantages")
    add("--anchor", default=None, choices=("exact", "similarity"), help="which states are equal")
    add("--similarity-threshold", type=float, default=None, help="of --anchor similarity")
    add("--engine", default="transformers", choices=("transformers", "vllm"))
    add("--num-engines", type=int, default=1, help="vLLM engines")
    add(
        "--gpus-per-engine",
        type=float,
        default=1.0,
        help="GPUs of a vLLM engine: several share the model, a fraction of one is shared",
    )
    add("--engine-options", default="{}", metavar="JSON", help=_HELP_OPTIONS)
    add("--set", default="{}", metavar="JSON", help=_HELP_SET)
    add(
        "--sharding",
        default=None,
        choices=("replicate", "fsdp"),
        help="who holds the model; by default two learners or more share it (fsdp)",
    )


def base_config(args: argparse.Namespace, *, model: str) -> GiGPOConfig:
    """Return the settings of `--algo`, with model, adapter and engine.

    Args:
        args: The command line.
        model: A key of `MODELS`, where `--model` names none.

    Raises:
        ValueError: No algorithm has the name that `--algo` gives, or an argument of vLLM engines
            comes without them.
    """
    check_engine_arguments(args, _OF_ENGINES)
    chosen = args.model or model
    name = MODELS[chosen].name if chosen in MODELS else chosen
    config = GiGPOConfig.preset(args.algo).llm(model=name)
    if has_adapters(args):
        config.llm(lora=LORA, base_dtype="bfloat16")
    if config.ratio_level == "sequence":
        # Ratio and correction are of one kind.
        config.training(rollout_correction=RolloutCorrection(level="sequence"))
    if args.engine == "vllm":
        options = json_object(args.engine_options, "--engine-options", "fields of VLLMSettings")
        engines = vllm_engines(args.gpus_per_engine, options)
        config.engines(num_engines=args.num_engines, **engines)
    return config.debugging(seed=args.seed)


def vllm_engines(gpus: float, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `engines(...)`: several GPUs share the model, a part of one is shared.

    Args:
        gpus: GPUs of an engine.
        options: Fields of `VLLMSettings`.
    """
    parallel = {"tensor_parallel_size": int(gpus)} if gpus > 1 else {}
    return {
        "engine": "vllm",
        "engine_num_gpus": gpus,
        # Whoever shares the GPU needs its memory while nothing is generated.
        "engine_sleep": 0 < gpus < 1,
        "engine_options": {**parallel, **options},
    }


def check_results(results: str) -> None:
    """Refuse a folder that would be lost with the job.

    Raises:
        ValueError: The cluster is not of this process, and the path is relative.
    """
    if "RAY_ADDRESS" in os.environ and not Path(results).is_absolute():
        raise ValueError(
            f"--results {results} on a cluster is a folder of the job's own, which the next job "
            "does not find: name one on shared storage, such as /shared/runs/alfworld"
        )


def has_adapters(args: argparse.Namespace) -> bool:
    """Whether adapters are trained: by `--lora`, or by a team's `--policies adapters`."""
    return args.lora or getattr(args, "policies", None) == "adapters"


def check_engine_arguments(args: argparse.Namespace, silent: Mapping[str, Any]) -> None:
    """Refuse arguments of vLLM engines where another engine generates.

    Args:
        args: The command line.
        silent: Names of these arguments, each with its default.

    Raises:
        ValueError: One of them differs from its default.
    """
    if args.engine == "vllm":
        return
    for name, default in silent.items():
        if getattr(args, name) != default:
            raise ValueError(
                f"{as_option(name)} {getattr(args, name)} with --engine {args.engine} has no "
                "effect: leave it out, or use --engine vllm"
            )


def as_option(name: str) -> str:
    """Return how an argument is typed."""
    return f"--{name.replace('_', '-')}"


def train_as(
    config: GiGPOConfig, args: argparse.Namespace, *, model: str, **paper: Any
) -> GiGPOConfig:
    """Set how it is trained.

    The environment's settings hold for every algorithm, except for those that an algorithm is made
    of; then come the model's and LoRA's; then the flags of the command line. An algorithm without
    groups plays as many episodes, each of a task of its own.

    Args:
        config: What `base_config` returned.
        args: The command line.
        model: As for `base_config`.
        **paper: GiGPO's settings in this environment.

    Raises:
        ValueError: A flag would make another algorithm, or the algorithm does not read it.
    """
    preset = get_preset(args.algo)
    own = set(preset.settings) - set(_OF_GROUPS)
    if not preset.name.startswith("gigpo"):
        own |= set(_OF_GIGPO)
    settings = {name: value for name, value in paper.items() if name not in own}
    if preset.settings.get("group_size") == 1:
        settings |= {"num_groups": paper["num_groups"] * paper["group_size"], "group_size": 1}
    chosen = MODELS.get(args.model or model)
    settings |= {} if chosen is None else dict(chosen.training)
    settings |= LORA_TRAINING if has_adapters(args) else {}
    flags = {name: getattr(args, name) for name in _OF_GIGPO}
    flags = {name: value for name, value in flags.items() if value is not None}
    _check_flags(preset.name, flags)
    config.training(**settings | flags)
    _check_read(config, flags)
    set_by_hand(config, args.set, preset)
    return config


def _check_flags(algo: str, flags: dict[str, Any]) -> None:
    clash = sorted(set(flags) & set(PRESETS[algo].settings))
    if clash:
        name = clash[0]
        raise ValueError(
            f"{as_option(name)} {flags[name]} with --algo {algo}: {name}="
            f"{PRESETS[algo].settings[name]!r} is what makes this algorithm; leave the flag out, "
            "or use --algo gigpo"
        )


def _check_read(config: GiGPOConfig, flags: Mapping[str, Any]) -> None:
    read = set(settings_of(config.advantage_estimator))
    # Without step groups nothing compares states, and GiGPO discounts for them alone.
    has_step_groups = config.omega > 0 or config.estimator == "hgpo"
    read |= {"anchor", "similarity_threshold"} if has_step_groups else set()
    read -= {"gamma"} if config.estimator == "gigpo" and not has_step_groups else set()
    unread = [name for name in _OF_GIGPO if name in flags and name not in read]
    if unread:
        name = unread[0]
        raise ValueError(
            f"{as_option(name)} {flags[name]} with --algo {config.algorithm_name} and omega="
            f"{config.omega:g} has no effect, as no states are compared: leave it out, or use "
            "--algo gigpo with an omega above 0"
        )
    if "similarity_threshold" in flags and config.anchor == "exact":
        raise ValueError(
            f"--similarity-threshold {flags['similarity_threshold']} with exact anchors has no "
            "effect: leave it out, or add --anchor similarity"
        )
