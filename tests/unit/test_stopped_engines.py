"""Engines that stop without dying, and engines that only seem to: a table of Ray's without Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from rllib_gigpo.engines.base import Completion, Request, Sampling
from rllib_gigpo.engines.published import Published
from rllib_gigpo.engines.vllm import native, remote
from rllib_gigpo.engines.vllm.actor import Birth, WeightVault
from rllib_gigpo.engines.vllm.fleet import Fleet
from rllib_gigpo.engines.vllm.process import EngineDiedError
from rllib_gigpo.engines.vllm.remote import RemoteVLLMEngine
from rllib_gigpo.engines.vllm.settings import VLLMSettings

POLICY = "default_policy"


class Answer:
    """An ObjectRef: the answer of an engine that has not stopped, or has restarted since."""

    def __init__(self, value: Any, engine: Stoppable | None = None):
        self.value = value
        self.engine = engine
        self.restarts = engine.restarts if engine else 0

    def done(self) -> bool:
        engine = self.engine
        return engine is None or not engine.is_stopped or engine.restarts > self.restarts

    def result(self) -> Any:
        return self.value() if callable(self.value) else self.value


class Stoppable:
    """The handle of an engine actor."""

    def __init__(self):
        self.is_stopped = False
        self.restarts = 0
        self._actor_id = SimpleNamespace(hex=lambda: "e1")
        self.ping = SimpleNamespace(remote=lambda: Answer(None, self))
        self.birth = SimpleNamespace(remote=lambda: Answer(self._birth, self))
        self.load = SimpleNamespace(remote=lambda published, packed: Answer(None, self))
        self.generate = SimpleNamespace()

    def _birth(self) -> Birth:
        return Birth(f"born-{self.restarts}", 1, 0)


class LittleRay:
    """What `remote` uses of Ray; `kill` restarts at once."""

    def __init__(self, state: str = "ALIVE"):
        self.engine = Stoppable()
        self.state = state
        self.kills = 0
        vault = WeightVault()
        self.is_vault_dead = False

        def condemn(process: str) -> Answer:
            return Answer(self._fail if self.is_vault_dead else vault.condemn(process))

        self.vault = SimpleNamespace(
            condemn=SimpleNamespace(remote=condemn),
            publish=SimpleNamespace(
                remote=lambda policy, what: Answer(vault.publish(policy, what))
            ),
            last_error=SimpleNamespace(remote=lambda policy: Answer(self._fail)),
        )

    def _fail(self) -> Any:
        raise GetTimeoutError

    def client(self, limit_s: float | None = 0.1) -> RemoteVLLMEngine:
        fleet = Fleet({POLICY: (self.engine,)}, self.vault, VLLMSettings(), limit_s)
        return RemoteVLLMEngine(fleet)

    def actors(self, actor_id: str) -> dict[str, Any]:
        assert actor_id == "e1"
        return {"State": self.state, "NumRestarts": self.engine.restarts}

    def wait(self, refs: list[Any], num_returns: int = 1, timeout: float | None = None) -> Any:
        return [r for r in refs if r.done()], [r for r in refs if not r.done()]

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        return [r.result() for r in refs] if isinstance(refs, list) else refs.result()

    def kill(self, engine: Stoppable, no_restart: bool) -> None:
        assert not no_restart
        self.kills += 1
        engine.restarts += 1
        engine.is_stopped = False


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> LittleRay:
    little = LittleRay()
    monkeypatch.setattr(remote, "ray", little)
    monkeypatch.setattr(remote, "actors", little.actors)
    monkeypatch.setattr(remote, "_START_TIMEOUT_S", 1.0)
    return little


def test_an_engine_that_stops_again_is_killed_by_a_client_that_missed_the_first_time(ray):
    first, second = ray.client(), ray.client()
    ray.engine.is_stopped = True
    assert first.version(POLICY) == 0
    ray.engine.is_stopped = True
    assert second.version(POLICY) == 0
    assert ray.kills == 2
    # Only what each of them asked told it of a restart.
    assert [client.faults.engine_restarts for client in (first, second)] == [1, 1]


def test_one_stop_is_one_kill(ray):
    first, second = ray.client(), ray.client()
    ray.engine.is_stopped = True
    asked = ray.engine.ping.remote()
    for client in (first, second):
        # Both look into the table before either has killed.
        ray.engine.is_stopped, ray.engine.restarts = True, 0
        client._end_stopped(ray.engine, asked)
    assert ray.kills == 1


def test_an_engine_that_ray_is_starting_is_left_alone(ray):
    client = ray.client()
    ray.state = "RESTARTING"
    ray.engine.is_stopped = True
    client._end_stopped(ray.engine, ray.engine.ping.remote())
    assert ray.kills == 0


async def wait_for_of_python_3_12(awaitable: Any, timeout: float) -> Any:
    """`asyncio.wait_for` as it is from Python 3.12 on."""
    async with asyncio.timeout(timeout):
        return await awaitable


def test_an_engine_that_answered_while_the_event_loop_stood_still_lives_on(ray, monkeypatch):
    monkeypatch.setattr(asyncio, "wait_for", wait_for_of_python_3_12)
    client = ray.client(limit_s=0.1)

    async def play() -> Completion:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()
        pings: list[asyncio.Future[None]] = []

        def ping() -> asyncio.Future[None]:
            pings.append(loop.create_future())
            return pings[-1]

        ray.engine.generate.remote = lambda request: answer
        ray.engine.ping.remote = ping
        request = Request(np.ones(1, np.int32), Sampling(), seed=0, request_id="a")
        asked = asyncio.ensure_future(client.generate(request))
        while not pings:
            await asyncio.sleep(0)
        time.sleep(0.2)  # an update of the weights, longer than the limit
        loop.call_soon(pings[0].set_result, None)  # came meanwhile: due with the timer
        while len(pings) < 2:
            await asyncio.sleep(0.01)
        pings[1].set_result(None)
        answer.set_result(Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", 0))
        return await asked

    assert asyncio.run(play()).finish_reason == "stop"
    assert ray.kills == 0


# While weights are sent to them -------------------------------------------------------------------

WEIGHTS = Published("weights", packed={}, version=0, checksums={})


def transfer(ray: LittleRay, seconds: float, *, stops: bool) -> Callable[..., str | None]:
    """What a learner does that sends weights: it waits for the engine, and for nothing else."""

    def send(engines: Any, incarnations: Any) -> str | None:
        ray.engine.is_stopped = stops
        restarts, give_up_at = ray.engine.restarts, time.monotonic() + seconds
        while ray.engine.restarts == restarts:
            if time.monotonic() > give_up_at:
                return None
            time.sleep(0.01)
        return "RayActorError"

    return send


def test_an_engine_that_stops_while_weights_are_sent_to_it_is_killed(ray):
    client = ray.client(limit_s=0.05)
    client.publish(POLICY, WEIGHTS, transfer(ray, 20.0, stops=True))
    assert client.faults.failed_transfers == 1
    # Once for its silence; then all engines of the policy start anew.
    assert ray.kills == 2
    assert client.version(POLICY) == WEIGHTS.version


def test_a_transfer_may_take_many_times_the_limit(ray):
    client = ray.client(limit_s=0.02)
    client.publish(POLICY, WEIGHTS, transfer(ray, 0.3, stops=False))
    assert (ray.kills, client.faults.failed_transfers) == (0, 0)


def test_without_a_limit_a_transfer_is_left_alone(ray):
    client = ray.client(limit_s=None)
    assert client._while_watched([ray.engine], threading.get_ident) == threading.get_ident()
    stopped = transfer(ray, 0.2, stops=True)
    assert client._while_watched([ray.engine], lambda: stopped([], [])) is None
    assert ray.kills == 0


def test_a_transfer_ends_where_stopped_engines_have_nothing_to_come_back_with(ray):
    client = ray.client(limit_s=0.05)
    ray.is_vault_dead = True
    with pytest.raises(EngineDiedError, match="keeps the weights for engines that restart"):
        client.publish(POLICY, WEIGHTS, transfer(ray, 20.0, stops=True))
    assert ray.kills == 1


def test_what_a_transfer_raises_is_its_own(ray):
    def broken() -> None:
        raise ZeroDivisionError("the learner broke")

    with pytest.raises(ZeroDivisionError, match="the learner broke"):
        ray.client()._while_watched([ray.engine], broken)


def test_a_request_is_not_left_waiting_for_what_an_engine_died_of(ray, monkeypatch):
    monkeypatch.setattr(remote, "_MAX_RETRIES", 0)

    async def die(request: Request) -> Completion:
        raise RayActorError

    client = ray.client()
    ray.engine.generate.remote = die
    client._listen = lambda engine: None
    request = Request(np.ones(1, np.int32), Sampling(), seed=0, request_id="a")
    with pytest.raises(EngineDiedError, match="keeps the weights for engines that restart"):
        asyncio.run(client.generate(request))


class Broadcast:
    """vLLM's trainer over NCCL: calls the engines, and waits in NCCL until it is aborted."""

    def __init__(self, client: native.EngineClient):
        self._client = client
        self._is_aborted = threading.Event()
        self.device_waits = 0

    def connect(self) -> None:
        self._together(lambda: self._client.init_weight_transfer_engine({}))

    def send_weights(self) -> None:
        self._together(lambda: self._client.update_weights({}))

    def _together(self, call: Callable[[], None]) -> None:
        threading.Thread(target=self._called, args=(call,), daemon=True).start()
        self.device_waits += 1
        self._is_aborted.wait(20.0)
        self.device_waits -= 1

    def _called(self, call: Callable[[], None]) -> None:
        try:
            call()
        except RayActorError:
            return  # raised once NCCL lets go
        self._is_aborted.set()

    def shutdown(self) -> None:
        self._is_aborted.set()


