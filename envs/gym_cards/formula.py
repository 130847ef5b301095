"""Formulas as lists of entries: what they are worth, and how to go on with one.

    sum     = product {("+" | "-") product}
    product = factor {("*" | "/") factor}
    factor  = ["+" | "-"] factor | number | "(" sum ")"

Arithmetic is exact: with floating-point numbers 8 / (3 - 8 / 3) would not be 24. Numbers side by
side make no longer number, and two stars no power.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import permutations, product
from typing import NamedTuple

_OPERATORS = "+-*/"


class _UnreadableError(Exception):
    """The entries cannot be read as a formula."""


def evaluate(entries: Sequence[str]) -> Fraction | None:
    """Return what a formula is worth, None where it is none or divides by zero."""
    reader = _Reader([entry for entry in entries if not entry.isspace()])
    try:
        value = reader.sum()
        reader.expect_end()
    except (_UnreadableError, ZeroDivisionError):
        return None
    return value


class _Reader:
    def __init__(self, entries: list[str]):
        self._entries = entries
        self._place = 0

    def sum(self) -> Fraction:
        value = self._product()
        while sign := self._take("+", "-"):
            value += self._product() if sign == "+" else -self._product()
        return value

    def expect_end(self) -> None:
        if self._place < len(self._entries):
            raise _UnreadableError

    def _product(self) -> Fraction:
        value = self._factor()
        while sign := self._take("*", "/"):
            factor = self._factor()
            value = value * factor if sign == "*" else value / factor
        return value

    def _factor(self) -> Fraction:
        if sign := self._take("+", "-"):
            return self._factor() if sign == "+" else -self._factor()
        if self._take("("):
            value = self.sum()
            if not self._take(")"):
                raise _UnreadableError
            return value
        if self._place < len(self._entries) and self._entries[self._place].isdecimal():
            self._place += 1
            return Fraction(self._entries[self._place - 1])
        raise _UnreadableError

    def _take(self, *wanted: str) -> str:
        if self._place < len(self._entries) and self._entries[self._place] in wanted:
            self._place += 1
            return self._entries[self._place - 1]
        return ""


class _Tree(NamedTuple):
    """A formula with its value; `operator` is empty for a number, `left` holds it then."""

    value: Fraction
    operator: str
    left: _Tree | int
    right: _Tree | None = None


def shortest_continuation(
    numbers: Sequence[int], actions: Sequence[str], goal: int, written: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the entries that make a formula worth the goal, using each number once.

    Args:
        numbers: Numbers on the cards.
        actions: Entries that may be written.
        goal: What the formula is to be worth.
        written: Entries that stand already.

    Returns:
        The fewest further entries, without "="; empty where nothing is left to write or there is
        no such formula.
    """
    operators = tuple(operator for operator in _OPERATORS if operator in actions)
    for formula in _solutions(tuple(sorted(numbers)), operators, "(" in actions, goal):
        if formula[: len(written)] == written:
            return formula[len(written) :]
    return ()


@lru_cache(maxsize=128)
def _solutions(
    numbers: tuple[int, ...], operators: tuple[str, ...], has_brackets: bool, goal: int
) -> tuple[tuple[str, ...], ...]:
    """Return all formulas worth the goal, shortest first; optional brackets make one each."""
    written = {
        formula
        for order in sorted(set(permutations(numbers)))
        for tree in _trees(order, operators)
        if tree.value == goal
        for formula in _writings(tree)
        if has_brackets or "(" not in formula
    }
    solutions = (formula for formula in written if evaluate(formula) == goal)
    return tuple(sorted(solutions, key=lambda formula: (len(formula), formula)))


@lru_cache(maxsize=256)
def _trees(order: tuple[int, ...], operators: tuple[str, ...]) -> tuple[_Tree, ...]:
    """Return every formula of the numbers in this order."""
    if len(order) == 1:
        return (_Tree(Fraction(order[0]), "", order[0]),)
    found = []
    for split in range(1, len(order)):
        sides = product(_trees(order[:split], operators), _trees(order[split:], operators))
        for (left, right), operator in product(sides, operators):
            if operator == "/" and right.value == 0:
                continue
            found.append(_Tree(_apply(operator, left.value, right.value), operator, left, right))
    return tuple(found)


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case _:
            return left / right


def _writings(tree: _Tree) -> Iterator[tuple[str, ...]]:
    """Yield the formula with brackets, and without, around each of its parts and the whole.

    Without, it may have become another formula.
    """
    if tree.right is None or isinstance(tree.left, int):
        yield (str(tree.left),)
        return
    for left, right in product(_writings(tree.left), list(_writings(tree.right))):
        formula = (*left, tree.operator, *right)
        yield formula
        yield ("(", *formula, ")")
