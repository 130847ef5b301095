"""From what the command line names to a GiGPOConfig."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.imports import import_place


def load_config(name: str, arguments: Sequence[str] = ()) -> GiGPOConfig:
    """Return the config that a name stands for.

    Args:
        name: `file.py:NAME` or `module:NAME`, where NAME is a GiGPOConfig or a function without
            arguments that returns one; or a tuned example, whose `parser` reads `arguments` and
            whose `paper_config` returns the config.
        arguments: The tuned example's own options. Those of learners and runners are taken to be
            meant for a machine that has a GPU for every learner, unless
            `--num-gpus-per-learner=0` says otherwise.

    Raises:
        ValueError: There is no such file, module or name, or it makes no GiGPOConfig.
    """
    if ":" not in name:
        return _checked(name, _tuned(name, import_place(name), arguments))
    if arguments:
        raise ValueError(
            f"{' '.join(arguments)}: {name} takes no options; only tuned examples do, which are "
            "named without ':NAME'"
        )
    found = load_named(name)
    return _checked(
        name, found if isinstance(found, GiGPOConfig) or not callable(found) else found()
    )


def load_named(name: str) -> Any:
    """Return what `file.py:NAME` or `module:NAME` names.

    Raises:
        ValueError: There is no such file, module or name.
    """
    place, _, attribute = name.rpartition(":")
    module = import_place(place)
    if not attribute or not hasattr(module, attribute):
        raise ValueError(f"{place} has no {attribute!r}: name something that it defines")
    return getattr(module, attribute)


def _tuned(name: str, module: ModuleType, arguments: Sequence[str]) -> Any:
    parser = getattr(module, "parser", None)
    if not (isinstance(parser, argparse.ArgumentParser) and hasattr(module, "paper_config")):
        raise ValueError(f"{name} is no tuned example: say which config in it, as {name}:NAME")
    args = getattr(module, "parse", parser.parse_args)(list(arguments))
    config = module.paper_config(args)
    # What all tuned examples share lies beside them.
    training = importlib.import_module("_training")
    training.check_arguments(args, config)
    # It will train on a machine that has a GPU for every learner, whatever this one has.
    return training.with_arguments(config, args, gpus=math.inf)


def _checked(name: str, found: Any) -> GiGPOConfig:
    if not isinstance(found, GiGPOConfig):
        raise ValueError(f"{name} is a {type(found).__name__}: expected a GiGPOConfig")
    return found
