"""Which checkpoints a run that goes on keeps, and what it does where it cannot go on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rllib_gigpo.checkpoints import CheckpointError, Place, save_whole
from rllib_gigpo.recording.folder import RunFolder, read_lines, write_json, write_lines
from rllib_gigpo.resuming import _forget_others, newest_checkpoint, train_to
from rllib_gigpo.watched_actors import LearnerError


def saved(folder: Path, *numbers: int) -> None:
    for number in numbers:
        place = Place.of(folder / f"checkpoint_{number:06d}")
        save_whole(place, lambda to: (to / "state").write_bytes(b"state"))


def numbers(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("checkpoint_")) for path in folder.glob("checkpoint_*")}


def test_the_newest_checkpoints_stay(tmp_path):
    saved(tmp_path, 1, 2, 3, 10)
    _forget_others(tmp_path, done=10, keep=2)
    assert numbers(tmp_path) == {3, 10}


def test_nobody_goes_on_from_a_branch_that_a_rollback_has_left(tmp_path):
    saved(tmp_path, 6, 9, 10)
    saved(tmp_path, 7)  # after the collapse of 10 and a rollback to 6
    _forget_others(tmp_path, done=7, keep=1)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint_000007"
    assert numbers(tmp_path) == {7}


def test_the_one_that_had_its_name_before_is_taken_for_a_damaged_one(tmp_path):
    saved(tmp_path, 6, 7)
    saved(tmp_path, 7)
    (tmp_path / "checkpoint_000007" / "state").write_bytes(b"st")
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint_000007.previous"
    (tmp_path / "checkpoint_000007.previous" / "state").unlink()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint_000006"


def test_a_save_killed_between_its_two_renames_has_left_the_one_before(tmp_path):
    saved(tmp_path, 6, 7)
    (tmp_path / "checkpoint_000007").rename(tmp_path / "checkpoint_000007.previous")
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint_000007.previous"


@pytest.mark.parametrize("arguments", [{"keep": 0}, {"checkpoint_every": 0}])
def test_a_run_that_could_not_go_on_is_refused(tmp_path, arguments):
    config: Any = None
    with pytest.raises(ValueError, match="=0: expected at least 1"):
        train_to(config, tmp_path, 1, then=lambda algorithm: None, **arguments)


class Refusing:
    """Settings and algorithm in one: it takes over no checkpoint."""

    is_stopped = False

    def copy(self, **kwargs: Any) -> Refusing:
        return self

    def recording(self, **kwargs: Any) -> Refusing:
        return self

    def build_algo(self) -> Refusing:
        return self

    def restore_from_path(self, path: Path) -> None:
        raise ValueError(f"another model than that of {path.name}")

    def stop(self) -> None:
        self.is_stopped = True


def test_what_takes_over_no_checkpoint_is_stopped(tmp_path):
    saved(tmp_path, 4)
    config: Any = Refusing()
    with pytest.raises(ValueError, match="another model than that of checkpoint_000004"):
        train_to(config, tmp_path, 5, then=lambda algorithm: None)
    assert config.is_stopped


class Killed(BaseException):
    """What ends the process."""


class Scripted(Refusing):
    """Counts to the iterations of a script, which a rollback lowers; it is killed at its end."""

    def __init__(self, folder: Path, *script: int):
        self.folder = folder
        self.script = list(script)
        self.num_updates = 0
        self.is_built = False

    def build_algo(self) -> Scripted:
        self.is_built = True
        return self

    def train(self) -> dict[str, Any]:
        if not self.script:
            raise Killed
        self.num_updates = self.script.pop(0)
        write_json(RunFolder(self.folder).run, {"run_id": "scripted"})
        write_lines(RunFolder(self.folder).metrics, trained(self.num_updates))
        return {}

    def save_to_path(self, path: Path) -> None:
        save_whole(Place.of(path), lambda to: (to / "state").write_text(str(self.num_updates)))

    def restore_from_path(self, path: Path) -> None:
        self.num_updates = int((path / "state").read_text())


def trained(count: int) -> list[dict[str, Any]]:
    return [{"iteration": number} for number in range(1, count + 1)]


def run(config: Any, iterations: int, **settings: Any) -> int:
    return train_to(
        config, config.folder, iterations, then=lambda algorithm: algorithm.num_updates, **settings
    )


def test_a_run_whose_checkpoints_are_all_damaged_loses_nothing(tmp_path):
    assert run(Scripted(tmp_path, 1, 2, 3), 3) == 3
    for path in tmp_path.glob("checkpoint_*"):
        (path / "state").write_text("damaged")
    config = Scripted(tmp_path, 1)
    with pytest.raises(CheckpointError) as error:
        run(config, 4)
    assert str(error.value) == (
        f"none of the 2 checkpoints in {tmp_path} is whole (the log says why): repair or remove "
        "them, or name another folder"
    )
    assert not config.is_built
    assert read_lines(RunFolder(tmp_path).metrics) == trained(3)
    assert numbers(tmp_path) == {2, 3}


def test_a_run_that_something_else_began_is_refused(tmp_path):
    write_json(RunFolder(tmp_path).run, {"run_id": "by hand"})
    write_lines(RunFolder(tmp_path).metrics, trained(7))
    config = Scripted(tmp_path, 1)
    with pytest.raises(ValueError, match="holds 7 iterations of run 'by hand', which train_to did"):
        run(config, 1)
    assert not config.is_built
    assert read_lines(RunFolder(tmp_path).metrics) == trained(7)


def test_what_was_killed_before_its_first_checkpoint_is_laid_aside(tmp_path):
    with pytest.raises(Killed):
        run(Scripted(tmp_path, 1, 2), 5, checkpoint_every=5)
    assert run(Scripted(tmp_path, 1), 1) == 1
    assert read_lines(RunFolder(tmp_path).metrics) == trained(1)
    assert read_lines(tmp_path / "superseded" / "1" / "metrics.jsonl") == trained(2)


def test_a_rollback_is_saved_at_once(tmp_path):
    # Every fifth iteration is saved. The 18th collapses and goes back to 12; 14 is the last.
    script = (*range(1, 18), 12, 13, 14)
    with pytest.raises(Killed):
        run(Scripted(tmp_path, *script), 20, checkpoint_every=5)
    assert numbers(tmp_path) == {10, 12}
    config = Scripted(tmp_path, 13, 14, 15)
    assert run(config, 15, checkpoint_every=5) == 15
    assert config.script == []


class Failing(Scripted):
    """A learner fails at the given moments, one after the other: "build", "restore", "train"."""

    def __init__(self, folder: Path, *script: int, fails: list[str]):
        super().__init__(folder, *script)
        self.fails = fails
        self.num_stops = 0

    def _maybe_fail(self, moment: str) -> None:
        if self.fails[:1] == [moment]:
            self.fails.pop(0)
            raise LearnerError(f"learner 1 of 2 died ({moment})")

    def build_algo(self) -> Scripted:
        self._maybe_fail("build")
        return super().build_algo()

    def restore_from_path(self, path: Path) -> None:
        self._maybe_fail("restore")
        super().restore_from_path(path)

    def train(self) -> dict[str, Any]:
        self._maybe_fail("train")
        return super().train()

    def stop(self) -> None:
        self.num_stops += 1


class Unstoppable(Failing):
    """What ends it is followed by a tracker's server that is down."""

    def stop(self) -> None:
        super().stop()
        raise ConnectionError("no server")


