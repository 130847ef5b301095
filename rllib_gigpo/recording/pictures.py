"""Pictures as PNG files, with the standard library alone."""

from __future__ import annotations

import struct
import zlib

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(picture: np.ndarray) -> bytes:
    """Encode a picture.

    Args:
        picture: RGB, uint8 [height, width, 3].

    Returns:
        A PNG file: 8 bits per channel, no row filter, no interlacing.
    """
    height, width, _ = picture.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)
    rows[:, 1:] = picture.reshape(height, 3 * width)
    parts = (
        _chunk(b"IHDR", header),
        _chunk(b"IDAT", zlib.compress(rows.tobytes())),
        _chunk(b"IEND", b""),
    )
    return _SIGNATURE + b"".join(parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
