"""Turns grammar texts into trees whose remaining choices are bit tests on the game's state.

Everything that cannot change in a game (names, kinds, which receptacle stands where) is worked out
once; what is left of a text are strings, choices between texts, and lists of candidates.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

from envs.alfworld.fast.expressions import evaluate, names_in
from envs.alfworld.fast.facts import Args, Facts, Types
from envs.alfworld.fast.grammar import (
    Grammar,
    Matches,
    Part,
    Symbol,
    Value,
    parse_query,
    parse_text,
)
from envs.alfworld.fast.queries import Bits, Mapped, Placeholder, Query


class Choice(NamedTuple):
    """The text of the first option of which any bit pattern is set."""

    options: tuple[tuple[tuple[int, ...], Text], ...]


class Listing(NamedTuple):
    """The texts whose bits are set, joined by separators.

    Bits count from `shift` on, so that the tests of a list work on small integers.
    """

    shift: int
    care: int
    items: tuple[tuple[int, Text], ...]
    empty: Text
    separator: Text
    last_separator: Text


Text = str | Choice | Listing | tuple["Text", ...]


class Footprint(NamedTuple):
    """What of its context a text depends on.

    Attributes:
        names: Names of the placeholders that it asks about.
        kinds: Types of the entities that its queries bind anew. Known entities of these types
            matter, because two placeholders never stand for one entity.
    """

    names: frozenset[str]
    kinds: frozenset[str]


def render(text: Text, state: int) -> str:
    """Return a text as it reads in a state.

    Raises:
        ValueError: No option of a choice holds.
    """
    if isinstance(text, str):
        return text
    if isinstance(text, Choice):
        for patterns, option in text.options:
            for bits in patterns:
                if state & bits == bits:
                    return render(option, state)
        raise ValueError("the game's grammar has no text for this state")
    if isinstance(text, Listing):
        local = state >> text.shift & text.care
        items = [
            item if isinstance(item, str) else render(item, state)
            for bits, item in text.items
            if local & bits == bits
        ]
        if not items:
            return render(text.empty, state)
        head = render(text.separator, state).join(items[:-1])
        return head + render(text.last_separator, state) + items[-1] if head else items[-1]
    return "".join([render(part, state) for part in text])


class TextCompiler:
    """Compiles the texts of one game.

    Args:
        grammar: The game's grammar.
        facts: All facts that can ever hold, `not_...` facts included.
        bits: Numbers of the state bits of facts that can change; other facts always hold.
        types: The game's entities.
        names: The name of each entity in texts.
    """

    def __init__(
        self,
        grammar: Grammar,
        facts: Facts,
        bits: Bits,
        types: Types,
        names: Mapping[str, str],
    ):
        self._grammar = grammar
        self._facts = facts
        self._bits = bits
        self._types = types
        self._names = names
        self._footprints: dict[tuple[str, tuple[Placeholder, ...]], Footprint] = {}
        self._compiled: dict[tuple[str, frozenset], Text] = {}
        self._queries: dict[tuple[str, tuple[Placeholder, ...]], Query] = {}
        self._values: dict[tuple[str | None, ...], str] = {}

    def compile(self, text: str, mapped: Mapped) -> Text:
        """Compile a template or feedback text in the context of an action's arguments.

        Raises:
            ValueError: The grammar lacks a symbol, or says something unsupported.
        """
        names, kinds = self._footprint(text, tuple(mapped))
        relevant = {
            placeholder: entity
            for placeholder, entity in mapped.items()
            if placeholder[0] in names or (kinds and self._types.type_of(entity) in kinds)
        }
        key = (text, frozenset(relevant.items()))
        if key not in self._compiled:
            parts = [self._part(part, relevant) for part in parse_text(text)]
            self._compiled[key] = _joined(parts)
        return self._compiled[key]

    def writer(
        self, template: str, parameters: tuple[tuple[str, str], ...]
    ) -> Callable[[Args], str]:
        """Return a function from an action's arguments to its command.

        Args:
            template: The command's template.
            parameters: (variable, type) of each argument.
        """
        placeholders = tuple((name[1:], kind) for name, kind in parameters)
        slots = {name: slot for slot, (name, _) in enumerate(placeholders)}
        pieces: list[str | int] = []
        for part in parse_text(template):
            if isinstance(part, str):
                pieces.append(part)
            elif _bare_name(part) in slots:
                pieces.append(slots[_bare_name(part)])
            else:
                return lambda args: self._command(template, placeholders, args)
        names = self._names
        return lambda args: "".join([p if isinstance(p, str) else names[args[p]] for p in pieces])

    def _command(self, template: str, placeholders: tuple[Placeholder, ...], args: Args) -> str:
        text = self.compile(template, dict(zip(placeholders, args, strict=True)))
        if not isinstance(text, str):
            raise ValueError(f"the command {template!r} depends on the state of the game")
        return text

    def _footprint(self, text: str, known: tuple[Placeholder, ...]) -> Footprint:
        """Return what a text, with all that it expands to, depends on in a context.

        Args:
            text: The text.
            known: The placeholders of the context.
        """
        if (text, known) not in self._footprints:
            names: set[str] = set()
            kinds: set[str] = set()
            seen, todo = {text}, [text]
            while todo:
                for part in parse_text(todo.pop()):
                    element = part.element if isinstance(part, Matches) else part
                    queries = [part.query] if isinstance(part, Matches) else []
                    if isinstance(element, Symbol):
                        rules = self._grammar.rules.get(element.name, ())
                        queries += [rule.condition for rule in rules]
                        todo += sorted({rule.text for rule in rules} - seen)
                        seen.update(todo)
                    elif isinstance(element, Value):
                        names.update(names_in(element.expression))
                    for atom in (atom for query in queries if query for atom in parse_query(query)):
                        names.update(name for name, _ in atom.placeholders)
                        for position, placeholder in enumerate(atom.placeholders):
                            if placeholder not in known:
                                entities = self._facts.entities(atom.predicate, position)
                                kinds.update(map(self._types.type_of, entities))
            self._footprints[text, known] = Footprint(frozenset(names), frozenset(kinds))
        return self._footprints[text, known]

    def _part(self, part: Part, mapped: Mapped) -> Text:
        if isinstance(part, str):
            return part
        if isinstance(part, Symbol):
            return self._symbol(part.name, mapped)
        return self._matches(part, mapped)

    def _symbol(self, name: str, mapped: Mapped) -> Text:
        if name not in self._grammar.rules:
            raise ValueError(f"the game's grammar has no rule for {name!r}")
        options: list[tuple[tuple[int, ...], Text]] = []
        for rule in self._grammar.rules[name]:
            needed = {0}
            if rule.condition:
                needed = {bits for bits, _ in self._query(rule.condition, mapped).matches(mapped)}
            patterns = (0,) if 0 in needed else tuple(sorted(needed))
            if patterns:
                options.append((patterns, self.compile(rule.text, mapped)))
            if 0 in needed:
                break
        if options and options[0][0] == (0,):
            return options[0][1]
        return Choice(tuple(options))

    def _matches(self, part: Matches, mapped: Mapped) -> Text:
        if not part.query:
            return self._element(part.element, mapped)
        query = self._query(part.query, mapped)
        items = [
            (
                bits,
                self._element(part.element, {**mapped, **dict(zip(query.new, new, strict=True))}),
            )
            for bits, new in query.matches(mapped)
        ]
        if len(items) == 1 and items[0][0] == 0:
            return items[0][1]
        ends: list[Text] = ["", "", ""]
        if part.enumerated:
            ends = [self._symbol(f"list_{end}", mapped) for end in _LIST_SYMBOLS]
        care = functools.reduce(operator.or_, (bits for bits, _ in items), 0)
        shift = max((care & -care).bit_length() - 1, 0)
        shifted = tuple((bits >> shift, item) for bits, item in items)
        return Listing(shift, care >> shift, shifted, *ends)

    def _element(self, element: Symbol | Value, mapped: Mapped) -> Text:
        if isinstance(element, Symbol):
            return self._symbol(element.name, mapped)
        entities = {name: entity for (name, _), entity in mapped.items()}
        key = (element.expression, *map(entities.get, names_in(element.expression)))
        if key not in self._values:
            self._values[key] = evaluate(element.expression, entities, self._names)
        return self._values[key]

    def _query(self, text: str, mapped: Mapped) -> Query:
        key = (text, tuple(mapped))
        if key not in self._queries:
            self._queries[key] = Query(text, key[1], self._facts, self._types, self._bits)
        return self._queries[key]


_LIST_SYMBOLS = ("empty", "separator", "last_separator")


def _bare_name(part: Part) -> str:
    """Return `o` for the part `{o}`, "" for any other part."""
    if isinstance(part, Matches) and isinstance(part.element, Value) and not part.query:
        return part.element.expression
    return ""


def _joined(parts: list[Text]) -> Text:
    merged: list[Text] = []
    for part in parts:
        for piece in part if type(part) is tuple else (part,):
            if isinstance(piece, str) and merged and isinstance(merged[-1], str):
                merged[-1] += piece
            else:
                merged.append(piece)
    return merged[0] if len(merged) == 1 else tuple(merged)
