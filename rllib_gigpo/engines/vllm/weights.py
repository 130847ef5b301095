"""Weights on their way from the learner into vLLM's model.

tensors -> pack -> Ray's object store (shared memory) -> unpack -> load_into_worker
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rllib_gigpo.engines.base import EngineError

PackedTensors = dict[str, tuple[np.ndarray, bool]]
"""Parameter name -> (array, whether its int16 values are the bits of bfloat16)."""

Shapes = Mapping[str, tuple[int, ...]]

_SHOWN = 3


def pack(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> PackedTensors:
    """Turn tensors into NumPy arrays, which Ray's object store shares without copying.

    Args:
        tensors: Name to tensor on any device.
        dtype: The engine's type, to which floating tensors are cast here once; None keeps theirs.
    """
    packed: PackedTensors = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        tensor = tensor.to("cpu").contiguous()
        is_bfloat16 = tensor.dtype == torch.bfloat16  # a type that NumPy does not have
        packed[name] = ((tensor.view(torch.int16) if is_bfloat16 else tensor).numpy(), is_bfloat16)
    return packed


def unpack(packed: PackedTensors) -> dict[str, torch.Tensor]:
    """Tensors over the packed memory, not to be written to."""
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, (array, is_bfloat16) in packed.items():
            tensor = torch.from_numpy(array)
            tensors[name] = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
    return tensors


def parameter_shapes(model: str) -> tuple[Shapes, frozenset[str]]:
    """Names and shapes of a model's parameters as transformers knows them.

    Args:
        model: Model folder or Hugging Face id.

    Returns:
        Shapes by name, and the names of further state that a tied or buffered model may also send.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    shapes = {name: tuple(value.shape) for name, value in skeleton.named_parameters()}
    return shapes, frozenset(skeleton.state_dict().keys() - shapes.keys())


def fitting(
    tensors: Mapping[str, torch.Tensor], shapes: Shapes, optional: frozenset[str]
) -> dict[str, torch.Tensor]:
    """The tensors to load, once they are known to be exactly the model's.

    Raises:
        EngineError: Missing or unknown names, or wrong shapes.
    """
    missing = sorted(shapes.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - shapes.keys() - optional)
    wrong = [
        f"{name} {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = [
        f"{len(found)} {what} ({', '.join(found[:_SHOWN])}{', ...' if len(found) > _SHOWN else ''})"
        for what, found in (("missing", missing), ("unknown", unknown), ("of wrong shape", wrong))
        if found
    ]
    if problems:
        raise EngineError(
            f"weights do not fit the model: {'; '.join(problems)}; send every parameter under its "
            "Hugging Face name"
        )
    return {name: tensors[name] for name in shapes}


def load_into_worker(worker: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace a vLLM worker's weights; runs inside the worker.

    Args:
        worker: vLLM's worker.
        tensors: All parameters under their Hugging Face names.
    """
    from vllm.platforms import current_platform

    worker.reload_weights(weights_iterator=iter(tensors.items()))
    if current_platform.is_cpu():
        _repack_heads(worker.model_runner.get_model())


def _repack_heads(model: torch.nn.Module) -> None:
    # vLLM's CPU kernels multiply with a packed copy of each matrix. Reloading renews the copies of
    # layers that receive weights; an output head tied to the embeddings receives none itself and
    # would go on with its old copy.
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
