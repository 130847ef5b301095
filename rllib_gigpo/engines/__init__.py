"""Engines that serve language-model policies to the rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rllib_gigpo.engines.base import Engine

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig


def build_engine(config: GiGPOConfig) -> Engine:
    """Build the in-process engine of one EnvRunner."""
    from rllib_gigpo.engines.transformers_engine import TransformersEngine
    from rllib_gigpo.models import materialize

    folder = materialize(config.model_spec)
    return TransformersEngine(
        dict.fromkeys(config.module_ids, folder),
        dtype=config.dtype,
        max_model_len=config.max_prompt_tokens + config.max_response_tokens,
        max_num_seqs=config.max_num_seqs,
    )
