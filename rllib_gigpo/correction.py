"""Rollout correction: what the loss does about an engine that is not quite the learner's policy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rllib_gigpo.losses import CorrectionLevel, CorrectionMode


@dataclass(frozen=True)
class RolloutCorrection:
    """Weights each token by pi_old / pi_engine, both before the update's first step.

    Engines in bf16 give log-probabilities that are off by a few percent per token, and an engine
    may serve older weights; see `rllib_gigpo.losses.correction_weights`.

    Attributes:
        level: "token", or "sequence": one weight for the whole response.
        mode: "truncate" holds the weight at `upper`, "mask" drops tokens outside
            [lower, upper].
        upper: Largest weight.
        lower: Smallest weight that "mask" keeps.

    Raises:
        ValueError: A value is none of these.
    """

    level: CorrectionLevel = "token"
    mode: CorrectionMode = "truncate"
    upper: float = 2.0
    lower: float = 0.0

    def __post_init__(self):
        """Check the values."""
        if self.level not in ("token", "sequence"):
            raise ValueError(f"correction level {self.level!r}: expected 'token' or 'sequence'")
        if self.mode not in ("truncate", "mask"):
            raise ValueError(f"correction mode {self.mode!r}: expected 'truncate' or 'mask'")
        if not (0.0 <= self.lower < 1.0 <= self.upper < math.inf):
            raise ValueError(
                f"correction bounds [{self.lower}, {self.upper}]: expected lower in [0, 1) and a "
                "finite upper of at least 1"
            )
