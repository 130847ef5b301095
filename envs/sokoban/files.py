"""Levels from text files in Boxoban's format: a line `; number`, then the rows of the level."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from envs.sokoban.level import Level, parse_level


class LevelFiles(Sequence[Level]):
    """All levels of a file, or of the `.txt` files of a folder and its subfolders by name.

    Files of a folder without a level, such as a licence, are passed over. Files are parsed when one
    of their levels is asked for, and the newest eight are kept.

    Args:
        path: File or folder.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: There is no level in it.
    """

    def __init__(self, path: str):
        root = Path(path)
        if not root.exists():
            raise FileNotFoundError(
                f"levels={path!r} does not exist: expected a file of levels or their folder"
            )
        self._root = root if root.is_dir() else root.parent
        files = sorted(root.rglob("*.txt")) if root.is_dir() else [root]
        counts = {file: count for file in files if (count := _count(file))}
        if not counts:
            raise ValueError(
                f"levels={path!r} has no level: expected text files with a line '; number' before "
                "each level"
            )
        self._files = list(counts)
        self._ends = list(accumulate(counts.values()))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Level:  # pyright: ignore[reportIncompatibleMethodOverride]
        file, place = self._place(number)
        try:
            return parse_level(_read(self._files[file])[place])
        except ValueError as error:
            raise ValueError(f"{self.name(number)} is no level: {error}") from error

    def name(self, number: int) -> str:
        """Return the file, relative to the folder, and the place of a level in it."""
        file, place = self._place(number)
        return f"{self._files[file].relative_to(self._root).as_posix()}:{place}"

    def _place(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"there is no level {number} among {len(self)}")
        file = bisect.bisect_right(self._ends, number)
        return file, number - (self._ends[file - 1] if file else 0)


@lru_cache(maxsize=4)
def open_levels(path: str | os.PathLike) -> LevelFiles:
    """Open level files; all environments of a process share them."""
    return LevelFiles(os.fspath(path))


def _count(file: Path) -> int:
    return sum(line.startswith(b";") for line in file.read_bytes().splitlines())


@lru_cache(maxsize=8)
def _read(file: Path) -> list[list[str]]:
    return list(_blocks(file.read_text(encoding="utf-8").splitlines()))


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    starts = [number for number, line in enumerate(lines) if line.startswith(";")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield [line.rstrip() for line in lines[start + 1 : end] if line.strip()]
