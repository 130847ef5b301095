"""The pictures of the four games, drawn with Pillow: RGB, uint8 [300, 300, 3].

Sizes and places are those of the original; cards and lettering are drawn here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from envs.gym_cards.game import SIDE, Card

_FELT = "#35654d"
_RED, _BLACK, _BLUE = "#c0282d", "#1c1c1c", "#274b8f"
_FINER = 4


def draw_numbers(target: int, current: int) -> np.ndarray:
    """Draw NumberLine's two numbers."""
    return np.array(_numbers(target, current))


@lru_cache(maxsize=64)
def _numbers(target: int, current: int) -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), "white")
    _write(image, (30, 60), f"Target: {target}", 36, "black")
    _write(image, (30, 180), f"Current: {current}", 36, "black")
    return image


def draw_cards_and_formula(
    cards: tuple[Card, ...], lines: tuple[tuple[str, int], ...], formula: Sequence[str], size: int
) -> np.ndarray:
    """Draw cards side by side and the formula below.

    Args:
        cards: Cards, left to right.
        lines: Text and height of each line below; the formula goes to the end of the last.
        formula: Its entries.
        size: Letter size.
    """
    image = _cards_on_felt(cards).copy()
    for number, (text, top) in enumerate(lines, start=1):
        end = " ".join(formula) if number == len(lines) else ""
        _write(image, (10, top), text + end, size, "white")
    return np.array(image)


def draw_table(dealer: Card, player: tuple[Card, ...]) -> np.ndarray:
    """Draw Blackjack's table: the dealer's open card, a covered one, and the player's cards."""
    width, height, gap = 70, 98, 4
    image = Image.new("RGB", (SIDE, SIDE), _FELT)
    _write(image, (5, 5), "Dealer", 16, "white")
    image.paste(_card(dealer, width, height), (5, 25))
    image.paste(_covered_card(width, height), (78, 25))
    _write(image, (5, 130), "Player", 16, "white")
    for number, card in enumerate(player):
        # The second row starts after five cards; what does not fit is left out, as in the original.
        row, column = (0, number) if number < 5 else (1, number - 5)
        place = (5 + column * (width + gap), 150 + row * (height + gap))
        image.paste(_card(card, width, height), place)
    return np.array(image)


@lru_cache(maxsize=256)
def _cards_on_felt(cards: tuple[Card, ...]) -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), _FELT)
    width = int(SIDE / len(cards) * 0.9)
    height = int(width * 7 / 5)
    for number, card in enumerate(cards):
        left = 5 + int(number * width * 1.1)
        image.paste(_card(card, width, height), (left, (SIDE - height) // 2))
    return image


@lru_cache(maxsize=256)
def _card(card: Card, width: int, height: int) -> Image.Image:
    image, draw = _blank_card(width, height)
    colour = _RED if card.suit in "HD" else _BLACK
    corner = width * _FINER // 10
    font = _font(width * _FINER * 3 // 10)
    draw.text((corner, corner // 2), card.rank, fill=colour, font=font)
    middle = (width * _FINER / 2, height * _FINER * 0.58)
    _draw_suit(draw, card.suit, middle, width * _FINER * 0.27, colour)
    return image.reduce(_FINER)


@lru_cache(maxsize=8)
def _covered_card(width: int, height: int) -> Image.Image:
    image, draw = _blank_card(width, height)
    edge = width * _FINER // 12
    right, bottom = width * _FINER - edge, height * _FINER - edge
    draw.rectangle((edge, edge, right, bottom), fill=_BLUE)
    for offset in range(edge, right + bottom, 3 * edge):
        draw.line((offset, edge, offset - bottom, bottom), fill="white", width=edge // 3)
    draw.rectangle((right, 0, width * _FINER, height * _FINER), fill="white")
    draw.rectangle((0, 0, edge, height * _FINER), fill="white")
    return image.reduce(_FINER)


def _blank_card(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    # Drawn four times as large and reduced by whole pixels: smooth, and the same everywhere.
    image = Image.new("RGB", (width * _FINER, height * _FINER), _FELT)
    draw = ImageDraw.Draw(image)
    outline = (0, 0, width * _FINER - 1, height * _FINER - 1)
    draw.rounded_rectangle(outline, radius=width * _FINER // 12, fill="white", outline=_BLACK)
    return image, draw


def _draw_suit(
    draw: ImageDraw.ImageDraw, suit: str, middle: tuple[float, float], size: float, colour: str
) -> None:
    """Draw a suit; `size` is half of its height."""
    x, y = middle
    half = size / 2

    def circle(across: float, down: float, radius: float) -> None:
        left, top = x + across * size, y + down * size
        box = (left - radius * size, top - radius * size, left + radius * size, top + radius * size)
        draw.ellipse(box, fill=colour)

    def polygon(*corners: tuple[float, float]) -> None:
        draw.polygon([(x + across * size, y + down * size) for across, down in corners], colour)

    match suit:
        case "D":
            polygon((0, -1), (0.75, 0), (0, 1), (-0.75, 0))
        case "H":
            circle(-0.44, -0.4, 0.48)
            circle(0.44, -0.4, 0.48)
            polygon((-0.88, -0.2), (0.88, -0.2), (0, 1))
        case "S":
            circle(-0.44, 0.2, 0.48)
            circle(0.44, 0.2, 0.48)
            polygon((-0.88, 0.02), (0.88, 0.02), (0, -1))
            polygon((0, 0.1), (0.35, 1), (-0.35, 1))
        case _:
            circle(-0.5, 0.15, 0.44)
            circle(0.5, 0.15, 0.44)
            circle(0, -0.5, 0.44)
            draw.rectangle((x - half / 2, y - half, x + half / 2, y + half), fill=colour)
            polygon((0, 0.1), (0.35, 1), (-0.35, 1))


def _write(image: Image.Image, place: tuple[int, int], text: str, size: int, colour: str) -> None:
    ImageDraw.Draw(image).text(place, text, fill=colour, font=_font(size))


@lru_cache(maxsize=16)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
