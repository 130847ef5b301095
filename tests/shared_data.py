"""Where the tests find the real benchmark data, which is not part of the project."""

import os
from pathlib import Path

import pytest

_DEFAULT = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(name: str) -> Path:
    """Return the path of a shared data file, or skip the calling test when it is missing."""
    path = Path(os.environ.get("RLLIB_GIGPO_SHARED_DATA", _DEFAULT)) / name
    if not path.exists():
        pytest.skip(f"real data {name} is not here (set RLLIB_GIGPO_SHARED_DATA to its folder)")
    return path
