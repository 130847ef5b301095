"""Reads PDDL domains and problems into rules whose conditions are in disjunctive normal form.

The subset is that of ALFRED's domain: types, conjunction, disjunction, negation of atoms,
existential quantifiers and conditional effects; action costs are ignored. As in the reference's
parser, names are case-insensitive and a type that nothing has (the domain writes "location," in one
place) matches no object.
"""

from __future__ import annotations

import itertools
import re
from functools import lru_cache
from typing import NamedTuple

ROOT_TYPE = "object"
# An s-expression: a token, or a list of s-expressions.
Expression = str | list


class Literal(NamedTuple):
    """An atom or its negation; arguments that start with "?" are variables."""

    positive: bool
    predicate: str
    args: tuple[str, ...]


class Conjunction(NamedTuple):
    """Literals that must all hold, and the types of the variables quantified around them."""

    literals: tuple[Literal, ...]
    types: tuple[tuple[str, str], ...]


# A disjunction of conjunctions.
Condition = tuple[Conjunction, ...]


class Effect(NamedTuple):
    """A literal that an action makes true wherever the condition held before."""

    condition: Condition
    literal: Literal


class Action(NamedTuple):
    """An action schema; `parameters` are (variable, type) pairs."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    precondition: Condition
    effects: tuple[Effect, ...]


class Domain(NamedTuple):
    """Action schemas by name, and the parent of each type."""

    parents: dict[str, str]
    actions: dict[str, Action]


class Problem(NamedTuple):
    """Objects with their types, facts that hold at the start, and the goal."""

    types: dict[str, str]
    init: tuple[tuple[str, tuple[str, ...]], ...]
    goal: Condition


@lru_cache(maxsize=16)
def parse_domain(text: str) -> Domain:
    """Parse a domain.

    Raises:
        ValueError: The text is no domain of the supported subset.
    """
    sections = _sections(text)
    parents = {
        name: parent for section in sections.get(":types", []) for name, parent in _typed(section)
    }
    actions = [_action(section) for section in sections.get(":action", [])]
    return Domain(parents, {action.name: action for action in actions})


def parse_problem(text: str) -> Problem:
    """Parse a problem.

    Raises:
        ValueError: The text is no problem of the supported subset.
    """
    sections = _sections(text)
    (objects,), (init,), ((goal,),) = (sections[key] for key in (":objects", ":init", ":goal"))
    # "(= (total-cost) 0)" sets a number, which no rule reads.
    facts = tuple((fact[0], tuple(fact[1:])) for fact in init if fact[0] != "=")
    return Problem(dict(_typed(objects)), facts, _disjunctive(goal, itertools.count()))


def _sections(text: str) -> dict[str, list[list[Expression]]]:
    root = _parse(text)
    if not isinstance(root, list) or root[0] != "define":
        raise ValueError("PDDL text must start with (define ...)")
    sections: dict[str, list[list[Expression]]] = {}
    for section in root[1:]:
        sections.setdefault(section[0], []).append(section[1:])
    return sections


def _parse(text: str) -> Expression:
    tokens = re.findall(r"[()]|\?[^\s()?]*|[^\s()?]+", re.sub(r";.*", "", text).lower())
    stack: list[list[Expression]] = [[]]
    for token in tokens:
        if token == "(":
            stack.append([])
        elif token == ")" and len(stack) > 1:
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(
            f"PDDL text has unbalanced parentheses ({len(stack) - 1} not closed, {len(stack[0])}"
            " expressions at the top, expected 0 and 1)"
        )
    return stack[0][0]


def _typed(tokens: list[Expression]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    names: list[str] = []
    rest = iter(tokens)
    for token in rest:
        if token == "-":
            kind = str(next(rest))
            pairs += [(name, kind) for name in names]
            names = []
        else:
            names.append(str(token))
    return pairs + [(name, ROOT_TYPE) for name in names]


def _action(section: list[Expression]) -> Action:
    name, *rest = section
    parts = dict(zip(map(str, rest[::2]), rest[1::2], strict=True))
    fresh = itertools.count()
    return Action(
        str(name),
        tuple(_typed(list(parts[":parameters"]))),
        _disjunctive(parts[":precondition"], fresh),
        tuple(_effects(parts[":effect"], (Conjunction((), ()),), fresh)),
    )


def _effects(expression: Expression, condition: Condition, fresh: itertools.count) -> list[Effect]:
    head, *rest = expression
    if head == "and":
        return [effect for part in rest for effect in _effects(part, condition, fresh)]
    if head == "when":
        return _effects(rest[1], _disjunctive(rest[0], fresh), fresh)
    if head == "increase":
        return []
    return [Effect(condition, _literal(expression))]


def _disjunctive(expression: Expression, fresh: itertools.count) -> Condition:
    head, *rest = expression or ["and"]
    if head == "or":
        return tuple(c for part in rest for c in _disjunctive(part, fresh))
    if head == "and":
        parts = [_disjunctive(part, fresh) for part in rest]
        return tuple(_merge(combination) for combination in itertools.product(*parts))
    if head == "exists":
        # Two quantifiers may use one name for different things.
        renamed = {name: (f"{name}#{next(fresh)}", kind) for name, kind in _typed(list(rest[0]))}
        body = _rename(rest[1], {name: new for name, (new, _) in renamed.items()})
        return tuple(
            Conjunction(c.literals, (*renamed.values(), *c.types))
            for c in _disjunctive(body, fresh)
        )
    if head in ("forall", "imply"):
        raise ValueError(f"PDDL conditions with {head!r} are not supported")
    return (Conjunction((_literal(expression),), ()),)


def _merge(parts: tuple[Conjunction, ...]) -> Conjunction:
    return Conjunction(
        tuple(literal for part in parts for literal in part.literals),
        tuple(pair for part in parts for pair in part.types),
    )


def _rename(expression: Expression, names: dict[str, str]) -> Expression:
    if isinstance(expression, str):
        return names.get(expression, expression)
    return [_rename(part, names) for part in expression]


def _literal(expression: Expression) -> Literal:
    positive = expression[0] != "not"
    predicate, *args = expression if positive else expression[1]
    if not all(isinstance(part, str) for part in (predicate, *args)):
        raise ValueError(f"expected a PDDL atom or its negation, got {expression}")
    return Literal(positive, predicate, tuple(args))
