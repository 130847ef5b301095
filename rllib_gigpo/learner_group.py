"""The group of learners that hold one model together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import ray
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.annotations import override

from rllib_gigpo.checkpoints import CheckpointError
from rllib_gigpo.watched_actors import LearnerActors, LearnerError

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig


class LLMLearnerGroup(LearnerGroup):
    """Learners that are watched from the first call on.

    Args:
        config: The settings.
        **kwargs: RLlib's `module_spec` and `placement_group`.

    Raises:
        LearnerError: A learner could not be built; all have been ended.
    """

    def __init__(self, *, config: GiGPOConfig, **kwargs: Any):
        try:
            super().__init__(config=config, **kwargs)
            if self.is_remote:
                manager: Any = self._worker_manager
                self._worker_manager = LearnerActors.take_over(manager, config.heartbeat_timeout_s)
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
