"""What changes rewards before any return is taken, and the KL coefficient that does so."""

import math
import sys

import numpy as np

from rllib_gigpo.advantages.parts import FloatArray, IntArray

_LARGEST_ERROR = 0.2


def overlong_cost(
    response_tokens: IntArray, *, max_tokens: int, buffer: float, penalty: float
) -> FloatArray:
    """Charge responses that come close to the token limit (DAPO, arXiv 2503.14476, Eq. 13).

    The cost is 0 up to `(1 - buffer) * max_tokens` tokens and rises linearly to `penalty` at the
    limit, where the engine cuts a response off.

    Args:
        response_tokens: Length of each row's response [N].
        max_tokens: The limit.
        buffer: Share of the limit that the ramp takes up, 0 to 1; 0 charges nothing.
        penalty: Cost at the limit.

    Returns:
        Costs [N], at least 0.
    """
    if buffer == 0.0:
        return np.zeros(len(response_tokens))
    over = response_tokens.astype(np.float64) - (1.0 - buffer) * max_tokens
    return np.clip(over / (buffer * max_tokens), 0.0, 1.0) * penalty


def adapted_kl_coeff(
    coeff: float, kl: float, *, target: float, horizon: float, num_rows: int
) -> float:
    """Move a KL coefficient towards the one that holds the KL at its target.

    Source: Ziegler et al., arXiv 1909.08593, Sec. 2.2, with the relative error of the KL held in
    [-0.2, 0.2]. Their factor 1 + error * rows / horizon is the first order of the one here,
    exp(error * rows / horizon), which stays positive however many rows an update has. One update
    makes the coefficient at most e times as large, or as small.

    Args:
        coeff: The present coefficient.
        kl: Measured mean KL per response token.
        target: KL wanted.
        horizon: Rows over which a full error of 1 would make it e times as large.
        num_rows: Rows of this update.

    Returns:
        The next coefficient.
    """
    error = min(max(kl / target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
    change = min(max(error * num_rows / horizon, -1.0), 1.0)
    return max(coeff * math.exp(change), sys.float_info.min)
