"""Optimizers of a learner, and their state where parameters are spread over the learners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ray.rllib.utils.numpy import convert_to_numpy

from rllib_gigpo.sharding import gathered, part_like

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

Parameters = list[torch.nn.Parameter]


def build_optimizer(groups: Sequence[Parameters], config: GiGPOConfig) -> torch.optim.Optimizer:
    """Return the optimizer of one module.

    Args:
        groups: The policy's trained parameters and, where there is one, the critic's own.
        config: The module's settings.
    """
    rates = (config.lr, config.critic_lr)
    with_rates: Any = [
        {"params": parameters, "lr": rate} for parameters, rate in zip(groups, rates, strict=False)
    ]
    # Torch steps sharded and whole parameters one after the other only.
    foreach = False if config.sharding == "fsdp" and config.critic == "model" else None
    if config.optimizer_name != "adamw":
        return torch.optim.SGD(with_rates, foreach=foreach)
    first, second = config.adam_betas
    return torch.optim.AdamW(
        with_rates, betas=(first, second), weight_decay=config.weight_decay, foreach=foreach
    )


def set_learning_rates(
    optimizer: torch.optim.Optimizer, config: GiGPOConfig, step: int, factor: float
) -> None:
    """Set the learning rates of an optimizer step.

    Args:
        optimizer: Of `build_optimizer`.
        config: The module's settings.
        step: Number of the step, from 1; the first `lr_warmup_steps` grow linearly.
        factor: Multiplies all rates.
    """
    warmup = min(1.0, step / max(1, config.lr_warmup_steps))
    for group, rate in zip(optimizer.param_groups, (config.lr, config.critic_lr), strict=False):
        group["lr"] = rate * warmup * factor


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state with sharded values whole, as NumPy arrays; all learners must ask."""
    state = optimizer.state_dict()
    values = {
        number: gathered(tensors, convert_to_numpy) for number, tensors in state["state"].items()
    }
    return {"state": values, "param_groups": state["param_groups"]}


def with_own_options(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the options of this optimizer, which the run's settings decide.

    Args:
        optimizer: Of `build_optimizer`.
        state: Of another run's optimizer: its own options would undo a changed setting, and
            `foreach` depends on how parameters are spread over the learners.

    Raises:
        ValueError: The other optimizer had other groups of parameters.
    """
    own, saved = optimizer.param_groups, state["param_groups"]
    if len(own) != len(saved):
        raise ValueError(
            f"the state is of an optimizer with {len(saved)} groups of parameters, this run's has "
            f"{len(own)}: restore it with the training(critic=...) that it was saved with"
        )
    groups = [{**group, "params": held["params"]} for group, held in zip(own, saved, strict=True)]
    return {**state, "param_groups": groups}


def own_part(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole state with this learner's parts of sharded parameters' values."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = {
        number: {
            key: part_like(parameters[number], torch.as_tensor(value))
            if np.shape(value) == tuple(parameters[number].shape)
            else value
            for key, value in values.items()
        }
        for number, values in state["state"].items()
    }
    return {**state, "state": parts}
