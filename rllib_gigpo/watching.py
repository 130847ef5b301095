"""Watchdog: the RLlib callback that looks for collapse after every iteration, and acts on it.

training_step begins -> begin()     keeps the weights that are about to play, where asked
on_train_result -> look             alarms: log, metrics, event, worst episodes
all callbacks are done -> act()     stop or roll back
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.rllib.callbacks.callbacks import RLlibCallback

from rllib_gigpo.checkpoints import CheckpointError
from rllib_gigpo.recording.folder import read_json, write_json
from rllib_gigpo.recording.recorder import run_path
from rllib_gigpo.watchdog import Alarm, History, Limits, find_alarms
from rllib_gigpo.weight_sync import TOLERANCE

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig
    from rllib_gigpo.gigpo import GiGPO

_LOG = logging.getLogger(__name__)
_WORST = 5
# The gap of a whole iteration is a mean over all tokens, that of the probe one over 32.
_GAPS = 2.0


class CollapseError(RuntimeError):
    """Training has collapsed, and the settings say that this ends the run."""


class Watchdog(RLlibCallback):
    """Looks at the metrics of every iteration.

    Args:
        algorithm: The algorithm that is watched.

    Attributes:
        alarms: Those of the last iteration.
        num_alarms: How many different ones there were.
        rollbacks: How often this run has been rolled back.
    """

    def __init__(self, algorithm: GiGPO):
        self._algorithm = algorithm
        self._limits = limits_of(algorithm.config)
        self._history = History()
        self._known: set[tuple[str, str, int]] = set()
        self._best = BestWeights(run_path(algorithm) / "watchdog")
        self._rolls_back = algorithm.config.on_collapse == "rollback"
        self._has_begun = False
        self._fresh: list[Alarm] = []
        self.alarms: list[Alarm] = []
        self.num_alarms = 0

    @property
    def rollbacks(self) -> int:
        """How often this run has been rolled back."""
        return self._best.rollbacks

    def begin(self, iteration: int) -> None:
        """Get ready for an iteration.

        Args:
            iteration: Iterations that are done.
        """
        if not self._has_begun:
            self._go_on(iteration)
        self._history.forget_after(iteration)
        if self._rolls_back:
            if iteration == 0 and not self._has_begun:
                self._best.forget_all()
            self._best.forget_after(iteration)
        self._has_begun = True
        if self._rolls_back and self._best.wants(iteration, self._algorithm.config.best_every):
            try:
                self._best.save(self._algorithm, iteration)
            except CheckpointError as error:
                _LOG.error("iteration %d: its weights are not kept: %s", iteration, error)

    def get_state(self) -> dict[str, Any] | None:
        """Return what the next iteration is compared with, and the counts of the run.

        None before the first iteration of this process, unless a state was taken over: what the run
        folder tells has not been read.
        """
        if not self._has_begun:
            return None
        return {
            "history": self._history.get_state(),
            "num_alarms": self.num_alarms,
            "rollbacks": self.rollbacks,
            "candidate": self._best.candidate,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on as the watchdog that had this state; the run folder is asked nothing."""
        self._history = History.from_state(state["history"])
        self.num_alarms = state["num_alarms"]
        self._best.go_on(state["rollbacks"], state["candidate"])
        self._has_begun = True
        self._fresh = []
        self._look_back()

    def _go_on(self, iteration: int) -> None:
        """Read in the run folder what earlier processes of the run have seen and told."""
        recorder = self._algorithm.recorder
        lines = [] if recorder is None else recorder.lines()
        lines = [line for line in lines if line["iteration"] <= iteration]
        self._history = History.of(lines)
        if lines:
            self.num_alarms = int((lines[-1].get("watchdog") or {}).get("num_alarms", 0))
        self._look_back()

    def _look_back(self) -> None:
        """Find out which alarms have been told before."""
        config = self._algorithm.config
        self.alarms = find_alarms(self._history, self._limits, config.watch_signals)
        # What asks for more than a warning asks for it until it has been done.
        told = self.alarms if config.on_collapse == "warn" else ()
        self._known = {alarm.key for alarm in told}

    def on_train_result(
        self, *, algorithm: Any, metrics_logger: Any = None, result: dict, **kwargs: Any
    ) -> None:
        """Look at the iteration's metrics, and tell what is wrong."""
        number = algorithm.num_updates
        self._history.add({**result, "iteration": number})
        config = algorithm.config
        self.alarms = find_alarms(self._history, self._limits, config.watch_signals)
        self._fresh = [alarm for alarm in self.alarms if alarm.key not in self._known]
        self._known = {alarm.key for alarm in self.alarms}
        self.num_alarms += len(self._fresh)
        signals = {alarm.signal for alarm in self.alarms}
        result["watchdog"] = {
            "num_alarms": self.num_alarms,
            "num_rollbacks": self.rollbacks,
            **{name: float(name in signals) for name in config.watch_signals},
        }
        if self._fresh:
            self._tell(number)
        if self._rolls_back:
            played_by = number - 1 - config.max_staleness
            returns = (result.get("env_runners") or {}).get("episode_return_mean")
            self._best.judge(played_by, None if self.alarms else returns)

    def _tell(self, number: int) -> None:
        recorder = self._algorithm.recorder
        worst = [] if recorder is None else recorder.keep_worst(number, _WORST)
        for alarm in self._fresh:
            _LOG.warning("iteration %d: collapse: %s", number, alarm.message)
            if recorder is not None:
                event = {"kind": "collapse", "iteration": number, "signal": alarm.signal}
                told = {"since": alarm.since, "value": alarm.value, "before": alarm.before}
                action = self._algorithm.config.on_collapse
                recorder.add_event(
                    {**event, **told, "message": alarm.message, "action": action, "worst": worst}
                )

    def act(self) -> None:
        """Do what the settings say, once everything about the iteration is written.

        Raises:
            CollapseError: The run is to end.
        """
        action, fresh = self._algorithm.config.on_collapse, self._fresh
        self._fresh = []
        if not fresh or action == "warn":
            return
        told = "; ".join(alarm.message for alarm in fresh)
        iteration = self._algorithm.num_updates
        if action == "stop":
            raise CollapseError(
                f"training has collapsed in iteration {iteration}: {told}; go on from an earlier "
                "checkpoint with a lower lr, or set watchdog(on_collapse='warn')"
            )
        best = self._best.iteration
        limit = self._algorithm.config.max_rollbacks
        if best is None or self.rollbacks >= limit:
            why = "there is no healthy checkpoint to go back to"
            if best is not None:
                why = f"it was rolled back {self.rollbacks} times (max_rollbacks={limit})"
            raise CollapseError(f"training has collapsed in iteration {iteration}: {told}; {why}")
        self._roll_back(best)

    def _roll_back(self, best: int) -> None:
        algorithm, left = self._algorithm, self._algorithm.num_updates
        num_alarms = self.num_alarms  # the checkpoint has what had been counted until then
        self._best.restore(algorithm)
        self.num_alarms = num_alarms
        factor = algorithm.config.rollback_lr_factor**self.rollbacks
        learners: Any = algorithm.learner_group
        for answer in learners.foreach_learner(methodcaller("set_lr_factor", factor)):
            if not answer.ok:
                raise answer.get()
        self._known, self.alarms = set(), []
        message = f"rolled back from iteration {left} to {best}; learning rates times {factor:g}"
        _LOG.warning("%s", message)
        if algorithm.recorder is not None:
            event = {"kind": "rollback", "iteration": left, "to": best, "message": message}
            algorithm.recorder.add_event(event)


