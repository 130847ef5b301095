"""Learners and EnvRunners that die or stop where RLlib does not look; a table of Ray's, no Ray."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated.common_pb2 import Address
from ray.exceptions import ActorDiedError, RayTaskError
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.utils.actor_manager import FaultTolerantActorManager

from rllib_gigpo import learner_group, starting, watched_actors
from rllib_gigpo.learner_group import LLMLearnerGroup
from rllib_gigpo.starting import made_in_time
from rllib_gigpo.watched_actors import LearnerError, WatchedActors

# Learners at their start ----------------------------------------------------------------------

HERE, ELSEWHERE = ("10.0.0.1", 7), ("10.0.0.1", 8)


class Table:
    """Ray's table of actors, and its kill by id."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.killed: list[str] = []
        self.some_died = threading.Event()

    def make(self, owner: tuple[str, int] = HERE, state: str = "ALIVE") -> str:
        actor_id = f"{len(self.entries):032x}"
        address = {"IPAddress": owner[0], "Port": owner[1]}
        self.entries[actor_id] = {"State": state, "OwnerAddress": address}
        return actor_id

    def kill_actor(self, actor_id: Any, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor_id.hex())
        self.entries[actor_id.hex()]["State"] = "DEAD"
        self.some_died.set()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    table = Table()
    own = Address(ip_address=HERE[0], port=HERE[1]).SerializeToString()
    ray = starting.ray
    monkeypatch.setattr(
        starting,
        "ray",
        SimpleNamespace(
            ActorID=ray.ActorID, put=lambda value: SimpleNamespace(owner_address=lambda: own)
        ),
    )
    monkeypatch.setattr(starting, "actors", lambda: table.entries)
    monkeypatch.setattr(starting, "global_worker", SimpleNamespace(core_worker=table))
    return table


def start_learners(monkeypatch: pytest.MonkeyPatch, start: Any, limit_s: float | None) -> None:
    """Start a group of which RLlib's part is another function."""
    monkeypatch.setattr(LearnerGroup, "__init__", lambda self, **kwargs: start())
    monkeypatch.setattr(LearnerGroup, "__del__", lambda self: None, raising=False)
    LLMLearnerGroup(config=SimpleNamespace(num_learners=2, heartbeat_timeout_s=limit_s))


def with_nothing_to_raise() -> None:
    """What RLlib does with a learner that dies while they find each other."""
    try:
        raise ActorDiedError
    except ActorDiedError:
        failure: Any = None
        raise failure  # noqa: B904


def in_what_it_was_asked() -> None:
    raise RayTaskError("connect", "Traceback:\nOSError: port in use", OSError("port in use"))


def in_its_constructor() -> None:
    try:
        in_what_it_was_asked()
    except RayTaskError as error:
        raise ActorDiedError(error) from None


@pytest.mark.parametrize(
    ("die", "told"),
    [
        (with_nothing_to_raise, r"its process was killed \(its log"),
        (in_what_it_was_asked, "OSError: port in use"),
        (in_its_constructor, "OSError: port in use"),
    ],
)
def test_a_learner_that_dies_at_its_start_ends_the_others(table, monkeypatch, die, told):
    others = [table.make(), table.make(ELSEWHERE)]
    learners: list[str] = []

    def start() -> None:
        learners.extend(table.make(state=state) for state in ("DEAD", "ALIVE", "PENDING_CREATION"))
        others.append(table.make(ELSEWHERE))
        die()

    expected = f"a learner died or stopped while it was started: {told}.*; the learners were ended"
    with pytest.raises(LearnerError, match=expected):
        start_learners(monkeypatch, start, 60.0)
    assert sorted(table.killed) == learners[1:]
    assert all(table.entries[actor_id]["State"] == "ALIVE" for actor_id in others)


def test_a_learner_that_stops_at_its_start_ends_the_others(table, monkeypatch):
    monkeypatch.setattr(learner_group, "START_LIMIT_S", 0.05)

    def start() -> None:
        table.make()
        assert table.some_died.wait(20.0)
        with_nothing_to_raise()

    told = r"not all ran after 0.05 s \(is there room for them"
    with pytest.raises(LearnerError, match=told):
        start_learners(monkeypatch, start, 0.01)
    assert len(table.killed) == 1


@pytest.mark.parametrize("limit_s", [20.0, None])
def test_learners_may_take_longer_than_a_heartbeat_to_start(table, monkeypatch, limit_s):
    monkeypatch.setattr(learner_group, "START_LIMIT_S", 0.05)

    def start() -> None:
        table.make()
        assert not table.some_died.wait(0.3)
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):  # what is no death stays what it is
        start_learners(monkeypatch, start, limit_s)
    assert len(table.killed) == 1


# EnvRunners at their start --------------------------------------------------------------------


def start_runners(
    table: Table, limit_s: float | None, states: list[str], error: Exception | None
) -> list[str]:
    """Make EnvRunners, wait for half a second or their end, and raise what RLlib does."""
    with made_in_time(limit_s):
        made = [table.make(state=state) for state in states]
        table.some_died.wait(0.5 if limit_s is None or "PENDING_CREATION" not in states else 30.0)
        if error is not None:
            raise error
    return made


