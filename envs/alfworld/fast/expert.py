"""An expert that sees the whole state and wins every game in few steps."""

from __future__ import annotations

from collections.abc import Sequence

from envs.alfworld.fast.compile import CompiledGame
from envs.alfworld.fast.operators import Group, Operator

_LONGEST_PLAN = 50


class Expert:
    """Follows a shortest plan for one episode and plans anew when the player leaves it.

    The goal holds in several ways (any mug, any shelf). For each, a breadth-first search over the
    actions on the objects and receptacles that it involves finds the shortest plan.

    Args:
        game: The game that is played.
    """

    def __init__(self, game: CompiledGame):
        self._game = game
        self._state = game.initial
        self._followed = 0
        self._plan: list[str] = []

    def next_command(self, commands: Sequence[str]) -> str:
        """Return the expert's next command.

        Args:
            commands: All commands of the episode so far.

        Raises:
            RuntimeError: The goal holds already, or it cannot be reached any more.
        """
        for command in commands[self._followed :]:
            operator = self._game.operator(self._state, command.strip())
            if operator is not None:
                self._state = operator.apply(self._state)
            self._plan = self._plan[1:] if self._plan[:1] == [command.strip()] else []
        self._followed = len(commands)
        if not self._plan:
            self._plan = find_plan(self._game, self._state)
        if not self._plan:
            done = self._game.is_won(self._state)
            raise RuntimeError(
                "the expert has no command: "
                + ("the goal holds already; call reset()" if done else "the goal is out of reach")
            )
        return self._plan[0]


def find_plan(game: CompiledGame, state: int) -> list[str]:
    """Return the shortest command list found that reaches the goal; empty if there is none."""
    best: list[str] = []
    ways = sorted(game.goal, key=lambda way: ((state ^ way[1]) & way[0]).bit_count())
    for care, want in ways:
        limit = len(best) - 1 if best else _LONGEST_PLAN
        best = _plan_for(game, state, care, want, limit) or best
    return best


def _plan_for(game: CompiledGame, state: int, care: int, want: int, limit: int) -> list[str]:
    """Return a plan of at most `limit` commands for one way to the goal; empty if there is none."""
    things = _involved(game, state, want)
    holding = game.facts_of(state & game.holds_bits)
    first: list[str] = []
    if holding and things.isdisjoint(holding[0][1]):
        # What the agent holds has no part in this way, so it goes down anywhere first.
        all_receptacles = {thing for thing in game.things if game.type_of(thing) == "receptacle"}
        drop = {*all_receptacles, *holding[0][1]}
        # Going, opening and putting down is all it takes, where anything can hold the thing.
        first, state = _search(game, state, game.holds_bits, 0, drop, min(limit, 3))
        if not first:
            return []
    rest, _ = _search(game, state, care, want, things, limit - len(first))
    return first + rest if rest else []


def _involved(game: CompiledGame, state: int, want: int) -> set[str]:
    """Return the things that have a part in reaching some facts."""
    things = {thing for _, args in game.facts_of(want) for thing in args if thing in game.things}
    objects = {thing for thing in things if game.type_of(thing) == "object"}
    for _, args in game.facts_of(state):
        if not objects.isdisjoint(args):
            things.update(thing for thing in args if thing in game.things)
    for thing in objects:
        for operator in game.operators_holding(thing):
            if operator.effect.set & want & ~state:
                things.update(arg for arg in operator.args if arg in game.things)
    return things


def _search(
    game: CompiledGame, state: int, care: int, want: int, things: set[str], limit: int
) -> tuple[list[str], int]:
    """Search breadth first; return a shortest command list and the state that it leads to."""
    usable: dict[Group, list[Operator]] = {}
    reached: dict[int, tuple[int, str]] = {state: (state, "")}
    frontier = [state]
    for _ in range(limit):
        following: list[int] = []
        for here in frontier:
            for group in game.scene(here).groups:
                if group not in usable:
                    usable[group] = [op for op in group.operators if _is_useful(game, op, things)]
                for operator in usable[group]:
                    if here & operator.care == operator.want:
                        there = operator.apply(here)
                        if there not in reached:
                            reached[there] = (here, operator.command)
                            following.append(there)
                            if there & care == want:
                                return _commands_to(reached, there), there
        frontier = following
    return [], state


def _is_useful(game: CompiledGame, operator: Operator, things: set[str]) -> bool:
    others = any(arg in game.things and arg not in things for arg in operator.args)
    return not others and operator.effect.set != 0


def _commands_to(reached: dict[int, tuple[int, str]], state: int) -> list[str]:
    commands: list[str] = []
    while (step := reached[state])[1]:
        commands.append(step[1])
        state = step[0]
    return commands[::-1]
