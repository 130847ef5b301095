"""Keys of states that are not text: pictures that look alike, and structured states.

`info["anchor"]` or `AgentProfile.anchor` may be such a key; equal keys are one anchor state, so
grouping by them does not depend on the order of the rows. Pictures need no such key where only
equal pixels are to count: `rllib_gigpo.observations.state_key` is their default.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_LUMA = np.array([0.299, 0.587, 0.114])


def perceptual_key(image: np.ndarray, *, size: int = 8) -> bytes:
    """Return a key that pictures share which differ in noise, compression or small details.

    The difference hash: the picture is averaged to grey cells, `size` rows of `size + 1`, and each
    bit says whether a cell is brighter than its left neighbour. Two pictures with one key are one
    state, so choose a size at which whatever matters is larger than a cell. A bit can flip where
    neighbours are almost equally bright: a key is not a distance, and near pictures may get
    different ones.

    Args:
        image: Picture [height, width] or [height, width, channels], of 1, 3 or 4 channels.
        size: Rows of the hash, at least 1; `size * size` bits.

    Returns:
        The key.

    Raises:
        ValueError: The array is no picture, or smaller than the hash.
    """
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3, 4)):
        raise ValueError(
            f"an image has shape {list(image.shape)}, expected [height, width] or [height, width, "
            "channels] with 1, 3 or 4 channels."
        )
    if size < 1 or image.shape[0] < size or image.shape[1] < size + 1:
        raise ValueError(
            f"an image of {image.shape[0]} x {image.shape[1]} pixels has no hash of size {size}, "
            "expected a size of at least 1 and at most the height, and below the width."
        )
    grey = image.astype(np.float64)
    if image.ndim == 3:
        grey = grey[..., 0] if image.shape[2] == 1 else grey[..., :3] @ _LUMA
    cells = _cell_means(_cell_means(grey, size).T, size + 1).T
    # Rounding noise of the means is not to decide about equal cells.
    brighter = np.diff(cells, axis=1) > 1e-6 * (1.0 + np.abs(cells[:, 1:]))
    return np.packbits(brighter).tobytes()


def structural_key(state: Any) -> Any:
    """Return a key of a nested state, such as `{"room": "kitchen", "holding": ["mug"]}`.

    Args:
        state: Mappings, sequences, sets, arrays, str, bytes, numbers, bool and None, nested at
            will.

    Returns:
        Nested tuples that are equal exactly when the states are: the order of a mapping's or a
        set's items does not matter, the order of a sequence's does. A text stays as it is.

    Raises:
        TypeError: A part is of another type.
    """
    if isinstance(state, str | bytes):
        return state
    if isinstance(state, bool | int | float | None | np.generic):
        # 1, 1.0 and True are equal to Python, and different states.
        plain = state.item() if isinstance(state, np.generic) else state
        return (type(plain).__name__, plain)
    if isinstance(state, np.ndarray):
        return ("array", str(state.dtype), state.shape, np.ascontiguousarray(state).tobytes())
    if isinstance(state, Mapping):
        items = [(structural_key(key), structural_key(value)) for key, value in state.items()]
        return ("mapping", *sorted(items, key=repr))
    if isinstance(state, set | frozenset):
        return ("set", *sorted(map(structural_key, state), key=repr))
    if isinstance(state, Sequence):
        return ("sequence", *map(structural_key, state))
    raise TypeError(
        f"a part of the state is a {type(state).__name__}, expected mappings, sequences, sets, "
        "arrays, text, numbers, bool or None."
    )


def _cell_means(values: np.ndarray, cells: int) -> np.ndarray:
    """Average consecutive rows [H, W] into `cells` almost equal parts [cells, W]."""
    starts = np.arange(cells) * len(values) // cells
    counts = np.diff(np.append(starts, len(values)))
    return np.add.reduceat(values, starts, axis=0) / counts[:, None]
