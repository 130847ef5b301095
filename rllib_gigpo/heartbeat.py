"""Signs of life of the processes that work on a call.

A process that is killed is noticed by Ray. One that is stopped (SIGSTOP, a frozen machine, a disk
that never answers) is not: whoever called it waits for ever. So every call beats while it runs: a
thread beside it counts up a number in Ray's own key-value store, and the caller looks whether it
still moves. No clock is compared with another one, and a caller that was itself stopped for a while
finds that the number has moved on.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

T = TypeVar("T")

NAMESPACE = b"rllib-gigpo-heartbeat"
_BEATS_PER_LIMIT = 10
_SLOWEST_BEAT_S = 5.0


class Beat(NamedTuple):
    """How a call shows that it lives.

    Attributes:
        key: Of the call, new for each.
        every_s: Seconds between two beats.
    """

    key: str
    every_s: float

    @classmethod
    def new(cls, limit_s: float) -> Beat:
        """Return a beat that is fast enough for a time limit."""
        return cls(uuid.uuid4().hex, min(_SLOWEST_BEAT_S, limit_s / _BEATS_PER_LIMIT))


@contextmanager
def beating(beat: Beat) -> Iterator[None]:
    """Beat while the block runs, and leave nothing in the store.

    Whoever waits for the call clears up after one that died. But not every call is waited for, and
    a beat may be on its way when the call ends: so the thread that beats clears up last of all.
    """
    is_over = threading.Event()

    def count() -> None:
        number = 0
        while not is_over.wait(beat.every_s):
            number += 1
            _put(beat.key, number)
        _forget(beat.key)

    _put(beat.key, 0)
    thread = threading.Thread(target=count, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()


def call_beating(
    function: Callable[..., T], beat: Beat, actor: Any, *args: Any, **kwargs: Any
) -> T:
    """Call a function on an actor, with a heartbeat beside it."""
    with beating(beat):
        return function(actor, *args, **kwargs)


class Listener:
    """Hears the heartbeats of calls; one that has not begun yet is silent.

    Args:
        beats: The calls, all issued just now.
    """

    def __init__(self, beats: Iterable[Beat]):
        now = time.monotonic()
        self._heard: dict[str, tuple[bytes | None, float]] = {b.key: (None, now) for b in beats}

    def silence_s(self, beat: Beat) -> float:
        """Return for how many seconds nothing new was heard of a call."""
        last, since = self._heard[beat.key]
        now, found = time.monotonic(), _internal_kv_get(beat.key, namespace=NAMESPACE)
        if found != last:
            self._heard[beat.key] = (found, now)
            return 0.0
        return now - since

    def forgive(self, beat: Beat) -> None:
        """Count the silence of a call anew."""
        self._heard[beat.key] = (self._heard[beat.key][0], time.monotonic())

    def close(self) -> None:
        """Forget the calls, also those whose process was killed."""
        for key in self._heard:
            _forget(key)


# Where the store does not answer, Ray has a trouble of its own, which it reports: the work that
# beats is not to fail for it.


def _put(key: str, number: int) -> None:
    with contextlib.suppress(Exception):
        _internal_kv_put(key, str(number), namespace=NAMESPACE)


def _forget(key: str) -> None:
    with contextlib.suppress(Exception):
        _internal_kv_del(key, namespace=NAMESPACE)
