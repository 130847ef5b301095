"""How weights and adapters reach vLLM: a model that notes the calls instead of vLLM."""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

from rllib_gigpo.engines.base import EngineError
from rllib_gigpo.engines.vllm import weights
from rllib_gigpo.engines.vllm.engine import VLLMEngine, _Adapter, _Policy
from rllib_gigpo.engines.vllm.process import EngineDiedError
from rllib_gigpo.engines.vllm.settings import VLLMSettings
from rllib_gigpo.engines.vllm.weights import adapter_checksums, load_into_worker

POLICY = "default_policy"


class Model:
    """What the engine uses of vLLM's `LLMEngine`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.rpcs: list[tuple[Any, tuple, Any]] = []
        self.refusals: dict[str, Exception] = {}
        self.model_executor = SimpleNamespace(sleeping_tags={"weights", "kv_cache"})

    def get_num_unfinished_requests(self) -> int:
        return 0

    def reset_prefix_cache(self) -> bool:
        return True

    def sleep(self, level: int) -> None:
        self.calls.append("sleep")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))

    def add_lora(self, request: Any) -> None:
        self._do("add_lora", request.lora_int_id)

    def remove_lora(self, number: int) -> None:
        self._do("remove_lora", number)

    def _do(self, call: str, number: int) -> None:
        self.calls.append((call, number))
        if call in self.refusals:
            raise self.refusals[call]

    def collective_rpc(self, method: Any, args: tuple = (), kwargs: Any = None) -> list[Any]:
        self.calls.append(method)
        self.rpcs.append((method, args, kwargs))
        return [{}]


def engine_of(model: Model, *, sleeps: bool) -> tuple[VLLMEngine, _Policy]:
    llm: Any = model
    policy = _Policy(llm, {}, frozenset(), vocab_size=8)
    engine = object.__new__(VLLMEngine)
    engine.settings = VLLMSettings(num_gpus=0.5, enable_sleep_mode=True, enable_lora=True)
    engine._policies = {POLICY: policy}
    engine._sleeping = False
    if sleeps:
        engine._sleep()
    return engine, policy


def adapter(number: int) -> _Adapter:
    request: Any = SimpleNamespace(lora_int_id=number)
    return _Adapter(request, {"a": torch.ones(2)}, 2.0)


def test_an_adapter_is_written_once_the_weights_have_their_memory_back():
    model = Model()
    engine, policy = engine_of(model, sleeps=True)
    policy.adapter = adapter(1)
    engine._load_adapter(POLICY, policy, adapter(2), version=5)
    # vLLM writes adapters into the memory of the "weights", which sleep has unmapped.
    assert model.calls == ["sleep", ("wake_up", "weights"), ("add_lora", 2), ("remove_lora", 1)]
    assert policy.version == 5
    assert policy.adapter is not None
    assert policy.adapter.request.lora_int_id == 2


def test_an_engine_that_is_awake_takes_an_adapter_as_it_is():
    model = Model()
    engine, policy = engine_of(model, sleeps=False)
    engine._load_adapter(POLICY, policy, adapter(1), version=1)
    assert model.calls == [("add_lora", 1)]


@pytest.mark.parametrize("call", ["add_lora", "remove_lora"])
def test_an_engine_that_breaks_under_an_adapter_is_replaced(call):
    model = Model()
    engine, policy = engine_of(model, sleeps=False)
    policy.adapter = adapter(1)
    model.refusals[call] = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(EngineDiedError, match=r"adapter of 'default_policy' failed: CUDA error"):
        engine._load_adapter(POLICY, policy, adapter(2), version=1)
    assert policy.version == 0


def test_an_adapter_that_vllm_refuses_does_not_end_the_engine():
    model = Model()
    engine, policy = engine_of(model, sleeps=False)
    model.refusals["add_lora"] = ValueError("rank 64 is greater than max_lora_rank 8")
    with pytest.raises(EngineError, match="vLLM refuses the adapter") as refusal:
        engine._load_adapter(POLICY, policy, adapter(1), version=1)
    assert not isinstance(refusal.value, EngineDiedError)


def test_tensors_are_arguments_of_the_call_and_no_part_of_the_callable():
    model = Model()
    engine, policy = engine_of(model, sleeps=False)
    tensors = {"a": torch.ones(1 << 20)}
    engine._load_weights(POLICY, policy, tensors, version=1)
    policy.adapter = adapter(3)
    engine._checksums(policy)
    assert [(method, args) for method, args, _ in model.rpcs] == [
        (load_into_worker, ()),
        (adapter_checksums, ()),
    ]
    sent = model.rpcs[0][2]
    assert sent["tensors"]["a"].data_ptr() == tensors["a"].data_ptr()
    assert model.rpcs[1][2]["number"] == 3
    # This is what vLLM pickles of the callable for every worker.
    assert max(len(cloudpickle.dumps(method)) for method, _, _ in model.rpcs) < 1000


def test_vllm_brings_them_to_a_workers_process_beside_the_pickle(monkeypatch):
    queue = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast")
    from vllm.v1.serial_utils import run_method

    given: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(weights, "begin_update", lambda worker: None)
    monkeypatch.setattr(weights, "end_update", lambda worker: None)
    worker = SimpleNamespace(reload_weights=lambda weights_iterator: given.update(weights_iterator))
    tensors = {"a": torch.arange(8, dtype=torch.bfloat16), "b": torch.ones(2, 3)}
    beside: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    # As `MessageQueue.enqueue` and `dequeue` do.
    pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=beside.append)
    pickler.dispatch_table = {torch.Tensor: queue._reduce_tensor}
    pickler.dump({"tensors": tensors})
    assert len(beside) == 2
    kwargs = pickle.loads(stream.getvalue(), buffers=[bytearray(each) for each in beside])
    run_method(worker, cloudpickle.dumps(load_into_worker), (), kwargs)
    assert all(torch.equal(given[name], tensor) for name, tensor in tensors.items())
