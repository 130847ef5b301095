"""Memory of this process that is in use, unlike memory that the C library holds back for later.

glibc keeps blocks of up to 32 MiB that were freed, nearly all activations, and the more of them the
longer the rows are: the resident memory of a process on a CPU lies above what its tensors need.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_EVERY_S = 0.005


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def in_use() -> int:
    """Return the bytes that are allocated now, in heaps and in mappings.

    Raises:
        RuntimeError: This C library cannot tell.
    """
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        raise RuntimeError("this C library has no mallinfo2: measure with glibc 2.33 or later")
    ask.restype = _Mallinfo2
    found = ask()
    return found.uordblks + found.hblkhd


@dataclass
class Peak:
    """The most that was in use, in bytes."""

    bytes: int


@contextmanager
def watched() -> Iterator[Peak]:
    """Look at what is in use every 5 ms, and keep the most."""
    peak, done = Peak(in_use()), threading.Event()

    def watch() -> None:
        while not done.wait(_EVERY_S):
            peak.bytes = max(peak.bytes, in_use())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