class BestWeights:
    """The checkpoint of the best weights so far, and one that is still to be judged.

    A checkpoint is judged by the iteration that its weights play, so that weights which an update
    has just destroyed never count as good. A disk that refuses `best.json` ends no run: the weights
    that the file names stay until it names better ones.

    Args:
        folder: Where they are kept.

    Attributes:
        iteration: Iterations behind the best weights; None while there are none.
        rollbacks: How often they were gone back to.
        candidate: Iterations behind the weights that are still to be judged, or None.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file = folder / "best.json"
        self._state: dict[str, Any] = read_json(self._file) if self._file.is_file() else {}
        self._written = self.iteration
        self.candidate: int | None = None

    @property
    def iteration(self) -> int | None:
        """Iterations behind the best weights."""
        return self._state.get("iteration")

    @property
    def rollbacks(self) -> int:
        """How often they were gone back to."""
        return self._state.get("rollbacks", 0)

    def wants(self, iteration: int, every: int) -> bool:
        """Whether the weights after so many iterations are to be saved."""
        is_due = self.iteration is None or iteration % every == 0
        return is_due and self.candidate is None and iteration != self.iteration

    def forget_all(self) -> None:
        """Forget the weights of another run that was in the folder before."""
        if self._state:
            self._state = {}
            self._write()

    def go_on(self, rollbacks: int, candidate: int | None) -> None:
        """Take over what a checkpoint tells; nothing is written before the run goes on.

        Args:
            rollbacks: How often the run had been rolled back.
            candidate: Iterations behind the weights that were still to be judged. They are, where
                they lie in this folder.
        """
        self._state["rollbacks"] = rollbacks
        is_here = candidate is not None and self._path(candidate).is_dir()
        self.candidate = candidate if is_here else None

    def forget_after(self, iteration: int) -> None:
        """Forget weights of a branch that the run has left for an earlier checkpoint."""
        if self.iteration is not None and self.iteration > iteration:
            self._state = {"rollbacks": self.rollbacks}
            self._write()
        if self.candidate is not None and self.candidate > iteration:
            self.candidate = None

    def save(self, algorithm: GiGPO, iteration: int) -> None:
        """Save the weights that are about to play."""
        algorithm.save_to_path(str(self._path(iteration)))
        self.candidate = iteration
        self._clean()

    def judge(self, iteration: int, episode_return: float | None) -> None:
        """Judge the weights after so many iterations by what they have earned.

        Args:
            iteration: The iterations.
            episode_return: Mean return of the episodes that they played; None where those were
                part of a collapse.
        """
        if iteration != self.candidate:
            return
        self.candidate = None
        if episode_return is not None and episode_return >= self._state.get("return", -math.inf):
            self._write(iteration=iteration, **{"return": float(episode_return)})
        self._clean()

    def restore(self, algorithm: GiGPO) -> None:
        """Go back to the best weights."""
        assert self.iteration is not None
        rollbacks = self.rollbacks + 1  # the checkpoint has how many there had been until then
        algorithm.restore_from_path(str(self._path(self.iteration)))
        self.candidate = None
        self._write(rollbacks=rollbacks)
        self._clean()

    def _path(self, iteration: int) -> Path:
        return self._folder / f"after_{iteration:06d}"

    def _write(self, **changes: Any) -> None:
        self._state |= changes
        try:
            write_json(self._file, self._state)
        except OSError as error:
            _LOG.error("%s could not be written: %s", self._file, error)
        else:
            self._written = self.iteration

    def _clean(self) -> None:
        """Remove what is neither the best nor to be judged, and what a killed save has left."""
        needed = (self.iteration, self._written, self.candidate)
        kept = {self._path(i) for i in needed if i is not None}
        for path in (*self._folder.glob("after_*"), *self._folder.glob(".after_*.partial-*")):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)


def limits_of(config: GiGPOConfig) -> Limits:
    """Return when a number is bad, under the settings."""
    # Rollouts one version behind the learner, and old log-probabilities that are the engine's own,
    # say nothing about how the engine computes.
    is_comparable = config.max_staleness == 0 and config.old_logp == "recompute"
    tolerance = config.probe_tolerance or TOLERANCE[config.dtype]
    gap = _GAPS * tolerance if is_comparable else None
    return Limits(patience=config.watch_patience, engine_gap=gap)
