"""Which groups of episodes an iteration plays and trains on, and when they are played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from ray import cloudpickle

from rllib_gigpo.collect import Collected, pools
from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.rollout_types import GroupTask
from rllib_gigpo.seeding import derive_seed


class _Ahead(NamedTuple):
    """Episodes that are being played before their iteration begins."""

    iteration: int
    collected: Future[Collected]


class Sampler:
    """Samples the groups of every iteration.

    Tasks are a function of the iteration and their number, so what is played depends on the
    weights alone, and an iteration that is resumed is repeated exactly.

    Args:
        config: The algorithm's settings.
        play: Plays task groups on the training runners.
    """

    def __init__(self, config: GiGPOConfig, play: Callable[[Sequence[GroupTask]], Collected]):
        self.config = config
        self._play = play
        self._ahead: _Ahead | None = None
        self._thread: ThreadPoolExecutor | None = None

    def collect(self, iteration: int) -> Collected:
        """Return the episodes of an iteration, played ahead or now."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.iteration == iteration:
            return ahead.collected.result()
        return self.sample(iteration)

    def sample(self, iteration: int) -> Collected:
        """Play an iteration's groups; in dynamic sampling, again for those that teach nothing.

        Raises:
            RuntimeError: A rollout failed, no runner came back, or environments failed in more
                groups than `max_dropped_share` allows.
        """
        config = self.config
        collected = self._play(training_tasks(config, iteration))
        played, pool_of = config.num_groups, pools(config)
        if config.dynamic_sampling:
            for _ in range(config.max_sampling_rounds - 1):
                useless = len(collected.dropped) + len(collected.uniform_groups(pool_of))
                missing = config.num_groups - (played - useless)
                if missing <= 0:
                    break
                more = training_tasks(config, iteration, first=played, count=missing)
                collected = collected.joined(self._play(more))
                played += missing
            collected = collected.choose(config.num_groups, pool_of)
        collected.check(played, config.max_dropped_share)
        return collected

    def play_ahead(self, iteration: int) -> None:
        """Start playing an iteration with the weights that the engines have now."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "rollout")
        self._ahead = _Ahead(iteration, self._thread.submit(self.sample, iteration))

    @property
    def is_ahead(self) -> bool:
        """Whether an iteration is played, or has been, before it begins."""
        return self._ahead is not None

    def wait(self) -> None:
        """Wait until what is played ahead has been played, or has failed."""
        if self._ahead is not None:
            wait([self._ahead.collected])

    def dump_ahead(self) -> bytes | None:
        """Return what has been played ahead, for a checkpoint; None where nothing has."""
        self.wait()
        if self._ahead is None or self._ahead.collected.exception() is not None:
            return None
        return cloudpickle.dumps((self._ahead.iteration, self._ahead.collected.result()))

    def load_ahead(self, dumped: bytes | None) -> None:
        """Go on with what a checkpoint holds of this, or with nothing played ahead."""
        self._ahead = None
        if dumped is not None and self.config.max_staleness > 0:
            iteration, collected = cloudpickle.loads(dumped)
            self._ahead = _Ahead(iteration, Future())
            self._ahead.collected.set_result(collected)

    def close(self) -> None:
        """Start nothing any more."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


def training_tasks(
    config: GiGPOConfig, iteration: int, *, first: int = 0, count: int | None = None
) -> list[GroupTask]:
    """Return task groups of one iteration, a function of the seed, the iteration and their number.

    Args:
        config: The settings.
        iteration: The iteration.
        first: Number of the first group; dynamic sampling goes on after `num_groups`.
        count: How many groups; by default `num_groups`.
    """
    return [
        GroupTask(
            group=group,
            env_seed=derive_seed(config.root_seed, "task", iteration, group),
            size=config.group_size,
            iteration=iteration,
        )
        for group in range(first, first + (config.num_groups if count is None else count))
    ]
