"""Tune's driver holds the calls that are under way, not all answers of a trial or their texts."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.air.execution._internal import RayActorManager
from ray.tune.utils import serialization
from ray.util import debug

from rllib_gigpo.tune_results import release_results

pytestmark = pytest.mark.ray


class Held(tune.Callback):
    """The most references of calls that the driver held at once."""

    most = 0

    def on_trial_result(self, *_: Any, **__: Any) -> None:
        """Look at each result."""
        managers = [o for o in gc.get_objects() if isinstance(o, RayActorManager)]
        held = [len(f) for m in managers for f in m._tracked_actors_to_task_futures.values()]
        self.most = max(self.most, *held)


def most_held(folder: Path) -> int:
    def report(config: Any) -> None:
        for _ in range(15):
            tune.report({"value": 1.0})

    held = Held()
    run_config = tune.RunConfig(storage_path=str(folder), callbacks=[held], verbose=0)
    assert not tune.Tuner(report, run_config=run_config).fit().errors
    return held.most


@pytest.mark.usefixtures("local_ray")
def test_results_are_let_go_of(tmp_path, monkeypatch):
    plain = RayActorManager._actor_task_resolved
    plain = getattr(plain, "__wrapped__", plain)
    monkeypatch.setattr(RayActorManager, "_actor_task_resolved", plain)
    # What Ray does; where it no longer does, `tune_results` can go.
    assert most_held(tmp_path / "plain") > 10
    release_results()
    release_results()
    assert most_held(tmp_path / "released") <= 3


class Result:
    """As a checkpoint's result: JSON has no form for it, and its text holds all metrics."""

    def __init__(self, value: int):
        self.value = value

    def __repr__(self) -> str:
        return f"Result({self.value})"


def texts_kept(count: int) -> int:
    """Return how many texts stay after each of `count` different results was written once."""
    before = len(debug._logged)
    for value in range(count):
        json.dumps({"result": Result(value)}, cls=serialization.TuneFunctionEncoder)
    return len(debug._logged) - before


def test_texts_of_written_results_are_let_go_of(monkeypatch):
    monkeypatch.setattr(
        RayActorManager, "_actor_task_resolved", RayActorManager._actor_task_resolved
    )
    monkeypatch.setattr(debug, "_logged", set())
    monkeypatch.setattr(serialization, "log_once", debug.log_once)
    # What Ray does; where it no longer does, that part of `tune_results` can go.
    assert texts_kept(5) == 5
    release_results()
    assert texts_kept(5) == 0
