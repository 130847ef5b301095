"""Folders that are whole or not there: checkpoints, and models.

    write into a scratch folder beside the target -> manifest.json: size and SHA-256 of every file
    -> everything to the disk -> what had the name becomes NAME.previous -> the scratch folder
    takes the name

A process that is killed or a disk that is full leaves a scratch folder at most, which nothing reads
and the next save to that name removes. Whoever restores a checkpoint compares every file with the
manifest first, so that one that was cut off, copied in part or damaged later is never taken for
whole.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.fs

MANIFEST = "manifest.json"
FORMAT = 1

_LOG = logging.getLogger(__name__)
_BLOCK = 1 << 20
# What RLlib writes first into a checkpoint: a folder with it is one, whole or not.
_RLLIB_FILE = "metadata.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written whole, or is not whole."""


class Place(NamedTuple):
    """Where a checkpoint lies.

    Attributes:
        filesystem: The file system.
        path: The folder on it, absolute, with "/" between names.
    """

    filesystem: pyarrow.fs.FileSystem
    path: str

    @classmethod
    def of(cls, path: str | Path, filesystem: pyarrow.fs.FileSystem | None = None) -> Place:
        """Return the place of a local path or a URI such as "s3://bucket/folder"."""
        if filesystem is None and "://" in str(path):
            filesystem, inner = pyarrow.fs.FileSystem.from_uri(str(path))
            return cls(filesystem, inner)
        filesystem = filesystem or pyarrow.fs.LocalFileSystem()
        if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            path = Path(path).expanduser().absolute().as_posix()
        return cls(filesystem, str(path))

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk of this machine."""
        return isinstance(self.filesystem, pyarrow.fs.LocalFileSystem)

    def has(self, name: str) -> bool:
        """Whether there is such a file in the folder."""
        return self.filesystem.get_file_info(f"{self.path}/{name}").is_file

    def exists(self) -> bool:
        """Whether there is anything."""
        return self.filesystem.get_file_info(self.path).type != pyarrow.fs.FileType.NotFound


def save_whole(
    place: Place, write: Callable[[Path], Any], facts: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint whole or not at all; on a local disk the one before is kept.

    Args:
        place: The folder. What lies there becomes NAME.previous.
        write: Writes all files into the folder it is given.
        facts: What else the manifest tells.

    Raises:
        CheckpointError: The disk or `write` refused; what lay there is untouched.
        ValueError: Something else than a checkpoint lies there, or, on a remote file system,
            anything.
    """
    if not place.is_local:
        _upload_whole(place, write, facts)
        return
    target = Path(place.path)
    if target.exists() and not (target.is_dir() and _may_be_replaced(target)):
        raise ValueError(
            f"{target} holds files and is no checkpoint: name a folder that is new, empty, or a "
            "checkpoint to be replaced"
        )
    try:
        with whole_folder(target) as scratch:
            write(scratch)
            _write_manifest(scratch, facts or {})
    except (OSError, CheckpointError) as error:
        kept = _whole_beside(target)
        before = f"; the one before is untouched in {kept}" if kept else ""
        raise CheckpointError(
            f"the checkpoint {target} could not be written: {error}{before}; make room, or name "
            "another folder, and save again"
        ) from error


@contextmanager
def whole_folder(target: Path, *, keep_old: bool = True) -> Iterator[Path]:
    """Fill a scratch folder that takes the target's name at the end, unless an error comes first.

    Args:
        target: The folder. What lies there becomes NAME.previous; an empty folder is replaced.
        keep_old: Whether NAME.previous stays once the new folder has its name.

    Raises:
        OSError: The disk refused.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    for left_over in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    scratch = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        scratch.mkdir()
        yield scratch
        _to_disk(scratch)
        old = _make_way(target)
        scratch.rename(target)
        _sync(target.parent)
        if old is not None and not keep_old:
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_whole(place: Place) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: It has none, or a file is missing, another one, or cannot be read; the
            first is named.
    """
    _check_files(place, _manifest(place)["files"])


def check_part(place: Place) -> None:
    """Compare a folder inside a checkpoint with the checkpoint's manifest, where there is one.

    Raises:
        CheckpointError: A file is missing or another one.
    """
    root, _, name = place.path.rpartition("/")
    while root:
        whole = Place(place.filesystem, root)
        if whole.has(MANIFEST):
            check_inside(whole, name)
            return
        root, _, parent = root.rpartition("/")
        name = f"{parent}/{name}"


def check_inside(place: Place, name: str) -> None:
    """Compare a folder inside a checkpoint with the checkpoint's manifest.

    Args:
        place: The checkpoint.
        name: The folder in it, with slashes.

    Raises:
        CheckpointError: It has no manifest, or a file is missing or another one.
    """
    files = _manifest(place)["files"]
    _check_files(place, {file: told for file, told in files.items() if file.startswith(f"{name}/")})


def fingerprint(place: Place) -> str:
    """Return the SHA-256 of a checkpoint's manifest, another one for other content.

    Raises:
        CheckpointError: It has no manifest, or one that cannot be read.
    """
    _manifest(place)
    return _digest(place, MANIFEST)


