"""Plays groups of episodes on the EnvRunners of an algorithm, whichever of them die."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_gigpo.collect import Collected, collect
from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.env_runner import LLMEnvRunner, Played
from rllib_gigpo.rollout_types import GroupTask
from rllib_gigpo.weight_sync import WeightSync

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_FAILED_ROUNDS = 10
_RESTART_S = 600.0


class GroupPlayer:
    """Plays groups, spread over the runners as evenly as their number allows.

    A group whose runner died is played again on another one. Episodes are a function of their task
    and the weights alone, so a retry gives what was lost.

    Args:
        config: The algorithm's settings.
        weights: Tells the version to play with, and gives runners that lack it what the others
            have. From a learner of its own it would come only after an update that is under way,
            and then it would be another one.
        restore: Brings dead runners back; returns their ids.
    """

    def __init__(
        self,
        config: GiGPOConfig,
        weights: WeightSync,
        restore: Callable[[EnvRunnerGroup], list[int]],
    ):
        self.config = config
        self.weights = weights
        self.restore = restore
        self._is_closed = False

    def close(self) -> None:
        """End what is being played, in whatever thread, with an error once its round is over."""
        self._is_closed = True

    @property
    def _patience_s(self) -> float:
        """Seconds without any runner after which none is waited for.

        One that is made again has as long as at the start of the run; where it then counts as
        stopped, the next one has ten minutes.
        """
        made_in = self.config.runner_start_limit_s
        return math.inf if made_in is None else made_in + _RESTART_S

    def play(self, runners: EnvRunnerGroup, tasks: Sequence[GroupTask]) -> Collected:
        """Play groups on the runners of a group.

        Raises:
            RuntimeError: A rollout failed, no runner came back, or the run has ended meanwhile.
        """
        waiting = {task.group: task for task in tasks}
        reports: list[Played] = []
        # Dying at every try is one thing, taking long to come back another.
        failed_rounds, is_up, last_up = 0, True, time.monotonic()
        while waiting:
            played = self.play_round(runners, list(waiting.values()))
            if self._is_closed:
                raise RuntimeError("the run has ended while this was being played")
            for report in played:
                if report.error is not None:
                    raise RuntimeError(f"the rollout failed: {report.error}")
                for group in report.groups:
                    waiting.pop(group, None)
            reports += played
            if any(report.groups for report in played):
                failed_rounds = 0
            elif is_up:
                failed_rounds += 1
            last_up = time.monotonic() if is_up else last_up
            quiet_s = time.monotonic() - last_up
            if failed_rounds >= _FAILED_ROUNDS or quiet_s > self._patience_s:
                raise RuntimeError(
                    f"{len(waiting)} groups could not be played: EnvRunners failed {failed_rounds} "
                    f"times in a row, the last one {quiet_s:.0f} s ago, and none is left; see "
                    "their logs for why they died"
                )
            if any(not report.groups for report in played):
                self.weights.repeat()
            elif waiting:
                time.sleep(self.config.delay_between_env_runner_restarts_s)
                was_up = is_up
                is_up = bool(self.restore(runners) or runners.healthy_worker_ids())
                if was_up and not is_up:
                    _LOG.warning(
                        "no EnvRunner is left for %d groups: waiting until Ray has made one again, "
                        "%.0f s at most",
                        len(waiting),
                        self._patience_s,
                    )
        self._replace_worn(runners, reports)
        return collect(reports)

    def play_round(self, runners: EnvRunnerGroup, tasks: list[GroupTask]) -> list[Played]:
        """Let every healthy runner play its share once; return the answers of those that live."""
        version = self.weights.version
        if runners.num_remote_workers() == 0:
            return [local_runner(runners).play(tasks, version)]
        ids = runners.healthy_worker_ids()
        if not ids:
            return []
        shares = [share for share in spread(tasks, len(ids)) if share]
        return runners.foreach_env_runner(
            [_play_call(share, version) for share in shares],
            remote_worker_ids=ids[: len(shares)],
            local_env_runner=False,
        )

    def _replace_worn(self, runners: EnvRunnerGroup, reports: Sequence[Played]) -> None:
        """Replace remote runners in which too many hung environment calls have piled up."""
        for report in reports:
            worn = report.counts.get("abandoned_threads", 0) > self.config.max_abandoned_threads
            if worn and report.worker_index > 0:
                actors = runners._worker_manager.actors()  # RLlib has no public way to one actor.
                ray.kill(actors[report.worker_index], no_restart=False)


def local_runner(runners: EnvRunnerGroup) -> LLMEnvRunner:
    """Return the runner of a group in this process.

    Raises:
        TypeError: There is none, or it is of another kind.
    """
    runner = runners.local_env_runner
    if not isinstance(runner, LLMEnvRunner):
        raise TypeError(
            f"the local EnvRunner is a {type(runner).__name__}: GiGPO needs LLMEnvRunner and "
            "create_local_env_runner=True where there are no remote ones"
        )
    return runner


def _play_call(tasks: list[GroupTask], version: int) -> Callable[[Any], Played]:
    return lambda runner: runner.play(tasks, version)


def spread(items: Sequence[T], parts: int) -> list[list[T]]:
    """Split items into contiguous parts whose sizes differ by at most one."""
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    return [list(items[low:high]) for low, high in pairwise(bounds)]
