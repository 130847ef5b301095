"""Settings of the watchdog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from rllib_gigpo.settings.base import UNSET, SettingsBase
from rllib_gigpo.watchdog import SIGNALS

OnCollapse = Literal["warn", "stop", "rollback"]


class WatchdogSettings(SettingsBase):
    """What is done about a collapse: `watchdog`."""

    def _set_watchdog_defaults(self) -> None:
        self.watch = True
        self.watch_signals: Sequence[str] = SIGNALS
        self.watch_patience = 2
        self.on_collapse: OnCollapse = "warn"
        self.best_every = 10
        self.rollback_lr_factor = 0.5
        self.max_rollbacks = 2

    def watchdog(
        self,
        *,
        enabled: bool = UNSET,
        signals: Sequence[str] = UNSET,
        patience: int = UNSET,
        on_collapse: OnCollapse = UNSET,
        best_every: int = UNSET,
        rollback_lr_factor: float = UNSET,
        max_rollbacks: int = UNSET,
    ) -> Self:
        """Set what is looked at after every iteration, and what follows when it collapses.

        An alarm is always logged, counted (`watchdog/num_alarms`) and written to the run folder,
        with the five worst episodes.

        Args:
            enabled: Whether anything is looked at.
            signals: Which of `rllib_gigpo.watchdog.SIGNALS`: "repetition", "invalid_actions",
                "zero_variance", "entropy", "kl", "engine_gap", "length".
            patience: Iterations in a row that must be bad.
            on_collapse: "warn" goes on; "stop" ends the run with the sentence; "rollback" goes on
                from the best checkpoint with a lower learning rate.
            best_every: With "rollback", the weights are saved every so many iterations, in the run
                folder; the best of them, by the return of the iteration that they play, are kept,
                the others removed.
            rollback_lr_factor: Factor of all learning rates after each rollback; 1 repeats the
                same steps, for tasks and draws are functions of the iteration.
            max_rollbacks: The next collapse after so many ends the run.
        """
        values = {
            "watch": enabled,
            "watch_signals": signals,
            "watch_patience": patience,
            "on_collapse": on_collapse,
            "best_every": best_every,
            "rollback_lr_factor": rollback_lr_factor,
            "max_rollbacks": max_rollbacks,
        }
        return self._take(values)
