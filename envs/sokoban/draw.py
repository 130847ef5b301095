"""What a Sokoban state looks like: symbols, or a picture drawn tile by tile."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import numpy as np

from envs.sokoban.level import Level

WALL, FLOOR, TARGET, BOX, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET = range(7)
SYMBOLS = "#_OX√PS"
TILE_PIXELS = 16

_Image = np.ndarray


def level_codes(level: Level) -> list[int]:
    """Return the code of every cell, without boxes and player."""
    codes = [WALL] * (level.width * level.height)
    for cell in level.floor:
        codes[cell] = TARGET if cell in level.targets else FLOOR
    return codes


def state_codes(codes: list[int], boxes: Collection[int], player: int) -> list[int]:
    """Return the code of every cell, boxes and player included."""
    codes = codes.copy()
    for cell in boxes:
        codes[cell] = BOX_ON_TARGET if codes[cell] == TARGET else BOX
    codes[player] = PLAYER_ON_TARGET if codes[player] == TARGET else PLAYER
    return codes


def draw_text(codes: list[int], width: int) -> str:
    """Return one line per row, the symbols separated by blanks."""
    symbols = [SYMBOLS[code] for code in codes]
    return "\n".join(
        " ".join(symbols[start : start + width]) for start in range(0, len(symbols), width)
    )


def draw_image(codes: list[int], width: int) -> _Image:
    """Return an RGB picture, uint8 [rows * 16, columns * 16, 3]."""
    grid = np.array(codes).reshape(-1, width)
    pixels = _tiles()[grid].swapaxes(1, 2)
    rows, _, columns, _, _ = pixels.shape
    return np.ascontiguousarray(pixels).reshape(rows * TILE_PIXELS, columns * TILE_PIXELS, 3)


@lru_cache(maxsize=1)
def _tiles() -> _Image:
    """Draw the seven tiles, uint8 [7, 16, 16, 3]."""
    y, x = np.mgrid[:TILE_PIXELS, :TILE_PIXELS]
    from_centre = np.maximum(abs(2 * x - 15), abs(2 * y - 15)) // 2
    diamond = abs(2 * x - 15) + abs(2 * y - 15)

    wall = _plain(150, 84, 60)
    joints = (y % 4 == 3) | ((x + 4 * (y // 4 % 2)) % 8 == 7)
    wall[joints] = (92, 50, 36)

    floor = _plain(28, 28, 32)
    target = floor.copy()
    target[diamond <= 8] = (214, 52, 60)

    box = _crate(from_centre, (x, y), wood=(222, 178, 92), edge=(150, 104, 40))
    box_on_target = _crate(from_centre, (x, y), wood=(120, 196, 96), edge=(44, 116, 44))
    return np.stack(
        [wall, floor, target, box, box_on_target, _person(floor), _person(target)]
    ).astype(np.uint8)


def _plain(*colour: int) -> _Image:
    return np.full((TILE_PIXELS, TILE_PIXELS, 3), colour)


def _crate(from_centre: _Image, where: tuple[_Image, _Image], wood: tuple, edge: tuple) -> _Image:
    x, y = where
    crate = _plain(28, 28, 32)
    crate[from_centre <= 6] = wood
    crate[(from_centre == 6) | ((from_centre < 6) & (abs(x - y) <= 1))] = edge
    crate[(from_centre < 6) & (abs(x + y - 15) <= 1)] = edge
    return crate


def _person(ground: _Image) -> _Image:
    y, x = np.mgrid[:TILE_PIXELS, :TILE_PIXELS]
    person = ground.copy()
    head = (2 * x - 15) ** 2 + (2 * y - 9) ** 2 <= 40
    body = (abs(2 * x - 15) <= 7) & (y >= 8) & (y <= 13)
    person[body] = (60, 120, 220)
    person[head] = (244, 204, 164)
    return person
