"""The spaces of observations and actions: all strings, and pictures."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from gymnasium.error import CustomSpaceError
from gymnasium.spaces import Box, Text
from gymnasium.vector.utils import create_shared_memory

_LONGEST_RANDOM_SAMPLE = 32


class TextSpace(Text):
    r"""A gymnasium space that contains every `str`: any length, any character.

    `gymnasium.spaces.Text` accepts only the characters of a finite set (without blanks or
    punctuation by default) up to a stated length, which no natural-language observation fits.
    This class stays a `Text` because RLlib can write only the space classes it knows into a
    checkpoint; the bounds and character set that `Text` declares describe random samples alone.

    Args:
        examples: Strings that `sample()` draws from, usually the legal actions. Empty: `sample()`
            returns 1 to 32 printable ASCII characters.
        seed: Seed of `sample()`.

    Example:
        >>> TextSpace(["go north", "go south"], seed=0).contains("Öffne die Tür!\n")
        True
    """

    def __init__(
        self, examples: Sequence[str] = (), *, seed: int | np.random.Generator | None = None
    ):
        if isinstance(examples, str) or not all(isinstance(text, str) for text in examples):
            raise TypeError(f"examples must be a sequence of strings, got {examples!r}")
        self.examples = tuple(examples)
        super().__init__(
            max_length=_LONGEST_RANDOM_SAMPLE, min_length=0, charset=string.printable, seed=seed
        )

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a `str`."""
        return isinstance(x, str)

    def sample(self, mask: None = None, probability: None = None) -> str:
        """Draw one of the examples, or random printable characters when there are none.

        Raises:
            ValueError: A mask was given; strings have no fixed number of choices to mask.
        """
        if mask is not None or probability is not None:
            raise ValueError(
                "TextSpace.sample takes neither mask nor probability; draw from "
                "info['admissible_actions'] instead"
            )
        if self.examples:
            return self.examples[self.np_random.integers(len(self.examples))]
        length = self.np_random.integers(1, _LONGEST_RANDOM_SAMPLE + 1)
        return "".join(self.np_random.choice(list(string.printable), size=length))

    @property
    def is_np_flattenable(self) -> bool:
        """False: strings of any length have no array of fixed size."""
        return False

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, TextSpace) and self.examples == other.examples

    def __repr__(self) -> str:
        return f"TextSpace({list(self.examples)})" if self.examples else "TextSpace()"


def image_space(height: int, width: int) -> Box:
    """Return the space of RGB pictures, uint8 [height, width, 3]."""
    return Box(low=0, high=255, shape=(height, width, 3), dtype=np.uint8)


@create_shared_memory.register(TextSpace)
def _refuse_shared_memory(space: TextSpace, n: int = 1, ctx: Any = None) -> NoReturn:
    # Text would allot an array of fixed size and fail later, inside a worker process.
    raise CustomSpaceError(f"{space} holds strings of any length, which shared memory cannot")
