"""vLLM's own weight transfer, its trainer and its workers, where no GPU is.

Trainer engine, worker engine, packing and the worker's update session are vLLM's; what needs a GPU
(memory handles, NCCL's broadcast, streams) is replaced by what it would do, in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import build_tiny_folder, forward_logps, tiny_model

from rllib_gigpo.engines.base import EngineError, Request, Sampling
from rllib_gigpo.engines.packing import checksums
from rllib_gigpo.engines.vllm import native
from tests.with_vllm import needs_vllm

pytestmark = [
    pytest.mark.vllm,
    needs_vllm,
]

POLICY = "default_policy"
PROMPT = np.arange(40, 60, dtype=np.int32)


class Handle:
    """What a Ray handle of an engine actor does, for an engine of this process."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._pool = ThreadPoolExecutor(1)
        self.calls: list[tuple[str, tuple]] = []

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Future[Any]:
            self.calls.append((method, arguments))
            return self._pool.submit(getattr(self._engine, method), POLICY, *arguments)

        return SimpleNamespace(remote=remote)


class Wire:
    """NCCL's broadcast from the trainer to one worker."""

    def __init__(self) -> None:
        self._sent: queue.Queue[torch.Tensor] = queue.Queue()
        self.is_open = True

    def trainer(self) -> Any:
        def send(tensor: torch.Tensor, src: int, stream: Any = None) -> None:
            self._sent.put(tensor.clone())

        return SimpleNamespace(broadcast=send, destroy=self._close)

    def worker(self) -> Any:
        def take(tensor: torch.Tensor, src: int, stream: Any = None) -> None:
            tensor.copy_(self._sent.get(timeout=60))

        return SimpleNamespace(broadcast=take, destroy=self._close)

    def _close(self) -> None:
        self.is_open = False


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Wire:
    from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor

    wire = Wire()
    stream = SimpleNamespace(synchronize=lambda: None)
    empty = torch.empty

    def empty_anywhere(*size: Any, **settings: Any) -> torch.Tensor:
        if settings.get("device") == "cuda":
            settings["device"] = "cpu"
        return empty(*size, **settings)

    exported: list[torch.Tensor] = []

    def export(tensor: torch.Tensor) -> tuple[None, tuple[int, ...]]:
        exported.append(tensor)
        return None, (len(exported) - 1, 0, 0, 0, 0, 0, 0)

    monkeypatch.setattr(torch, "empty", empty_anywhere)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-0")
    )
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda index, count: (stream,) * count)
    monkeypatch.setattr(packed_tensor, "reduce_tensor", export)
    monkeypatch.setattr(
        torch.multiprocessing.reductions,
        "rebuild_cuda_tensor",
        lambda number, *rest: exported[number],
    )
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: wire.trainer())
    monkeypatch.setattr(
        nccl_engine, "worker_init_process_group", lambda info, parallel: wire.worker()
    )
    assert ipc_engine.packed_ipc_producer is packed_tensor.packed_ipc_producer
    ray = SimpleNamespace(
        get=lambda futures: [future.result(timeout=60) for future in futures],
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
    )
    monkeypatch.setattr(native, "ray", ray)
    # Small enough that the tiny model takes several packets.
    monkeypatch.setattr(native, "_BUFFER_BYTES", 1 << 14)
    return wire


