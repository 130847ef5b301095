"""The group of learners that hold one model together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.annotations import override

from rllib_gigpo.checkpoints import CheckpointError
from rllib_gigpo.in_time import START_LIMIT_S
from rllib_gigpo.starting import NewActors
from rllib_gigpo.watched_actors import LearnerActors, LearnerError

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig


class LLMLearnerGroup(LearnerGroup):
    """Learners that are watched from the first call on, and have a time limit before it.

    Args:
        config: The settings.
        **kwargs: RLlib's `module_spec` and `placement_group`.

    Raises:
        LearnerError: A learner could not be started or built; all have been ended.
    """

    def __init__(self, *, config: GiGPOConfig, **kwargs: Any):
        start = partial(super().__init__, config=config, **kwargs)
        limit_s = config.heartbeat_timeout_s
        try:
            if config.num_learners == 0:
                start()
            else:
                start_in_time(
                    start, threading.TIMEOUT_MAX if limit_s is None else max(START_LIMIT_S, limit_s)
                )
                manager: Any = self._worker_manager
                self._worker_manager = LearnerActors.take_over(manager, limit_s)
                # RLlib's own call, which nobody could watch, built nothing: see `GroupedLearner`.
                self._all("build")
        except Exception:
            self._abandon()
            raise

    @override(LearnerGroup)
    def save_to_path(self, *args: Any, **kwargs: Any) -> str:
        """Write the state; what a learner's disk refuses comes back as an error.

        Raises:
            CheckpointError: It refused.
        """
        path = super().save_to_path(*args, **kwargs)
        if self.is_remote:
            for refusal in self._all("take_refusal"):
                if refusal is not None:
                    raise CheckpointError(refusal)
        return path

    @override(LearnerGroup)
    def shutdown(self) -> None:
        """End the learners; without ceremony where they hang or have been ended already."""
        manager = getattr(self, "_worker_manager", None)
        if isinstance(manager, LearnerActors) and manager.what_failed is not None:
            self._abandon()
            return
        super().shutdown()

    def _abandon(self) -> None:
        """Kill what there is; learners that wait for each other would answer nothing."""
        for worker in getattr(self, "_workers", None) or ():
            ray.kill(worker)
        self._is_shut_down = True

    def _all(self, method: str) -> list[Any]:
        call: Any = methodcaller(method)
        return self._get_results(self.foreach_learner(call))


class ShardedLearnerGroup(LLMLearnerGroup):
    """Learners that gather their state before RLlib asks the first one for it.

    RLlib reads and saves the state of one learner; alone, that one would wait for the others'
    parts for ever.
    """

    @override(LLMLearnerGroup)
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of all learners as that of one, which fits any number of them."""
        with self._gathered():
            return super().get_state(*args, **kwargs)

    @override(LLMLearnerGroup)
    def save_to_path(self, *args: Any, **kwargs: Any) -> str:
        """Write the state of all learners as that of one."""
        with self._gathered():
            return super().save_to_path(*args, **kwargs)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        self._all("gather_state")
        try:
            yield
        except LearnerError:
            raise  # There is nobody left to let go of anything.
        except BaseException:
            # A disk that refused, say: the run may go on, and is not to be read as it was then.
            self._all("release_state")
            raise
        self._all("release_state")


def start_in_time(start: Callable[[], None], limit_s: float) -> None:
    """Start learners; where not all of them come up, end those that were started.

    RLlib keeps their handles to itself until all of them run, waits for that without an end, and
    raises a bare TypeError where one dies while they find each other.

    Args:
        start: RLlib's start; it makes the learners' actors, and no others.
        limit_s: Seconds that it may take.

    Raises:
        LearnerError: A learner died or stopped.
    """
    made = NewActors()
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        made.kill()  # whoever waits for one of them now hears of its death

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        start()
    except Exception as error:
        made.kill()
        death = _death_in(error)
        if death is None and not is_late.is_set():
            raise
        told = (
            f"not all ran after {limit_s:g} s (is there room for them? See `ray status`)"
            if death is None or is_late.is_set()
            else _told(death)
        )
        raise LearnerError(
            f"a learner died or stopped while it was started: {told}; the learners were ended: "
            "start the run again, or restore it from its last checkpoint"
        ) from error
    finally:
        timer.cancel()


def _death_in(error: BaseException) -> RayError | None:
    if isinstance(error, TypeError) and not isinstance(error, RayError):
        return _death_in(error.__context__) if error.__context__ else None
    return error if isinstance(error, RayError) else None


def _told(death: RayError) -> str:
    text = str(death).strip()
    # Of a process that is gone Ray tells every way in which that may have come.
    if isinstance(death, RayActorError) and "creation task" not in text:
        return "its process was killed (its log or the kernel's says by whom)"
    return text.rpartition("\n")[2]
