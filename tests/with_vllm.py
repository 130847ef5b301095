"""What tests of vLLM share: when they are skipped, and the settings of a tiny engine."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from rllib_gigpo.engines.vllm.settings import VLLMSettings

# Where it is required, tests fail without it and are not skipped.
REQUIRED = os.environ.get("RLLIB_GIGPO_REQUIRE_VLLM") == "1"

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and not REQUIRED, reason="vLLM is not installed"
)
vllm = pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm])
"""The engine's kind, as a parameter of tests and fixtures."""


def skip_without_vllm() -> None:
    """As `needs_vllm`, for fixtures."""
    if not REQUIRED:
        pytest.importorskip("vllm")


def tiny_settings(**changes: Any) -> VLLMSettings:
    """In fp32, 16 sequences of 256 tokens, and adapters up to rank 8."""
    usual: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 16 << 20,
        "enable_lora": True,
        "max_lora_rank": 8,
    }
    return VLLMSettings(**{**usual, **changes})
