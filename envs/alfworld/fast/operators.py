"""Grounded actions, and the groups in which they are looked up."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import NamedTuple

from envs.alfworld.fast.facts import Args
from envs.alfworld.fast.ground import Change, Grounder
from envs.alfworld.fast.text import Text


class Effect(NamedTuple):
    """What an operator does.

    Attributes:
        clear: Bits that it clears in every state.
        set: Bits that it sets in every state.
        sometimes: What it changes besides in some states.
        touched: All bits that it may change.
    """

    clear: int
    set: int
    sometimes: tuple[Change, ...]
    touched: int


class Operator:
    """A grounded action, in a group that says where the agent must be and what it must hold.

    Attributes:
        care: Bits that decide whether it is possible besides.
        want: Which of these must be set.
        command: What the player types.
        grounder: Knows the rest.
        row: What the grounder knows it by.
        feedback: The answer; None until it is first asked for.
        namesake: Another operator of its group with the same command.
    """

    __slots__ = ("_effect", "care", "command", "feedback", "grounder", "namesake", "row", "want")

    def __init__(self, grounder: Grounder, row: Args):
        self.care, self.want = grounder.test(row)
        self.command = grounder.command(row)
        self.grounder = grounder
        self.row = row
        self.feedback: Text | None = None
        self.namesake: Operator | None = None
        self._effect: Effect | None = None

    @property
    def args(self) -> Args:
        """The entities of the action's parameters."""
        return self.grounder.args(self.row)

    @property
    def effect(self) -> Effect:
        """What the action does; worked out on first use, since most actions are never taken."""
        if self._effect is None:
            changes = self.grounder.changes(self.row)
            always = [change for change in changes if not change.care]
            sometimes = tuple(change for change in changes if change.care)
            clear = union(change.clear for change in always)
            set_ = union(change.set for change in always)
            touched = union(change.clear | change.set for change in sometimes)
            self._effect = Effect(clear, set_, sometimes, clear | set_ | touched)
        return self._effect

    def apply(self, state: int) -> int:
        """Return the state after the action."""
        clear, set_, sometimes, _ = self.effect
        for care, want, more_clear, more_set in sometimes:
            if state & care == want:
                clear |= more_clear
                set_ |= more_set
        return state & ~clear | set_


class Group:
    """Operators that require the agent to be at one place, to hold one thing, both or neither.

    Attributes:
        operators: The operators.
        care: All bits that decide which of them apply.
    """

    def __init__(self, operators: list[Operator]):
        self.operators = operators
        self.care = union(op.care for op in operators)
        self._always = [op.command for op in operators if not op.care]
        self._sometimes = [op for op in operators if op.care]
        self._by_command: dict[str, Operator] = {}

    def commands(self, state: int) -> list[str]:
        """Return the commands of the operators that apply in a state."""
        possible = [op.command for op in self._sometimes if state & op.care == op.want]
        return self._always + possible

    def find(self, state: int, command: str) -> Operator | None:
        """Return the operator that a command means in a state."""
        if not self._by_command:
            by_command: dict[str, Operator] = {}
            for op in reversed(self.operators):
                op.namesake = by_command.get(op.command)
                by_command[op.command] = op
            self._by_command = by_command  # whole: other threads read it
        found = self._by_command.get(command)
        while found is not None and state & found.care != found.want:
            found = found.namesake
        return found


def union(bits: Iterable[int]) -> int:
    """Return the bits that are set in any of some integers."""
    return functools.reduce(operator.or_, bits, 0)
