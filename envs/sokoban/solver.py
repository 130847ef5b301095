"""Finds shortest solutions: A* over pushes, counted in moves, with deadlocks cut off.

A state is the boxes and the player's cell just after a push; an edge is a walk and the next push,
which costs its moves. The estimate of what is left is the cheapest assignment of boxes to targets,
each box counted as if it were alone: never more than the moves needed, so the first solution found
is a shortest one.
"""

from __future__ import annotations

import heapq
import itertools
from functools import lru_cache
from typing import NamedTuple

from envs.sokoban.level import Level, walking_distances

_FAR = 10**6
_Boxes = frozenset[int]


class Solution(NamedTuple):
    """What a search came to.

    Attributes:
        moves: Names of the directions of a shortest solution, None where none was found.
        states: States that were looked at.
        is_complete: Whether None means that there is none, rather than that the search gave up.
    """

    moves: list[str] | None
    states: int
    is_complete: bool


class Solver:
    """Solves the states of one level.

    Args:
        level: Walls and targets count; boxes and player are those of each call.
        max_states: States after which a search gives up.
    """

    def __init__(self, level: Level, max_states: int = 50_000):
        self._level = level
        self._steps = tuple(level.steps.values())
        self._max_states = max_states
        self._pushes = [_pushes_to(level, target) for target in sorted(level.targets)]
        # Where a box can still come from to a target; a box on any other cell is lost.
        self._alive = frozenset(itertools.chain.from_iterable(self._pushes))

    def solve(self, boxes: _Boxes, player: int) -> Solution:
        """Find a shortest solution in moves."""
        start = (boxes, player)
        estimate = self._pushes_left(boxes)
        if estimate >= _FAR:
            return Solution(None, 0, True)
        best = {start: 0}
        came_from: dict[tuple, tuple] = {}
        order = itertools.count()
        waiting = [(estimate, next(order), 0, start)]
        states = 0
        while waiting:
            _, _, moves, state = heapq.heappop(waiting)
            if moves > best[state]:
                continue
            if state[0] == self._level.targets:
                return Solution(self._replay(start, state, came_from), states, True)
            if states == self._max_states:
                return Solution(None, states, False)
            states += 1
            for following, cost in self._pushes_from(*state):
                total = moves + cost
                if total < best.get(following, _FAR):
                    left = self._pushes_left(following[0])
                    if left < _FAR:
                        best[following] = total
                        came_from[following] = state
                        heapq.heappush(waiting, (total + left, next(order), total, following))
        return Solution(None, states, True)

    def _pushes_from(self, boxes: _Boxes, player: int) -> list[tuple[tuple[_Boxes, int], int]]:
        floor = self._level.floor
        walks = walking_distances(player, floor, boxes, self._steps)
        found = []
        for box in boxes:
            for step in self._steps:
                behind, ahead = box - step, box + step
                if behind in walks and ahead in self._alive and ahead not in boxes:
                    pushed = boxes - {box} | {ahead}
                    if not self._is_stuck(ahead, pushed):
                        found.append(((pushed, box), walks[behind] + 1))
        return found

    def _is_stuck(self, box: int, boxes: _Boxes) -> bool:
        """Whether a box just pushed is part of a square of four that nobody can move again."""
        floor, width = self._level.floor, self._level.width
        for dy in (-width, width):
            for dx in (-1, 1):
                square = (box, box + dx, box + dy, box + dx + dy)
                held = [cell for cell in square if cell in boxes]
                if all(cell in boxes or cell not in floor for cell in square) and not (
                    self._level.targets.issuperset(held)
                ):
                    return True
        return False

    def _pushes_left(self, boxes: _Boxes) -> int:
        return _cheapest_assignment(
            tuple(tuple(pushes.get(box, _FAR) for pushes in self._pushes) for box in sorted(boxes))
        )

    def _replay(self, start: tuple, end: tuple, came_from: dict[tuple, tuple]) -> list[str]:
        pushes = [end]
        while pushes[-1] != start:
            pushes.append(came_from[pushes[-1]])
        pushes.reverse()
        moves: list[str] = []
        for (boxes, player), (after, box) in itertools.pairwise(pushes):
            (ahead,) = after - boxes
            moves += self._path(player, box - (ahead - box), boxes)
            moves.append(self._name(ahead - box))
        return moves

    def _path(self, start: int, end: int, boxes: _Boxes) -> list[str]:
        walks = walking_distances(end, self._level.floor, boxes, self._steps)
        moves, cell = [], start
        while cell != end:
            step = next(s for s in self._steps if walks.get(cell + s, _FAR) == walks[cell] - 1)
            moves.append(self._name(step))
            cell += step
        return moves

    def _name(self, step: int) -> str:
        return next(name for name, value in self._level.steps.items() if value == step)


def _pushes_to(level: Level, target: int) -> dict[int, int]:
    """Return how many pushes a lone box needs to the target, from each cell where it can.

    Pulled away from the target, the box visits them in the order of their distance.
    """
    steps = tuple(level.steps.values())
    distances = {target: 0}
    border = [target]
    while border:
        reached = []
        for cell in border:
            for step in steps:
                # To have come from there, the box was pushed by a player one cell further.
                before, player = cell - step, cell - 2 * step
                if before in level.floor and player in level.floor and before not in distances:
                    distances[before] = distances[cell] + 1
                    reached.append(before)
        border = reached
    return distances


@lru_cache(maxsize=1 << 16)
def _cheapest_assignment(costs: tuple[tuple[int, ...], ...]) -> int:
    """Return the least sum of costs [boxes][targets] with one target each, by dynamic programming.

    Up to about ten boxes; the work doubles with every box.
    """
    sums = {0: 0}
    for row in costs:
        taken: dict[int, int] = {}
        for used, total in sums.items():
            for target, cost in enumerate(row):
                if not used >> target & 1:
                    key = used | 1 << target
                    taken[key] = min(taken.get(key, _FAR * len(costs)), total + cost)
        sums = taken
    return min(sums.values())
