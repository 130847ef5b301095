"""A folder belongs to the settings that it was begun with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rllib_gigpo.recording.folder import read_json, write_json
from rllib_gigpo.recording.plain import jsonable, without_secrets


def claim(folder: Path, name: str, settings: Mapping[str, Any], *, option: str) -> None:
    """Note down settings in a folder, or compare them with those that are noted there.

    Args:
        folder: The folder; it is made.
        name: File that holds the settings.
        settings: What decides the results.
        option: Option of the command that names the folder.

    Raises:
        ValueError: The folder was begun with others; the first is named.
    """
    wanted = json.loads(json.dumps(without_secrets(jsonable(settings))))
    path = folder / name
    if not path.exists():
        write_json(path, wanted)
        return
    found = read_json(path)
    for key in sorted({*wanted, *found}):
        if found.get(key) != wanted.get(key):
            raise ValueError(
                f"{folder} holds results with {key}={found.get(key)!r}, not {wanted.get(key)!r}: "
                f"name another folder with {option}, or repeat the old settings to go on with it"
            )
