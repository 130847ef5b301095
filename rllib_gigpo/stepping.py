"""Environment steps beside generation: in threads, with time limits, and with failures as values.

An environment that raises or hangs must neither stop the other episodes nor be trained on as
"reward 0". Its calls go through a `Stepper`, which turns both into an `EnvFailure`; the rollouts
then replay or drop by rule, and count.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from rllib_gigpo.games import Game

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

# What an environment may end a call with. SystemExit is one: simulators call sys.exit().
_RAISED = (Exception, SystemExit)

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
        counts: "env_errors", "env_timeouts", "env_close_errors", "abandoned_threads" so far.
    """

    def __init__(self, settings: StepSettings):
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._slots = asyncio.Semaphore(max(1, settings.threads))

    async def call(
        self,
        name: str,
        what: str,
        work: Callable[[], T],
        left_s: float,
        *,
        game: Game | None = None,
        late: Callable[[T | None], object] | None = None,
    ) -> T:
        """Make one call.

        Args:
            name: The environment's name, for the message.
            what: "make", "reset" or "step".
            work: The call.
            left_s: Seconds left to the episode (math.inf without a limit).
            game: Whose call it is, but for "make". Where nobody waits for it any more the game
                `is_left`, and is closed once the call comes back.
            late: Takes what such a call returns, None where it raised.

        Raises:
            EnvFailure: It raised or ran out of time. The environment must not be used again.
        """
        if left_s <= 0:
            self.counts["env_timeouts"] += 1
            raise EnvFailure("timeout", f"{name} used up its episode's time before a {what}")
        if game is not None:
            late = partial(self._close_late, game)
        try:
            return await self._in_time(work, left_s, game, late)
        except _TimeUpError as error:
            self.counts["env_timeouts"] += 1
            message = f"{what} of environment {name!r} took over {error.limit_s:g} s"
            raise EnvFailure("timeout", message) from None
        except _RAISED as error:
            self.counts["env_errors"] += 1
            raise EnvFailure(
                "error",
                f"{what} of environment {name!r} raised {type(error).__name__}: {error}",
            ) from error

    async def close(self, game: Game) -> None:
        """Close an environment that is not used again; one that fails at it is counted and told.

        Its episode is over, so nothing is lost but what the environment holds: its processes end
        with the EnvRunner's.
        """
        try:
            await self._in_time(game.close, math.inf, game)
        except (*_RAISED, _TimeUpError) as error:
            self._not_closed(game, error)

    def _close_late(self, game: Game, _: object) -> None:
        """Close an environment whose call has come back late; nothing waits for that either."""

        def close() -> None:
            try:
                game.close()
            except _RAISED as error:
                self._not_closed(game, error)

        threading.Thread(target=close, name="env-close", daemon=True).start()

    def _not_closed(self, game: Game, error: BaseException) -> None:
        self.counts["env_close_errors"] += 1
        _LOG.warning(
            "environment %r could not be closed (%s: %s); what it holds stays until its EnvRunner "
            "ends",
            game.name,
            type(error).__name__,
            error,
        )

    async def _in_time(
        self,
        work: Callable[[], T],
        left_s: float,
        game: Game | None,
        late: Callable[[T | None], object] | None = None,
    ) -> T:
        """Make a call, in a thread where there are any; raise what it raises, or _TimeUpError."""
        if self.settings.threads == 0:
            return work()
        async with self._slots:
            running = _start_thread(work, late)
            limit = min(left_s, self.settings.step_timeout_s or math.inf)
            try:
                await asyncio.wait([running], timeout=None if math.isinf(limit) else limit)
            except asyncio.CancelledError:
                if running.cancel():
                    _leave(game)
                elif game is None:
                    _hand_over(running.result(), late)
                raise
        if not running.done():
            running.cancel()
            _leave(game)
            self.counts["abandoned_threads"] += 1
            raise _TimeUpError(limit)
        result, error = running.result()
        if error is not None:
            raise error
        return result


class _TimeUpError(BaseException):
    """A call is taking longer than it may; of no kind that an environment raises itself."""

    def __init__(self, limit_s: float):
        super().__init__(f"it took over {limit_s:g} s")
        self.limit_s = limit_s


def _start_thread(
    work: Callable[[], T], late: Callable[[T | None], object] | None
) -> asyncio.Future[tuple[T, BaseException | None]]:
    """Run the call in a thread of its own; the future holds (result, None) or (None, error).

    A daemon thread, and not one of an executor: Python waits for an executor's threads before it
    exits, and a hung environment would keep the process from ever doing so. Errors come as values,
    because a future takes not all of them (StopIteration). What comes after the future was
    cancelled, or after its loop was closed, goes to `late`.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any) -> None:
        if outcome.cancelled():
            _hand_over(value, late)
        else:
            outcome.set_result(value)

    def run() -> None:
        try:
            value = work(), None
        except BaseException as error:  # whatever it is, somebody waits for the outcome
            value = None, error
        try:
            loop.call_soon_threadsafe(settle, value)
        except RuntimeError:  # the loop was closed: a hung call comes back after its run has ended
            _hand_over(value, late)

    threading.Thread(target=run, name="env-call", daemon=True).start()
    return outcome


def _leave(game: Game | None) -> None:
    if game is not None:
        game.is_left = True


def _hand_over(
    outcome: tuple[Any, BaseException | None], late: Callable[[Any], object] | None
) -> None:
    if late is not None:
        late(outcome[0])
