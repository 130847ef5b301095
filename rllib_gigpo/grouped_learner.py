"""What makes a learner a good member of a group: it fails where the group can see it."""

from __future__ import annotations

from typing import Any

from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.annotations import override


class GroupedLearner(TorchLearner):
    """A learner that may live in an actor, beside others."""

    _waits_for_group = False
    _refusal: str | None = None

    @override(Learner)
    def _set_learner_index_and_placement_group(self, **kwargs: Any) -> None:
        """Take over its number; RLlib tells it to those in actors alone."""
        super()._set_learner_index_and_placement_group(**kwargs)
        self._waits_for_group = True

    @override(TorchLearner)
    def build(self) -> None:
        """Build module and optimizers.

        In an actor the first call, RLlib's own, does nothing: RLlib waits for it without an end,
        even where one learner has failed and the others wait for it. `LLMLearnerGroup` calls again.
        """
        if self._waits_for_group:
            self._waits_for_group = False
            return
        super().build()

    @override(Learner)
    def save_to_path(self, *args: Any, **kwargs: Any) -> str:
        """Write the state; in an actor a refusal of the disk is kept for `take_refusal`.

        RLlib throws away what a remote save answers, and ends the process of one that raises.
        """
        try:
            return super().save_to_path(*args, **kwargs)
        except OSError as error:
            if self.config.num_learners == 0:
                raise
            self._refusal = f"learner {self._learner_index}: {error}"
            return ""

    def take_refusal(self) -> str | None:
        """Return, once, why the last save failed, or None."""
        refusal, self._refusal = self._refusal, None
        return refusal
