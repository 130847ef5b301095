"""Tools: their description as JSON schema, and the calls that an action text holds.

A tool is described as models know them from their chat templates: `{"name", "description",
"parameters"}`, the parameters a JSON schema of one object. A call is the JSON object `{"name",
"arguments"}`; `<answer>text</answer>` ends the episode.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from envs.adapters.base import without_surrogates

Tool = dict[str, Any]

_ANSWER = re.compile(r"\A\s*<answer>(.*)</answer>\s*\Z", re.DOTALL)
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_CHECKS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class Call(NamedTuple):
    """A tool call."""

    name: str
    arguments: dict[str, Any]


def tool_of(function: Callable[..., Any]) -> Tool:
    """Describe a function by its name, type hints and Google docstring."""
    hints = typing.get_type_hints(function)
    summary, described = _docstring(inspect.getdoc(function) or "")
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        schema = json_schema(hints.get(name, Any))
        if name in described:
            schema["description"] = described[name]
        properties[name] = schema
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": function.__name__, "description": summary, "parameters": parameters}


def json_schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type hint; {} for one that JSON cannot name."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [json_schema(argument) for argument in arguments]}
    if list in (hint, origin):
        return {"type": "array", **({"items": json_schema(arguments[0])} if arguments else {})}
    if dict in (hint, origin):
        return {"type": "object"}
    return {}


def parse_action(action: str) -> Call | str | None:
    """Return the call or the answer text that an action holds, None where it holds neither."""
    answer = _ANSWER.match(action)
    if answer:
        return answer[1].strip()
    value = json_value(action)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    return Call(value["name"], arguments) if isinstance(arguments, dict) else None


def json_value(text: str) -> Any:
    """Return what a JSON text says, None where it is none.

    Python also reads and writes NaN, Infinity and numbers too large for it, which no other reader
    takes, and lone surrogates, which have no UTF-8 form: the former are no JSON here, and the
    latter are replaced.
    """
    try:
        strict = json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
        return json.loads(without_surrogates(strict))
    except (ValueError, RecursionError):
        return None


def fault(call: Call, tools: Sequence[Tool]) -> str | None:
    """Return what is wrong with a call, None where the tool's schema allows it."""
    tool = next((tool for tool in tools if tool["name"] == call.name), None)
    if tool is None:
        return f"There is no tool {call.name!r}; use one of {[tool['name'] for tool in tools]}."
    schema = tool.get("parameters", {})
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in call.arguments]
    if missing:
        return f"The call of {call.name!r} lacks the argument(s) {missing}."
    for name, value in call.arguments.items():
        if name not in properties:
            if schema.get("additionalProperties", False) is not False:
                continue
            return f"The tool {call.name!r} has no argument {name!r}."
        if not _fits(value, properties[name]):
            return f"The argument {name!r} of {call.name!r} does not fit {properties[name]}."
    return None


def random_call(tools: Sequence[Tool], rng: random.Random, words: Sequence[str]) -> str:
    """Draw a call that fits a tool's schema, as an action text.

    Args:
        tools: What may be called.
        rng: For the draws.
        words: What texts without an enumeration are drawn from.
    """
    tool = rng.choice(list(tools))
    schema = tool.get("parameters", {})
    arguments = {
        name: _drawn(schema.get("properties", {}).get(name, {}), rng, words)
        for name in schema.get("required", ())
    }
    return call_text(tool["name"], arguments)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Write a call as an action text."""
    return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    kinds = schema.get("type", ())
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    return not kinds or any(_is(value, kind) for kind in kinds)


def _is(value: Any, kind: str) -> bool:
    # A bool is an int to Python and none to JSON.
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return isinstance(value, _CHECKS.get(kind, object))


def _drawn(schema: Mapping[str, Any], rng: random.Random, words: Sequence[str]) -> Any:
    if "enum" in schema:
        return rng.choice(list(schema["enum"]))
    if "anyOf" in schema:
        return _drawn(rng.choice(list(schema["anyOf"])), rng, words)
    kind = schema.get("type", "string")
    kind = kind if isinstance(kind, str) else kind[0]
    draws: dict[str, Callable[[], Any]] = {
        "integer": lambda: rng.randint(schema.get("minimum", 0), schema.get("maximum", 9)),
        "number": lambda: float(rng.randint(0, 9)),
        "boolean": lambda: rng.random() < 0.5,
        "array": lambda: [_drawn(schema.get("items", {}), rng, words)],
        "object": dict,
        "null": lambda: None,
    }
    return draws.get(kind, lambda: rng.choice(list(words) or ["text"]))()


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a Google docstring into what stands before `Args:` and the arguments' texts."""
    head, _, rest = text.partition("\nArgs:")
    described = {}
    for line in rest.splitlines():
        if line and not line[0].isspace():
            break
        found = _ARGUMENT.match(line)
        if found:
            described[found[1]] = found[2].strip()
    before = re.split(r"\n(?:Returns|Raises|Yields|Example)s?:", head)[0]
    return " ".join(before.split()), described
