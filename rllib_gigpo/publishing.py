"""What a learner's module gives to the engines: its weights, or its adapter where LoRA trains."""

from __future__ import annotations

import torch

from rllib_gigpo.engines.packing import Checksums, PackedTensors, checksum, checksums, pack, unpack
from rllib_gigpo.engines.published import Published
from rllib_gigpo.module import CausalLMModule


def packed_weights(module: CausalLMModule, dtype: torch.dtype) -> PackedTensors:
    """Return the policy's weights in the engines' dtype, an adapter merged in."""
    return pack(module.policy_weights("cpu"), dtype)


def publish(module: CausalLMModule, dtype: torch.dtype, version: int) -> Published:
    """Return what engines are to serve: the adapter where one trains, else all weights.

    Args:
        module: The module.
        dtype: The engines' dtype.
        version: The weights' version.
    """
    if module.lora is None:
        packed = packed_weights(module, dtype)
        return Published("weights", packed, version, checksums(unpack(packed)))
    tensors, peft_config = module.adapter_weights()
    return Published("adapter", pack(tensors), version, checksums(tensors), peft_config)


def checksums_of(module: CausalLMModule, dtype: torch.dtype, *, is_sharded: bool) -> Checksums:
    """Return the checksums of what `publish` would give, without packing it.

    Args:
        module: The module.
        dtype: The engines' dtype.
        is_sharded: Whether its weights are spread over the learners, which must then all ask.
    """
    if module.lora is not None:
        return checksums(module.adapter_weights()[0])
    weights = module.policy_weights("cpu" if is_sharded else None)
    return {
        name: checksum(tensor.to(dtype) if tensor.is_floating_point() else tensor)
        for name, tensor in weights.items()
    }
