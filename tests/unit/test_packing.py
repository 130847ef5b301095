"""Tensors as arrays for the object store, and their checksums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo.engines.packing import checksum, checksums, pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_keeps_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(-6, 6).reshape(3, 4).to(dtype)
    if dtype.is_floating_point:
        tensor = tensor / 7
        tensor[0, 0] = torch.inf
    packed = pack({"w": tensor, "strided": tensor.t(), "scalar": tensor[1, 1]})
    assert all(isinstance(array, np.ndarray) for array, _ in packed.values())
    restored = unpack(packed)
    for name, expected in {"w": tensor, "strided": tensor.t(), "scalar": tensor[1, 1]}.items():
        assert restored[name].dtype == dtype
        assert torch.equal(restored[name], expected)


def test_packing_casts_floating_tensors_once() -> None:
    # 1 + 2^-9 lies halfway between the bfloat16 neighbours 1 and 1 + 2^-8 ... below the half: 1.
    packed = pack({"w": torch.tensor([1 + 2**-9]), "i": torch.tensor([7])}, torch.bfloat16)
    restored = unpack(packed)
    assert restored["w"].dtype == torch.bfloat16
    assert restored["w"].item() == 1.0
    assert restored["i"].dtype == torch.int64


def test_unpacking_shares_memory() -> None:
    packed = pack({"w": torch.zeros(3, dtype=torch.bfloat16)})
    restored = unpack(packed)
    packed["w"][0][1] = 0x3F80  # the bits of bfloat16 1.0
    assert restored["w"].tolist() == [0.0, 1.0, 0.0]


def test_unpacking_read_only_memory_is_silent(recwarn: pytest.WarningsRecorder) -> None:
    array = np.ones(2, dtype=np.float32)
    array.flags.writeable = False
    assert unpack({"w": (array, False)})["w"].tolist() == [1.0, 1.0]
    assert not recwarn.list


def test_a_checksum_is_a_sum_of_words_with_factors():
    # One word, the integer 5: its factor is the first, 0 * ... | 1 = 1. The sum starts with the
    # number of bytes, 8, times 0x9E3779B97F4A7C15 = 11400714819323198485.
    expected = (8 * 11400714819323198485 + 5) % 2**64
    assert checksum(torch.tensor([5])) == expected


def test_the_last_word_is_filled_up_with_zeros():
    # 3 int16 are 6 bytes of one word: 1 + 2 * 2^16 + 3 * 2^32.
    expected = (6 * 11400714819323198485 + 1 + 2 * 2**16 + 3 * 2**32) % 2**64
    assert checksum(torch.tensor([1, 2, 3], dtype=torch.int16)) == expected


@given(
    dtype=st.sampled_from(DTYPES),
    length=st.integers(1, 300),
    data=st.data(),
)
def test_any_changed_element_changes_the_checksum(dtype, length, data):
    tensor = torch.arange(length).to(dtype)
    place = data.draw(st.integers(0, length - 1))
    changed = tensor.clone()
    changed[place] = -changed[place] - 1
    assert checksum(changed) != checksum(tensor)


def test_order_length_and_large_tensors_count():
    # More than one chunk of 65,536 words of four bfloat16 each.
    tensor = torch.randn(600_001, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor.flip(0)) != checksum(tensor)
    assert checksum(tensor.roll(4 * 65_536)) != checksum(tensor)
    assert checksum(torch.cat([tensor, torch.zeros(4).bfloat16()])) != checksum(tensor)


def test_a_checksum_is_of_the_values_in_order_wherever_they_lie():
    tensor = torch.arange(35, dtype=torch.bfloat16).reshape(5, 7)
    assert checksum(tensor[1:]) == checksum(tensor[1:].clone())
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
    assert checksum(tensor.t()) != checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_packed_has_the_same_checksums(dtype):
    tensors = {"a": torch.arange(10).to(dtype), "b": torch.ones(3, 3).to(dtype).t()}
    assert checksums(unpack(pack(tensors))) == checksums(tensors)
