"""Which of several running servers an environment of this machine may use."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Sequence
from typing import IO


def lease(urls: Sequence[str]) -> tuple[str, IO[str]]:
    """Return the first server that no environment of this machine uses, and the lock on it.

    Closing the lock gives the server back, and so does the end of the process.

    Raises:
        RuntimeError: All are in use.
    """
    for url in urls:
        name = hashlib.sha256(url.encode()).hexdigest()[:16]
        path = os.path.join(tempfile.gettempdir(), f"rllib_gigpo-appworld-{name}.lock")
        lock = open(path, "w")  # noqa: SIM115 - open for as long as the server is used
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return url, lock
    raise RuntimeError(
        f"all {len(urls)} AppWorld server(s) of server={list(urls)} are in use: a server plays one "
        "episode at a time, so name as many as episodes run at once"
    )
