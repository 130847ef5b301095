"""Settings of a tuned example that `--set` replaces."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.commands import json_object
from rllib_gigpo.presets import Preset

# What has a flag of its own, which knows more about it.
_FLAGS = {
    "model": "--model",
    "lora": "--lora",
    "omega": "--omega",
    "gamma": "--gamma",
    "f_norm": "--f-norm",
    "anchor": "--anchor",
    "similarity_threshold": "--similarity-threshold",
}


def set_by_hand(config: GiGPOConfig, given: str, preset: Preset) -> None:
    """Set what `--set` says, on top of everything else.

    Args:
        config: The settings.
        given: Arguments of `training(...)` and `llm(...)`, a JSON object.
        preset: The algorithm; what makes it what it is stays.

    Raises:
        ValueError: It is no JSON object, or names what has a flag, what makes the algorithm, or no
            setting.
    """
    own = json_object(given, "--set", "settings")
    of_llm, of_training = _arguments(config.llm), _arguments(config.training)
    of_training |= _arguments(AlgorithmConfig.training)
    for name, value in own.items():
        if name in _FLAGS:
            raise ValueError(f"--set {name}: use {_FLAGS[name]}, which this example has for it")
        if name in preset.settings:
            raise ValueError(
                f"--set {name}={value!r} with --algo {preset.name}: {name}="
                f"{preset.settings[name]!r} is what makes this algorithm; leave it out, or use "
                "another --algo"
            )
        if name not in of_llm | of_training:
            near = difflib.get_close_matches(name, of_llm | of_training, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"--set {name}: training(...) and llm(...) have no such setting{hint}")
    config.llm(**{name: value for name, value in own.items() if name in of_llm})
    config.training(**{name: value for name, value in own.items() if name not in of_llm})


def _arguments(method: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(method).parameters) - {"self", "kwargs"}
