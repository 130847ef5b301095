"""What a test does where an optional package is missing."""

import os

import pytest


def skip_or_fail(reason: str) -> None:
    """Skip the calling test; fail it where everything was meant to be installed.

    `.ci/run` sets RLLIB_GIGPO_REQUIRE_EXTRAS=1: there a skip would hide a broken installation.
    """
    if os.environ.get("RLLIB_GIGPO_REQUIRE_EXTRAS") == "1":
        pytest.fail(f"RLLIB_GIGPO_REQUIRE_EXTRAS=1, but: {reason}")
    pytest.skip(reason)
