"""When vLLM engines are started, how long they may take, and beside which learner; no Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray as real_ray
from ray.exceptions import RayActorError

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.engines.vllm import fleet, remote
from rllib_gigpo.engines.vllm.actor import Birth
from rllib_gigpo.engines.vllm.fleet import Fleet
from rllib_gigpo.engines.vllm.process import EngineDiedError
from rllib_gigpo.engines.vllm.remote import RemoteVLLMEngine
from rllib_gigpo.engines.vllm.settings import VLLMSettings
from rllib_gigpo.weight_sync import WeightSync, check_learner_of_driver

TURN = ("create", "born")


class Engine:
    """The handle of an engine actor; notes when it is created and asked for its birth."""

    def __init__(self, name: str, events: list[str]):
        self.name = name
        self.birth = SimpleNamespace(remote=lambda: self)
        self._events = events
        events.append(f"create {name}")

    def born(self) -> Birth:
        self._events.append(f"born {self.name}")
        return Birth(self.name, 1, 0)


class LittleRay:
    """What `remote` uses of Ray; an answer is the engine that gives it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.fails: str | None = None

    def create(self, policy_id: str, *arguments: Any) -> Engine:
        number = sum(event.startswith("create") for event in self.events)
        return Engine(f"{policy_id}{number}", self.events)

    def wait(self, engines: list[Engine], num_returns: int, timeout: float | None) -> Any:
        return engines, []

    def get(self, engines: list[Engine], timeout: float) -> list[Birth]:
        if any(engine.name == self.fails for engine in engines):
            raise RayActorError
        return [engine.born() for engine in engines]

    def kill(self, actor: Any) -> None:
        self.events.append(f"kill {getattr(actor, 'name', actor)}")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> LittleRay:
    little = LittleRay()
    for module in (remote, fleet):
        monkeypatch.setattr(module, "ray", little)
    monkeypatch.setattr(remote, "create_vault", lambda: ("name", "vault"))
    monkeypatch.setattr(remote, "create_engine", little.create)
    return little


def start(num_gpus: float) -> RemoteVLLMEngine:
    settings = VLLMSettings(num_gpus=num_gpus)
    return RemoteVLLMEngine.start({"a": "folder", "b": "folder"}, settings, num_engines=2)


def test_engines_on_parts_of_a_gpu_start_one_after_another(ray):
    client = start(0.25)
    one_by_one = [f"{what} {name}" for name in ("a0", "a1", "b2", "b3") for what in TURN]
    assert ray.events[: len(one_by_one)] == one_by_one
    assert {policy: len(each) for policy, each in client.fleet.engines.items()} == {"a": 2, "b": 2}
    assert client.faults.engine_restarts == 0


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_engines_that_share_no_gpu_start_together(ray, num_gpus):
    start(num_gpus)
    names = ("a0", "a1", "b2", "b3")
    assert ray.events == [f"{what} {name}" for what in TURN for name in names]


def test_where_an_engine_does_not_start_those_before_it_are_ended(ray):
    ray.fails = "a1"
    with pytest.raises(EngineDiedError, match="does not start"):
        start(0.25)
    assert ray.events == [
        "create a0",
        "born a0",
        "create a1",
        "kill a0",
        "kill a1",
        "kill vault",
    ]


@pytest.mark.parametrize(
    ("heartbeat_timeout_s", "limit"), [(None, 1800.0), (60.0, 1800.0), (7200.0, 7200.0)]
)
def test_an_engine_may_take_as_long_to_start_as_a_learner(ray, heartbeat_timeout_s, limit):
    client = RemoteVLLMEngine(Fleet({}, "vault", VLLMSettings(), heartbeat_timeout_s))
    waited: list[float] = []
    client._await = lambda engines, refs, timeout_s: waited.append(timeout_s)
    client._births([Engine("a0", ray.events)])
    assert waited == [limit]


# Beside a learner in the main process -------------------------------------------------------------


def config_of(learner_gpus: float, engine_gpus: float, **engines: Any) -> GiGPOConfig:
    return (
        GiGPOConfig()
        .environment("KeyDoor")
        .llm(model="tiny", max_prompt_tokens=64, max_response_tokens=8)
        .learners(num_gpus_per_learner=learner_gpus)
        .engines(engine="vllm", engine_num_gpus=engine_gpus, **engines)
    )


@pytest.mark.parametrize(
    ("gpus", "num_engines"),
    [((1, 1), 1), ((1, 0.5), 1), ((0.5, 0.5), 2), ((0.5, 1), 1)],
)
def test_a_learner_whose_gpu_an_engine_would_get_too_is_refused(gpus, num_engines):
    with pytest.raises(ValueError, match=r"set learners\(num_learners=1\)"):
        check_learner_of_driver(config_of(*gpus, num_engines=num_engines))


@pytest.mark.parametrize("gpus", [(0, 0), (1, 0), (0, 1), (0.5, 0.5)])
def test_a_learner_that_shares_its_gpu_or_has_none_is_not(gpus):
    check_learner_of_driver(config_of(*gpus))


@pytest.mark.parametrize(
    ("is_local", "is_in_worker", "is_refused"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_only_a_main_process_that_ray_did_not_start_is_asked(
    monkeypatch, is_local, is_in_worker, is_refused
):
    mode = real_ray.WORKER_MODE if is_in_worker else real_ray.SCRIPT_MODE
    context = SimpleNamespace(worker=SimpleNamespace(mode=mode))
    monkeypatch.setattr(real_ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(RemoteVLLMEngine, "start", lambda *arguments, **options: "fleet")

    def connect() -> WeightSync:
        return WeightSync(config_of(1, 1), [], lambda call: None, learner_is_local=is_local)

    if is_refused:
        with pytest.raises(ValueError, match="num_learners=0"):
            connect()
    else:
        assert connect().fleet == "fleet"
