"""What an environment may show: text, a picture, or text beside a picture."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_TEXT, _IMAGE = "text", "image"

EXPECTED = (
    "a string, a picture (uint8 array [height, width, 3]), or both as {'text': ..., 'image': ...}"
)


def is_picture(observation: Any) -> bool:
    """Whether an observation is a picture: RGB, uint8 [height, width, 3]."""
    return (
        isinstance(observation, np.ndarray)
        and observation.dtype == np.uint8
        and observation.ndim == 3
        and observation.shape[2] == 3
    )


def is_text_and_picture(observation: Any) -> bool:
    """Whether an observation is a mapping of exactly a "text" and an "image"."""
    return (
        isinstance(observation, Mapping)
        and set(observation) == {_TEXT, _IMAGE}
        and isinstance(observation[_TEXT], str)
        and is_picture(observation[_IMAGE])
    )


def is_observation(observation: Any) -> bool:
    """Whether an observation is one that agents can be shown, see `EXPECTED`."""
    return (
        isinstance(observation, str) or is_picture(observation) or is_text_and_picture(observation)
    )


def state_key(state: Any) -> Any:
    """Return what stands for a state where states are compared.

    Args:
        state: An observation, or anything that can be compared already.

    Returns:
        For an array a digest of its shape, type and bytes, so that two pictures are equal exactly
        when every pixel is; for text beside a picture the pair of text and digest; anything else
        as it is.
    """
    if is_text_and_picture(state):
        return (state[_TEXT], state_key(state[_IMAGE]))
    if not isinstance(state, np.ndarray):
        return state
    digest = hashlib.blake2b(f"{state.shape}{state.dtype}".encode(), digest_size=16)
    digest.update(state.tobytes())
    return digest.digest()
