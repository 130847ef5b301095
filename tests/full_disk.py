"""A file on a disk that is full: it takes what there is room for, and says nothing."""

from __future__ import annotations

import os
from typing import Any


class FullDisk:
    """A file opened in binary that never grows over a size.

    Args:
        file: The file.
        room: Its largest size in bytes.
    """

    def __init__(self, file: Any, room: int):
        self._file = file
        self._room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> int:
        room = self._room - self._file.seek(0, os.SEEK_END)
        return self._file.write(content[: max(0, room)])
