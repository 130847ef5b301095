"""From settings and metrics to plain JSON, without the secrets that they may hold."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN = "***"

_LONGEST_REPR = 300
_SHORTEST_SECRET = 8
_SECRET_NAME = re.compile(
    r"(?:^|[_\-.\s])(?:api[_-]?key|access[_-]?key|private[_-]?key|key[_-]?id|secrets?|password|"
    r"passwd|passphrase|credentials?|bearer|authorization|token(?!_id))(?:$|[_\-.\s])"
    r"|apikey|secretkey|accesskey",
    re.IGNORECASE,
)
_SECRET_TEXT = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}"
    r"|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}")
_OPTION = re.compile(r"(--?[\w-]+|\w+)(=|\s+)(\S+)")


def jsonable(value: Any) -> Any:
    """Return a value as plain JSON.

    Numbers that are not finite become None; classes and functions become "module:name"; other
    objects become the start of their `repr`.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return jsonable(value.item())
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **jsonable(shown)}
    if isinstance(value, Mapping):
        return {_name(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return jsonable(value._asdict())  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, Set):
        return sorted((jsonable(inner) for inner in value), key=str)
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [jsonable(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    # An address differs from run to run.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:_LONGEST_REPR]


def _name(key: Any) -> str:
    return key if isinstance(key, str) else str(jsonable(key))


def without_secrets(value: Any) -> Any:
    """Return plain JSON with `***` in place of whatever looks like a secret.

    Hidden are texts under a telling name (password, api_key, token, ...), texts of the forms that
    common services give their keys, logins inside addresses, and the values of environment
    variables with a telling name wherever they turn up.
    """
    return _hide(value, _environment_secrets())


def _hide(value: Any, known: Sequence[str]) -> Any:
    if isinstance(value, dict):
        return {
            name: HIDDEN
            if isinstance(inner, str) and inner and _SECRET_NAME.search(name)
            else _hide(inner, known)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_hide(inner, known) for inner in value]
    return _hide_in_text(value, known) if isinstance(value, str) else value


def _hide_in_text(text: str, known: Sequence[str]) -> str:
    for secret in known:
        text = text.replace(secret, HIDDEN)
    text = _SECRET_TEXT.sub(HIDDEN, text)
    text = _URL_LOGIN.sub(HIDDEN, text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    return _OPTION.sub(_hide_option, text)


def _hide_option(found: re.Match[str]) -> str:
    """Hide what a command line gives a telling option or variable."""
    name, separator, value = found.groups()
    is_named = name.startswith("-") or separator == "="
    if not is_named or value.startswith("-") or not _SECRET_NAME.search(name.lstrip("-")):
        return found.group()
    return f"{name}{separator}{HIDDEN}"


def _environment_secrets() -> list[str]:
    found = {
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
    }
    # A path names where a secret lies, and is worth knowing.
    return sorted((value for value in found if not value.startswith("/")), key=len, reverse=True)
