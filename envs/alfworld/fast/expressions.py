"""Expressions in a grammar's texts: names and articles of entities, put together.

The reference hands them to Python's `eval`; here only what the games use is understood, so that a
game file cannot run code.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping

_ARTICLES = {"definite": "the", "indefinite": "a"}


def evaluate(expression: str, entities: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Return the text of an expression such as `o.indefinite + ' ' + o.name`.

    Args:
        expression: The expression.
        entities: Entity by name in the expression.
        names: The name of each entity in texts.

    Raises:
        ValueError: It uses anything but names, articles, text, `+` and `or`.
    """
    return _evaluate(_parse(expression), entities, names)


@functools.lru_cache(maxsize=1024)
def _parse(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


@functools.lru_cache(maxsize=1024)
def names_in(expression: str) -> tuple[str, ...]:
    """Return the names of the entities that an expression asks about, sorted."""
    nodes = ast.walk(_parse(expression))
    return tuple(sorted({node.id for node in nodes if isinstance(node, ast.Name)}))


def _evaluate(node: ast.expr, entities: Mapping[str, str], names: Mapping[str, str]) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name in entities:
            return names[entities[name]]
        case ast.Attribute(value=ast.Name(id=name), attr="name") if name in entities:
            return names[entities[name]]
        case ast.Attribute(value=ast.Name(id=name), attr="id") if name in entities:
            return entities[name]
        case ast.Attribute(value=ast.Name(id=name), attr=attr) if (
            name in entities and attr in _ARTICLES
        ):
            return _ARTICLES[attr]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _evaluate(left, entities, names) + _evaluate(right, entities, names)
        case ast.BoolOp(op=ast.Or(), values=values):
            texts = [_evaluate(value, entities, names) for value in values]
            return next((text for text in texts if text), texts[-1])
    raise ValueError(
        f"the grammar expression {ast.unparse(node)!r} is not supported; names and articles of the"
        f" entities {sorted(entities)}, text, + and or are"
    )
