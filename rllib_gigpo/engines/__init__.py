"""Engines that serve language-model policies to the rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllib_gigpo.engines.base import Engine

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig


def model_folders(config: GiGPOConfig) -> dict[str, str]:
    """Return where each policy's first weights are."""
    from rllib_gigpo.models import materialize

    return {
        module_id: materialize(config.get_config_for_module(module_id).model_spec)
        for module_id in config.module_ids
    }


def build_engine(config: GiGPOConfig, *, device: str | None = None) -> Engine:
    """Build an engine in this process.

    Args:
        config: The settings.
        device: Where it computes; None for CUDA if there is a GPU, else the CPU.
    """
    from rllib_gigpo.engines.transformers_engine import TransformersEngine

    return TransformersEngine(
        model_folders(config),
        dtype=config.dtype,
        device=device,
        max_model_len=config.max_prompt_tokens + config.max_response_tokens,
        max_num_seqs=config.max_num_seqs,
    )
