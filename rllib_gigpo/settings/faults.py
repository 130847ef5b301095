"""Settings of what happens when processes die or stop."""

from __future__ import annotations

from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.utils.annotations import override

from rllib_gigpo.settings.base import UNSET, SettingsBase


class FaultSettings(SettingsBase):
    """How faults are found: `fault_tolerance`."""

    def _set_fault_defaults(self) -> None:
        self.heartbeat_timeout_s: float | None = 60.0

    @override(AlgorithmConfig)
    def fault_tolerance(self, *, heartbeat_timeout_s: float | None = UNSET, **kwargs: Any) -> Self:
        """Set how faults are found.

        Args:
            heartbeat_timeout_s: Seconds without a sign of life after which a process that works for
                this run (EnvRunner, learner, engine) counts as stopped and is killed. What takes
                long is not what is silent: a call of an hour beats all the while. Nothing beats in
                an EnvRunner that is being made, which has `stepping(start_timeout_s=...)` and half
                an hour. None waits for ever for processes that are stopped; those that die are
                always noticed.
            **kwargs: RLlib's settings, such as `delay_between_env_runner_restarts_s`.
        """
        super().fault_tolerance(**kwargs)
        return self._take({"heartbeat_timeout_s": heartbeat_timeout_s})
