"""Engines that stop without dying, and engines that only seem to: a table of Ray's without Ray."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rllib_gigpo.engines.base import Completion, Request, Sampling
from rllib_gigpo.engines.vllm import remote
from rllib_gigpo.engines.vllm.actor import Birth, WeightVault
from rllib_gigpo.engines.vllm.remote import Fleet, RemoteVLLMEngine
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
        condemn = SimpleNamespace(remote=lambda process: Answer(vault.condemn(process)))
        self.vault = SimpleNamespace(condemn=condemn)

    def client(self, limit_s: float = 0.1) -> RemoteVLLMEngine:
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
    monkeypatch.setattr(remote, "_RESTART_TIMEOUT_S", 1.0)
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
