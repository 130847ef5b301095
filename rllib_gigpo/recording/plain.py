"""From settings and metrics to plain JSON, without the secrets that they may hold."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence, Set
from enum import Enum, auto
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN = "***"

_LONGEST_REPR = 300
_SHORTEST_SECRET = 8
_SECRET_NAME = re.compile(
    r"(?:^|[_\-.\s])(?:api[_-]?keys?|access[_-]?keys?|private[_-]?keys?|key[_-]?ids?|secrets?|"
    r"passwords?|passwd|passphrases?|credentials?|bearer|authorization|"
    r"(?:api|access|auth|bearer|refresh|session)[_-]?tokens|"
    r"token(?!s?[_-](?:ids?|budget|level|limit|length)))(?:$|[_\-.\s])"
    r"|apikey|secretkey|accesskey",
    re.IGNORECASE,
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SECRET_TEXT = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}"
    r"|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}")
_SCHEME = "(?:apikey|basic|bearer|digest|negotiate|token)"
# A line "Name: value" of an HTTP request, also as "--header=Name: value"; no address.
_HEADER = re.compile(
    rf"^([ \t]*(?:(-{{1,2}}[\w.-]+)=)?)([\w.-]+)(:[ \t]*)({_SCHEME}[ \t]+)?((?!//)\S.*)$",
    re.IGNORECASE | re.MULTILINE,
)
_HEADER_OPTION = re.compile(r"-H|--?(?:\w+-)*headers?")
_HEADER_NAME = re.compile(r"(?:(-{1,2}[\w.-]+)=)?([\w.-]+):")
_SCHEME_WORD = re.compile(_SCHEME, re.IGNORECASE)
# "module:Class", which names an environment, a policy or a profile.
_OBJECT = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_][\w.]*(?=\s|$)")
# A word of a command line with its quotes; a quote that nothing closes is an apostrophe.
_SHELL_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|\S)+""", re.DOTALL)
_ASSIGNED = re.compile(r"(?<![\w.-])(-{0,2}[\w.-]+)=([^&\s]+)")
_MEMBER = re.compile(
    r"""((["'])([\w.\- ]+)\2\s*:\s*)("(?:\\.|[^"\\])+"|'(?:\\.|[^'\\])+')""", re.DOTALL
)


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

    Hidden are all texts under a telling name (password, api_key, apiToken, ...), what a command
    line gives an option, a variable or a header (`X-API-Key: ...`) of such a name, texts of the
    forms that common services give their keys, logins inside addresses, and the values of
    environment variables with a telling name wherever they turn up.
    """
    return _hide(value, _environment_secrets())


def _hide(value: Any, known: Sequence[str], is_secret: bool = False) -> Any:
    if isinstance(value, dict):
        return {
            name: _hide(inner, known, is_secret or _is_telling(name))
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_hide(inner, known, is_secret) for inner in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if is_secret and value else _hide_in_text(value, known)


def _is_telling(name: str) -> bool:
    return _SECRET_NAME.search(_HUMP.sub("_", name)) is not None


def _hide_in_text(text: str, known: Sequence[str]) -> str:
    for secret in known:
        text = text.replace(secret, HIDDEN)
    text = _SECRET_TEXT.sub(HIDDEN, text)
    text = _URL_LOGIN.sub(HIDDEN, text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    return _hide_arguments(text)


def _hide_arguments(text: str) -> str:
    """Hide what a command line, or JSON in it, gives telling options, variables, headers, keys."""
    if (as_json := _hide_in_json(text)) is not None:
        return as_json
    text = _MEMBER.sub(_hide_member, _hide_headers(text))
    parts: list[str] = []
    end, follows = 0, _Follows.ANYTHING
    for found in _SHELL_WORD.finditer(text):
        quoted, word = found.group(), _unquoted(found.group())
        if follows is _Follows.CREDENTIALS and _SCHEME_WORD.fullmatch(quoted):
            shown = quoted
        elif follows in (_Follows.SECRET, _Follows.CREDENTIALS) and not word.startswith("-"):
            shown, follows = HIDDEN, _Follows.ANYTHING
        else:
            is_header = follows is _Follows.HEADER
            shown = _hide_in_word(quoted, word, is_header)
            follows = _what_follows(quoted, word, is_header)
        parts += [text[end : found.start()], shown]
        end = found.end()
    return "".join([*parts, text[end:]])


class _Follows(Enum):
    """What the next word of a command line is, by the words before it."""

    ANYTHING = auto()
    SECRET = auto()
    HEADER = auto()
    CREDENTIALS = auto()  # the value of a header, behind its scheme if it has one


def _what_follows(quoted: str, word: str, is_header: bool) -> _Follows:
    if word.startswith("-") and "=" not in word:
        if _is_telling(word.lstrip("-")):
            return _Follows.SECRET
        return _Follows.HEADER if _HEADER_OPTION.fullmatch(word) else _Follows.ANYTHING
    found = _HEADER_NAME.fullmatch(quoted)
    if found is None or not _is_telling(found.group(2)):
        return _Follows.ANYTHING
    # A single word with a colon may stand in any sentence: "the password: ...".
    is_sure = is_header or _is_header_option(found.group(1)) or _is_header_name(found.group(2))
    return _Follows.CREDENTIALS if is_sure else _Follows.ANYTHING


def _hide_in_word(quoted: str, word: str, is_header: bool) -> str:
    name, is_assigned, value = word.partition("=")
    if is_assigned and value and not re.search(r"[^\w.-]", name) and _is_telling(name.lstrip("-")):
        return f"{name}={HIDDEN}"
    hidden = _hide_headers(word, is_header)
    if quoted == word:
        return _ASSIGNED.sub(_hide_assigned, hidden)
    # What was quoted may be a command line, or JSON, of its own.
    as_json = _hide_in_json(value)
    hidden = _hide_arguments(hidden) if as_json is None else f"{name}={as_json}"
    return quoted if hidden == word else shlex.quote(hidden)


def _hide_headers(text: str, is_header: bool = False) -> str:
    """Hide the values of lines `Name: value`.

    Args:
        text: The lines.
        is_header: Whether they are known to be headers.
    """

    def hide(found: re.Match[str]) -> str:
        start, option, name, colon, scheme, value = found.groups()
        is_sure = is_header or _is_header_option(option)
        is_object = _OBJECT.match(f"{name}{colon}{value}") and not _is_constant(name)
        if not _is_telling(name) or (is_object and not is_sure):
            return found.group()
        return f"{start}{name}{colon}{scheme or ''}{HIDDEN}"

    return _HEADER.sub(hide, text)


def _is_header_option(option: str | None) -> bool:
    return option is not None and _HEADER_OPTION.fullmatch(option) is not None


def _is_header_name(name: str) -> bool:
    """Whether a telling name is no word of a sentence."""
    return name.lower() == "authorization" or bool(re.search(r"[_.-]", _HUMP.sub("_", name)))


def _is_constant(name: str) -> bool:
    """Whether a telling name is that of a variable or of the usual header, and of no module."""
    return name.isupper() or name.lower() == "authorization"


def _hide_in_json(text: str) -> str | None:
    """Return a JSON object or list without secrets; None where there is none, or no secret."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    hidden = _hide(found, ())
    return None if hidden == found else json.dumps(hidden)


def _hide_member(found: re.Match[str]) -> str:
    start, _, name, value = found.groups()
    return f"{start}{value[0]}{HIDDEN}{value[0]}" if _is_telling(name) else found.group()


def _hide_assigned(found: re.Match[str]) -> str:
    name = found.group(1)
    return f"{name}={HIDDEN}" if _is_telling(name.lstrip("-")) else found.group()


def _unquoted(word: str) -> str:
    """Return what a shell makes of a word; the word itself where that is not one word."""
    try:
        found = shlex.split(word)
    except ValueError:
        return word
    return found[0] if len(found) == 1 else word


def _environment_secrets() -> list[str]:
    found = {
        value
        for name, value in os.environ.items()
        if _is_telling(name) and len(value) >= _SHORTEST_SECRET
    }
    # A path names where a secret lies, and is worth knowing.
    return sorted((value for value in found if not value.startswith("/")), key=len, reverse=True)
