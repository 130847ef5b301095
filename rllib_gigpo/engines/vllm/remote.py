"""The engine contract over engine actors: what rollouts and the training driver hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from ray._private.state import actors
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rllib_gigpo.engines.base import Completion, EngineError, Request
from rllib_gigpo.engines.packing import Checksums, checksums, pack, unpack
from rllib_gigpo.engines.published import Published
from rllib_gigpo.engines.vllm.actor import Birth, create_engine, create_vault
from rllib_gigpo.engines.vllm.fleet import Faults, Fleet
from rllib_gigpo.engines.vllm.process import EngineDiedError
from rllib_gigpo.engines.vllm.settings import VLLMSettings
from rllib_gigpo.in_time import START_LIMIT_S

logger = logging.getLogger(__name__)

T = TypeVar("T")

Send = Callable[[Sequence[Any], Sequence[str]], str | None]
"""From engine handles and their incarnations to what went wrong, or None."""

_MAX_RETRIES = 3
# Of the first start too: both read the model, and compile where nothing is cached.
_START_TIMEOUT_S = START_LIMIT_S
_PINGS_PER_LIMIT = 4

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": None,
}


@dataclass(frozen=True)
class _Running:
    engine: Any
    aborted: asyncio.Event


class RemoteVLLMEngine:
    """An `Engine` whose work is done by vLLM actors.

    Start it once (`start`), give its `fleet` to every process that plays episodes, and make a
    client of the fleet there. All requests of a group go to one engine, for its prefix cache.

    An engine that dies is started again by Ray with the newest weights, and the requests it was
    computing are sent again: a response is a function of prompt, seed and weights alone.

    Args:
        fleet: The actors.

    Attributes:
        fleet: The actors.
        faults: Deaths and retries that this client saw.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.faults = Faults()
        self._owns_actors = False
        self._running: dict[str, _Running] = {}
        self._incarnations: dict[Any, str] = {}
        self._returning: dict[Any, asyncio.Task[Birth]] = {}
        self._listening: dict[Any, asyncio.Task[None]] = {}
        for engines in fleet.engines.values():
            self._births(engines)

    @classmethod
    def start(
        cls,
        models: Mapping[str, str | Path],
        settings: VLLMSettings | None = None,
        *,
        num_engines: int = 1,
        heartbeat_timeout_s: float | None = None,
    ) -> RemoteVLLMEngine:
        """Start `num_engines` engines per policy and wait until they serve.

        Engines that ask for a part of a GPU start one after another: each takes for its own all
        memory of the GPU that goes while it measures what is left for its cache.

        Args:
            models: Policy id to model folder or Hugging Face id, readable on every machine.
            settings: How each engine runs.
            num_engines: Engines per policy.
            heartbeat_timeout_s: See `Fleet`.

        Raises:
            EngineDiedError: An engine could not start.
            ValueError: `num_engines` below 1.
        """
        if num_engines < 1:
            raise ValueError(f"num_engines is {num_engines}: expected at least 1")
        settings = settings or VLLMSettings()
        vault_name, vault = create_vault()
        engines: dict[str, list[Any]] = {policy_id: [] for policy_id in models}
        client = cls(Fleet(engines, vault, settings, heartbeat_timeout_s))
        client._owns_actors = True
        try:
            for policy_id, model in models.items():
                for _ in range(num_engines):
                    engine = create_engine(policy_id, model, settings, vault_name)
                    engines[policy_id].append(engine)
                    if 0 < settings.num_gpus < 1:
                        client._births([engine])
            client._births(client._all_engines())
        except EngineDiedError:
            client.close()
            raise
        return client

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus response in tokens."""
        return self.fleet.settings.max_model_len

    async def generate(self, request: Request) -> Completion:
        """Continue one prompt; see `Engine.generate`.

        Raises:
            EngineDiedError: The engine died again and again under this request, or did not come
                back.
        """
        engines = self._engines(request.policy_id)
        running = _Running(engines[request.group_id % len(engines)], asyncio.Event())
        if request.request_id in self._running:
            raise EngineError(f"request id {request.request_id!r} is running already")
        self._running[request.request_id] = running
        try:
            return await self._generate(request, running)
        except asyncio.CancelledError:
            running.engine.abort.remote(request.request_id)
            raise
        except RayTaskError as error:
            raise _plain(error) from None
        finally:
            del self._running[request.request_id]

    async def _generate(self, request: Request, running: _Running) -> Completion:
        retries = 0
        while True:
            self._listen(running.engine)
            try:
                return await running.engine.generate.remote(request)
            except RayActorError as error:
                if retries == _MAX_RETRIES:
                    told = self.fleet.vault.last_error.remote(request.policy_id)
                    cause = await asyncio.to_thread(self._of_vault, told)
                    raise EngineDiedError(
                        f"the engine died {retries + 1} times under request "
                        f"{request.request_id!r}, last of this: {cause}"
                    ) from error
            birth = await self._wait_until_back(running.engine)
            if running.aborted.is_set():
                nothing = np.zeros(0, dtype=np.int32)
                return Completion(nothing, nothing.astype(np.float32), "abort", birth.version)
            retries += 1
            self.faults.retried_requests += 1

    def _listen(self, engine: Any) -> None:
        """Ask an engine again and again whether it lives, as long as it has requests of ours."""
        listening = self._listening.get(engine)
        if self.fleet.heartbeat_timeout_s is None or (listening and not listening.done()):
            return
        self._listening[engine] = asyncio.create_task(self._ask(engine))

    async def _ask(self, engine: Any) -> None:
        limit: Any = self.fleet.heartbeat_timeout_s
        while any(running.engine is engine for running in self._running.values()):
            if engine not in self._returning:
                ping = engine.ping.remote()
                with contextlib.suppress(RayActorError):  # its requests see that too
                    try:
                        await asyncio.wait_for(ping, limit)
                    except TimeoutError:
                        await asyncio.to_thread(self._end_stopped, engine, ping)
            await asyncio.sleep(limit / _PINGS_PER_LIMIT)

    def _end_stopped(self, engine: Any, ping: ray.ObjectRef) -> None:
        """Kill an engine that left a ping unanswered, unless Ray is starting it or others did so.

        Which process that is, Ray's table says: a client learns of a restart only where it had
        requests there.
        """
        actor_id = engine._actor_id.hex()
        entry = actors(actor_id)
        if entry.get("State") != "ALIVE":
            return
        # An event loop that stood still for longer than the limit finds answer and time-out due
        # together, and from Python 3.12 on `wait_for` then tells the time-out. This comes after the
        # look at the table: a ping to the process before the one found there has failed by now.
        if ray.wait([ping], timeout=0)[0]:
            return
        process = f"{actor_id}:{entry['NumRestarts']}"
        if self._of_vault(self.fleet.vault.condemn.remote(process)):
            logger.error(
                "a vLLM engine gave no sign of life for %g s: it is killed, and started again",
                self.fleet.heartbeat_timeout_s,
            )
            ray.kill(engine, no_restart=False)

    def _of_vault(self, answer: ray.ObjectRef) -> Any:
        try:
            return ray.get(answer, timeout=self.fleet.heartbeat_timeout_s)
        except (RayActorError, GetTimeoutError) as error:
            raise EngineDiedError(
                "the process that keeps the weights for engines that restart died or stopped: "
                "restore the run from its last checkpoint"
            ) from error

    async def _wait_until_back(self, engine: Any) -> Birth:
        """Wait for a restart; the requests that an engine lost wait together."""
        waiting = self._returning.get(engine)
        if waiting is None:
            waiting = self._returning[engine] = asyncio.create_task(self._returned(engine))
            waiting.add_done_callback(lambda _: self._returning.pop(engine))
        return await asyncio.shield(waiting)

    async def _returned(self, engine: Any) -> Birth:
        try:
            birth = await asyncio.wait_for(engine.birth.remote(), self._start_limit_s)
        except (RayActorError, TimeoutError) as error:
            raise _lost(error) from error
        return self._note(engine, birth)

    async def abort(self, request_id: str) -> None:
        """End a running request; see `Engine.abort`."""
        running = self._running.get(request_id)
        if running is not None:
            running.aborted.set()
            with contextlib.suppress(RayActorError):  # then the retry sees that it is aborted
                await running.engine.abort.remote(request_id)

    def load_weights(
        self, policy_id: str, tensors: Mapping[str, torch.Tensor], version: int
    ) -> None:
        """Give all engines of a policy the same new weights; see `Engine.load_weights`."""
        packed = pack(tensors, _DTYPES[self.fleet.settings.dtype])
        sums = checksums(unpack(packed))
        self.publish(policy_id, Published("weights", ray.put(packed), version, sums))

    def load_adapter(
        self,
        policy_id: str,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        version: int,
    ) -> None:
        """Give all engines of a policy a LoRA adapter; see `Engine.load_adapter`."""
        packed, sums = ray.put(pack(tensors)), checksums(tensors)
        self.publish(policy_id, Published("adapter", packed, version, sums, dict(config)))

    def publish(self, policy_id: str, published: Published, send: Send | None = None) -> None:
        """Serve a policy with tensors that lie in Ray's object store already.

        Every engine reads the one copy of its machine. Engines that die meanwhile are waited for.

        Args:
            policy_id: The policy.
            published: The tensors; engines that start later serve them too.
            send: Brings the same tensors to the engines on another road. Where it fails, weights
                may be half old and half new: the engines start anew, with the copy in the store.

        Raises:
            EngineError: While requests run, or when names or shapes do not fit the model.
            EngineDiedError: The engines do not settle on the new version.
        """
        engines = behind = self._engines(policy_id)
        for _ in range(_MAX_RETRIES + 1):
            before = self._births(engines)
            if send is None:
                self._everywhere(
                    behind, lambda engine: engine.load.remote(published, published.packed)
                )
            # From here on an engine that restarts finds the new version by itself.
            self._of_vault(self.fleet.vault.publish.remote(policy_id, published))
            if send is not None:
                self._send(policy_id, send, engines, before)
                send = None  # whatever it missed comes from the store
            after = self._births(engines)
            behind = [
                engine
                for engine, old, new in zip(engines, before, after, strict=True)
                if (new.incarnation, new.version) != (old.incarnation, published.version)
            ]
            if not behind:
                return
        raise EngineDiedError(
            f"{len(behind)} of {len(engines)} engines of policy {policy_id!r} do not settle on "
            f"weight version {published.version}"
        )

    def _send(
        self, policy_id: str, send: Send, engines: Sequence[Any], births: Sequence[Birth]
    ) -> None:
        incarnations = [birth.incarnation for birth in births]
        problem = self._while_watched(engines, lambda: send(engines, incarnations))
        if problem is None:
            return
        self.faults.failed_transfers += 1
        logger.warning(
            "weights of policy %r did not reach its engines directly (%s): the engines start anew "
            "with the copy in Ray's object store",
            policy_id,
            problem,
        )
        for engine in engines:
            ray.kill(engine, no_restart=False)

    def _while_watched(self, engines: Sequence[Any], work: Callable[[], T]) -> T:
        """Do work that waits for engines, and end those that stop meanwhile.

        A learner that waits for an engine beats: nobody else would see that both stand still.

        Raises:
            EngineDiedError: The vault died, and with it what the engines would come back with.
        """
        if self.fleet.heartbeat_timeout_s is None:
            return work()
        is_over = threading.Event()
        with ThreadPoolExecutor(1, "watch-engines") as pool:
            watching = pool.submit(self._watch, engines, is_over)
            try:
                result = work()
            finally:
                is_over.set()
        watching.result()
        return result

    def _watch(self, engines: Sequence[Any], is_over: threading.Event) -> None:
        try:
            while not is_over.wait(self.fleet.heartbeat_timeout_s):
                self._end_silent(engines)
        except Exception:
            # Nobody watches from here on: whoever waits for an engine would do so for ever.
            for engine in engines:
                ray.kill(engine, no_restart=False)
            raise

    def checksums(self, policy_id: str = "default_policy") -> Checksums:
        """Checksums on the policy's first engine; see `Engine.checksums`."""
        return self.all_checksums(policy_id)[0]

    def all_checksums(self, policy_id: str) -> list[Checksums]:
        """Checksums on each of the policy's engines."""
        engines = self._engines(policy_id)
        return self._everywhere(engines, lambda engine: engine.checksums.remote())

    def version(self, policy_id: str = "default_policy") -> int:
        """Version of the weights now serving the policy; 0 before the first load."""
        return self._births(self._engines(policy_id)[:1])[0].version

    def sleep(self) -> None:
        """Give up device memory; see `VLLMEngine.sleep`."""
        self._everywhere(self._all_engines(), lambda engine: engine.sleep.remote())

    def wake(self) -> None:
        """Take the memory back; see `VLLMEngine.wake`."""
        self._everywhere(self._all_engines(), lambda engine: engine.wake.remote())

    def close(self) -> None:
        """End the actors, where this client started them; a second call does nothing."""
        if self._owns_actors:
            self._owns_actors = False
            self.fleet.kill()

    def _engines(self, policy_id: str) -> Sequence[Any]:
        engines = self.fleet.engines.get(policy_id)
        if engines is None:
            raise EngineError(
                f"unknown policy {policy_id!r}: these engines serve {sorted(self.fleet.engines)}"
            )
        return engines

    def _all_engines(self) -> list[Any]:
        return [engine for engines in self.fleet.engines.values() for engine in engines]

    def _everywhere(
        self, engines: Sequence[Any], call: Callable[[Any], ray.ObjectRef]
    ) -> list[Any]:
        """Make a call on all engines at once, and again on those that die under it."""
        answers: dict[Any, Any] = {}
        waiting = list(engines)
        for _ in range(_MAX_RETRIES + 1):
            refs = [call(engine) for engine in waiting]
            self._await(waiting, refs, math.inf)
            died = []
            for engine, ref in zip(waiting, refs, strict=True):
                try:
                    answers[engine] = ray.get(ref)
                except RayActorError:
                    died.append(engine)
                except RayTaskError as error:
                    raise _plain(error) from None
            self._births(died)
            if not died:
                return [answers[engine] for engine in engines]
            waiting = died
        raise EngineDiedError(f"{len(waiting)} vLLM engines died again and again under one call")

    def _births(self, engines: Sequence[Any]) -> list[Birth]:
        """Ask engines who they are; waits for those that start."""
        refs = [engine.birth.remote() for engine in engines]
        self._await(engines, refs, self._start_limit_s)
        try:
            births = ray.get(refs, timeout=0)
        except (RayActorError, GetTimeoutError) as error:
            raise _lost(error) from error
        return [self._note(engine, birth) for engine, birth in zip(engines, births, strict=True)]

    @property
    def _start_limit_s(self) -> float:
        return max(_START_TIMEOUT_S, self.fleet.heartbeat_timeout_s or 0.0)

    def _await(self, engines: Sequence[Any], refs: list[Any], timeout_s: float) -> None:
        """Wait for answers, killing engines that are stopped; Ray restarts them."""
        limit = self.fleet.heartbeat_timeout_s or math.inf
        give_up_at = time.monotonic() + timeout_s
        waiting = list(refs)
        while waiting and (left := give_up_at - time.monotonic()) > 0:
            patience = min(left, limit)
            _, waiting = ray.wait(
                waiting,
                num_returns=len(waiting),
                timeout=None if math.isinf(patience) else patience,
            )
            late = [e for e, ref in zip(engines, refs, strict=True) if ref in waiting]
            if late and not math.isinf(limit):
                self._end_silent(late)

    def _end_silent(self, engines: Sequence[Any]) -> None:
        """Ask engines whether they live; kill those that do not answer within the time limit."""
        pings = {engine.ping.remote(): engine for engine in engines}
        _, silent = ray.wait(
            list(pings), num_returns=len(pings), timeout=self.fleet.heartbeat_timeout_s
        )
        for ping in silent:
            self._end_stopped(pings[ping], ping)

    def _note(self, engine: Any, birth: Birth) -> Birth:
        known = self._incarnations.setdefault(engine, birth.incarnation)
        if known != birth.incarnation:
            self._incarnations[engine] = birth.incarnation
            self.faults.engine_restarts += 1
        return birth


def _lost(error: Exception) -> EngineDiedError:
    return EngineDiedError(
        f"a vLLM engine does not start, or died and did not come back: {error or 'time-out'}"
    )


def _plain(error: RayTaskError) -> Exception:
    """The engine's own refusal without Ray's copy of the remote traceback."""
    return EngineError(str(error.cause)) if isinstance(error.cause, EngineError) else error