# RLlib may raise what it hears of a death, or pass over it.
@pytest.mark.parametrize("error", [ActorDiedError(), None])
def test_a_runner_that_is_not_made_in_time_ends_the_start(table, error):
    others = [table.make(state="PENDING_CREATION"), table.make(ELSEWHERE, "PENDING_CREATION")]
    told = r"an EnvRunner was not made within 0.2 s \(is there room for it\?"
    with pytest.raises(RuntimeError, match=told):
        start_runners(table, 0.2, ["ALIVE", "PENDING_CREATION"], error)
    assert sorted(table.killed) == sorted(table.entries.keys() - set(others))
    assert len(table.killed) == 2


@pytest.mark.parametrize(("limit_s", "state"), [(0.1, "ALIVE"), (None, "PENDING_CREATION")])
def test_a_runner_that_was_made_in_time_or_has_no_limit_is_left_alone(table, limit_s, state):
    assert len(start_runners(table, limit_s, [state], None)) == 1
    with pytest.raises(ValueError, match="no such model"):
        start_runners(table, limit_s, [state], ValueError("no such model"))
    assert table.killed == []


def test_each_runner_has_the_whole_limit(table):
    with made_in_time(0.4):
        for _ in range(4):
            actor_id = table.make(state="PENDING_CREATION")
            assert not table.some_died.wait(0.2)
            table.entries[actor_id]["State"] = "ALIVE"
    assert table.killed == []


# EnvRunners out of service --------------------------------------------------------------------


class Runners:
    """Two EnvRunners of which RLlib has taken the second out of service, and its pings to it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        limit_s: float | None,
        start_limit_s: float | None = None,
    ):
        self.now = 0.0
        self.entries = {f"actor-{n}": {"State": "ALIVE", "NumRestarts": 1} for n in (1, 2)}
        self.killed: list[str] = []
        self.answers = False
        handles: list[Any] = [
            SimpleNamespace(_actor_id=SimpleNamespace(hex=name.__str__)) for name in self.entries
        ]
        plain = FaultTolerantActorManager(handles, init_id=1)
        plain.set_actor_state(2, healthy=False)
        self.manager = WatchedActors.take_over(plain, limit_s, start_limit_s=start_limit_s)
        monkeypatch.setattr(FaultTolerantActorManager, "probe_unhealthy_actors", self._ping)
        monkeypatch.setattr(watched_actors, "actors", self.entries.__getitem__)
        monkeypatch.setattr(watched_actors, "ray", SimpleNamespace(kill=self._kill))
        monkeypatch.setattr(watched_actors, "time", SimpleNamespace(monotonic=lambda: self.now))

    @property
    def entry(self) -> dict[str, Any]:
        return self.entries["actor-2"]

    def _ping(self, timeout_seconds: float, mark_healthy: bool) -> list[int]:
        self.now += 0.0 if self.answers else timeout_seconds
        if self.answers:
            self.manager.set_actor_state(2, healthy=True)
        return [2] if self.answers else []

    def _kill(self, actor: Any, no_restart: bool) -> None:
        assert not no_restart
        self.killed.append(actor._actor_id.hex())
        self.entry["NumRestarts"] += 1

    def probe(self, times: int = 1) -> list[int]:
        for _ in range(times):
            restored = self.manager.probe_unhealthy_actors(timeout_seconds=30.0, mark_healthy=True)
        return restored


def test_a_runner_that_stops_before_its_first_ping_is_replaced(monkeypatch):
    runners = Runners(monkeypatch, limit_s=50.0)
    runners.probe(2)
    assert runners.killed == []  # silent for 30 s since it was first seen alive
    runners.probe()
    assert runners.killed == ["actor-2"]
    assert runners.manager.num_silent == 1
    # The next process has the whole limit again, and stops too.
    runners.probe(2)
    assert len(runners.killed) == 1
    runners.probe()
    assert len(runners.killed) == 2
    runners.answers = True
    assert runners.probe() == [2]
    assert len(runners.killed) == 2


@pytest.mark.parametrize("state", ["RESTARTING", "PENDING_CREATION", "DEPENDENCIES_UNREADY"])
def test_a_runner_that_is_being_made_again_has_a_limit_of_its_own(monkeypatch, state):
    runners = Runners(monkeypatch, limit_s=50.0, start_limit_s=100.0)
    runners.entry["State"] = state
    runners.probe(4)
    assert runners.killed == []  # for 90 s since it was first seen
    runners.probe()
    assert runners.killed == ["actor-2"]
    runners.probe(4)
    assert len(runners.killed) == 1
    runners.probe()
    assert len(runners.killed) == 2
    # Made at last, it is silent for 60 s from when that was first seen.
    runners.entry["State"] = "ALIVE"
    runners.probe(2)
    assert len(runners.killed) == 2
    runners.probe()
    assert len(runners.killed) == 3


@pytest.mark.parametrize(
    ("state", "start_limit_s"), [("RESTARTING", None), ("RESTARTING", 1e6), ("DEAD", 100.0)]
)
def test_a_runner_that_is_being_made_is_waited_for(monkeypatch, state, start_limit_s):
    runners = Runners(monkeypatch, limit_s=50.0, start_limit_s=start_limit_s)
    runners.entry["State"] = state
    runners.probe(100)
    assert runners.killed == []
    # Its silence counts from when it had been made.
    runners.entry["State"] = "ALIVE"
    runners.probe(2)
    assert runners.killed == []
    runners.probe()
    assert runners.killed == ["actor-2"]


def test_without_a_limit_a_silent_runner_is_waited_for(monkeypatch):
    runners = Runners(monkeypatch, limit_s=None)
    runners.probe(100)
    assert runners.killed == []
