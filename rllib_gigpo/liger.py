"""Liger's kernels inside a Hugging Face model: norms, rotary positions and gated layers.

Source: https://github.com/linkedin/Liger-Kernel (arXiv 2410.10989). Its fused losses are left out:
they give no entropy, and `rllib_gigpo.chunked` never holds all logits either.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def runs_without_gpu() -> bool:
    """Whether Triton interprets kernels on the CPU, as tests have it do: right, but slow."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def use_liger_kernels(model: PreTrainedModel) -> None:
    """Let a model's layers compute with Liger's kernels; no weight and no name changes.

    Models of the same type that this process makes later use them too, as Liger replaces the type's
    classes and functions.

    Raises:
        ImportError: liger-kernel is not installed.
        ValueError: Liger has no kernels for this type of model.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ImportError(
            "use_liger_kernel=True needs liger-kernel, which is not installed: "
            "pip install -e '.[liger]' in rllib-gigpo's folder, or set "
            "learners(use_liger_kernel=False)"
        ) from error
    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(
            f"use_liger_kernel=True with a model of type {kind!r}: Liger has kernels for "
            f"{', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}; set "
            "learners(use_liger_kernel=False)"
        )
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(model, _LOSSES)
