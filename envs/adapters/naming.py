"""Objects and task rows that env_config names."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = str | Sequence[Mapping[str, Any]]


def named(found: Any, what: str) -> Any:
    """Return what `"module:attribute"` names, or the object itself where it is no text.

    Args:
        found: The text, or the object.
        what: What it is, for the errors.

    Raises:
        ValueError: The text has another form, or there is no such module or attribute.
    """
    if not isinstance(found, str):
        return found
    module, _, attribute = found.partition(":")
    if not module or not attribute:
        raise ValueError(f"{what} is {found!r}: expected module:attribute, such as my_module:Mine")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{what} is {found!r}, but there is no module {error.name!r}: put its folder on "
            "PYTHONPATH"
        ) from error
    if not hasattr(loaded, attribute):
        raise ValueError(f"{what} is {found!r}, but module {module!r} has no {attribute!r}")
    return getattr(loaded, attribute)


def load_rows(rows: Rows) -> list[dict[str, Any]]:
    """Return the task rows: given as they are, or one JSON object per line of a file.

    Raises:
        ValueError: There is none, or a line is no JSON object.
    """
    if not isinstance(rows, str):
        loaded = [dict(row) for row in rows]
    else:
        loaded = []
        for number, line in enumerate(Path(rows).read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} of {rows} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} of {rows} is no JSON object: {line[:80]!r}")
            loaded.append(row)
    if not loaded:
        raise ValueError(f"rows={rows!r} holds no task: give at least one")
    return loaded


def chosen_row(
    rows: Sequence[dict[str, Any]], seed: int, options: Mapping[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Return the number and the row of an episode: that of `options["task_id"]`, else the seed's.

    Raises:
        ValueError: The task id is not one of the rows' numbers.
    """
    task_id = options.get("task_id")
    if task_id is None:
        number = seed % len(rows)
        return number, rows[number]
    if str(task_id) not in map(str, range(len(rows))):
        raise ValueError(
            f"task_id {task_id!r} is not one of the rows' numbers 0 to {len(rows) - 1}"
        )
    return int(task_id), rows[int(task_id)]


def spelled(words: str, names: Sequence[str]) -> str | None:
    """Return the name that words mean, as it is spelled: the same one, else the first in any case.

    None where there is no such name.
    """
    if words in names:
        return words
    folded = words.casefold()
    return next((name for name in names if name.casefold() == folded), None)


def prompt_text(prompt: Any) -> str:
    """Return the text of a prompt: a text, or chat messages in OpenAI's form (their contents)."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    return "\n".join(str(message.get("content", "")) for message in prompt)
