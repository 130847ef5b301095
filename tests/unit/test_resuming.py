"""Which checkpoints a run that goes on keeps, and what it does where it cannot go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rllib_gigpo.checkpoints import Place, save_whole
from rllib_gigpo.resuming import _forget_others, newest_checkpoint, train_to


def saved(folder: Path, *numbers: int) -> None:
    for number in numbers:
        place = Place.of(folder / f"checkpoint_{number:06d}")
        save_whole(place, lambda to: (to / "state").write_bytes(b"state"))


def numbers(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("checkpoint_")) for path in folder.iterdir()}


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
