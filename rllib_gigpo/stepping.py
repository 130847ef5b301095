"""Environment steps beside generation: in threads, with time limits, and with failures as values.

An environment that raises or hangs must neither stop the other episodes nor be trained on as
"reward 0". Its calls go through a `Stepper`, which turns both into an `EnvFailure`; the rollouts
then replay or drop by rule, and count.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rllib_gigpo.games import Game

T = TypeVar("T")

FailureRule = Literal["raise", "replay", "drop"]


class EnvFailure(Exception):  # noqa: N818 - an outcome that is handled by rule, not a bug here
    """An environment call raised or ran out of time."""

    def __init__(self, kind: Literal["error", "timeout"], message: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class StepSettings:
    """How environments are stepped.

    Attributes:
        threads: Environment calls that run at the same time beside generation; 0 steps in the event
            loop itself, which is fastest for environments that answer in microseconds.
        step_timeout_s: Seconds that one call may take, or None; needs threads.
        episode_timeout_s: Seconds that one episode may take in all, or None; it is checked at every
            step.
        on_failure: What follows a failure: "raise" ends the run with its message, "replay" plays
            the episode again in a new environment (`max_replays` times, then its group is
            dropped), "drop" drops its group.
        max_replays: Replays of one episode.
    """

    threads: int = 0
    step_timeout_s: float | None = None
    episode_timeout_s: float | None = None
    on_failure: FailureRule = "raise"
    max_replays: int = 1


class Stepper:
    """Makes environment calls for the rollouts of one runner.

    Attributes:
        counts: "env_errors", "env_timeouts", "abandoned_threads" so far.
    """

    def __init__(self, settings: StepSettings):
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._slots = asyncio.Semaphore(max(1, settings.threads))

    async def call(self, game: Game, what: str, work: Callable[[], T], left_s: float) -> T:
        """Make one call.

        Args:
            game: The environment, for the message.
            what: "reset" or "step".
            work: The call.
            left_s: Seconds left to the episode (math.inf without a limit).

        Raises:
            EnvFailure: It raised or ran out of time. The environment must not be used again.
        """
        if left_s <= 0:
            self.counts["env_timeouts"] += 1
            raise EnvFailure("timeout", f"{game.name} used up its episode's time before a {what}")
        try:
            if self.settings.threads == 0:
                return work()
            async with self._slots:
                running = _start_thread(work)
                limit = min(left_s, self.settings.step_timeout_s or math.inf)
                await asyncio.wait([running], timeout=None if math.isinf(limit) else limit)
            if running.done():
                return running.result()
            running.cancel()
        except Exception as error:
            self.counts["env_errors"] += 1
            raise EnvFailure(
                "error",
                f"{what} of environment {game.name!r} raised {type(error).__name__}: {error}",
            ) from error
        self.counts["env_timeouts"] += 1
        self.counts["abandoned_threads"] += 1
        raise EnvFailure("timeout", f"{what} of environment {game.name!r} took over {limit:g} s")


def _start_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run the call in a thread of its own.

    A daemon thread, and not one of an executor: Python waits for an executor's threads before it
    exits, and a hung environment would keep the process from ever doing so.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], value: Any) -> None:
        if not outcome.cancelled():
            set_outcome(value)

    def run() -> None:
        try:
            result = work()
        except Exception as error:
            report = (settle, outcome.set_exception, error)
        else:
            report = (settle, outcome.set_result, result)
        # The loop is closed when a hung call comes back after its run has ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(*report)

    threading.Thread(target=run, name="env-call", daemon=True).start()
    return outcome
