"""Actors that are being made: none of them beats yet, so one that stops would be waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private.state import actors
from ray._private.worker import global_worker
from ray.core.generated.common_pb2 import Address  # pyright: ignore[reportAttributeAccessIssue]

_LOOKS_PER_LIMIT = 10
_SLOWEST_LOOK_S = 10.0


class NewActors:
    """The actors that this process makes from now on, whoever holds their handles."""

    def __init__(self) -> None:
        owner: Any = Address.FromString(ray.put(None).owner_address())
        self._owner = owner.ip_address, owner.port
        self._known = set(self._states())

    def kill(self) -> None:
        """End all of them."""
        worker: Any = global_worker
        for actor_id in self._states().keys() - self._known:
            worker.core_worker.kill_actor(ray.ActorID.from_hex(actor_id), True)

    def unmade(self) -> set[str]:
        """Return those whose constructor has not returned yet."""
        states = self._states()
        return {actor_id for actor_id in states.keys() - self._known if states[actor_id] != "ALIVE"}

    def _states(self) -> dict[str, str]:
        return {
            actor_id: entry["State"]
            for actor_id, entry in actors().items()
            if entry["State"] != "DEAD"
            and (entry["OwnerAddress"]["IPAddress"], entry["OwnerAddress"]["Port"]) == self._owner
        }


@contextmanager
def made_in_time(limit_s: float | None) -> Iterator[None]:
    """End the actors that the block makes when one of them takes too long to be made.

    RLlib waits for its EnvRunners without an end.

    Args:
        limit_s: Seconds that each may take; None waits for ever.

    Raises:
        RuntimeError: One took longer.
    """
    if limit_s is None:
        yield
        return
    made, is_over, is_late = NewActors(), threading.Event(), threading.Event()

    def watch() -> None:
        since: dict[str, float] = {}
        while not is_over.wait(min(_SLOWEST_LOOK_S, limit_s / _LOOKS_PER_LIMIT)):
            now = time.monotonic()
            since = {actor_id: since.get(actor_id, now) for actor_id in made.unmade()}
            if any(now - first > limit_s for first in since.values()):
                is_late.set()
                made.kill()  # whoever waits for one of them now hears of its death
                return

    late = RuntimeError(
        f"an EnvRunner was not made within {limit_s:g} s (is there room for it? See `ray status`); "
        "all were ended: start the run again, or raise stepping(start_timeout_s=...) where its "
        "environment takes longer"
    )
    watcher = threading.Thread(target=watch, name="made-in-time", daemon=True)
    watcher.start()
    try:
        yield
    except Exception as error:
        if is_late.is_set():
            raise late from error
        raise
    finally:
        is_over.set()
        watcher.join()
    if is_late.is_set():
        raise late
