"""Random rooms that can be solved: a room is carved, solved, and played backwards.

Played backwards, a push is a pull. Whatever pulls lead to is solved by the same moves forwards, so
no level needs to be tried, and the length of the play bounds that of the shortest solution.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import NamedTuple

from envs.sokoban.level import Level, walking_distances

_ROOMS = 1000
_PLAYS = 16
_OPEN_SHARE = (0.5, 0.9)
_TURN = 0.35


class _Start(NamedTuple):
    """A state that a backward play met."""

    displacement: int
    moves: int
    boxes: frozenset[int]
    player: int


@lru_cache(maxsize=4096)
def generate_level(seed: int, width: int, height: int, num_boxes: int, search_depth: int) -> Level:
    """Generate the level of a seed.

    Of 16 backward plays in a room, the state counts whose boxes are farthest from the targets;
    where every box is one step away at most, another room is carved.

    Args:
        seed: Decides everything; the same on every machine.
        width: Columns, walls included.
        height: Rows, walls included.
        num_boxes: Boxes; none of them starts on a target.
        search_depth: Longest backward play in moves, so the shortest solution has no more.

    Raises:
        ValueError: No such level was found in 1,000 rooms.
    """
    rng = random.Random(seed)
    farther = min(num_boxes + 1, search_depth)
    for _ in range(_ROOMS):
        floor = _carve(rng, width, height)
        if len(floor) <= 2 * num_boxes:
            continue
        targets = frozenset(rng.sample(sorted(floor), num_boxes))
        room = Level(width, height, floor, targets, targets, player=-1)
        plays = [_farthest_start(rng, room, search_depth) for _ in range(_PLAYS)]
        starts = [start for start in plays if start and start.displacement >= farther]
        if starts:
            best = max(starts, key=lambda start: (start.displacement, start.moves))
            player = _walk_away(rng, room, best, search_depth)
            return Level(width, height, floor, targets, best.boxes, player)
    raise ValueError(
        f"no room of {width} x {height} cells has a level with {num_boxes} boxes that start off "
        f"their targets within {search_depth} moves of the solution: enlarge size, search_depth or "
        "horizon, or take fewer boxes"
    )


def _carve(rng: random.Random, width: int, height: int) -> frozenset[int]:
    """Walk about at random, and open the cells that were visited."""
    inside = (width - 2) * (height - 2)
    wanted = round(inside * rng.uniform(*_OPEN_SHARE))
    x, y = rng.randrange(1, width - 1), rng.randrange(1, height - 1)
    dx, dy = rng.choice(((1, 0), (-1, 0), (0, 1), (0, -1)))
    floor = {y * width + x}
    while len(floor) < wanted:
        if rng.random() < _TURN:
            dx, dy = rng.choice(((1, 0), (-1, 0), (0, 1), (0, -1)))
        x = min(max(x + dx, 1), width - 2)
        y = min(max(y + dy, 1), height - 2)
        floor.add(y * width + x)
    return frozenset(floor)


def _farthest_start(rng: random.Random, room: Level, search_depth: int) -> _Start | None:
    """Play backwards from the solved room, never into a state twice."""
    steps = tuple(room.steps.values())
    boxes = room.targets
    player = rng.choice(sorted(room.floor - boxes))
    moves, is_first = 0, True
    seen = {boxes}
    best: _Start | None = None
    while True:
        walks = walking_distances(player, room.floor, boxes, steps)
        pulls = []
        for box in sorted(boxes):
            for step in steps:
                # The player stands beside the box, and both go one step on.
                behind = box + 2 * step
                if box + step in walks and behind in room.floor and behind not in boxes:
                    pulled = boxes - {box} | {box + step}
                    if pulled not in seen:
                        # Forwards, nobody walks after the last push.
                        walk = 0 if is_first else walks[box + step]
                        pulls.append((pulled, behind, moves + walk + 1))
        if not pulls:
            return best
        boxes, player, moves = rng.choice(pulls)
        if moves > search_depth:
            return best
        seen.add(boxes)
        is_first = False
        if not boxes & room.targets:
            far = sum(
                min(_apart(box, target, room.width) for target in room.targets) for box in boxes
            )
            if best is None or far > best.displacement:
                best = _Start(far, moves, boxes, player)


def _walk_away(rng: random.Random, room: Level, start: _Start, search_depth: int) -> int:
    """Let the player start anywhere from where the solution is still short enough."""
    walks = walking_distances(start.player, room.floor, start.boxes, room.steps.values())
    near = [cell for cell, walk in walks.items() if start.moves + walk <= search_depth]
    return rng.choice(sorted(near))


def _apart(first: int, second: int, width: int) -> int:
    return abs(first % width - second % width) + abs(first // width - second // width)
