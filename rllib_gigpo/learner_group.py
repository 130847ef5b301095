"""The group of learners that hold one model together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import methodcaller
from typing import Any

from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.annotations import override


class ShardedLearnerGroup(LearnerGroup):
    """Learners that gather their state before RLlib asks the first one for it.

    RLlib reads and saves the state of one learner; alone, that one would wait for the others'
    parts for ever.
    """

    @override(LearnerGroup)
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of all learners as that of one, which fits any number of them."""
        with self._gathered():
            return super().get_state(*args, **kwargs)

    @override(LearnerGroup)
    def save_to_path(self, *args: Any, **kwargs: Any) -> str:
        """Write the state of all learners as that of one."""
        with self._gathered():
            return super().save_to_path(*args, **kwargs)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        self._all("gather_state")
        try:
            yield
        finally:
            self._all("release_state")

    def _all(self, method: str) -> None:
        call: Any = methodcaller(method)
        self._get_results(self.foreach_learner(call))
