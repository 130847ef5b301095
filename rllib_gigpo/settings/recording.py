"""Settings of the run folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from rllib_gigpo.recording.provenance import command
from rllib_gigpo.settings.base import UNSET, SettingsBase


class RecordingSettings(SettingsBase):
    """What a run leaves behind: `recording`."""

    def _set_recording_defaults(self) -> None:
        self.record = True
        self.record_folder: str | None = None
        self.record_every = 1
        self.record_groups: int | None = 8
        self.price_per_hour: float | None = None
        self.trackers: Sequence[str | Callable[..., Any]] = ()
        # Read where the config is made: a worker of Ray has a command line of its own.
        self.record_command = command()

    def recording(
        self,
        *,
        enabled: bool = UNSET,
        folder: str | None = UNSET,
        every: int = UNSET,
        groups: int | None = UNSET,
        price_per_hour: float | None = UNSET,
        trackers: Sequence[str | Callable[..., Any]] = UNSET,
    ) -> Self:
        """Set what the run folder holds; `rllib-gigpo report` and `view` show it.

        Args:
            enabled: Whether there is a run folder.
            folder: Where; by default the trial's folder under Tune, else RLlib's log folder. Under
                Tune each trial gets a folder of its own in it. A relative one is below where the
                config is made. A restored run goes on in its folder.
            every: Rollouts of every so many iterations are written; 0 writes none. Metrics are
                always written.
            groups: Groups of an iteration whose rollouts are written, the first ones; None writes
                all.
            price_per_hour: What an hour of the machine costs, for the receipt.
            trackers: "wandb", "mlflow", "trackio", or callables (content of run.json, run folder)
                -> `rllib_gigpo.recording.trackers.Tracker`. TensorBoard files are always written.
        """
        if isinstance(folder, str | Path) and str(folder):
            # A trial of Tune works in a folder of Ray's that is gone after the session.
            folder = os.path.abspath(os.path.expanduser(folder))
        values = {
            "record": enabled,
            "record_folder": folder,
            "record_every": every,
            "record_groups": groups,
            "price_per_hour": price_per_hour,
            "trackers": trackers,
        }
        return self._take(values)
