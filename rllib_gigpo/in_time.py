"""Calls that must come back: what hangs at the start of a run must not keep it from ever ending."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# The first environment may build an index or load a corpus that all later ones share.
START_LIMIT_S = 1800.0
_RING_AGAIN_S = 1.0


def call_in_time(work: Callable[[], T], limit_s: float, *, in_thread: bool) -> T:
    """Return what a call returns; raise what it raises.

    Args:
        work: The call.
        limit_s: Seconds that it may take.
        in_thread: Whether a thread of its own makes it. Otherwise the caller's thread does, which
            what is made may then belong to: an alarm interrupts it, where it is the main thread and
            waits in Python; any other is not interrupted, nor is one whose alarm C code listens to,
            which Python could not give back. What the call sets for alarms of its own is kept.

    Raises:
        TimeoutError: It took longer.
    """
    if in_thread:
        return _in_thread(work, limit_s)
    if threading.current_thread() is threading.main_thread():
        return _with_alarm(work, limit_s)
    return work()


class _AlarmError(BaseException):
    """The time is up; of no kind that an environment catches."""


def _in_thread(work: Callable[[], T], limit_s: float) -> T:
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:  # whatever it is, somebody waits for the outcome
            outcome.put((None, error))

    threading.Thread(target=run, name="call-in-time", daemon=True).start()
    try:
        result, error = outcome.get(timeout=limit_s)
    except queue.Empty:
        raise _late(limit_s) from None
    if error is not None:
        raise error
    return result


def _with_alarm(work: Callable[[], T], limit_s: float) -> T:
    def ring(number: int, frame: Any) -> None:
        raise _AlarmError

    handler = signal.getsignal(signal.SIGALRM)
    if handler is None:
        return work()
    signal.signal(signal.SIGALRM, ring)
    # It rings again, should somebody have caught the first one.
    timer = signal.setitimer(signal.ITIMER_REAL, limit_s, _RING_AGAIN_S)
    left, interval = 0.0, _RING_AGAIN_S
    try:
        try:
            return work()
        finally:
            left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    except _AlarmError:
        raise _late(limit_s) from None
    finally:
        # An environment may have set a handler, or a timer, that serves its later calls.
        if signal.getsignal(signal.SIGALRM) is ring:
            signal.signal(signal.SIGALRM, handler)
        is_own = interval != _RING_AGAIN_S
        signal.setitimer(signal.ITIMER_REAL, *((left, interval) if is_own else timer))


def _late(limit_s: float) -> TimeoutError:
    return TimeoutError(
        f"it took over {limit_s:g} s; if it needs longer, raise stepping(start_timeout_s=...)"
    )
