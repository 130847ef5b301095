"""Compiles one game: from domain, problem and grammar to operators on an integer.

The state is the set of facts that hold now, one bit each. What no action changes is worked into
operators and texts. Operators are grounded when the agent first stands at a place and first holds
a thing there; which commands are possible is remembered for the facts that decide it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import NamedTuple

from envs.alfworld.fast.facts import Args, Fact, Facts, Join, Types
from envs.alfworld.fast.grammar import parse_grammar, queried_predicates
from envs.alfworld.fast.ground import (
    AT,
    HOLDS,
    NOT,
    Grounder,
    bit_of,
    dynamic_predicates,
    fixed_literals,
    possible_facts,
    tester,
)
from envs.alfworld.fast.names import entity_names
from envs.alfworld.fast.operators import Group, Operator, union
from envs.alfworld.fast.pddl import Condition, Problem, parse_domain, parse_problem
from envs.alfworld.fast.text import TextCompiler, render

# Remembered lists of admissible commands per game; when full, the memory starts anew.
_MAX_VIEWS = 512
# Low bits first: they are in most tests, and small integers are fast.
_ORDER = (AT, HOLDS, "holdsany", "opened")


class Scene(NamedTuple):
    """What can be done where the agent is, with what it holds.

    Attributes:
        groups: The operators that may apply.
        care: All bits that decide which of them do.
    """

    groups: tuple[Group, ...]
    care: int


class CompiledGame:
    """A game ready to play; it holds no episode, so any number of episodes share it.

    Attributes:
        initial: The state at the start.
        intro: The text at the start.
        goal: Ways to reach the goal: bits that matter, and which of these must be set.
        things: All objects and receptacles.
        holds_bits: The bits of the facts that the agent holds something.

    Args:
        data: `pddl_domain`, `pddl_problem` and `grammar` of a game file.

    Raises:
        ValueError: The game uses PDDL or grammar outside the supported subset.
    """

    def __init__(self, data: Mapping[str, str]):
        domain = parse_domain(data["pddl_domain"])
        problem = parse_problem(data["pddl_problem"])
        self._grammar = parse_grammar(data["grammar"])
        self._actions = domain.actions
        self._changing = dynamic_predicates(domain.actions.values())
        types = self._types = Types(problem.types, domain.parents)
        facts = self._known_facts(problem, types)
        self._numbered = self._changing_facts(facts)
        self._bits: dict[str, dict[Args, int]] = {}
        for number, (predicate, args) in enumerate(self._numbered):
            self._bits.setdefault(predicate, {})[args] = number
        self.holds_bits = union(1 << number for number in self._bits.get(HOLDS, {}).values())
        at_bits = union(1 << number for number in self._bits.get(AT, {}).values())
        self._scene_bits = at_bits | self.holds_bits
        names = entity_names({arg for _, args in problem.init for arg in args})
        self._texts = TextCompiler(self._grammar, facts, self._bits, types, names)
        self._grounders = [
            Grounder(
                action,
                part,
                facts,
                types,
                self._bits,
                self._changing,
                self._texts,
                self._grammar.commands[name].template,
            )
            for name, action in domain.actions.items()
            for part in action.precondition
        ]
        # Threads share a game, and a group is known before all groups beside it are.
        self._grounding = threading.Lock()
        self._groups: dict[tuple[Fact | None, Fact | None], Group] = {}
        self._scenes: dict[int, Scene] = {}
        self._views: dict[tuple[int, int], list[str]] = {}
        self._inventory = self._texts.compile(self._grammar.commands["inventory"].feedback, {})
        self.things = {
            entity for entity in names if types.type_of(entity) in ("object", "receptacle")
        }
        self.initial = union(bit_of(self._bits, *fact) for fact in problem.init)
        self.goal = self._goal_tests(problem.goal, facts, types)
        self._goal_care = union(care for care, _ in self.goal)
        # At the start every fact is known, so the text has no choices left.
        start = TextCompiler(self._grammar, Facts(problem.init), {}, types, names)
        self.intro = render(start.compile("#intro#", {}), self.initial)

    def admissible(self, state: int) -> list[str]:
        """Return the commands that are possible in a state, sorted. Callers must not change it."""
        scene = self.scene(state)
        key = (state & self._scene_bits, state & scene.care)
        view = self._views.get(key)
        if view is None:
            commands = {command for group in scene.groups for command in group.commands(state)}
            view = sorted(commands)
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[key] = view
        return view

    def operator(self, state: int, command: str) -> Operator | None:
        """Return what a command does in a state, None if it is not possible."""
        for group in self.scene(state).groups:
            found = group.find(state, command)
            if found is not None:
                return found
        return None

    def feedback(self, operator: Operator, state: int) -> str:
        """Return the answer to an action that led to a state."""
        if operator.feedback is None:
            grounder = operator.grounder
            rule = self._grammar.commands[grounder.action.name].feedback
            operator.feedback = self._texts.compile(rule, grounder.mapped(operator.row))
        return render(operator.feedback, state)

    def inventory(self, state: int) -> str:
        """Return the answer to the command `inventory` in a state."""
        return render(self._inventory, state)

    def is_won(self, state: int) -> bool:
        """Return whether the goal holds in a state."""
        return any(state & care == want for care, want in self.goal)

    def may_win(self, operator: Operator) -> bool:
        """Return whether an action may change what the goal asks about."""
        return bool(operator.effect.touched & self._goal_care)

    def scene(self, state: int) -> Scene:
        """Return what can be done where the agent is in a state, with what it holds."""
        bits = state & self._scene_bits
        scene = self._scenes.get(bits)
        if scene is None:
            known = {fact[0]: fact for fact in self.facts_of(bits)}
            at, held = known.get(AT), known.get(HOLDS)
            keys = dict.fromkeys(itertools.product((None, at), (None, held)))
            with self._grounding:
                groups = tuple(self._group(*key) for key in keys)
            scene = Scene(groups, union(group.care for group in groups))
            self._scenes[bits] = scene
        return scene

    def operators_holding(self, thing: str) -> list[Operator]:
        """Return the operators, at any place, that require the agent to hold a thing."""
        held = [fact for fact in self.facts_of(self.holds_bits) if fact[1][-1] == thing]
        with self._grounding:
            for fact in held:
                self._group(None, fact)
            groups = [group for key, group in self._groups.items() if key[1] in held]
        return [op for group in groups for op in group.operators]

    def type_of(self, entity: str) -> str:
        """Return the declared type of an entity."""
        return self._types.type_of(entity)

    def facts_of(self, bits: int) -> list[Fact]:
        """Return the facts that a set of bits stands for."""
        facts = []
        while bits:
            lowest = bits & -bits
            facts.append(self._numbered[lowest.bit_length() - 1])
            bits ^= lowest
        return facts

    def _known_facts(self, problem: Problem, types: Types) -> Facts:
        actions = self._actions.values()
        conditions = [problem.goal]
        for action in actions:
            conditions += [action.precondition, *(effect.condition for effect in action.effects)]
        read = {lit.predicate for parts in conditions for part in parts for lit in part.literals}
        queried = queried_predicates(self._grammar)
        negated = {name.removeprefix(NOT) for name in queried if name.startswith(NOT)}
        read = self._changing & (read | queried | negated)
        facts = possible_facts(actions, problem.init, types, read)
        negations = {(NOT + name, args) for name, args in facts if name in negated & read}
        return Facts(facts | negations)

    def _changing_facts(self, facts: Facts) -> list[Fact]:
        changing = [fact for fact in facts if fact[0].removeprefix(NOT) in self._changing]
        ranks = {name: rank for rank, name in enumerate(_ORDER)}
        # Facts about one receptacle or place, which texts list together, are neighbours.
        return sorted(changing, key=lambda f: (ranks.get(f[0], len(ranks)), f[0], f[1][::-1]))

    def _group(self, at: Fact | None, held: Fact | None) -> Group:
        """Return the operators that require exactly these facts of the agent."""
        group = self._groups.get((at, held))
        if group is None:
            if held is None or (None, held) not in self._groups:
                self._ground(at, held)
            group = self._groups.setdefault((at, held), Group([]))
        return group

    def _ground(self, at: Fact | None, held: Fact | None) -> None:
        """Ground what can be done at a place, or with a held thing at all places at once."""
        key, given = held or at or (None, ())
        found: dict[Args, list[Operator]] = {at[1] if at and not held else (): []}
        for grounder in self._grounders:
            if grounder.key == key:
                for row in grounder.rows(given):
                    if grounder.changes_anything(row):
                        found.setdefault(grounder.at(row), []).append(Operator(grounder, row))
        for place, operators in found.items():
            self._groups[(AT, place) if place else None, held] = Group(operators)

    def _goal_tests(
        self, goal: Condition, facts: Facts, types: Types
    ) -> tuple[tuple[int, int], ...]:
        tests: dict[tuple[int, int], None] = {}
        for part in goal:
            join = Join(fixed_literals(part, self._changing), dict(part.types), (), facts, types)
            test = tester(join, part, self._bits, ())
            tests.update((test(row), None) for row in join.run())
        return tuple(tests)
