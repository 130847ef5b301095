"""KeyDoor that keeps the contract until a test tells it how to break it, and in which episodes.

The tests play it in their own process, so that what it is told can stand on the class.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

from envs.key_door import KeyDoor
from rllib_gigpo import register_llm_env
from rllib_gigpo.agent.profiles.key_door import profile

HANG_S = 20.0
MEGABYTE = "at 0 0 . " * (10**6 // 9)


class Misbehaving(KeyDoor):
    """KeyDoor with a fault.

    Attributes:
        fault: From the place ("make", "reset", "step", "close") to what happens there: called with
            the environment and what it would have answered, it returns the answer instead.
        seeds: Reset seeds of the episodes that it happens in; None: in all.
        left: How often it still happens; -1: always.
    """

    fault: ClassVar[dict[str, Callable[[Any, Any], Any]]] = {}
    seeds: ClassVar[set[int] | None] = None
    left: ClassVar[int] = -1
    release: ClassVar[threading.Event] = threading.Event()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def behave(cls) -> None:
        """Do nothing wrong from now on; what hangs goes on."""
        cls.fault, cls.seeds, cls.left = {}, None, -1
        cls.release.set()
        cls.release = threading.Event()

    @classmethod
    def misbehave(cls, fault: dict[str, Any], seeds: set[int] | None = None, left: int = -1):
        """Do something wrong from now on."""
        cls.fault, cls.seeds, cls.left = fault, seeds, left

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.seed: int | None = None
        self.children: list[subprocess.Popen] = []
        self._at("make", None)

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return self._at("reset", super().reset(seed=seed, options=options))

    def step(self, action):
        return self._at("step", super().step(action))

    def close(self):
        for child in self.children:
            # Each leads a group, which holds what it has started itself.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        self._at("close", None)

    def _at(self, place: str, answer: Any) -> Any:
        happens = self.fault.get(place)
        is_meant = place == "make" or self.seeds is None or self.seed in self.seeds
        if happens is None or not is_meant:
            return answer
        with self._lock:
            if Misbehaving.left == 0:
                return answer
            Misbehaving.left -= 1
        return happens(self, answer)


register_llm_env("Misbehaving", Misbehaving, profile)


def raises(error: BaseException) -> Callable[[Any, Any], Any]:
    def happen(env: Misbehaving, answer: Any) -> Any:
        raise error

    return happen


def hangs(env: Misbehaving, answer: Any) -> Any:
    env.release.wait(HANG_S)
    return answer


def slow(env: Misbehaving, answer: Any) -> Any:
    time.sleep(0.05)
    return answer


def returns(value: Any) -> Callable[[Any, Any], Any]:
    return lambda env, answer: value


def part(place: int, value: Any) -> Callable[[Any, Any], Any]:
    """Another value in one place of what reset or step returns; from the end, info is -1."""

    def happen(env: Misbehaving, answer: tuple) -> tuple:
        changed = list(answer)
        changed[place] = value
        return tuple(changed)

    return happen


def told(**info: Any) -> Callable[[Any, Any], Any]:
    """Other values in the info."""
    return lambda env, answer: (*answer[:-1], {**answer[-1], **info})


def never_ends(env: Misbehaving, answer: tuple) -> tuple:
    env._steps = 0
    return (answer[0], 0.0, False, False, answer[-1])


def child_dies(env: Misbehaving, answer: Any) -> Any:
    """Ask a simulator in a process of its own, which is dead by now."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env.children.append(subprocess.Popen(["cat"], start_new_session=True, **pipes))
    env.children[-1].kill()
    env.children[-1].wait()
    pipe = env.children[-1].stdin
    assert pipe is not None
    pipe.write(b"where am I?\n")
    pipe.flush()  # BrokenPipeError
    return answer


def forks_many(env: Misbehaving, answer: Any) -> Any:
    """Start processes at every step until the machine's patience ends."""
    for _ in range(8):
        env.children.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
    if len(env.children) > 8:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return answer


def child_forks_on(env: Misbehaving, answer: Any) -> Any:
    """Start one process that goes on starting processes, until the machine's patience ends."""
    spawn = "while :; do sleep 600 & sleep 0.02; done"
    env.children.append(subprocess.Popen(["sh", "-c", spawn], start_new_session=True))
    time.sleep(0.15)
    raise BlockingIOError(11, "Resource temporarily unavailable")
