"""Grounds action schemas: which facts are possible, and the operators that act on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from envs.alfworld.fast.facts import Args, Fact, Facts, Join, Types
from envs.alfworld.fast.pddl import Action, Conjunction, Effect, Literal
from envs.alfworld.fast.queries import Bits, Mapped
from envs.alfworld.fast.text import TextCompiler

# The reference writes "not_p" down as a fact when an action deletes p; texts may ask for it.
NOT = "not_"
# The two facts of which at most one each holds at a time; operators are grouped by them.
AT, HOLDS = "atlocation", "holds"


def dynamic_predicates(actions: Iterable[Action]) -> frozenset[str]:
    """Return the predicates that some action changes."""
    return frozenset(effect.literal.predicate for action in actions for effect in action.effects)


def possible_facts(
    actions: Iterable[Action], init: Sequence[Fact], types: Types, read: frozenset[str]
) -> set[Fact]:
    """Return a superset of the facts that can ever hold.

    A fact is possible if it holds at the start, or if some action adds it and those unchanging
    preconditions that share variables with it can be met.

    Args:
        actions: All action schemas.
        init: The facts that hold at the start.
        types: The entities.
        read: The changing predicates that matter; facts of others are left out.
    """
    actions = list(actions)
    changing = dynamic_predicates(actions)
    static = Facts(fact for fact in init if fact[0] not in changing)
    possible = {fact for fact in init if fact[0] not in changing or fact[0] in read}
    for action in actions:
        for effect in action.effects:
            added = effect.literal
            if added.positive and added.predicate in read:
                for literals, kinds in _static_parts(action, added, changing):
                    join = Join(literals, kinds, (), static, types)
                    pick = join.picker(added.args)
                    possible.update((added.predicate, pick(row)) for row in join.run())
    return possible


def _static_parts(
    action: Action, effect: Literal, changing: frozenset[str]
) -> list[tuple[list[Literal], dict[str, str]]]:
    """Return, per precondition that is not implied by another, what an added fact depends on."""
    parts: dict[frozenset[Literal], tuple[list[Literal], dict[str, str]]] = {}
    for conjunction in action.precondition:
        literals = [lit for lit in conjunction.literals if lit.predicate not in changing]
        reached, linked = set(effect.args), []
        while more := [lit for lit in literals if reached & _variables(lit)]:
            linked += more
            literals = [lit for lit in literals if lit not in more]
            reached.update(*map(_variables, more))
        kinds = {**dict(action.parameters), **dict(conjunction.types)}
        kinds = {name: kind for name, kind in kinds.items() if name in reached}
        parts[frozenset(linked)] = (linked, kinds)
    return [part for key, part in parts.items() if not any(other < key for other in parts)]


def _variables(literal: Literal) -> set[str]:
    return {arg for arg in literal.args if arg[0] == "?"}


class Change(NamedTuple):
    """Bits cleared and bits set where, of the bits in `care`, exactly those in `want` are set."""

    care: int
    want: int
    clear: int
    set: int


class Grounder:
    """Grounds one conjunction of an action's precondition, for one place or one held thing.

    A ground instance is a row of values, of which the methods tell the rest.

    Args:
        action: The action.
        conjunction: One of the conjunctions of its precondition.
        facts: All possible facts.
        types: The entities.
        bits: Numbers of the state bits of all possible facts that can change.
        changing: The predicates that can change.
        texts: Writes the command.
        template: The grammar's template of the command.

    Attributes:
        action: The action.
        key: The predicate whose arguments `rows` is told: `HOLDS` if the conjunction requires such
            a fact, else `AT`, else None.
        args: Returns the entities of the action's parameters.
        at: Returns the arguments of the `AT` fact that is required, () if none is.
        test: Returns the bits that decide whether the instance is possible and which of these must
            be set, apart from its `AT` and `HOLDS` facts.
    """

    def __init__(
        self,
        action: Action,
        conjunction: Conjunction,
        facts: Facts,
        types: Types,
        bits: Bits,
        changing: frozenset[str],
        texts: TextCompiler,
        template: str,
    ):
        required = {lit.predicate: lit.args for lit in conjunction.literals if lit.positive}
        self.action = action
        self.key = next((name for name in (HOLDS, AT) if name in required), None)
        given = required.get(self.key or "", ())
        kinds = {**dict(action.parameters), **dict(conjunction.types)}
        join = Join(fixed_literals(conjunction, changing), kinds, given, facts, types)
        self.rows = join.run
        self.args = join.picker(tuple(name for name, _ in action.parameters))
        self.at = join.picker(required.get(AT, ()))
        self.test = tester(join, conjunction, bits, skip=(AT, HOLDS))
        self._bits = bits
        self._effects = [
            (
                join.picker(effect.literal.args),
                effect.literal,
                [join.picker(args) for args in _void_if(effect, action, conjunction)],
                [tester(join, part, bits, ()) for part in effect.condition],
            )
            for effect in action.effects
        ]
        self._write = texts.writer(template, action.parameters)

    def command(self, row: Args) -> str:
        """Return what the player types."""
        return self._write(self.args(row))

    def mapped(self, row: Args) -> Mapped:
        """Return the placeholders that the texts of the instance may use."""
        parameters = zip(self.action.parameters, self.args(row), strict=True)
        return {(name[1:], kind): arg for (name, kind), arg in parameters}

    def changes_anything(self, row: Args) -> bool:
        """Return whether the instance does anything; the game leaves out those that do not."""
        for pick, _, void_if, _ in self._effects:
            args = pick(row)
            if not any(args == other(row) for other in void_if):
                return True
        return False

    def changes(self, row: Args) -> list[Change]:
        """Return what the instance does."""
        changes = []
        for pick, literal, void_if, conditions in self._effects:
            args = pick(row)
            if any(args == other(row) for other in void_if):
                continue
            own = bit_of(self._bits, literal.predicate, args)
            opposite = bit_of(self._bits, NOT + literal.predicate, args)
            clear, set_ = (opposite, own) if literal.positive else (own, opposite)
            changes += [Change(*condition(row), clear, set_) for condition in conditions]
        return changes


def _void_if(effect: Effect, action: Action, conjunction: Conjunction) -> list[Args]:
    """Return the arguments at which an effect is dropped.

    What is a precondition already changes nothing, and a deletion gives way to an addition.
    """
    rivals = list(conjunction.literals)
    if not effect.literal.positive:
        added = [e.literal for e in action.effects if e.condition == effect.condition]
        rivals += [lit._replace(positive=False) for lit in added if lit.positive]
    return [lit.args for lit in rivals if lit[:2] == effect.literal[:2]]


def fixed_literals(conjunction: Conjunction, changing: frozenset[str]) -> list[Literal]:
    """Return the literals that can be settled whatever the state is."""
    return [
        literal
        for literal in conjunction.literals
        if literal.positive or literal.predicate not in changing
    ]


def tester(
    join: Join, conjunction: Conjunction, bits: Bits, skip: Sequence[str]
) -> Callable[[Args], tuple[int, int]]:
    """Return a function from a row of a join to what a conjunction then asks of the state.

    It returns the bits that the conjunction asks about, and which of these must be set.

    Args:
        join: The join that makes the rows.
        conjunction: The conjunction.
        bits: Numbers of the state bits of all possible facts that can change.
        skip: Predicates whose positive literals are left out.
    """
    parts = [
        (join.picker(lit.args), bits[lit.predicate], lit.positive)
        for lit in conjunction.literals
        if lit.predicate in bits and not (lit.positive and lit.predicate in skip)
    ]
    if not parts:
        return lambda row: (0, 0)

    def test(row: Args) -> tuple[int, int]:
        care = want = 0
        for pick, numbers, positive in parts:
            number = numbers.get(pick(row))
            if number is not None:
                care |= 1 << number
                if positive:
                    want |= 1 << number
        return care, (care if want == care else want)

    return test


def bit_of(bits: Bits, predicate: str, args: Args) -> int:
    """Return the state bit of a fact, 0 if it has none."""
    number = bits.get(predicate, {}).get(args)
    return 0 if number is None else 1 << number
