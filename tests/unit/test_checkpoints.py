"""Checkpoints are whole or not there, whatever happens while they are written and afterwards."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import pyarrow.fs
import pytest

from rllib_gigpo import checkpoints
from rllib_gigpo.checkpoints import (
    MANIFEST,
    CheckpointError,
    Place,
    check_part,
    check_whole,
    find_whole,
    is_whole,
    save_whole,
    whole_folder,
)

FILES = {"state.pkl": b"some state", "learner/weights.bin": bytes(range(200)), "empty": b""}


def fill(folder: Path, files: dict[str, bytes] | None = None) -> None:
    for name, content in (FILES if files is None else files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def saved(folder: Path, **facts) -> Path:
    save_whole(Place.of(folder), fill, facts)
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_written_is_whole(tmp_path):
    checkpoint = saved(tmp_path / "new" / "checkpoint", num_updates=3)
    check_whole(Place.of(checkpoint))
    told = json.loads((checkpoint / MANIFEST).read_text())
    assert told["num_updates"] == 3
    assert set(told["files"]) == set(FILES)
    # SHA-256 of nothing, of FIPS 180-4's examples.
    nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert told["files"]["empty"] == {"bytes": 0, "sha256": nothing}
    assert names(tmp_path / "new") == {"checkpoint"}


def test_files_that_others_add_do_no_harm(tmp_path):
    checkpoint = saved(tmp_path / "checkpoint")
    (checkpoint / ".metadata.json").write_text("{}")  # Tune does
    check_whole(Place.of(checkpoint))


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "gone"])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    file = saved(tmp_path / "checkpoint") / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "longer":
        file.write_bytes(content + b"x")
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif content:
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    if file.exists() and file.read_bytes() == content:
        check_whole(Place.of(tmp_path / "checkpoint"))  # nothing can be taken from nothing
        return
    with pytest.raises(CheckpointError, match=rf"{name}.*restore an earlier one"):
        check_whole(Place.of(tmp_path / "checkpoint"))


def test_one_flipped_bit_of_a_checksum_is_found(tmp_path):
    checkpoint = saved(tmp_path / "checkpoint")
    text = (checkpoint / MANIFEST).read_text()
    digit = text.index('"sha256": "') + len('"sha256": "')
    other = "0" if text[digit] != "0" else "1"
    (checkpoint / MANIFEST).write_text(text[:digit] + other + text[digit + 1 :])
    with pytest.raises(CheckpointError, match="its checksum differs"):
        check_whole(Place.of(checkpoint))


def test_the_one_before_is_kept(tmp_path):
    checkpoint = saved(tmp_path / "checkpoint", num_updates=1)
    saved(checkpoint, num_updates=2)
    saved(checkpoint, num_updates=3)
    updates = [
        json.loads((tmp_path / name / MANIFEST).read_text())["num_updates"]
        for name in ("checkpoint", "checkpoint.previous")
    ]
    assert updates == [3, 2]
    assert names(tmp_path) == {"checkpoint", "checkpoint.previous"}
    (checkpoint / "state.pkl").unlink()
    with pytest.raises(CheckpointError, match=r"restore the one before, .*checkpoint\.previous"):
        check_whole(Place.of(checkpoint))


def test_a_damaged_checkpoint_does_not_push_a_good_one_out(tmp_path):
    checkpoint = saved(tmp_path / "checkpoint", num_updates=1)
    saved(checkpoint, num_updates=2)
    (checkpoint / "learner/weights.bin").write_bytes(b"half")
    saved(checkpoint, num_updates=3)
    previous = tmp_path / "checkpoint.previous"
    assert json.loads((previous / MANIFEST).read_text())["num_updates"] == 1
    assert is_whole(Place.of(previous))
    assert is_whole(Place.of(checkpoint))


def test_other_folders_are_not_replaced(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"cat")
    with pytest.raises(ValueError, match="holds files and is no checkpoint"):
        saved(tmp_path / "photos")
    assert (tmp_path / "photos" / "cat.png").read_bytes() == b"cat"
    (tmp_path / "empty").mkdir()  # as Tune makes them
    saved(tmp_path / "empty")
    assert not (tmp_path / "empty.previous").exists()


def save_and_be_killed(moment: str, checkpoint: Path) -> None:
    """Save new files, and be killed (SIGKILL) at a moment of it; runs in a process of its own."""
    rename, count = Path.rename, 0

    def kill(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(self, target):
        nonlocal count
        count += 1
        if moment == f"rename {count}":
            kill()
        return rename(self, target)

    def write(folder: Path) -> None:
        fill(folder, {"state.pkl": b"new state"})
        if moment == "writing":
            kill()
        fill(folder, {"learner/weights.bin": b"new weights"})

    Path.rename = counted
    if moment == "manifest":
        hashlib.file_digest = kill
    save_whole(Place.of(checkpoint), write)


@pytest.mark.parametrize("moment", ["writing", "manifest", "rename 1", "rename 2", "never"])
def test_kill_9_leaves_the_old_or_the_new(tmp_path, moment):
    checkpoint = saved(tmp_path / "checkpoint")
    process = multiprocessing.get_context("fork").Process(
        target=save_and_be_killed, args=(moment, checkpoint)
    )
    process.start()
    process.join()
    assert process.exitcode == (0 if moment == "never" else -signal.SIGKILL)
    place = find_whole(Place.of(checkpoint))
    check_whole(place)
    expected = b"new state" if moment == "never" else FILES["state.pkl"]
    assert (Path(place.path) / "state.pkl").read_bytes() == expected
    # Between the two renames it is there under the other name, and nobody is asked to know that.
    assert place.path.endswith(".previous") == (moment == "rename 2")
    # The next save clears away what was left.
    saved(checkpoint)
    check_whole(Place.of(checkpoint))
    assert names(tmp_path) == {"checkpoint", "checkpoint.previous"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_refuses_keeps_the_old(tmp_path, code):
    checkpoint = saved(tmp_path / "checkpoint")

    def write(folder: Path) -> None:
        fill(folder, {"state.pkl": b"new state"})
        raise OSError(code, "refused")

    with pytest.raises(CheckpointError, match=r"refused; the one before is untouched in .*make"):
        save_whole(Place.of(checkpoint), write)
    check_whole(Place.of(checkpoint))
    assert (checkpoint / "state.pkl").read_bytes() == FILES["state.pkl"]
    assert names(tmp_path) == {"checkpoint"}


def test_a_disk_that_is_really_full_keeps_the_old(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a small disk")
    try:
        checkpoint = saved(disk / "checkpoint")
        with pytest.raises(CheckpointError, match="No space left on device; the one before is un"):
            save_whole(Place.of(checkpoint), lambda to: fill(to, {"big": bytes(10**6)}))
        check_whole(Place.of(checkpoint))
        assert names(disk) == {"checkpoint"}
        saved(checkpoint)  # there is room again
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_that_the_disk_does_not_give_back_is_damage(tmp_path, monkeypatch):
    saved(tmp_path / "checkpoint")

    def fail(place, name):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoints, "_digest", fail)
    with pytest.raises(CheckpointError, match=r"cannot be read .*Input/output error.*restore an"):
        check_whole(Place.of(tmp_path / "checkpoint"))
    assert not is_whole(Place.of(tmp_path / "checkpoint"))


def test_a_part_is_compared_with_the_manifest_of_the_whole(tmp_path):
    checkpoint = saved(tmp_path / "checkpoint")
    (checkpoint / "state.pkl").write_bytes(b"other")
    check_part(Place.of(checkpoint / "learner"))
    (checkpoint / "learner/weights.bin").write_bytes(b"other")
    with pytest.raises(CheckpointError, match=r"learner/weights\.bin"):
        check_part(Place.of(checkpoint / "learner"))
    check_part(Place.of(tmp_path))  # no part of a checkpoint: nothing to compare with


def test_a_remote_checkpoint_is_written_once_its_manifest_last(tmp_path):
    remote = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    place = Place(remote, "bucket/checkpoint")
    save_whole(place, fill, {})
    check_whole(place)
    with pytest.raises(ValueError, match="name a new folder"):
        save_whole(place, fill, {})
    remote.delete_file("bucket/checkpoint/state.pkl")
    with pytest.raises(CheckpointError, match=r"state\.pkl is missing"):
        check_whole(place)


def test_what_refuses_a_remote_checkpoint_is_told(tmp_path):
    def refuse(folder: Path) -> None:
        raise CheckpointError("learner 0: No space left on device")

    remote = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    told = "checkpoint bucket/checkpoint could not be written: learner 0: No space left on device"
    with pytest.raises(CheckpointError, match=told):
        save_whole(Place(remote, "bucket/checkpoint"), refuse)
    assert not (tmp_path / "bucket").exists()
    # A file where the folder should be: the file system itself refuses.
    (tmp_path / "bucket").write_text("no folder")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_whole(Place(remote, "bucket/checkpoint"), fill)


def test_a_folder_takes_its_name_only_when_it_is_filled(tmp_path):
    def fill_half() -> None:
        with whole_folder(tmp_path / "model") as scratch:
            fill(scratch)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fill_half()
    assert names(tmp_path) == set()
    with whole_folder(tmp_path / "model") as scratch:
        fill(scratch)
        assert not (tmp_path / "model").exists()
    assert (tmp_path / "model" / "state.pkl").read_bytes() == FILES["state.pkl"]


def test_what_is_no_checkpoint_gives_way_to_the_new_folder(tmp_path):
    for number in range(3):
        with whole_folder(tmp_path / "model") as scratch:
            fill(scratch, {"number": str(number).encode()})
    # The one before is kept, not the first one, although neither has a manifest.
    assert (tmp_path / "model.previous" / "number").read_text() == "1"
    assert (tmp_path / "model" / "number").read_text() == "2"
    with whole_folder(tmp_path / "model", keep_old=False) as scratch:
        fill(scratch, {"number": b"3"})
        assert (tmp_path / "model" / "number").read_text() == "2"
    assert names(tmp_path) == {"model"}
    assert (tmp_path / "model" / "number").read_text() == "3"


def test_there_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*nowhere"):
        check_whole(Place.of(tmp_path / "nowhere"))
    saved(tmp_path / "old")
    (tmp_path / "old" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=rf"it has no {MANIFEST}, which is written last"):
        check_whole(Place.of(tmp_path / "old"))
