"""The files of a run folder, written so that a killed process leaves none of them half done.

    run.json            what the run is: settings, versions, commit, seeds, data, command
    metrics.jsonl       one line per iteration
    evaluations.jsonl   one line per evaluation
    events.jsonl        what the watchdog has seen and done, in the order of time
    watchdog/           the best weights so far, where the watchdog may go back to them
    collapse/000012.jsonl             the rows of the worst episodes of an iteration with an alarm
    rollouts/000012.jsonl, .parquet   the rows of iteration 12
    pictures/<digest>.png             what the rows show, each picture once
    receipt.json, receipt.md          what it was, what it cost, how to repeat it
    superseded/1/       what a run that went back to a checkpoint had written after it
    train_to.json       when `train_to` began the run, where it did
    .train_to.lock      what it holds while it trains

Whole files are written beside their place and renamed. Lines are appended; a line that was cut off
has no newline, and readers leave it out. Nothing here is ever unpickled.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FORMAT = 1

_TAIL = 4096

_ROLLOUT = re.compile(r"(\d{6,})\.(jsonl|parquet)")


class RunFolder:
    """Paths of a run folder, and safe ways to write and read its files.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.run = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.events = self.path / "events.jsonl"
        self.collapse = self.path / "collapse"
        self.rollouts = self.path / "rollouts"
        self.pictures = self.path / "pictures"
        self.receipt = self.path / "receipt.json"
        self.receipt_text = self.path / "receipt.md"

    def rollout_file(self, iteration: int, kind: str = "jsonl") -> Path:
        """Return the path of an iteration's rows, "jsonl" or "parquet"."""
        return self.rollouts / f"{iteration:06d}.{kind}"

    def inside(self, path: Path) -> Path:
        """Return a path of this folder that is going to be read.

        A folder that somebody sent may hold links to files of whoever opens it, and a report of it
        would carry them away.

        Raises:
            ValueError: A link leads out of the folder.
        """
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(
                f"{path} is a link out of the run folder: it is not read; put the file itself there"
            )
        return path

    def recorded_iterations(self) -> list[int]:
        """Return the iterations whose rows are here, in order."""
        if not self.rollouts.is_dir():
            return []
        names = (_ROLLOUT.fullmatch(path.name) for path in self.rollouts.iterdir())
        return sorted({int(name.group(1)) for name in names if name and name.group(2) == "jsonl"})

    def cut(self, iteration: int) -> None:
        """Lay aside what was written after an iteration, for a run that goes on from there.

        It is moved into `superseded/<number>`, because whoever goes back on purpose may want it.
        """
        place = self.path / "superseded"
        place = place / str(len(list(place.iterdir())) + 1 if place.is_dir() else 1)
        for file in (self.metrics, self.evaluations):
            lines = read_lines(file) if file.exists() else []
            later = [line for line in lines if line["iteration"] > iteration]
            if later:
                try:
                    write_lines(place / file.name, later)
                    write_lines(file, [line for line in lines if line["iteration"] <= iteration])
                except OSError:
                    # They are still where they were; another try would add a second copy.
                    (place / file.name).unlink(missing_ok=True)
                    with suppress(OSError):
                        place.rmdir()
                    raise
        for path in sorted(self.rollouts.iterdir()) if self.rollouts.is_dir() else ():
            name = _ROLLOUT.fullmatch(path.name)
            if name and int(name.group(1)) > iteration:
                place.mkdir(parents=True, exist_ok=True)
                path.replace(place / path.name)

    def sync(self) -> None:
        """Bring what was appended or renamed here to the disk itself.

        Raises:
            OSError: The disk refused.
        """
        files = (self.metrics, self.evaluations, self.events)
        for path in (*files, self.rollouts, self.pictures, self.path):
            if path.exists():
                handle = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)

    def clear(self) -> None:
        """Remove the files of a run; whatever else lies in the folder stays."""
        files = (self.run, self.metrics, self.evaluations, self.events)
        for file in (*files, self.receipt, self.receipt_text):
            file.unlink(missing_ok=True)
        folders = (self.rollouts, self.pictures, self.collapse, self.path / "superseded")
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file: readers see the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A folder that somebody sent may hold links under names that can be foretold.
    scratch = path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")
    try:
        with open(scratch, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write one JSON file."""
    write_bytes(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read one JSON file.

    Raises:
        ValueError: It is no JSON; its path is named.
    """
    try:
        return json.loads(path.read_bytes(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): the file is damaged") from error


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole JSON-lines file."""
    write_bytes(path, b"".join(map(_line, rows)))


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one line; half a line, of a full disk or of a process that was killed, never stays.

    Raises:
        OSError: The disk refused; the file is what it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = _line(row)
    with open(path, "a+b", buffering=0) as file:
        end = _cut_unfinished_line(file)
        written = file.write(line)
        if written != len(line):  # a full disk takes what fits
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _cut_unfinished_line(file: Any) -> int:
    """Remove what stands behind the last line end; return the size of the file."""
    end = file.seek(0, os.SEEK_END)
    tail = b""
    start = end
    while start > 0 and b"\n" not in tail:
        start = max(0, start - _TAIL)
        file.seek(start)
        tail = file.read(end - start)
    whole = start + tail.rfind(b"\n") + 1
    if whole != end:
        file.truncate(whole)
    return whole


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file; a last line without its end was cut off and is left out.

    Raises:
        ValueError: A line is no JSON object; its number is named.
    """
    *lines, _cut_off = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}, is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected an object")
        rows.append(row)
    return rows


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _line(row: Mapping[str, Any]) -> bytes:
    # A surrogate that a model wrote has no UTF-8 form; as an escape it has.
    return (json.dumps(row, ensure_ascii=True, allow_nan=False) + "\n").encode()
