"""What the EnvRunners of an iteration bring together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rllib_gigpo.env_runner import Played
from rllib_gigpo.rollout import Episode


@dataclass(frozen=True)
class Collected:
    """All that was played for one list of tasks.

    Attributes:
        episodes: In order of (group, member), whole groups only.
        dropped: Groups of which an episode failed for good.
        replays: Episodes that were played again.
        failures: Messages of the environment failures.
        env_errors: Environment calls that raised.
        env_timeouts: Environment calls and episodes that ran out of time.
        metrics: What callbacks have logged on each EnvRunner, reduced.
    """

    episodes: list[Episode]
    dropped: tuple[int, ...]
    replays: int
    failures: tuple[str, ...]
    env_errors: int
    env_timeouts: int
    metrics: list[dict[str, Any]]

    def counts(self) -> dict[str, int]:
        """Return the metrics of what failed."""
        return {
            "num_groups_dropped": len(self.dropped),
            "num_replays": self.replays,
            "num_env_errors": self.env_errors,
            "num_env_timeouts": self.env_timeouts,
        }

    def check(self, num_groups: int, max_dropped_share: float) -> None:
        """Stop a run whose environments fail too often.

        Raises:
            RuntimeError: More groups were dropped than allowed, or nothing is left.
        """
        dropped = len(self.dropped)
        if dropped > max_dropped_share * num_groups or dropped == num_groups:
            raise RuntimeError(
                f"{dropped} of {num_groups} groups were dropped because their environment failed "
                f"(max_dropped_share={max_dropped_share}); the first failure: {self.failures[0]}"
            )


def collect(reports: Sequence[Played]) -> Collected:
    """Put the reports of all runners together."""
    episodes = [episode for report in reports for episode in report.rollout.episodes]
    episodes.sort(key=lambda e: (e.custom_data["group"], e.custom_data["member"]))
    return Collected(
        episodes=episodes,
        dropped=tuple(sorted(group for r in reports for group in r.rollout.dropped)),
        replays=sum(r.rollout.replays for r in reports),
        failures=tuple(message for r in reports for message in r.rollout.failures),
        env_errors=sum(r.new_counts.get("env_errors", 0) for r in reports),
        env_timeouts=sum(r.new_counts.get("env_timeouts", 0) for r in reports),
        metrics=[report.metrics for report in reports if report.metrics],
    )
