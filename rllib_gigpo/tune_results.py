"""Results that Tune's driver has handled are let go of.

Ray 2.60 keeps the reference of each call to a trial until the trial ends, and with it what was
answered: some 25 KiB per iteration (`RayActorManager._tracked_actors_to_task_futures`). And each
time that it writes the experiment's state it keeps the text of every newest checkpoint's result,
only to write one debug line per text (`TuneFunctionEncoder.default`).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from ray.air.execution._internal import RayActorManager
from ray.tune.utils import serialization


def release_results() -> None:
    """Have this process's Tune let go of results; again it changes nothing."""
    serialization.log_once = _never
    handle = RayActorManager._actor_task_resolved
    if hasattr(handle, "__wrapped__"):
        return

    @wraps(handle)
    def handle_and_release(self: Any, tracked_actor_task: Any, result: Any) -> None:
        handle(self, tracked_actor_task, result)
        futures = self._tracked_actors_to_task_futures.get(tracked_actor_task._tracked_actor)
        if futures:
            futures &= self._actor_task_events.get_futures()

    RayActorManager._actor_task_resolved = handle_and_release


def _never(key: str) -> bool:
    """Stand in for `ray.util.debug.log_once`, which keeps every key."""
    return False