def test_what_ended_a_run_is_not_hidden_by_what_fails_while_it_is_stopped(tmp_path, caplog):
    config = Unstoppable(tmp_path, 2, fails=["train"])
    with pytest.raises(ConnectionError):  # the second run has nothing else to tell
        run(config, 2)
    assert (config.fails, config.num_stops) == ([], 2)
    assert "died (train) (failure 1 of at most" in caplog.text
    assert "the run could not be stopped cleanly" in caplog.text


@pytest.mark.parametrize(
    ("fails", "stops"),
    [(["build"], 1), (["restore"], 2), (["train"], 2), (["build", "restore", "train"], 3)],
)
def test_it_goes_on_after_a_learner_that_fails_at_any_moment(tmp_path, caplog, fails, stops):
    place = Place.of(tmp_path / "checkpoint_000001")
    save_whole(place, lambda to: (to / "state").write_text("1"))
    config = Failing(tmp_path, 2, fails=list(fails))
    assert run(config, 2, max_failures=len(fails)) == 2
    assert config.fails == []
    assert config.num_stops == stops
    for number, moment in enumerate(fails, start=1):
        assert f"died ({moment}) (failure {number} of at most {len(fails)})" in caplog.text
    config = Failing(tmp_path, 3, fails=["restore", "restore"])
    with pytest.raises(LearnerError, match="restore"):
        run(config, 3, max_failures=1)


def test_one_folder_is_trained_in_by_one_call_at_a_time(tmp_path):
    is_there, is_seen = threading.Event(), threading.Event()

    class Waiting(Scripted):
        def train(self) -> dict[str, Any]:
            is_there.set()
            assert is_seen.wait(60)
            return super().train()

    first = threading.Thread(target=run, args=(Waiting(tmp_path, 1), 1))
    first.start()
    assert is_there.wait(60)
    second = Scripted(tmp_path, 1)
    with pytest.raises(ValueError, match="another train_to is at work in") as error:
        run(second, 1)
    assert str(error.value) == (
        f"another train_to is at work in {tmp_path}: wait for it, end it, or name another folder"
    )
    assert not second.is_built
    is_seen.set()
    first.join()
    assert run(second, 1) == 1
    # The lock is no file of a run: nothing of it is cleared or laid aside.
    RunFolder(tmp_path).clear()
    assert (tmp_path / ".train_to.lock").exists()


def test_what_killed_saves_have_left_goes(tmp_path):
    left_over = tmp_path / ".checkpoint_000001.partial-0123abcd"
    left_over.mkdir()
    other = tmp_path / ".mine.partial-0123abcd"
    other.mkdir()
    assert run(Scripted(tmp_path, 2), 2) == 2
    assert not left_over.exists()
    assert other.exists()
