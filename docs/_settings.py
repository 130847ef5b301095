"""Tables of every setting of GiGPOConfig, made from the code when the documentation is built.

`python docs/_settings.py` prints them.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_gigpo import GiGPOConfig

METHODS = (
    "training",
    "llm",
    "agent",
    "engines",
    "stepping",
    "learners",
    "evaluation",
    "recording",
    "watchdog",
    "fault_tolerance",
)
# Where the tables stand on the page.
MARK = "<!-- tables of all settings -->"

_ARGUMENT = re.compile(r"^    (\*{0,2}\w+): (.*(?:\n(?:        .*|$))*)", re.MULTILINE)
_PLAIN = (type(None), bool, int, float, str, tuple)


class Setting(NamedTuple):
    """A setting.

    Attributes:
        argument: What its method calls it.
        name: What the config, a sweep and messages call it.
        default: Its default, as Python writes it.
        meaning: What the method's docstring says, on one line.
    """

    argument: str
    name: str
    default: str
    meaning: str


def settings_of(method: str) -> list[Setting]:
    """Return the settings of a method of GiGPOConfig, in the order of its signature."""
    function = getattr(GiGPOConfig, method)
    meanings = _meanings(function)
    keywords = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY
    ]
    defaults = vars(GiGPOConfig())
    found = []
    for argument in keywords:
        name = _name(method, argument)
        found.append(Setting(argument, name, repr(defaults[name]), meanings[argument]))
    return found


def changed_defaults() -> list[tuple[str, str, str]]:
    """Return RLlib's settings whose default is another here: name, RLlib's default, this one's."""
    theirs, ours = vars(AlgorithmConfig()), vars(GiGPOConfig())
    return [
        (name, repr(theirs[name]), repr(value))
        for name, value in ours.items()
        if name in theirs and value != theirs[name] and isinstance(value, _PLAIN)
    ]


def tables() -> str:
    """Return the tables as Markdown, a section for each method."""
    parts = []
    for method in METHODS:
        settings = settings_of(method)
        rows = []
        for setting in settings:
            renamed = "" if setting.argument == setting.name else f" (`{setting.name}`)"
            rows.append((f"`{setting.argument}`{renamed}", f"`{setting.default}`", setting.meaning))
        parts += [f"## `{method}`", _table(("setting", "default", "meaning"), rows)]
    rows = [tuple(f"`{cell}`" for cell in row) for row in changed_defaults()]
    parts += ["## RLlib's own", _table(("setting", "RLlib's default", "here"), rows)]
    return "\n\n".join(parts)


def _name(method: str, argument: str) -> str:
    """Find out which setting an argument sets, by setting it."""
    config, value = GiGPOConfig(), object()
    getattr(config, method)(**{argument: value})
    (name,) = (name for name, found in vars(config).items() if found is value)
    return name


def _meanings(function: Any) -> dict[str, str]:
    arguments = inspect.cleandoc(function.__doc__).partition("\nArgs:\n")[2]
    return {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(arguments)}


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(tables())  # noqa: T201
