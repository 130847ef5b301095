"""A pickle that does something when it is read."""

from __future__ import annotations

import os
from pathlib import Path


class Bomb:
    """Pickled, it makes a folder when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = str(mark)

    def __reduce__(self):
        return (os.mkdir, (self.mark,))
