"""Sets of facts: which entities there are, what is known of them, and joins over that."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from envs.alfworld.fast.pddl import ROOT_TYPE, Literal

Args = tuple[str, ...]
Fact = tuple[str, Args]


class Types:
    """The type of every entity, with the subtype relation.

    Args:
        entity_types: Type by entity.
        parents: Parent by type; types without one are below the root.
    """

    def __init__(self, entity_types: Mapping[str, str], parents: Mapping[str, str]):
        self._parents = parents
        self._entity_types = entity_types
        self._members: dict[str, frozenset[str]] = {}

    def type_of(self, entity: str) -> str:
        """Return the declared type of an entity."""
        return self._entity_types.get(entity, ROOT_TYPE)

    def members(self, kind: str) -> frozenset[str]:
        """Return all entities of a type or of its subtypes."""
        if kind not in self._members:
            self._members[kind] = frozenset(
                entity for entity, own in self._entity_types.items() if self._is_a(own, kind)
            )
        return self._members[kind]

    def _is_a(self, own: str, kind: str) -> bool:
        while own not in (kind, ROOT_TYPE):
            own = self._parents.get(own, ROOT_TYPE)
        return own == kind or kind == ROOT_TYPE


class Facts:
    """A set of facts; those of one predicate are listed in sorted order."""

    def __init__(self, facts: Iterable[Fact]):
        self._rows: dict[str, list[Args]] = {}
        for predicate, args in sorted(set(facts)):
            self._rows.setdefault(predicate, []).append(args)
        self._sets = {predicate: frozenset(rows) for predicate, rows in self._rows.items()}
        self._entities: dict[tuple[str, int], frozenset[str]] = {}
        self._indices: dict[tuple, dict[Args, list[Args]]] = {}

    def __iter__(self) -> Iterator[Fact]:
        return ((predicate, args) for predicate, rows in self._rows.items() for args in rows)

    def rows(self, predicate: str) -> list[Args]:
        """Return the arguments of all facts of a predicate."""
        return self._rows.get(predicate, [])

    def row_set(self, predicate: str) -> frozenset[Args]:
        """Return the same as a set."""
        return self._sets.get(predicate, frozenset())

    def entities(self, predicate: str, position: int) -> frozenset[str]:
        """Return what stands at a position in the facts of a predicate."""
        key = (predicate, position)
        if key not in self._entities:
            self._entities[key] = frozenset(args[position] for args in self.rows(predicate))
        return self._entities[key]

    def lookup(
        self, predicate: str, known: tuple[int, ...], wanted: tuple[int, ...]
    ) -> dict[Args, list[Args]]:
        """Return, by the arguments at the `known` positions, those at the `wanted` ones."""
        key = (predicate, known, wanted)
        if key not in self._indices:
            index: dict[Args, list[Args]] = {}
            pick_known, pick_wanted = picker(known), picker(wanted)
            for args in self.rows(predicate):
                index.setdefault(pick_known(args), []).append(pick_wanted(args))
            self._indices[key] = index
        return self._indices[key]


def picker(positions: Sequence[int]) -> Callable[[Args], Args]:
    """Return a function from a tuple to the tuple of its values at some positions."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    if not positions:
        return lambda row: ()
    (only,) = positions
    return lambda row: (row[only],)


class Join:
    """Finds all assignments of typed variables under which literals hold in a set of facts.

    Args:
        literals: Positive ones must be facts, negative ones must not be; `=` compares.
        kinds: Type by variable. A variable that no positive literal binds ranges over its type.
        given: Variables that `run` is told.
        facts: The facts.
        types: The entities.

    Attributes:
        slots: Position by variable, and by constant, in the rows that `run` returns.
    """

    def __init__(
        self,
        literals: Sequence[Literal],
        kinds: Mapping[str, str],
        given: Sequence[str],
        facts: Facts,
        types: Types,
    ):
        constants = {a for lit in literals for a in lit.args if a[0] != "?"}
        self._constants = tuple(sorted(constants))
        self.slots = {name: slot for slot, name in enumerate([*given, *self._constants])}
        self._facts = facts
        self._allowed = [(self.slots[name], types.members(kinds[name])) for name in given]
        self._steps: list[Callable[[list[Args]], list[Args]]] = []
        atoms = [lit for lit in literals if lit.positive and lit.predicate != "="]
        while atoms:
            atom = min(atoms, key=self._cost)
            atoms.remove(atom)
            self._steps.append(self._step(atom, kinds, types))
        for name in kinds:
            if name not in self.slots:
                self.slots[name] = len(self.slots)
                self._steps.append(_spread(types.members(kinds[name])))
        for literal in literals:
            if not literal.positive or literal.predicate == "=":
                self._steps.append(self._check(literal))

    def run(self, given: Args = ()) -> list[Args]:
        """Return the values of all slots for each assignment that agrees with the given values."""
        if not all(given[slot] in members for slot, members in self._allowed):
            return []
        rows: list[Args] = [(*given, *self._constants)]
        for step in self._steps:
            rows = step(rows)
        return rows

    def picker(self, args: Args) -> Callable[[Args], Args]:
        """Return a function from a row to the values of `args` in it."""
        return picker([self.slots[arg] for arg in args])

    def _cost(self, atom: Literal) -> float:
        """Estimate how many rows one row becomes when the atom comes next."""
        known = [p for p, arg in enumerate(atom.args) if arg in self.slots]
        if len(known) == len(atom.args):
            return 0.0
        spread = max((len(self._facts.entities(atom.predicate, p)) for p in known), default=0)
        return len(self._facts.rows(atom.predicate)) / max(spread, 1)

    def _step(self, atom: Literal, kinds: Mapping[str, str], types: Types):
        known = tuple(p for p, arg in enumerate(atom.args) if arg in self.slots)
        free = tuple(p for p, arg in enumerate(atom.args) if arg not in self.slots)
        if len({atom.args[p] for p in free}) < len(free):
            raise ValueError(f"a condition names one free variable twice in one atom: {atom}")
        pick = self.picker(tuple(atom.args[p] for p in known))
        if not free:
            return _keep(pick, self._facts.row_set(atom.predicate), True)
        index = self._facts.lookup(atom.predicate, known, free)
        for number, position in enumerate(free):
            self.slots[atom.args[position]] = len(self.slots)
            members = types.members(kinds[atom.args[position]])
            if not self._facts.entities(atom.predicate, position) <= members:
                index = {
                    key: [values for values in rows if values[number] in members]
                    for key, rows in index.items()
                }
        return _extend(pick, index)

    def _check(self, literal: Literal):
        if literal.predicate == "=":
            left, right = (self.slots[arg] for arg in literal.args)
            wanted = literal.positive
            return lambda rows: [row for row in rows if (row[left] == row[right]) == wanted]
        return _keep(self.picker(literal.args), self._facts.row_set(literal.predicate), False)


def _keep(pick: Callable[[Args], Args], facts: frozenset[Args], wanted: bool):
    return lambda rows: [row for row in rows if (pick(row) in facts) == wanted]


def _spread(members: frozenset[str]):
    ordered = sorted(members)
    return lambda rows: [(*row, entity) for row in rows for entity in ordered]


def _extend(pick: Callable[[Args], Args], index: dict[Args, list[Args]]):
    nothing: list[Args] = []
    return lambda rows: [row + new for row in rows for new in index.get(pick(row), nothing)]
