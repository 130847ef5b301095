"""Pictures inside texts.

In the texts that prompts are made of, memories included, a picture is a mark: its digest between
two private characters. So whatever works on texts works on texts with pictures, and the same
picture is kept once however often it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rllib_gigpo.observations import is_picture, is_text_and_picture, state_key

_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}([0-9a-f]{{32}}){_CLOSE}")


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture that prompts show.

    Attributes:
        pixels: RGB, uint8 [height, width, 3], read-only.
        key: Digest; equal exactly where shape and pixels are.
    """

    pixels: np.ndarray = field(repr=False)
    key: bytes

    @property
    def name(self) -> str:
        """The digest as text, under which `PromptContext.pictures` holds the picture."""
        return self.key.hex()

    @property
    def mark(self) -> str:
        """What stands for the picture in a text."""
        return f"{_OPEN}{self.name}{_CLOSE}"


class PlacedPicture(NamedTuple):
    """A picture in a prompt.

    Attributes:
        picture: The picture.
        runs: Start and length of each run of prompt tokens in whose place the model sees it.
    """

    picture: Picture
    runs: tuple[tuple[int, int], ...]


class Gallery:
    """Keeps every distinct picture once."""

    def __init__(self) -> None:
        self._held: dict[bytes, Picture] = {}

    def hang(self, pixels: np.ndarray) -> Picture:
        """Return the gallery's object of a picture; its pixels are a copy of the first seen."""
        key = state_key(pixels)
        held = self._held.get(key)
        if held is None:
            copy = np.array(pixels)
            copy.setflags(write=False)
            held = self._held[key] = Picture(copy, key)
        return held

    def keep(self, observation: Any) -> Any:
        """Return the observation with the gallery's pixels in place of its own."""
        if is_picture(observation):
            return self.hang(observation).pixels
        if is_text_and_picture(observation):
            return {**observation, "image": self.hang(observation["image"]).pixels}
        return observation

    def show(self, observation: Any) -> tuple[str, dict[str, Picture]]:
        """Return an observation as text, and the pictures of its marks by name.

        A picture alone is its mark; beside a text, the mark stands on the line before.
        """
        if is_picture(observation):
            picture = self.hang(observation)
            return picture.mark, {picture.name: picture}
        if is_text_and_picture(observation):
            picture = self.hang(observation["image"])
            return f"{picture.mark}\n{observation['text']}", {picture.name: picture}
        return observation, {}


def split_marks(text: str, pictures: Mapping[str, Picture]) -> list[str | Picture]:
    """Cut a text at the marks of known pictures.

    Args:
        text: A text.
        pictures: Known pictures by name; anything else that looks like a mark stays text.

    Returns:
        Texts (none empty) and pictures, in order.
    """
    if _OPEN not in text:
        return [text] if text else []
    parts: list[str | Picture] = []
    start = 0
    for found in _MARK.finditer(text):
        picture = pictures.get(found[1])
        if picture is not None:
            parts += [text[start : found.start()], picture]
            start = found.end()
    return [part for part in (*parts, text[start:]) if part != ""]


def names_of_marks(text: str) -> list[str]:
    """Return the names of the pictures whose marks a text holds."""
    return _MARK.findall(text)


def strip_marks(text: str) -> str:
    """Return a text without marks, for those that look at its words."""
    return _MARK.sub("", text)


def units(text: str) -> list[str]:
    """Cut a text into characters, a mark being one."""
    if _OPEN not in text:
        return list(text)
    return re.findall(f"{_MARK.pattern.replace('(', '(?:')}|.", text, re.DOTALL)