@pytest.fixture(scope="module", params=["ipc", "nccl"])
def road(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(road: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from rllib_gigpo.engines.vllm.engine import VLLMEngine
    from rllib_gigpo.engines.vllm.settings import VLLMSettings

    folder: Path = build_tiny_folder(
        tmp_path_factory.mktemp("models") / "llama", "llama", tied=True
    )
    settings = VLLMSettings(
        dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 20, weight_transfer=road
    )
    engine = VLLMEngine({POLICY: folder}, settings)
    yield engine
    engine.close()


class Learner:
    """As much of a learner as sends weights."""

    def __init__(self, seed: int):
        self.model = tiny_model("llama", tied=True, seed=seed)
        self.config = SimpleNamespace(
            dtype="float32", vllm_settings=SimpleNamespace(tensor_parallel_size=1)
        )
        module = SimpleNamespace(policy_weights=lambda: dict(self.model.named_parameters()))
        self.module = {POLICY: SimpleNamespace(unwrapped=lambda: module)}


def send(learner: Learner, road: Any, handle: Handle, version: int, process: str) -> str | None:
    return native.send_weights(
        learner,
        road=road,
        module_id=POLICY,
        engines=[handle],
        incarnations=[process],
        version=version,
    )


def assert_served_by(engine: Any, model: Any, version: int) -> None:
    request = Request(PROMPT, Sampling(max_tokens=8), seed=0, request_id="one", policy_id=POLICY)
    completion = asyncio.run(engine.generate(request))
    assert completion.weight_version == version
    expected = forward_logps(model, PROMPT, completion.token_ids)
    np.testing.assert_allclose(completion.logps, expected, atol=1e-4)


def test_weights_arrive_every_time(engine: Any, road: str, without_gpu: Wire) -> None:
    learner, handle = Learner(seed=3), Handle(engine)
    assert send(learner, road, handle, 1, "first process") is None
    assert_served_by(engine, learner.model, version=1)
    assert engine.checksums(POLICY) == checksums(dict(learner.model.named_parameters()))
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    assert send(learner, road, handle, 2, "first process") is None
    assert_served_by(engine, learner.model, version=2)
    assert engine.checksums(POLICY) == checksums(dict(learner.model.named_parameters()))
    connected = [method for method, _ in handle.calls].count("init_transfer")
    assert connected == 1
    # An engine that came back needs a new connection.
    assert send(learner, road, handle, 3, "second process") is None
    assert [method for method, _ in handle.calls].count("init_transfer") == 2
    assert without_gpu.is_open == (road == "ipc")
    # IPC takes several packets through one buffer; NCCL announces all in one round.
    packets = [method for method, _ in handle.calls].count("receive")
    assert packets > 3 if road == "ipc" else packets == 3
    assert_served_by(engine, learner.model, version=3)


def test_it_ends_with_the_weights_that_the_store_brings(
    engine: Any, road: str, without_gpu: Wire
) -> None:
    model = tiny_model("llama", tied=True, seed=8)
    engine.load_weights(POLICY, dict(model.named_parameters()), 5)
    assert_served_by(engine, model, version=5)


def test_requests_that_run_are_told_of(engine: Any, road: str, without_gpu: Wire) -> None:
    async def scenario() -> None:
        request = Request(
            PROMPT, Sampling(max_tokens=40), seed=0, request_id="long", policy_id=POLICY
        )
        task = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="still run"):
            engine.start_update(POLICY)
        await engine.abort("long")
        await task

    asyncio.run(scenario())


def test_a_wrong_order_ends_the_engine(engine: Any, road: str, without_gpu: Wire) -> None:
    """Runs last: the engine is dead afterwards, and its actor would start anew."""
    from rllib_gigpo.engines.vllm.process import EngineDiedError

    with pytest.raises(EngineDiedError, match="start_weight_update must be called before"):
        engine.receive(POLICY, {})
    assert "EngineDiedError" in str(send(Learner(0), road, Handle(engine), 9, "first process"))


def test_every_engine_gets_its_place_in_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ray", SimpleNamespace(get=lambda results: results))
    seen: list[dict[str, Any]] = []
    handle = SimpleNamespace(init_transfer=SimpleNamespace(remote=seen.append))
    client = native.EngineClient([handle] * 3, workers=2)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7})
    # The learner is 0, the engines' workers are 1 and 2, 3 and 4, 5 and 6.
    assert [info["rank_offset"] for info in seen] == [1, 3, 5]
    seen.clear()
    client.init_weight_transfer_engine({"packed": True})
    assert seen == [{"packed": True}] * 3


def test_the_source_says_what_it_yields() -> None:
    model = tiny_model("qwen2", tied=False)
    source = native.PolicySource(lambda: dict(model.named_parameters()), torch.bfloat16)
    told = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    for _ in range(2):
        given = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
        assert given == told
    # 300 words x 64 x 2 bytes.
    assert source.largest_bytes() == 300 * 64 * 2
    info = native.trainer_info("ipc", source, members=2)
    assert (info.rank, info.packed, info.packed_buffer_size_bytes) == (0, True, 256 << 20)


def test_the_engine_configuration_names_the_road(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from rllib_gigpo.engines.vllm.settings import VLLMSettings

    folder = build_tiny_folder(tmp_path / "llama", "llama", tied=True)
    for road in ("nccl", "ipc"):
        settings = VLLMSettings(dtype="float32", max_model_len=64, weight_transfer=road)
        config = EngineArgs(**settings.engine_args(str(folder), on_cpu=True)).create_engine_config()
        assert config.weight_transfer_config.backend == road