@pytest.mark.parametrize("dies_in", ["init_transfer", "receive"])
def test_a_learner_does_not_wait_in_nccl_for_an_engine_that_is_gone(dies_in, monkeypatch):
    called: list[str] = []
    broadcasts: list[Broadcast] = []

    class Engine:
        def __getattr__(self, method: str) -> Any:
            def call(*arguments: Any) -> Answer:
                called.append(method)
                return Answer(die if method == dies_in else None)

            return SimpleNamespace(remote=call)

    def die() -> None:
        raise RayActorError

    def connect(road: str, source: Any, client: native.EngineClient, members: int) -> Broadcast:
        broadcasts.append(Broadcast(client))
        broadcasts[-1].connect()
        broadcasts[-1]._is_aborted.clear()
        return broadcasts[-1]

    monkeypatch.setattr(native, "ray", LittleRay())
    monkeypatch.setattr(native, "import_vllm", lambda: None)
    monkeypatch.setattr(native, "_connect", connect)

    class Learner:
        config = SimpleNamespace(
            dtype="float32", vllm_settings=SimpleNamespace(tensor_parallel_size=1)
        )

    learner = Learner()
    for number in (1, 2):  # a broken connection is not used again
        started = time.monotonic()
        problem = native.send_weights(
            learner,
            road="nccl",
            module_id=POLICY,
            engines=[Engine()],
            incarnations=["born-0"],
            version=number,
        )
        assert str(problem).startswith("RayActorError")
        assert time.monotonic() - started < 10.0
        assert len(broadcasts) == number
    if dies_in == "receive":
        deadline = time.monotonic() + 10.0
        while any(each.device_waits for each in broadcasts):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    for each in broadcasts:
        each.shutdown()
