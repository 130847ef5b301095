"""Two learner processes of one algorithm, to compare with one learner in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_gigpo.engines.packing import unpack
from rllib_gigpo.rows import RowData, complete_batch
from tests.tiny_runs import tiny_config


class Pair:
    """Two learner processes of one algorithm.

    Settings are read at every update, so that all cases can share the processes.

    Args:
        base: Settings of every case; those that shape the module are the same in all of them.
        learners: Settings of `learners(...)`.
        llm: Settings of `llm(...)`.
        settings: Further settings at the start.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        learners: Mapping[str, Any] | None = None,
        llm: Mapping[str, Any] | None = None,
        **settings: Any,
    ):
        self.base = dict(base)
        self.learners = {"num_learners": 2, **(learners or {})}
        self.llm = dict(llm or {})
        self.config = tiny_config(**{**self.base, **settings}).llm(**self.llm)
        self.algorithm = self.config.copy().learners(**self.learners).build_algo()
        self.group: Any = self.algorithm.learner_group
        self.start = self.group.get_state()

    def begin(self, **settings: Any) -> None:
        """Back to the initial weights, with other settings."""
        config = tiny_config(**{**self.base, **settings}).llm(**self.llm)
        self.config = config.learners(**self.learners)
        config = self.config

        def take(learner: Any) -> None:
            learner.config = config
            for optimizer in learner._named_optimizers.values():
                optimizer.state.clear()

        self.each(take)
        self.group.set_state(self.start)

    def each(self, call) -> list[Any]:
        """What both learners answer."""
        return [answer.get() for answer in self.group.foreach_learner(call)]

    def update(self, batch: SampleBatch, iteration: int) -> list[dict[str, float]]:
        """One update; what each learner reports of the policy."""
        rows = complete_batch(batch.copy())
        everything = MultiAgentBatch({DEFAULT_MODULE_ID: rows}, env_steps=len(rows))
        results = self.group.update(
            training_data=RowData(everything, self.config.minibatch_plan),
            timesteps={"num_env_steps_sampled_lifetime": 0},
            iteration=iteration,
        )
        reports = [
            {n: float(s.peek()) for n, s in r[DEFAULT_MODULE_ID].items() if "throughput" not in n}
            for r in results
        ]
        logger = MetricsLogger(root=True)
        logger.aggregate(results)
        self.together = logger.peek(DEFAULT_MODULE_ID)
        return reports

    def weights(self) -> list[dict[str, torch.Tensor]]:
        found = self.each(lambda learner: learner.packed_weights())
        return [unpack(packed[DEFAULT_MODULE_ID]) for packed in found]
