"""Rollout correction: what the loss does about an engine that is not quite the learner's policy."""

from __future__ import annotations

from dataclasses import dataclass

from rllib_gigpo.losses import CorrectionLevel, CorrectionMode
from rllib_gigpo.value_checks import is_number


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
        if not isinstance(self.level, str) or self.level not in ("token", "sequence"):
            raise ValueError(f"correction level {self.level!r}: expected 'token' or 'sequence'")
        if not isinstance(self.mode, str) or self.mode not in ("truncate", "mask"):
            raise ValueError(f"correction mode {self.mode!r}: expected 'truncate' or 'mask'")
        are_bounds = is_number(self.lower, 0.0) and is_number(self.upper, 1.0)
        if not are_bounds or self.lower >= 1.0:
            raise ValueError(
                f"correction bounds [{self.lower}, {self.upper}]: expected lower in [0, 1) and a "
                "finite upper of at least 1"
            )
