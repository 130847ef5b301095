"""What an environment may show: text, or a picture."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def is_picture(observation: Any) -> bool:
    """Whether an observation is a picture: RGB, uint8 [height, width, 3]."""
    return (
        isinstance(observation, np.ndarray)
        and observation.dtype == np.uint8
        and observation.ndim == 3
        and observation.shape[2] == 3
    )


def state_key(state: Any) -> Any:
    """Return what stands for a state where states are compared.

    Args:
        state: A picture, or anything that can be compared already.

    Returns:
        For an array a digest of its shape, type and bytes, so that two pictures are equal exactly
        when every pixel is; anything else as it is.
    """
    if not isinstance(state, np.ndarray):
        return state
    digest = hashlib.blake2b(f"{state.shape}{state.dtype}".encode(), digest_size=16)
    digest.update(state.tobytes())
    return digest.digest()
