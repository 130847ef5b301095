"""Keeps a second process out of a folder where two at once would spoil each other's files."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOG = logging.getLogger(__name__)
# What file systems answer that know no locks.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_held: set[int] = set()


@contextmanager
def alone(file: Path, busy: str) -> Iterator[None]:
    """Hold a lock on a file; it ends with the process, however that ends.

    On a disk without locks nobody is kept out, and the log says so.

    Args:
        file: Made where it is not there, with its folder; its content is left alone.
        busy: What to say where somebody else holds it.

    Raises:
        ValueError: Somebody else does, in this process or another one.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(descriptor)
    is_locked = False
    try:
        is_locked = _lock(descriptor, file, busy)
        yield
    finally:
        if descriptor in _held:
            _held.discard(descriptor)
            if is_locked:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _lock(descriptor: int, file: Path, busy: str) -> bool:
    """Return whether the lock is held; False where the disk has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(busy) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _LOG.warning(
            "%s cannot be locked (%s): let nothing else work in %s at the same time",
            file,
            error.strerror,
            file.parent,
        )
        return False
    return True


def _forget_in_child() -> None:
    """Close what a fork has copied: a child that lives on would keep a killed process's lock."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_in_child)
