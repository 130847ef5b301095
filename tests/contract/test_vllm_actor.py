"""vLLM engines as Ray actors: the contract from outside, shared clients, deaths and retries."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from tiny_models import build_tiny_folder, forward_logps, tiny_adapter, tiny_model

from rllib_gigpo.engines.base import Completion, EngineError, Request, Sampling, generate_batch
from rllib_gigpo.engines.packing import checksums, pack
from rllib_gigpo.engines.published import Published
from rllib_gigpo.engines.vllm.fleet import Fleet
from rllib_gigpo.engines.vllm.process import EngineDiedError
from rllib_gigpo.engines.vllm.remote import RemoteVLLMEngine
from tests.with_vllm import needs_vllm, tiny_settings

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    needs_vllm,
]

POLICY = "default_policy"
PROMPT = np.arange(40, 60, dtype=np.int32)
EXACT = 1e-4
SETTINGS = tiny_settings()


@pytest.fixture(scope="module")
def engine(local_ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteVLLMEngine]:
    folder = build_tiny_folder(tmp_path_factory.mktemp("models") / "llama", "llama", tied=True)
    engine = RemoteVLLMEngine.start({POLICY: folder}, SETTINGS, num_engines=2)
    yield engine
    engine.close()
    engine.close()


@pytest.fixture(scope="module")
def base() -> Any:
    return tiny_model("llama", tied=True)


def requests_of(
    count: int = 8, *, members: int = 4, first_id: int = 0, policy: str = POLICY, **sampling: Any
) -> list[Request]:
    """Groups of `members` requests; group g belongs to engine g % 2."""
    settings = Sampling(**{"max_tokens": 12, **sampling})
    return [
        Request(
            PROMPT,
            settings,
            seed=number,
            request_id=f"request-{first_id + number}",
            policy_id=policy,
            group_id=number // members,
        )
        for number in range(count)
    ]


def batch(engine: RemoteVLLMEngine, requests: Sequence[Request]) -> list[Completion]:
    return asyncio.run(generate_batch(engine, requests))


def assert_served_by(model: Any, completions: Sequence[Completion], version: int) -> None:
    for completion in completions:
        expected = forward_logps(model, PROMPT, completion.token_ids)
        np.testing.assert_allclose(completion.logps, expected, atol=EXACT)
        assert completion.weight_version == version


def kill(engine: RemoteVLLMEngine, index: int) -> None:
    birth = ray.get(engine.fleet.engines[POLICY][index].birth.remote())
    os.kill(birth.pid, signal.SIGKILL)


def test_answers_like_a_plain_forward(engine: RemoteVLLMEngine, base: Any) -> None:
    completions = batch(engine, requests_of())
    assert_served_by(base, completions, version=0)
    assert len({tuple(completion.token_ids) for completion in completions}) == 8
    assert engine.max_model_len == 256


def test_a_stopped_engine_is_replaced_and_its_requests_answered(
    engine: RemoteVLLMEngine, base: Any
) -> None:
    # Two clients ask: one kill is enough, and the second must not meet the new process.
    watched = dataclasses.replace(engine.fleet, heartbeat_timeout_s=4.0)
    clients = [RemoteVLLMEngine(watched) for _ in range(2)]
    expected = [c.token_ids.tolist() for c in batch(engine, requests_of())]
    before = ray.get(engine.fleet.engines[POLICY][0].birth.remote())
    os.kill(before.pid, signal.SIGSTOP)

    async def ask() -> list[list[Completion]]:
        asked = [generate_batch(c, requests_of(first_id=100 * i)) for i, c in enumerate(clients)]
        return await asyncio.gather(*asked)

    for completions in asyncio.run(ask()):
        assert_served_by(base, completions, version=0)
        assert [c.token_ids.tolist() for c in completions] == expected
    assert not Path(f"/proc/{before.pid}").exists()
    assert [client.faults.engine_restarts for client in clients] == [1, 1]
    # One that is stopped while nothing runs is found when weights are to be loaded.
    after = ray.get(engine.fleet.engines[POLICY][0].birth.remote())
    os.kill(after.pid, signal.SIGSTOP)
    assert clients[0].version(POLICY) == 0
    assert not Path(f"/proc/{after.pid}").exists()


def test_refusals_come_back_as_they_are(engine: RemoteVLLMEngine) -> None:
    with pytest.raises(EngineError) as refusal:
        batch(engine, requests_of(1, max_tokens=0))
    assert str(refusal.value) == "max_tokens is 0: expected at least 1"
    with pytest.raises(EngineError, match="nobody"):
        batch(engine, requests_of(1, policy="nobody"))
    with pytest.raises(EngineError, match="nobody"):
        engine.version("nobody")
    with pytest.raises(EngineError, match="missing"):
        engine.load_weights(POLICY, {}, 1)
    assert engine.version(POLICY) == 0


def test_abort_and_cancel_reach_the_actor(engine: RemoteVLLMEngine, base: Any) -> None:
    weights = dict(base.named_parameters())

    async def scenario() -> Completion:
        aborted, cancelled = requests_of(2, max_tokens=200)
        tasks = [asyncio.create_task(engine.generate(request)) for request in (aborted, cancelled)]
        await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match="still run"):
            engine.load_weights(POLICY, weights, 1)
        await engine.abort(aborted.request_id)
        await engine.abort("never sent")
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        return await tasks[0]

    completion = asyncio.run(scenario())
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) == len(completion.logps) < 200
    engine.load_weights(POLICY, weights, 0)  # refused if one of the two still ran


def test_every_engine_serves_the_new_weights(engine: RemoteVLLMEngine, base: Any) -> None:
    model = tiny_model("llama", tied=True, seed=3)
    engine.load_weights(POLICY, dict(model.named_parameters()), 5)
    assert engine.version(POLICY) == 5
    assert_served_by(model, batch(engine, requests_of()), version=5)
    engine.load_weights(POLICY, dict(base.named_parameters()), 0)
    assert_served_by(base, batch(engine, requests_of()), version=0)


def test_bfloat16_travels_as_bfloat16(engine: RemoteVLLMEngine, base: Any) -> None:
    rounded = tiny_model("llama", tied=True)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    weights = {name: value.bfloat16() for name, value in rounded.named_parameters()}
    engine.load_weights(POLICY, weights, 1)
    assert_served_by(rounded, batch(engine, requests_of()), version=1)
    engine.load_weights(POLICY, dict(base.named_parameters()), 0)


def test_other_processes_share_the_engines(engine: RemoteVLLMEngine, base: Any) -> None:
    @ray.remote(num_cpus=1)
    def play(fleet: Fleet, requests: list[Request]) -> list[Completion]:
        client = RemoteVLLMEngine(fleet)
        completions = asyncio.run(generate_batch(client, requests))
        client.close()  # only the client that started the actors ends them
        return completions

    here = batch(engine, requests_of())
    others = [play.remote(engine.fleet, requests_of(first_id=first)) for first in (100, 200)]
    for there in ray.get(others):
        for mine, theirs in zip(here, there, strict=True):
            np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
            np.testing.assert_allclose(mine.logps, theirs.logps, atol=EXACT)
    assert_served_by(base, batch(engine, requests_of()), version=0)


def test_sleep_refuses_until_wake(engine: RemoteVLLMEngine) -> None:
    engine.sleep()
    with pytest.raises(EngineError, match="wake"):
        batch(engine, requests_of(1))
    engine.wake()
    assert len(batch(engine, requests_of(1))) == 1


def test_a_killed_engine_comes_back_and_its_requests_are_repeated(
    engine: RemoteVLLMEngine, base: Any
) -> None:
    """The new process serves the newest weights and the adapter on them."""
    adapter = tiny_adapter("llama", tied=True)
    engine.load_weights(POLICY, dict(base.named_parameters()), 6)
    engine.load_adapter(POLICY, adapter.tensors, adapter.config, 7)
    requests = requests_of(12, max_tokens=200)  # groups 0 and 2 on engine 0, group 1 on engine 1
    expected = batch(engine, requests)
    before = dataclasses.replace(engine.faults)

    async def scenario() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0.05)
        kill(engine, 0)
        return list(await asyncio.gather(*tasks))

    completions = asyncio.run(scenario())
    assert_served_by(adapter.merged, completions, version=7)
    for interrupted, whole in zip(completions, expected, strict=True):
        np.testing.assert_array_equal(interrupted.token_ids, whole.token_ids)
        assert interrupted.finish_reason == "length"
    assert engine.faults.engine_restarts == before.engine_restarts + 1
    assert engine.faults.retried_requests == before.retried_requests + 8


def test_an_engine_that_fails_inside_ends_its_process_and_says_why(
    engine: RemoteVLLMEngine,
) -> None:
    def break_it(actor: Any) -> None:
        def step() -> None:
            raise ZeroDivisionError("a kernel failed")

        for policy in actor._engine._policies.values():
            policy.llm.step = step

    before = batch(engine, requests_of(4))
    restarts = engine.faults.engine_restarts
    ray.get(engine.fleet.engines[POLICY][0].__ray_call__.remote(break_it))
    for one, other in zip(before, batch(engine, requests_of(4)), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
    assert engine.faults.engine_restarts == restarts + 1
    assert "a kernel failed" in ray.get(engine.fleet.vault.last_error.remote(POLICY))


def test_an_engine_that_died_between_calls_takes_the_next_weights(
    engine: RemoteVLLMEngine,
) -> None:
    model = tiny_model("llama", tied=True, seed=6)
    kill(engine, 1)
    engine.load_weights(POLICY, dict(model.named_parameters()), 8)
    assert engine.version(POLICY) == 8
    assert_served_by(model, batch(engine, requests_of()), version=8)


def published(model: Any, version: int) -> Published:
    weights = {name: value.detach() for name, value in model.named_parameters()}
    return Published("weights", ray.put(pack(weights)), version, checksums(weights))


def test_a_copy_of_what_came_directly_is_there_for_engines_that_restart(
    engine: RemoteVLLMEngine,
) -> None:
    model = tiny_model("llama", tied=True, seed=9)
    parcel = published(model, 9)

    def directly(engines: Sequence[Any], incarnations: Sequence[str]) -> None:
        assert len(set(incarnations)) == 2
        ray.get([each.load.remote(parcel, parcel.packed) for each in engines])

    engine.publish(POLICY, parcel, directly)
    assert engine.all_checksums(POLICY) == [parcel.checksums] * 2
    kill(engine, 0)
    assert_served_by(model, batch(engine, requests_of()), version=9)
    assert engine.checksums(POLICY) == parcel.checksums
    assert engine.faults.failed_transfers == 0


def test_engines_that_missed_a_direct_transfer_start_anew_with_the_copy(
    engine: RemoteVLLMEngine,
) -> None:
    model = tiny_model("llama", tied=True, seed=10)
    restarts = engine.faults.engine_restarts
    engine.publish(POLICY, published(model, 10), lambda engines, incarnations: "a cable was cut")
    assert_served_by(model, batch(engine, requests_of()), version=10)
    assert engine.faults.failed_transfers == 1
    assert engine.faults.engine_restarts == restarts + 2


def test_an_engine_that_cannot_start_says_why(engine: RemoteVLLMEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineDiedError, match=r"config\.json|not a local folder"):
        RemoteVLLMEngine.start({POLICY: tmp_path}, SETTINGS)
    with pytest.raises(ValueError, match="num_engines is 0"):
        RemoteVLLMEngine.start({POLICY: tmp_path}, SETTINGS, num_engines=0)
