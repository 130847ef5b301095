"""What the EnvRunners of an iteration bring together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rllib_gigpo.advantages import rounding_of_returns
from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.env_runner import Played
from rllib_gigpo.rollout_types import Episode
from rllib_gigpo.rows import agent_episodes
from rllib_gigpo.weight_sync import never_trained

# From an agent to the pool that its returns are compared in; None where nobody learns from them.
PoolOf = Callable[[Any], Hashable | None]


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
        left_out: Groups that are played and counted, and not trained on.
        rounds: Rounds of playing that it took.
        env_close_errors: Environments that could not be closed.
    """

    episodes: list[Episode]
    dropped: tuple[int, ...]
    replays: int
    failures: tuple[str, ...]
    env_errors: int
    env_timeouts: int
    metrics: list[dict[str, Any]]
    left_out: tuple[int, ...] = ()
    rounds: int = 1
    env_close_errors: int = 0

    @property
    def training_episodes(self) -> list[Episode]:
        """The episodes that are trained on."""
        left_out = set(self.left_out)
        return [e for e in self.episodes if e.custom_data["group"] not in left_out]

    def counts(self) -> dict[str, int]:
        """Return the metrics of what failed and of what was left out."""
        return {
            "num_groups_left_out": len(self.left_out),
            "num_sampling_rounds": self.rounds,
            "num_groups_dropped": len(self.dropped),
            "num_replays": self.replays,
            "num_env_errors": self.env_errors,
            "num_env_timeouts": self.env_timeouts,
            "num_env_close_errors": self.env_close_errors,
            "num_empty_episodes": sum(episode.env_steps() == 0 for episode in self.episodes),
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

    def joined(self, other: Collected) -> Collected:
        """Return this and what was played after it."""
        return Collected(
            episodes=[*self.episodes, *other.episodes],
            dropped=(*self.dropped, *other.dropped),
            replays=self.replays + other.replays,
            failures=(*self.failures, *other.failures),
            env_errors=self.env_errors + other.env_errors,
            env_timeouts=self.env_timeouts + other.env_timeouts,
            env_close_errors=self.env_close_errors + other.env_close_errors,
            metrics=[*self.metrics, *other.metrics],
            rounds=self.rounds + other.rounds,
        )

    def uniform_groups(self, pool_of: PoolOf = str) -> list[int]:
        """Return the groups whose episodes all have the same return, in order.

        It is the environment's, as in DAPO (arXiv 2503.14476, Sec. 3.2): without penalties, the
        episode advantages of such a group are 0. Returns are equal that differ by rounding alone.

        Args:
            pool_of: Whose returns are compared, see `pools`; by default every agent's own.
        """
        rewards: dict[int, dict[Hashable, list[np.ndarray]]] = {}
        for episode in self.episodes:
            pools = rewards.setdefault(episode.custom_data["group"], defaultdict(list))
            for agent, single in agent_episodes(episode):
                pool = pool_of(agent)
                if pool is not None:
                    pools[pool].append(np.array(single.rewards, dtype=np.float64))
        return sorted(
            group for group, pools in rewards.items() if all(map(_earn_alike, pools.values()))
        )

    def uniform_share(self, pool_of: PoolOf = str) -> float | None:
        """Return the share of uniform groups; None where an episode is a group of its own."""
        groups = {episode.custom_data["group"] for episode in self.episodes}
        if len(self.episodes) == len(groups):
            return None
        return len(self.uniform_groups(pool_of)) / len(groups)

    def choose(self, num_groups: int, pool_of: PoolOf = str) -> Collected:
        """Leave uniform groups out; the first of them fill what is missing to `num_groups`."""
        uniform = self.uniform_groups(pool_of)
        informative = len({e.custom_data["group"] for e in self.episodes}) - len(uniform)
        return replace(self, left_out=tuple(uniform[max(0, num_groups - informative) :]))


def _earn_alike(episodes: Sequence[np.ndarray]) -> bool:
    """Whether the returns are equal, up to rounding, from the rewards of each episode."""
    resolution = rounding_of_returns(
        max(map(len, episodes)), max(float(np.abs(rewards).sum()) for rewards in episodes)
    )
    return float(np.ptp([rewards.sum() for rewards in episodes])) <= resolution


def pools(config: GiGPOConfig) -> PoolOf:
    """Return whose returns are compared: an agent's own, or a policy's; those that are trained."""
    untrained, policy_of = never_trained(config), config.module_of

    def pool_of(agent: Any) -> str | None:
        policy = policy_of(agent)
        if policy in untrained:
            return None
        return policy if config.normalize_over == "policy" else str(agent)

    return pool_of


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
        env_close_errors=sum(r.new_counts.get("env_close_errors", 0) for r in reports),
        metrics=[report.metrics for report in reports if report.metrics],
    )


def token_counts(episodes: Sequence[Episode]) -> dict[str, int]:
    """Count the "prompt" and "response" tokens of episodes."""
    singles = [single for episode in episodes for _, single in agent_episodes(episode)]
    steps = [(single, step) for single in singles for step in range(len(single))]
    return {
        "prompt": sum(len(single.observations[step]) for single, step in steps),
        "response": sum(len(single.actions[step]) for single, step in steps),
    }
