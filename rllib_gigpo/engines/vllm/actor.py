"""One vLLM engine in a process of its own, as a Ray actor, and where it finds its weights again.

Ray restarts an engine whose process dies. The handle stays the same for every client, and the new
process loads the newest weights from the vault before it answers anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError

from rllib_gigpo.engines.base import Completion, EngineError, Request
from rllib_gigpo.engines.packing import Checksums, PackedTensors
from rllib_gigpo.engines.published import Published, check_held, serve
from rllib_gigpo.engines.vllm.engine import VLLMEngine
from rllib_gigpo.engines.vllm.process import EngineDiedError, import_vllm
from rllib_gigpo.engines.vllm.settings import VLLMSettings

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Ray's own limit of concurrent calls; vLLM queues what exceeds `max_num_seqs`.
_MAX_CONCURRENT_CALLS = 10_000
_NOTE_TIMEOUT_S = 5.0


class WeightVault:
    """Keeps what every policy is served with alive, for engines that restart."""

    def __init__(self) -> None:
        self._published: dict[str, list[Published]] = {}
        self._last_error: dict[str, str] = {}
        self._condemned: set[str] = set()

    def publish(self, policy_id: str, published: Published) -> None:
        """Remember the newest weights, or the newest adapter beside the weights it stands on."""
        base = [
            kept
            for kept in self._published.get(policy_id, [])
            if published.kind == "adapter" and kept.kind == "weights"
        ]
        self._published[policy_id] = [*base, published]

    def newest(self, policy_id: str) -> list[Published]:
        """What to load, in order; empty before the first sync."""
        return self._published.get(policy_id, [])

    def note_death(self, policy_id: str, error: str) -> None:
        """Remember what an engine died of, which its clients cannot see."""
        self._last_error[policy_id] = error

    def last_error(self, policy_id: str) -> str:
        """What an engine of the policy last died of."""
        return self._last_error.get(policy_id, "its process was killed")

    def condemn(self, process: str) -> bool:
        """Whether the caller is the first who wants this process killed: one kill is enough.

        A second one would meet the process that has been started in its place.

        Args:
            process: An actor's id and how often Ray has restarted it.
        """
        is_first = process not in self._condemned
        self._condemned.add(process)
        return is_first


def check_reserved(settings: VLLMSettings) -> None:
    """Refuse to use a GPU of which Ray does not know.

    Ray hides no GPU from an actor that asks for none: it would take the first one's memory from
    whoever has reserved that.

    Raises:
        EngineError: The installed vLLM computes on GPUs, and none is reserved.
    """
    import_vllm()
    from vllm.platforms import current_platform

    if not settings.num_gpus and not current_platform.is_cpu():
        raise EngineError(
            "engine_num_gpus=0, but the installed vLLM computes on GPUs: set "
            "engines(engine_num_gpus=1), or a fraction to share one"
        )


@dataclass(frozen=True)
class Birth:
    """Which process an engine runs in.

    Attributes:
        incarnation: New after every restart.
        pid: Process id on the engine's machine.
        version: Weight version that the process serves now.
    """

    incarnation: str
    pid: int
    version: int


class VLLMEngineActor:
    """Serves one policy; made by `RemoteVLLMEngine.start`.

    Args:
        policy_id: The policy.
        model: Model folder or Hugging Face id.
        settings: How the engine runs.
        vault_name: Name of the `WeightVault`. (Ray cannot promise restarts to an actor whose
            arguments hold a handle.)
    """

    def __init__(self, policy_id: str, model: str | Path, settings: VLLMSettings, vault_name: str):
        check_reserved(settings)
        self._policy_id = policy_id
        self._incarnation = uuid.uuid4().hex
        self._engine = VLLMEngine({policy_id: model}, settings)
        self._vault = ray.get_actor(vault_name)
        for published in ray.get(self._vault.newest.remote(policy_id)):
            serve(self._engine, policy_id, published, ray.get(published.packed))
            check_held(published, self._engine.checksums(policy_id))

    @ray.method(max_task_retries=-1)
    async def birth(self) -> Birth:
        """Tell which process answers; waits for a restart where one is under way."""
        return Birth(self._incarnation, os.getpid(), self._engine.version(self._policy_id))

    async def ping(self) -> None:
        """Answer at once, whatever the engine computes."""

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`."""
        return await self._guarded(self._engine.generate(request))

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        await self._engine.abort(request_id)

    async def load(self, published: Published, packed: PackedTensors) -> None:
        """Serve with new weights or a new adapter.

        Args:
            published: What `packed` is.
            packed: The tensors; Ray resolves the reference without copying.
        """
        await self._in_thread(partial(serve, self._engine, self._policy_id, published, packed))

    async def checksums(self) -> Checksums:
        """See `Engine.checksums`."""
        return await self._in_thread(partial(self._engine.checksums, self._policy_id))

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """See `VLLMEngine.init_transfer`."""
        await self._in_thread(partial(self._engine.init_transfer, self._policy_id, info))

    async def start_update(self) -> None:
        """See `VLLMEngine.start_update`."""
        await self._in_thread(partial(self._engine.start_update, self._policy_id))

    async def receive(self, info: Any) -> None:
        """See `VLLMEngine.receive`."""
        await self._in_thread(partial(self._engine.receive, self._policy_id, info))

    async def finish_update(self, version: int) -> None:
        """See `VLLMEngine.finish_update`."""
        await self._in_thread(partial(self._engine.finish_update, self._policy_id, version))

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        await self._in_thread(self._engine.sleep)

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await self._in_thread(self._engine.wake)

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        return await self._guarded(asyncio.to_thread(function))

    async def _guarded(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await work
        except EngineDiedError as error:
            logger.exception("the engine of policy %r ends its process", self._policy_id)
            with contextlib.suppress(RayActorError, TimeoutError):
                note = self._vault.note_death.remote(self._policy_id, str(error))
                await asyncio.wait_for(note, _NOTE_TIMEOUT_S)
            logging.shutdown()
            os._exit(1)  # unlike an orderly exit, this makes Ray start a new process


def create_vault() -> tuple[str, Any]:
    """Start a `WeightVault` that outlives the engines; returns its name and handle."""
    name = f"rllib-gigpo-weights-{uuid.uuid4().hex}"
    return name, ray.remote(WeightVault).options(name=name, num_cpus=0).remote()


def create_engine(
    policy_id: str, model: str | Path, settings: VLLMSettings, vault_name: str
) -> Any:
    """Start one engine actor; returns its handle at once."""
    options = {
        "num_cpus": settings.num_cpus,
        "num_gpus": settings.num_gpus,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": _MAX_CONCURRENT_CALLS,
    }
    actor = ray.remote(VLLMEngineActor).options(**options)
    return actor.remote(policy_id, str(model), settings, vault_name)
