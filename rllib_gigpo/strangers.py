"""Environments that a file of somebody else's names: made only where that runs nothing of theirs.

The name in a run folder or a checkpoint is looked up like one that was typed, and many kinds of
names and settings run something: `module:Class` is imported and called, `mcp:` starts a command
line, a setting may be an address, a program or a file. So a name counts that is known here anyway,
and settings that can only choose. Everything else needs the word of whoever is at the keyboard.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

from rllib_gigpo.registry import is_registered

# What each may be set to; None is any plain word. Other texts may be paths, addresses or commands.
_CHOICES: dict[str, frozenset[str] | None] = {
    "anchor": None,
    "corpus": frozenset({"generated", "questions"}),
    "engine": None,
    "games": None,
    "goals": None,
    "products": frozenset({"generated"}),
    "questions": frozenset({"generated"}),
    "retriever": frozenset({"bm25"}),
    "reward": None,
    "split": None,
    "task_types": None,
    "view": None,
    "world": None,
}
_WORD = re.compile(r"\w[\w ,&+-]*")


def check_name(name: Any, *, named_by: str, cure: str) -> None:
    """Make sure that an environment's name out of a file leads to no code of the file's author.

    Args:
        name: The name; registered ones pass, and gymnasium ids, also behind `gym:`.
        named_by: The file, for the error.
        cure: How the user says that it is meant, for the error.

    Raises:
        ValueError: It may import a module, start a command or open an address; or is no text.
    """
    if not isinstance(name, str):
        raise ValueError(f"{named_by} names the environment {name!r}: expected a text")
    if not is_registered(name):
        raise ValueError(
            f"{named_by} names the environment {name!r}, which is no registered one and may run "
            f"code of the file's author: {cure}"
        )


def check_settings(settings: Any, *, named_by: str, cure: str) -> None:
    """Make sure that an environment's settings out of a file can only choose.

    Args:
        settings: The settings; numbers, flags and None pass, and words under the names that choose
            (view, split, games, ...).
        named_by: The file, for the error.
        cure: How the user says that they are meant, for the error.

    Raises:
        ValueError: One may be a path, an address or a command; or they are no mapping.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f"{named_by} holds the settings {settings!r}: expected an object")
    for name, value in _texts(settings):
        if not _is_choice(name, value):
            raise ValueError(
                f"{named_by} sets {name}={value!r} of the environment, which may be a file, an "
                f"address or a command: {cure}"
            )


def _texts(settings: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield what is no number, flag or None, each with the name that it stands under."""
    for name, value in settings.items():
        yield from _texts_of(name, value)


def _texts_of(name: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from _texts(value)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _texts_of(name, inner)
    elif value is not None and not isinstance(value, Number):
        yield name, value


def _is_choice(name: Any, value: Any) -> bool:
    if name not in _CHOICES or not isinstance(value, str):
        return False
    allowed = _CHOICES[name]
    return _WORD.fullmatch(value) is not None if allowed is None else value in allowed
