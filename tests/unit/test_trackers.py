"""Trackers follow a run and go on under its id when it is resumed."""

import sys

import pytest

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.recording.recorder import flat_numbers
from rllib_gigpo.recording.trackers import start_trackers
from tests import fake_trackers
from tests.recorded import RUN, metrics_line


def started(name: str, run: dict, tmp_path):
    (tracker,) = start_trackers([name], run, tmp_path)
    return tracker


@pytest.fixture
def run():
    return {**RUN, "trackers": {}}


@pytest.fixture
def module(request, monkeypatch):
    made = getattr(fake_trackers, request.param)()
    monkeypatch.setitem(sys.modules, request.param, made)
    return made


def test_numbers_have_flat_names():
    numbers = flat_numbers(metrics_line(1))
    assert numbers["env_runners/step_groups/group_share/2-5"] == 0.25
    assert numbers["learners/default_policy/kl"] == 0.01
    assert all(isinstance(value, float) for value in numbers.values())


@pytest.mark.parametrize("module", ["wandb"], indirect=True)
def test_wandb_resumes_under_the_run_s_id(module, run, tmp_path):
    for step in (1, 2):
        tracker = started("wandb", run, tmp_path)
        tracker.log(step, {"a/b": 0.5})
        tracker.finish()
    first, second = module.runs
    assert first.settings["id"] == second.settings["id"] == "abc"
    assert first.settings["resume"] == "allow"
    assert first.settings["config"]["omega"] == 0.5
    assert (first.rows, second.rows) == ({1: {"a/b": 0.5}}, {2: {"a/b": 0.5}})
    assert second.finished


@pytest.mark.parametrize("module", ["mlflow"], indirect=True)
def test_mlflow_resumes_the_run_that_it_made(module, run, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    for step in (1, 2):
        tracker = started("mlflow", run, tmp_path)
        assert module.runs["run0"]["status"] == "RUNNING"
        tracker.log(step, {"step_groups/group_share/>=50": 0.5, "a/b": 1.0})
        tracker.finish()
    assert run["trackers"] == {"mlflow": "run0"}
    (made,) = module.runs.values()
    assert made["params"] == {"omega": "0.5"}
    assert made["metrics"]["a/b"] == {1: 1.0, 2: 1.0}
    assert made["metrics"]["step_groups/group_share/__50"] == {1: 0.5, 2: 0.5}
    assert (made["status"], module.experiments) == ("FINISHED", {"mine": "0"})


@pytest.mark.parametrize("module", ["trackio"], indirect=True)
def test_trackio_resumes_under_the_run_s_name(module, run, tmp_path):
    for step in (1, 2):
        tracker = started("trackio", run, tmp_path)
        tracker.log(step, {"a/b": 0.5})
        tracker.finish()
    (((project, name), made),) = module.runs.items()
    assert (project, name) == ("rllib-gigpo-KeyDoor", "GiGPO-KeyDoor-abc")
    assert made.rows == {1: {"a/b": 0.5}, 2: {"a/b": 0.5}}
    assert made.finished == 2


def test_a_missing_package_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"needs the package wandb: pip install .*\[wandb\]"):
        start_trackers(["wandb"], run, tmp_path)


@pytest.mark.parametrize("trackers", ["wandb", ["tensorbord"], [3]])
def test_what_is_no_tracker_is_refused(trackers):
    config = GiGPOConfig().environment("KeyDoor").llm(model="tiny").recording(trackers=trackers)
    with pytest.raises(ValueError, match=r"trackers=.*: expected a list of 'wandb', 'mlflow'"):
        config.validate()
