"""A Sokoban level: cells are numbered row by row, `cell = y * width + x`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

_FLOOR, _TARGET, _BOX, _BOX_ON_TARGET, _PLAYER, _PLAYER_ON_TARGET = " ", ".", "$", "*", "@", "+"
_SYMBOLS = "#" + _FLOOR + _TARGET + _BOX + _BOX_ON_TARGET + _PLAYER + _PLAYER_ON_TARGET


@dataclass(frozen=True)
class Level:
    """A level that is ready to play.

    Attributes:
        width: Columns, walls included.
        height: Rows, walls included.
        floor: Cells that are no wall; none of them lies at the border.
        targets: Cells where boxes belong.
        boxes: Cells of the boxes at the start, as many as targets.
        player: Cell of the player at the start.
    """

    width: int
    height: int
    floor: frozenset[int]
    targets: frozenset[int]
    boxes: frozenset[int]
    player: int

    @property
    def steps(self) -> dict[str, int]:
        """From a direction's name to what a step adds to the cell number."""
        return {"up": -self.width, "down": self.width, "left": -1, "right": 1}


def parse_level(rows: Sequence[str]) -> Level:
    """Read a level in the usual symbols: wall `#`, target `.`, box `$`, player `@`.

    A box on a target is `*`, a player on a target `+`, floor a blank. Short rows are filled up with
    walls.

    Raises:
        ValueError: The rows are no playable level; the message says why.
    """
    width, height = max(map(len, rows), default=0), len(rows)
    cells = "".join(row.ljust(width, "#") for row in rows)
    unknown = set(cells) - set(_SYMBOLS)
    if unknown:
        raise ValueError(f"unknown symbol {min(unknown)!r}, expected one of {_SYMBOLS!r}")
    players = _where(cells, _PLAYER + _PLAYER_ON_TARGET)
    boxes = _where(cells, _BOX + _BOX_ON_TARGET)
    targets = _where(cells, _TARGET + _BOX_ON_TARGET + _PLAYER_ON_TARGET)
    floor = frozenset(range(len(cells))) - _where(cells, "#")
    if len(players) != 1:
        raise ValueError(f"{len(players)} players, expected one")
    if not boxes or len(boxes) != len(targets):
        raise ValueError(
            f"{len(boxes)} boxes and {len(targets)} targets, expected as many, at least one"
        )
    if boxes == targets:
        raise ValueError("every box stands on a target already, expected something to do")
    if any(cell % width in (0, width - 1) or cell // width in (0, height - 1) for cell in floor):
        raise ValueError("a cell at the border is open, expected walls all round")
    (player,) = players
    return Level(width, height, floor, targets, boxes, player)


def format_level(level: Level) -> str:
    """Write a level in the symbols that `parse_level` reads."""
    symbols = dict.fromkeys(level.floor, _FLOOR)
    symbols |= dict.fromkeys(level.targets, _TARGET)
    for cell in level.boxes:
        symbols[cell] = _BOX_ON_TARGET if cell in level.targets else _BOX
    symbols[level.player] = _PLAYER_ON_TARGET if level.player in level.targets else _PLAYER
    cells = "".join(symbols.get(cell, "#") for cell in range(level.width * level.height))
    return "\n".join(
        cells[start : start + level.width] for start in range(0, len(cells), level.width)
    )


def walking_distances(
    start: int, floor: Container[int], boxes: Container[int], steps: Iterable[int]
) -> dict[int, int]:
    """Return how many moves each cell is away that the player reaches without a push."""
    distances = {start: 0}
    border = [start]
    steps = tuple(steps)
    while border:
        reached = []
        for cell in border:
            for step in steps:
                beside = cell + step
                if beside in floor and beside not in distances and beside not in boxes:
                    distances[beside] = distances[cell] + 1
                    reached.append(beside)
        border = reached
    return distances


def _where(cells: str, symbols: str) -> frozenset[int]:
    return frozenset(cell for cell, symbol in enumerate(cells) if symbol in symbols)
