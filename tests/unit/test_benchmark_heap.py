"""Memory in use, as `benchmarks.update` holds it against the estimate."""

import time

import torch

from benchmarks.heap import in_use, watched

_MIB = 2**20


def test_what_was_freed_counts_while_it_was_there_alone():
    before = in_use()
    with watched() as peak:
        held = [torch.zeros(2**18) for _ in range(64)]  # 64 blocks of 2^18 x 4 bytes = 1 MiB
        time.sleep(0.1)
        del held
        after = in_use()
    # Small blocks and what other threads allocate besides.
    assert 64 <= (peak.bytes - before) / _MIB < 72
    assert (after - before) / _MIB < 8
