"""Weights from the learner's GPU into the engines by vLLM's own transfer (vLLM 0.32 and 0.33).

    learner: PolicySource -> vLLM's trainer engine -> EngineClient
    engine actors: vLLM's worker engine -> model

vLLM's trainer engine drives the round (init, start, update, finish) through the client; over NCCL
the tensors themselves go from GPU to GPU, over IPC the workers open the learner's memory. One
NCCL group holds the learner (rank 0) and the workers of all engines of a policy.

A member that dies leaves the others waiting inside NCCL for ever. So a thread sends, and the first
call to an engine that fails ends the sending for its caller and aborts the group.
"""

from __future__ import annotations

import queue
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import ray
import torch

from rllib_gigpo.engines.vllm.process import import_vllm

_BUFFER_BYTES = 256 << 20

_senders: weakref.WeakKeyDictionary[Any, dict[str, _Group]] = weakref.WeakKeyDictionary()


class PolicySource:
    """vLLM's `WeightSource` over a policy: cast to the engines' type one tensor at a time.

    Args:
        weights: Returns the policy's weights under their Hugging Face names.
        dtype: The engines' type.
    """

    def __init__(self, weights: Callable[[], Mapping[str, torch.Tensor]], dtype: torch.dtype):
        self._weights = weights
        self._dtype = dtype

    def metadata(self) -> list[Any]:
        """Name, type and shape of what iteration yields (vLLM's `ParamMeta`)."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [
            ParamMeta(name, self._dtype, tuple(tensor.shape))
            for name, tensor in self._weights().items()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the present weights."""
        for name, tensor in self._weights().items():
            yield name, tensor.detach().to(self._dtype)

    def largest_bytes(self) -> int:
        """Size of the largest tensor that iteration yields."""
        return max(tensor.numel() for tensor in self._weights().values()) * self._dtype.itemsize


class EngineClient:
    """vLLM's `VLLMWeightSyncClient` over several engine actors, which form one group.

    Args:
        engines: Their handles.
        workers: Workers (GPUs) of each engine.

    Attributes:
        version: What the engines are to call the weights of the next round.
        on_failure: Called with what goes wrong in a call to the engines, before it is raised.
    """

    def __init__(self, engines: Sequence[Any], workers: int):
        self._engines = engines
        self._workers = workers
        self.version = 0
        self.on_failure: Callable[[BaseException], None] = lambda error: None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make every engine a member; vLLM numbers the workers of a single engine only."""
        infos = [dict(init_info) for _ in self._engines]
        for number, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += number * self._workers
        pairs = zip(self._engines, infos, strict=True)
        self._wait_for([engine.init_transfer.remote(info) for engine, info in pairs])

    def start_weight_update(self) -> None:
        """Make the engines ready to receive."""
        self._wait_for([engine.start_update.remote() for engine in self._engines])

    def update_weights(self, update_info: Any) -> None:
        """Let the engines receive; over NCCL this lasts as long as the broadcast."""
        self._wait_for([engine.receive.remote(update_info) for engine in self._engines])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Put what was received into effect as `version`."""
        self._wait_for([engine.finish_update.remote(self.version) for engine in self._engines])

    def _wait_for(self, answers: list[Any]) -> None:
        try:
            ray.get(answers)
        except Exception as error:
            self.on_failure(error)
            raise


class _Group:
    """A learner's connection to the engines of one policy, as long as none of them restarts."""

    def __init__(
        self,
        road: Literal["nccl", "ipc"],
        source: PolicySource,
        engines: Sequence[Any],
        incarnations: Sequence[str],
        workers: int,
    ):
        import_vllm()
        self.incarnations = tuple(incarnations)
        self._client = EngineClient(engines, workers)
        self._connect = partial(_connect, road, source, self._client, 1 + workers * len(engines))
        self._trainer: Any = None

    def send(self, version: int) -> None:
        """Send the present weights; connects at the first call.

        Raises:
            Exception: What went wrong first. The thread that sends may still wait inside NCCL for
                an engine that is gone, until `close`.
        """
        outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._client.version, self._client.on_failure = version, outcomes.put
        device = torch.cuda.current_device() if torch.cuda.is_available() else -1

        def work() -> None:
            try:
                with torch.cuda.device(device):  # each thread has a current one of its own
                    if self._trainer is None:
                        self._trainer = self._connect()
                    self._trainer.send_weights()
            except BaseException as error:  # whatever it is, somebody waits for the outcome
                outcomes.put(error)
            else:
                outcomes.put(None)

        threading.Thread(target=work, name="send-weights", daemon=True).start()
        error = outcomes.get()
        if error is not None:
            raise error

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.shutdown()


def _connect(
    road: Literal["nccl", "ipc"], source: PolicySource, client: EngineClient, members: int
) -> Any:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    return WeightTransferTrainerFactory.trainer_init(
        trainer_info(road, source, members),
        client=client,
        source=source,  # pyright: ignore[reportArgumentType]
    )


def trainer_info(road: Literal["nccl", "ipc"], source: PolicySource, members: int) -> Any:
    """Return vLLM's description of the learner's side.

    Args:
        road: How tensors travel.
        source: What is sent.
        members: The learner and all workers.
    """
    size = max(_BUFFER_BYTES, source.largest_bytes())
    if road == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=size)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return NCCLTrainerInitInfo(
        rank=0,
        master_address=ray.util.get_node_ip_address(),
        master_port=port,
        world_size=members,
        packed=True,
        packed_buffer_size_bytes=size,
    )


def send_weights(
    learner: Any,
    *,
    road: Literal["nccl", "ipc"],
    module_id: str,
    engines: Sequence[Any],
    incarnations: Sequence[str],
    version: int,
) -> str | None:
    """Send a learner's weights to the engines of one policy; runs in the learner's process.

    Args:
        learner: The learner; its connection is kept for the next call.
        road: How tensors travel.
        module_id: The policy.
        engines: Handles of all its engines.
        incarnations: Which processes they are; another one needs a new connection.
        version: What the engines are to call the weights.

    Returns:
        What went wrong, or None. (Raised inside a learner actor, it would be lost.)
    """
    groups = _senders.setdefault(learner, {})
    settings = learner.config.vllm_settings
    try:
        group = groups.get(module_id)
        if group is not None and group.incarnations != tuple(incarnations):
            groups.pop(module_id).close()
            group = None
        if group is None:
            source = PolicySource(
                lambda: learner.module[module_id].unwrapped().policy_weights(),
                getattr(torch, learner.config.dtype),
            )
            group = _Group(road, source, engines, incarnations, settings.tensor_parallel_size)
            groups[module_id] = group
        group.send(version)
    except Exception as error:
        if module_id in groups:
            groups.pop(module_id).close()
        return f"{type(error).__name__}: {error}"
    return None
