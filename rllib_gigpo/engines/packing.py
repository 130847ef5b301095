"""Tensors as Ray's object store carries them, and checksums that tell whether they arrived.

tensors -> pack -> object store (shared memory, no copy) -> unpack -> Engine.load_...
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch

PackedTensors = dict[str, tuple[np.ndarray, bool]]
"""Parameter name -> (array, whether its int16 values are the bits of bfloat16)."""

Checksums = dict[str, int]
"""Tensor name -> `checksum` of the tensor."""

_CHUNK = 1 << 16  # 64-bit words: half a megabyte, which stays in a core's cache
_MODULUS = 1 << 64
_CHUNK_FACTOR = 0x9E3779B97F4A7C15
_WORD_FACTOR = -7046029254386353131  # the same bits as a signed integer


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


def checksums(tensors: Mapping[str, torch.Tensor]) -> Checksums:
    """Checksum of every tensor."""
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def checksum(tensor: torch.Tensor) -> int:
    """64-bit checksum of a tensor's bytes, computed on its device and the same on every one.

    The bytes are read as 64-bit words (the last one filled up with zeros), each multiplied by an
    odd number of its own and summed modulo 2^64. So a change of any one word changes the sum, and
    what differs in more of them, in order or in length, escapes with a chance of about 2^-64. It
    is no protection against someone who wants to be missed.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # words must lie at multiples of their size
    octets = flat.view(torch.uint8)
    whole = octets.numel() // 8 * 8
    total = octets.numel()
    words = octets[:whole].view(torch.int64)
    for start in range(0, len(words), _CHUNK):
        total = _extend(total, words[start : start + _CHUNK])
    if whole < octets.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=octets.device)
        rest[: octets.numel() - whole] = octets[whole:]
        total = _extend(total, rest.view(torch.int64))
    return total


def _extend(total: int, words: torch.Tensor) -> int:
    # Integer products and sums of torch wrap around, which is what modulo 2^64 means.
    factors = _odd_factors(words.device)[: len(words)]
    return (total * _CHUNK_FACTOR + int((words * factors).sum())) % _MODULUS


@lru_cache(maxsize=8)
def _odd_factors(device: torch.device) -> torch.Tensor:
    """A different odd int64 for every word of a chunk."""
    return torch.arange(_CHUNK, dtype=torch.int64, device=device) * _WORD_FACTOR | 1
