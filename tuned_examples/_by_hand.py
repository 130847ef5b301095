"""Settings of a tuned example that `--set` replaces."""

import difflib
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.commands import json_object
from rllib_gigpo.presets import Preset

# What has a flag of its own, which knows more about it.
FLAGS = {
    "model": "--model",
    "lora": "--lora",
    "omega": "--omega",
    "gamma": "--gamma",
    "f_norm": "--f-norm",
    "anchor": "--anchor",
    "similarity_threshold": "--similarity-threshold",
    "num_learners": "--num-learners",
    "num_gpus_per_learner": "--num-gpus-per-learner",
    "num_cpus_per_learner": "--num-cpus-per-learner",
    "num_env_runners": "--num-env-runners",
    "evaluation_interval": "--evaluation-interval",
    "evaluation_duration": "--evaluation-duration",
    "evaluation_num_env_runners": "--evaluation-num-env-runners",
    "seed": "--seed",
    "engine": "--engine",
    "num_engines": "--num-engines",
    "engine_num_gpus": "--gpus-per-engine",
    "engine_options": "--engine-options",
    "sharding": "--sharding",
    "folder": "--results",
    "trackers": "--trackers",
}
_METHODS = (
    "llm",
    "training",
    "agent",
    "stepping",
    "evaluation",
    "watchdog",
    "recording",
    "fault_tolerance",
)
# A demo runs on one machine, with neither engines nor several learners.
_OF_THE_MACHINE = ("learners", "engines")


def set_by_hand(
    config: GiGPOConfig,
    given: str,
    preset: Preset,
    *,
    is_demo: bool = False,
    flags: Mapping[str, str] = FLAGS,
) -> None:
    """Set what `--set` says, on top of everything else.

    Args:
        config: The settings.
        given: Arguments of GiGPO's methods of settings (`llm(...)`, `stepping(...)`, ...), a JSON
            object; of `training(...)` RLlib's too.
        preset: The algorithm; what makes it what it is stays.
        is_demo: Leave out what learners and engines are told.
        flags: Settings with a flag of their own.

    Raises:
        ValueError: It is no JSON object, or names what has a flag, what makes the algorithm, or no
            setting.
    """
    own = json_object(given, "--set", "settings")
    methods = _methods_of_each(config)
    chosen: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in own.items():
        if name in flags:
            raise ValueError(f"--set {name}: use {flags[name]}, which this example has for it")
        if name in preset.settings:
            raise ValueError(
                f"--set {name}={value!r} with --algo {preset.name}: {name}="
                f"{preset.settings[name]!r} is what makes this algorithm; leave it out, or use "
                "another --algo"
            )
        if len(methods.get(name, [])) > 1:
            raise ValueError(
                f"--set {name}: {' and '.join(methods[name])} have one each; set it in a script"
            )
        if name not in methods:
            near = difflib.get_close_matches(name, methods, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            known = ", ".join(f"{method}(...)" for method in (*_METHODS, *_OF_THE_MACHINE))
            raise ValueError(f"--set {name}: none of {known} has such a setting{hint}")
        chosen[methods[name][0]][name] = value
    for method, values in chosen.items():
        if not (is_demo and method in _OF_THE_MACHINE):
            getattr(config, method)(**values)


def names_set(given: str) -> set[str]:
    """Return the settings that `--set` names."""
    return set(json_object(given, "--set", "settings"))


def _methods_of_each(config: GiGPOConfig) -> dict[str, list[str]]:
    """Return the methods that take a setting of a name, for every such name."""
    takers: defaultdict[str, list[str]] = defaultdict(list)
    for method in (*_METHODS, *_OF_THE_MACHINE):
        for name in _arguments(getattr(config, method)):
            takers[name].append(method)
    for name in _arguments(AlgorithmConfig.training) - set(takers):
        takers[name].append("training")
    return takers


def _arguments(method: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(method).parameters) - {"self", "kwargs"}
