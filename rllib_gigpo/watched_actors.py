"""RLlib's managers of remote actors, with an ear on whether those that work still live.

EnvRunners may be replaced: one that is silent is killed, Ray starts it again, and RLlib sees what
it sees when one dies. Learners hold one model together: when one fails, the others wait for it
inside a collective, so all are ended at once, and the run stops with one sentence.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import ray
from ray._private.state import actors
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from ray.rllib.utils.actor_manager import FaultTolerantActorManager, RemoteCallResults
from ray.rllib.utils.annotations import override

from rllib_gigpo.heartbeat import Beat, Listener, call_beating

_LOG = logging.getLogger(__name__)
# Where one learner dies, another may see its lost connection before Ray sees the death.
_GRACE_S = 5.0


class LearnerError(RuntimeError):
    """A learner failed; the run cannot go on without it, but from its last checkpoint it can."""


class WatchedActors(FaultTolerantActorManager):
    """Actors of which one that gives no sign of life during a call is killed, and restarted.

    Attributes:
        limit_s: Seconds of silence after which an actor counts as stopped; None waits for ever.
        start_limit_s: Seconds that an actor may take to be made again; None waits for ever.
        num_silent: Actors that were killed for their silence, or were not made again in time.
    """

    limit_s: float | None
    start_limit_s: float | None
    num_silent: int
    _beats: dict[Any, Beat]
    _unanswered_since: dict[tuple[int, int, bool], float]

    @classmethod
    def take_over(
        cls,
        manager: FaultTolerantActorManager,
        limit_s: float | None,
        *,
        start_limit_s: float | None = None,
    ) -> Self:
        """Return a manager of the same actors."""
        watched = cls.__new__(cls)
        watched.__dict__.update(vars(manager))
        watched.limit_s, watched.start_limit_s, watched.num_silent = limit_s, start_limit_s, 0
        watched._beats = {}
        watched._unanswered_since = {}
        return watched

    @property
    def _look_every_s(self) -> float | None:
        return None if self.limit_s is None else Beat.new(self.limit_s).every_s

    @override(FaultTolerantActorManager)
    def _call_actors(
        self, func: Any, *, kwargs: Any = None, remote_actor_ids: list[int] | None = None
    ) -> list[Any]:
        ids = self.actor_ids() if remote_actor_ids is None else remote_actor_ids
        functions = func if isinstance(func, list) else [func] * len(ids)
        beats = [Beat.new(self.limit_s or 0.0) for _ in ids]
        calls = super()._call_actors(
            [
                self._wrapped(function, beat)
                for function, beat in zip(functions, beats, strict=True)
            ],
            kwargs=kwargs if isinstance(kwargs, list) else [kwargs or {}] * len(ids),
            remote_actor_ids=ids,
        )
        self._beats.update(zip(calls, beats, strict=True))
        return calls

    def _wrapped(self, function: Any, beat: Beat) -> Callable[..., Any]:
        named = partial(_call_method, function) if isinstance(function, str) else function
        return named if self.limit_s is None else partial(call_beating, named, beat)

    @override(FaultTolerantActorManager)
    def _fetch_result(
        self,
        *,
        remote_actor_ids: list[int],
        remote_calls: list[Any],
        tags: list[str],
        timeout_seconds: float | None = None,
        **kwargs: Any,
    ) -> tuple[list[Any], RemoteCallResults]:
        if timeout_seconds is None and remote_calls:
            beats = {call: self._beats[call] for call in remote_calls}
            listener = Listener(beats.values() if self.limit_s is not None else ())
            try:
                self._wait(dict(zip(remote_calls, remote_actor_ids, strict=True)), beats, listener)
            finally:
                listener.close()
        done, results = super()._fetch_result(
            remote_actor_ids=remote_actor_ids,
            remote_calls=remote_calls,
            tags=tags,
            timeout_seconds=timeout_seconds,
            **kwargs,
        )
        for call in remote_calls:
            # RLlib asks again for asynchronous calls that are not done; others it forgets.
            if call in done or call not in self._in_flight_req_to_actor_id:
                self._beats.pop(call, None)
        return done, results

    def _wait(self, actor_of: dict[Any, int], beats: dict[Any, Beat], listener: Listener) -> None:
        """Wait until every call has come to its end, killing actors that are silent."""
        waiting = list(actor_of)
        while True:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=self._look_every_s)
            if not waiting:
                return
            for call in self._silent(waiting, beats, listener):
                self._replace(actor_of[call], f"gave no sign of life for {self.limit_s or 0:g} s")
                # The call fails by itself once Ray has seen to it.
                listener.forgive(beats[call])

    def _replace(self, actor_id: int, fault: str) -> None:
        self.num_silent += 1
        _LOG.error("actor %d %s: it is killed, and started again", actor_id, fault)
        ray.kill(self._actors[actor_id], no_restart=False)

    @override(FaultTolerantActorManager)
    def probe_unhealthy_actors(self, *args: Any, **kwargs: Any) -> list[int]:
        """Ping actors that are out of service; kill those that leave pings without an answer.

        One that stops while it is made again, or before its first ping, would stay out of service:
        RLlib waits for a ping for a limited time, so nobody listens whether it beats.
        """
        restored = super().probe_unhealthy_actors(*args, **kwargs)
        now = time.monotonic()
        since: dict[tuple[int, int, bool], float] = {}
        for number in self.actor_ids():
            if self.is_actor_healthy(number):
                continue
            entry = actors(self._actors[number]._actor_id.hex())
            if (state := entry.get("State")) in (None, "DEAD"):
                continue
            # Ray calls an actor alive once it has been made; before, it imports, builds its
            # environment or waits for room.
            is_made = state == "ALIVE"
            limit_s = self.limit_s if is_made else self.start_limit_s
            process = number, entry["NumRestarts"], is_made
            first = self._unanswered_since.get(process, now)
            if limit_s is None or now - first <= limit_s:
                since[process] = first
            elif is_made:
                self._replace(number, f"gave no sign of life for {limit_s:g} s")
            else:
                self._replace(number, f"was not made again within {limit_s:g} s")
        self._unanswered_since = since
        return restored

    def _silent(
        self, waiting: Sequence[Any], beats: dict[Any, Beat], listener: Listener
    ) -> list[Any]:
        if self.limit_s is None:
            return []
        return [call for call in waiting if listener.silence_s(beats[call]) > self.limit_s]


class _Failed(NamedTuple):
    """An error that travels as a value: raised, RLlib would end the process and lose the text."""

    text: str


class LearnerActors(WatchedActors):
    """Learners, which live and die together."""

    what_failed: str | None = None

    @override(WatchedActors)
    def _wrapped(self, function: Any, beat: Beat) -> Callable[..., Any]:
        return partial(_call_telling, super()._wrapped(function, beat))

    @override(WatchedActors)
    def _call_actors(self, func: Any, **kwargs: Any) -> list[Any]:
        if self.what_failed is not None:
            raise LearnerError(self.what_failed)
        return super()._call_actors(func, **kwargs)

    @override(WatchedActors)
    def _fetch_result(self, **kwargs: Any) -> tuple[list[Any], RemoteCallResults]:
        done, results = super()._fetch_result(**kwargs)
        # Only where a call had a time limit: others were looked at while they were waited for.
        answers = {r.actor_id: r.get() for r in results.result_or_errors if r.ok}
        failed = {n: f"failed: {a.text}" for n, a in answers.items() if isinstance(a, _Failed)}
        if failed:
            self.end(failed)
        return done, results

    @override(WatchedActors)
    def _wait(self, actor_of: dict[Any, int], beats: dict[Any, Beat], listener: Listener) -> None:
        waiting, failed, give_up_at = list(actor_of), {}, math.inf
        while waiting and time.monotonic() < give_up_at:
            timeout = _GRACE_S if failed else self._look_every_s
            done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
            faults = {actor_of[call]: _fault_of(call) for call in done}
            silent = self._silent(waiting, beats, listener)
            self.num_silent += len(silent)
            silence = f"gave no sign of life for {self.limit_s or 0:g} s"
            faults |= {actor_of[call]: silence for call in silent}
            failed |= {number: fault for number, fault in faults.items() if fault is not None}
            waiting = [call for call in waiting if call not in silent]
            if failed:
                give_up_at = min(give_up_at, time.monotonic() + _GRACE_S)
        if failed:
            self.end(failed)

    def end(self, failed: dict[int, str]) -> None:
        """End all learners.

        Args:
            failed: By number of the learner, what was wrong with it.

        Raises:
            LearnerError: Always: what happened and what to do.
        """
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        # Where one has died, the others' errors are about the connection that was lost.
        number, fault = min(failed.items(), key=lambda item: (item[1] != _DIED, item[0]))
        self.what_failed = (
            f"learner {number} of {len(self._actors)} {fault}; the learners were ended: restore "
            "the run from its last checkpoint"
        )
        raise LearnerError(self.what_failed)


_DIED = "died: its process was killed (its log or the kernel's says by whom)"


def _fault_of(call: Any) -> str | None:
    """Return what went wrong in a call that is over, or None."""
    try:
        answer = ray.get(call)
    except RayTaskError as error:
        return f"failed: {error.cause}"
    except OutOfMemoryError as error:  # Ray's monitor ended it
        return f"failed: {error}"
    except RayError:
        return _DIED
    return f"failed: {answer.text}" if isinstance(answer, _Failed) else None


def _call_method(name: str, actor: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(actor, name)(*args, **kwargs)


def _call_telling(function: Callable[..., Any], actor: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(actor, *args, **kwargs)
    except Exception as error:
        _LOG.exception("a call to this learner failed")
        return _Failed(f"{type(error).__name__}: {error}")
