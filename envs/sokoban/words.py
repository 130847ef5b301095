"""A Sokoban state told in words, for language models too small to read a drawn room.

    wall up left . box down 2 right 1 wall right target up 1 right 2 .

is: walls above and to the left of the player; a box two cells below and one to the right of the
player, with a wall on its right, and a target one cell above and two to the right of the box.
"""

from __future__ import annotations

from collections.abc import Collection

from envs.sokoban.level import Level

VOCABULARY = ("wall", "box", "target", "here", "up", "down", "left", "right", ".")


def tell(level: Level, boxes: Collection[int], player: int) -> str:
    """Return the walls around the player, and per box its place, walls and ways to the targets.

    Walls that touch neither the player nor a box are not told.
    """
    sentences = [_walls(level, player)]
    for box in sorted(boxes):
        targets = (f"target {_way(level, box, target)}" for target in sorted(level.targets))
        parts = (f"box {_way(level, player, box)}", _walls(level, box), *targets)
        sentences.append(" ".join(filter(None, parts)))
    return " . ".join(filter(None, sentences)) + " ."


def _walls(level: Level, cell: int) -> str:
    beside = [name for name, step in level.steps.items() if cell + step not in level.floor]
    return " ".join(["wall", *beside]) if beside else ""


def _way(level: Level, start: int, end: int) -> str:
    """Return rows and columns from one cell to another, such as "up 1 right 2", or "here"."""
    down = end // level.width - start // level.width
    right = end % level.width - start % level.width
    vertical = f"{'down' if down > 0 else 'up'} {abs(down)}" if down else ""
    horizontal = f"{'right' if right > 0 else 'left'} {abs(right)}" if right else ""
    return " ".join(filter(None, (vertical, horizontal))) or "here"
