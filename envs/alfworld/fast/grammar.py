"""Reads a game's text grammar (.twl2): commands and feedback of actions, and production rules.

A rule's right-hand side mixes literal text with `#symbol#` (expand another rule),
`{expression | query}` (the expression once per match of the query) and `[{...}]` (the same as an
enumeration, with separators).
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple


class Symbol(NamedTuple):
    """`#name#`: the text of the first rule of that name whose condition holds."""

    name: str


class Value(NamedTuple):
    """`expression` of entities, such as `o.indefinite + ' ' + o.name`."""

    expression: str


class Matches(NamedTuple):
    """`{element | query}`, once if the query is empty; in `[...]` it is enumerated."""

    element: Symbol | Value
    query: str
    enumerated: bool


Part = str | Symbol | Matches


class Rule(NamedTuple):
    """One production: it applies where the condition (empty: always) has a match."""

    condition: str
    text: str


class Command(NamedTuple):
    """What the player types for an action, and the symbol of the answer."""

    template: str
    feedback: str


class Grammar(NamedTuple):
    """Commands by lower-case action name, and rules by symbol."""

    commands: dict[str, Command]
    rules: dict[str, tuple[Rule, ...]]


class Query(NamedTuple):
    """A predicate of (name, type) placeholders: `inreceptacle(o:object, r:receptacle)`."""

    predicate: str
    placeholders: tuple[tuple[str, str], ...]


_BLANK = re.compile(r"(?:\s|\#[^\n]*)*")
_TOKEN = re.compile(r'(?P<block>"""(?:.|\n)*?""")|(?P<string>"[^"]*")|(?P<word>[\w/-]+|::|[{};])')
_PART = re.compile(
    r"\#(?P<symbol>[\w()/!<>\-\s,.]+)\#"
    r"|(?P<open>\[)?\{(?:\#(?P<inner>[\w()/!<>\-\s,.]+)\#|(?P<value>[^|\[\]{}\n<>]+))"
    r"(?:\s*\|\s*(?P<query>[^;|{}\n\[\]\#]+))?\}(?(open)\])"
    r'|(?P<literal>[^;|"<>\[\]\#{}]+)'
)
_ATOM = re.compile(r"\s*(\w+)\(([^()]*)\)\s*")


@lru_cache(maxsize=64)
def parse_grammar(text: str) -> Grammar:
    """Parse a .twl2 text.

    Raises:
        ValueError: The text breaks the format.
    """
    commands: dict[str, Command] = {}
    rules: dict[str, tuple[Rule, ...]] = {}
    tokens = _tokens(text)
    for word in tokens:
        if word == "action":
            name = next(tokens)
            fields = _fields(tokens)
            commands[name.lower()] = Command(fields["template"], fields["feedback"])
            rules.update(_rules(fields.get("grammar", "{}")))
        elif word == "grammar" and next(tokens) == "::":
            rules.update(_rules(_unquote(next(tokens))))
        elif word != ";":
            raise ValueError(f'expected "action" or "grammar" in the .twl2 text, got {word!r}')
    return Grammar(commands, rules)


def _tokens(text: str) -> Iterator[str]:
    position = 0
    while (position := _skip_blank(text, position)) < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"cannot read the .twl2 text at {text[position : position + 40]!r}")
        position = match.end()
        yield match[0]


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _fields(tokens: Iterator[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    words = list(itertools.takewhile(lambda token: token != "}", tokens))[1:]
    for name, colons, value, end in zip(*(words[i::4] for i in range(4)), strict=True):
        if (colons, end) != ("::", ";"):
            raise ValueError(f'expected name :: "text"; in the .twl2 text, got {name} {colons}')
        fields[name] = _unquote(value)
    return fields


def _unquote(token: str) -> str:
    return textwrap.dedent(token[3:-3]) if token.startswith('"""') else token[1:-1]


def _rules(block: str) -> dict[str, tuple[Rule, ...]]:
    lines = [line for line in block.split("\n") if not line.lstrip().startswith("#")]
    return {
        name: tuple(Rule(rule.get("condition", ""), rule["rhs"]) for rule in alternatives)
        for name, alternatives in json.loads("\n".join(lines)).items()
    }


@lru_cache(maxsize=4096)
def parse_text(text: str) -> tuple[Part, ...]:
    """Split a right-hand side or a command template into its parts.

    As in the reference, white space at the very start is dropped, and so is everything from a
    character on that has no meaning where it stands.
    """
    text = text.lstrip()
    parts: list[Part] = []
    position = 0
    while match := _PART.match(text, position):
        position = match.end()
        if match["literal"]:
            parts.append(match["literal"].replace("\\n", "\n"))
        elif match["symbol"]:
            parts.append(Symbol(match["symbol"]))
        else:
            element = Symbol(match["inner"]) if match["inner"] else Value(match["value"].strip())
            parts.append(Matches(element, match["query"] or "", match["open"] is not None))
    return tuple(parts)


@lru_cache(maxsize=1024)
def parse_query(text: str) -> tuple[Query, ...]:
    """Split `p(a:type) & q(a:type, b:type)` into its atoms.

    Raises:
        ValueError: The text is no such conjunction.
    """
    atoms: list[Query] = []
    for atom in text.split("&"):
        match = _ATOM.fullmatch(atom)
        if match is None:
            raise ValueError(f"expected predicate(name:type, ...), got {atom!r} in {text!r}")
        names = [part.split(":") for part in match[2].replace(" ", "").split(",") if part]
        atoms.append(Query(match[1], tuple((name[0], name[-1]) for name in names)))
    return tuple(atoms)


def queried_predicates(grammar: Grammar) -> frozenset[str]:
    """Return the predicates that texts and their conditions ask for."""
    texts = [command.template for command in grammar.commands.values()]
    queries = []
    for rules in grammar.rules.values():
        texts += [rule.text for rule in rules]
        queries += [rule.condition for rule in rules]
    for text in texts:
        queries += [part.query for part in parse_text(text) if isinstance(part, Matches)]
    return frozenset(atom.predicate for query in queries if query for atom in parse_query(query))
