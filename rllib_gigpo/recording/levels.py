"""How much of the advantages in the loss each of their two levels makes up.

Shapes: N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rllib_gigpo.advantages import Advantages, settings_of

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

_WEIGHTS = ("episode_weight", "omega")


def level_sizes(config: GiGPOConfig, found: Advantages) -> dict[str, float]:
    """Return the mean size of what each level adds to the total.

    Args:
        config: The settings of the policy that the rows [N > 0] are of.
        found: Its advantages, each [N].

    Returns:
        `episode_mean_abs`, mean |w_E A_E|, and `step_mean_abs`, mean |w_S A_S|: the same scale as
        the total, which whitening has changed.
    """
    levels = np.stack([found.episode, found.step])
    sizes = np.abs(level_weights(config, found)) * np.mean(np.abs(levels), axis=1)
    return {"episode_mean_abs": float(sizes[0]), "step_mean_abs": float(sizes[1])}


def level_weights(config: GiGPOConfig, found: Advantages) -> np.ndarray:
    """Return the weights [2] of A_E and A_S in the total.

    They are settings of the estimators that read them. Any other may put its levels together in a
    way of its own (of HGPO the step level is all there is, or a part that differs from row to row):
    there they are those that come closest to the total, in least squares.
    """
    levels = np.stack([found.episode, found.step])
    if not set(_WEIGHTS) <= set(settings_of(config.advantage_estimator)):
        centred = levels - levels.mean(axis=1, keepdims=True)
        return np.linalg.lstsq(centred.T, found.total - found.total.mean(), rcond=None)[0]
    weights = np.array([getattr(config, name) for name in _WEIGHTS], dtype=np.float64)
    if not config.whiten_advantages:
        return weights
    spread = float(np.std(weights @ levels))
    return weights * (float(np.std(found.total)) / spread) if spread > 0 else 0.0 * weights
