"""Folders that are built once and then shared by every process, on one machine or a shared disk."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

CACHE_VARIABLE = "RLLIB_GIGPO_CACHE"


def cache_root() -> Path:
    """Folder of the built models: `$RLLIB_GIGPO_CACHE`, or `~/.cache/rllib_gigpo`."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/rllib_gigpo").expanduser().absolute()


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """Return the cached folder `name`, building it first where it is missing.

    The folder appears complete or not at all: it is built under another name and renamed.
    Processes that build it at the same time all work; the first to finish is kept, and the rest
    throw their copy away. No lock is taken, because shared disks do not agree on locks.

    Args:
        name: Folder name; it must change whenever the content would.
        build: Fills the empty folder that it is given.

    Returns:
        Absolute path of the finished folder.
    """
    root = cache_root()
    folder = root / name
    if folder.is_dir():
        return folder
    scratch = root / f".{name}.{uuid.uuid4().hex}"
    scratch.mkdir(parents=True)
    try:
        build(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