def find_whole(place: Place) -> Place:
    """Return the place, or that of the checkpoint before where a save was killed in between.

    Between two renames, for some microseconds, a local checkpoint is there under NAME.previous
    alone.
    """
    before = place._replace(path=f"{place.path}.previous")
    if place.exists() or not before.exists():
        return place
    _LOG.warning("%s is gone, its save was interrupted: using %s", place.path, before.path)
    return before


def is_whole(place: Place) -> bool:
    """Whether all files of a checkpoint are there and what they were."""
    try:
        check_whole(place)
    except CheckpointError:
        return False
    return True


def _write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": digest}
    content = {"format": FORMAT, **facts, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _manifest(place: Place) -> dict[str, Any]:
    if not place.exists():
        raise CheckpointError(f"there is no checkpoint {place.path}: {_cure(place)}")
    if not place.has(MANIFEST):
        raise CheckpointError(
            f"the checkpoint {place.path} is not whole: it has no {MANIFEST}, which is written "
            f"last; {_cure(place)}"
        )
    try:
        with place.filesystem.open_input_stream(f"{place.path}/{MANIFEST}") as file:
            content = json.loads(file.read())
        known, files = content["format"], content["files"]
        if known != FORMAT or not isinstance(files, dict):
            raise ValueError(f"format {known!r}, expected {FORMAT}")
        for told in files.values():
            _ = told["bytes"], told["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint {place.path} is not whole: {MANIFEST} cannot be read ({error!r}); "
            f"{_cure(place)}"
        ) from error
    return content


def _check_files(place: Place, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, told in files.items():
        fault = _fault(place, name, told)
        if fault is not None:
            raise CheckpointError(
                f"the checkpoint {place.path} is not whole: {name} {fault}; {_cure(place)}"
            )


def _fault(place: Place, name: str, told: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a file, or None."""
    found = place.filesystem.get_file_info(f"{place.path}/{name}")
    if not found.is_file:
        return "is missing"
    if found.size != told["bytes"]:
        return f"has {found.size} bytes, expected {told['bytes']}"
    try:
        is_same = _digest(place, name) == told["sha256"]
    except OSError as error:
        return f"cannot be read ({error})"
    return None if is_same else "is not what was written: its checksum differs"


def _digest(place: Place, name: str) -> str:
    digest = hashlib.sha256()
    with place.filesystem.open_input_stream(f"{place.path}/{name}") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _cure(place: Place) -> str:
    before = place._replace(path=f"{place.path}.previous")
    if before.exists():
        return f"restore the one before, {before.path}"
    return "restore an earlier one"


def _whole_beside(target: Path) -> Path | None:
    for path in (target, target.with_name(f"{target.name}.previous")):
        if is_whole(Place.of(path)):
            return path
    return None


def _may_be_replaced(target: Path) -> bool:
    return _is_checkpoint(target) or not any(target.iterdir())


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, whole or not."""
    return any((folder / name).is_file() for name in (MANIFEST, _RLLIB_FILE))


def _make_way(target: Path) -> Path | None:
    """Keep what has the target's name as NAME.previous, unless that is a better checkpoint.

    Returns:
        Where it is kept; None where nothing was.
    """
    if not target.exists() or not any(target.iterdir()):
        return None
    previous = target.with_name(f"{target.name}.previous")
    is_damaged = _is_checkpoint(target) and not _has_all_files(Place.of(target))
    if previous.exists() and is_damaged:
        shutil.rmtree(target)
        return None
    shutil.rmtree(previous, ignore_errors=True)
    target.rename(previous)
    return previous


def _has_all_files(place: Place) -> bool:
    """Whether all files have their sizes; reading them all would take as long as the save."""
    try:
        files = _manifest(place)["files"]
    except CheckpointError:
        return False
    infos = place.filesystem.get_file_info([f"{place.path}/{name}" for name in files])
    return [info.size for info in infos] == [told["bytes"] for told in files.values()]


def _to_disk(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _upload_whole(
    place: Place, write: Callable[[Path], Any], facts: Mapping[str, Any] | None
) -> None:
    """Write on this machine, then copy, the manifest last of all."""
    with tempfile.TemporaryDirectory(prefix="rllib-gigpo-") as name:
        folder = Path(name, "checkpoint")
        manifest = Path(name, MANIFEST)
        try:
            there = pyarrow.fs.FileSelector(place.path, allow_not_found=True)
            if place.filesystem.get_file_info(there):
                raise ValueError(
                    f"{place.path} holds files already: on a remote file system name a new folder"
                )
            folder.mkdir()
            write(folder)
            _write_manifest(folder, facts or {})
            (folder / MANIFEST).rename(manifest)
            place.filesystem.create_dir(place.path, recursive=True)
            pyarrow.fs.copy_files(str(folder), place.path, destination_filesystem=place.filesystem)
            with place.filesystem.open_output_stream(f"{place.path}/{MANIFEST}") as file:
                file.write(manifest.read_bytes())
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"the checkpoint {place.path} could not be written: {error}; without {MANIFEST} it "
                "will not be restored by mistake; save again to another folder"
            ) from error
