"""Activation checkpointing: layers whose insides are computed again in the backward pass."""

from __future__ import annotations

import torch


def allow_recompute(model: torch.nn.Module) -> None:
    """Prepare a Hugging Face model, once.

    Raises:
        ValueError: The model has no layer that can be computed again.
    """
    if not repeated_layers(model):
        raise ValueError(
            f"{type(model).__name__} has no layer that can be computed again: leave "
            "activation_checkpointing off"
        )
    model.gradient_checkpointing_enable(  # pyright: ignore[reportCallIssue]
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )


def recompute_layers(model: torch.nn.Module) -> None:
    """Keep only the inputs of the layers in the passes to come; `model.eval()` ends it.

    A layer is told that it trains, and nothing inside it: dropout stays off.
    """
    for layer in repeated_layers(model):
        layer.training = True


def repeated_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that a Hugging Face model is made of, in their order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
