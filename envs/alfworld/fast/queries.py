"""Queries of a grammar: which entities can be put for its placeholders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from envs.alfworld.fast.facts import Args, Facts, Join, Types
from envs.alfworld.fast.grammar import parse_query
from envs.alfworld.fast.pddl import Literal

Placeholder = tuple[str, str]  # name, type
Mapped = dict[Placeholder, str]  # what each stands for
# The number of the state bit of each fact that can change, by predicate and arguments.
Bits = Mapping[str, Mapping[Args, int]]


class Query:
    """A query in a context where some placeholders are known.

    Args:
        text: The query, as in `inreceptacle(o:object, r:receptacle)`.
        known: The placeholders of the context.
        facts: All facts that can ever hold.
        types: The game's entities.
        bits: Numbers of the state bits of facts that can change; other facts always hold.

    Attributes:
        new: The placeholders that the query adds.
    """

    def __init__(
        self,
        text: str,
        known: tuple[Placeholder, ...],
        facts: Facts,
        types: Types,
        bits: Bits,
    ):
        atoms = parse_query(text)
        kinds = {f"?{name}:{kind}": kind for atom in atoms for name, kind in atom.placeholders}
        literals = [
            Literal(
                True, atom.predicate, tuple(f"?{name}:{kind}" for name, kind in atom.placeholders)
            )
            for atom in atoms
        ]
        wanted = dict.fromkeys(ph for atom in atoms for ph in atom.placeholders)
        self._given = [ph for ph in wanted if ph in known]
        self.new = [ph for ph in wanted if ph not in known]
        given = [f"?{name}:{kind}" for name, kind in self._given]
        self._join = Join(literals, kinds, given, facts, types)
        self._pick_new = self._join.picker(tuple(f"?{name}:{kind}" for name, kind in self.new))
        self._bits = [
            (self._join.picker(lit.args), bits[lit.predicate])
            for lit in literals
            if lit.predicate in bits
        ]
        order = tuple(arg for lit in literals for arg in lit.args)
        self._order = self._join.picker(order) if len(literals) > 1 else None

    def matches(self, mapped: Mapped) -> list[tuple[int, Args]]:
        """Return the bits that each match needs and the entities of the new placeholders.

        As in the reference, matches are sorted by the fact of the first atom, then of the second
        and so on, and two placeholders never stand for one entity.
        """
        rows = self._join.run(tuple(mapped[placeholder] for placeholder in self._given))
        if self._order:
            rows.sort(key=self._order)
        used, found = set(mapped.values()), []
        for row in rows:
            new = self._pick_new(row)
            if used.isdisjoint(new) and len(set(new)) == len(new):
                needed = 0
                for pick, bits in self._bits:
                    needed |= 1 << bits[pick(row)]
                found.append((needed, new))
        return found


def _variables(placeholders: Iterable[Placeholder]) -> Args:
    return tuple(f"?{name}:{kind}" for name, kind in placeholders)
