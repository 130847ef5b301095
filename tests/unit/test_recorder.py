"""The recorder of a run: order of writing, full disks, trackers that fail, and the end of a run."""

import errno
import os
import time
from typing import Any

import pytest
from ray.rllib.algorithms.algorithm import Algorithm

from rllib_gigpo import GiGPO, GiGPOConfig
from rllib_gigpo.recording.folder import read_lines, write_lines
from rllib_gigpo.recording.recorder import RunRecorder
from rllib_gigpo.whole_checkpoints import WholeCheckpoints
from tests.recorded import EPISODES, iteration_of
from tests.tiny_runs import tiny_config


def test_the_rows_of_an_iteration_are_there_before_a_checkpoint_counts_it_as_done(
    tmp_path, monkeypatch
):
    """A process that is killed after the save has lost none: nobody would play them again."""
    algorithm: Any = object.__new__(GiGPO)
    algorithm.config = GiGPOConfig().recording(folder=str(tmp_path))
    algorithm._storage = None
    algorithm.recorder = recorder = RunRecorder(algorithm)
    folder = recorder.folder

    def write_slowly(iteration):
        time.sleep(0.3)
        write_lines(folder.rollout_file(iteration.number), [])

    def save(self, path, **options):
        assert folder.recorded_iterations() == [7]
        return path

    monkeypatch.setattr(recorder, "_write_rollouts", write_slowly)
    monkeypatch.setattr(recorder, "_load_tokenizer", lambda: None)
    monkeypatch.setattr(WholeCheckpoints, "save_to_path", save)
    recorder._write_soon(iteration_of(EPISODES, 7))
    assert algorithm.save_to_path(tmp_path / "checkpoint") == tmp_path / "checkpoint"
    recorder.close()


def recorder_of(tmp_path, **recording) -> tuple[Any, RunRecorder]:
    """An algorithm without anything but a recorder, whose run has begun."""
    algorithm: Any = object.__new__(GiGPO)
    algorithm.config = (
        GiGPOConfig().environment("KeyDoor").llm(model="tiny").recording(folder=str(tmp_path))
    )
    algorithm.config.recording(every=0, **recording)
    algorithm._storage = None
    algorithm.recorder = recorder = RunRecorder(algorithm)
    algorithm.first_learner = lambda call: {}
    recorder.begin(0)
    return algorithm, recorder


def record(algorithm: Any, number: int) -> None:
    algorithm.num_updates = number
    iteration = iteration_of(EPISODES, number)
    algorithm.recorder.keep(iteration.episodes, iteration.batch)
    algorithm.recorder.on_train_result(algorithm=algorithm, result={"env_runners": {}})


@pytest.mark.parametrize("room_for", [0, 1])
def test_a_full_disk_at_a_turn_back_stops_nothing_and_mixes_no_branches(
    room_for, tmp_path, monkeypatch
):
    algorithm, recorder = recorder_of(tmp_path)
    for number in (1, 2, 3):
        record(algorithm, number)

    written = []

    def full(path, rows):
        # The copy of what is laid aside may still fit, the file without it does not.
        written.append(path)
        if path.name == "metrics.jsonl" and len(written) % 2 == room_for:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_lines(path, rows)

    with monkeypatch.context() as patched:
        patched.setattr("rllib_gigpo.recording.folder.write_lines", full)
        recorder.begin(1)
        record(algorithm, 2)
        # The old branch is still there, whole, and nothing of the new one beside it.
        assert [line["iteration"] for line in recorder.lines()] == [1, 2, 3]
        # It goes back once more, to a later point of the new branch.
        record(algorithm, 3)
        recorder.begin(2)
        failed = recorder.failures
        assert failed >= 3
    record(algorithm, 3)
    # There was room again: the new branch's second iteration is lost, as any line of a full disk.
    assert [line["iteration"] for line in recorder.lines()] == [1, 3]
    superseded = read_lines(tmp_path / "superseded" / "1" / "metrics.jsonl")
    assert [line["iteration"] for line in superseded] == [2, 3]
    assert recorder.failures == failed
    recorder.close()


class Failing:
    """A tracker whose server is down."""

    def __init__(self, run: Any, folder: Any):
        self.calls: list[str] = []

    def log(self, step: int, numbers: Any) -> None:
        self.calls.append("log")
        raise ConnectionError("no server")

    def finish(self) -> None:
        self.calls.append("finish")
        raise ConnectionError("no server")


def test_a_tracker_that_fails_stops_no_run(tmp_path, caplog):
    algorithm, recorder = recorder_of(tmp_path, trackers=[Failing])
    (tracker,) = recorder._trackers
    record(algorithm, 1)
    assert [line["iteration"] for line in recorder.lines()] == [1]
    recorder.close()
    assert tracker.calls == ["log", "finish"]
    assert "a tracker failed in Failing.log: ConnectionError('no server')" in caplog.text


def test_what_a_save_counts_as_done_is_on_the_disk_itself(tmp_path, monkeypatch):
    algorithm, recorder = recorder_of(tmp_path)
    record(algorithm, 1)
    synced = []
    real = os.fsync

    def note(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(WholeCheckpoints, "save_to_path", lambda self, path, **options: path)
    monkeypatch.setattr("os.fsync", note)
    algorithm.save_to_path(tmp_path / "checkpoint")
    assert {str(tmp_path / "metrics.jsonl"), str(tmp_path)} <= set(synced)
    recorder.close()


@pytest.mark.parametrize("fails", ["recorder", "sampler", "player", "weights"])
def test_all_of_a_run_is_stopped_whatever_fails_on_the_way(fails, monkeypatch):
    stopped = []

    class Part:
        def __init__(self, name: str):
            self.name = name

        def close(self) -> None:
            stopped.append(self.name)
            if self.name == fails:
                raise ConnectionError(f"{self.name} failed")

    algorithm: Any = object.__new__(GiGPO)
    for name in ("player", "sampler", "recorder", "weights"):
        setattr(algorithm, name, Part(name))
    monkeypatch.setattr(Algorithm, "cleanup", lambda self: stopped.append("actors"))
    with pytest.raises(ConnectionError, match=f"{fails} failed"):
        algorithm.cleanup()
    # The sampler's thread ends when its player does.
    assert stopped == ["player", "sampler", "recorder", "actors", "weights"]


def test_a_run_that_could_not_be_connected_is_stopped(monkeypatch):
    # Whoever tries again in the same process would find its actors' CPUs and GPUs taken.
    stopped = []

    def refuse(self):
        raise RuntimeError("an engine does not start")

    def fail(self):
        stopped.append(self)
        raise ConnectionError("nor can it be stopped cleanly")

    monkeypatch.setattr(Algorithm, "setup", lambda self, config: None)
    monkeypatch.setattr(GiGPO, "_connect", refuse)
    monkeypatch.setattr(GiGPO, "cleanup", fail)
    algorithm: Any = object.__new__(GiGPO)
    with pytest.raises(RuntimeError, match="an engine does not start"):
        algorithm.setup(tiny_config())
    assert stopped == [algorithm]
