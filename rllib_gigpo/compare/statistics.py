"""Statistics over seeds, after Agarwal et al., arXiv 2108.13264: few runs, honest intervals.

Shapes: S seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_DRAWS = 10_000
_SEED = 0


def area_under_curve(curve: Sequence[Mapping[str, float]], budget: int) -> float:
    """Return the mean success over the first `budget` environment steps.

    Args:
        curve: Per iteration `env_steps` (so far, at its end) and `success` (of its episodes).
        budget: Environment steps; the curve must reach them.

    Raises:
        ValueError: It does not.
    """
    ends = np.array([point["env_steps"] for point in curve], dtype=np.float64)
    if not len(ends) or ends[-1] < budget:
        reached = int(ends[-1]) if len(ends) else 0
        raise ValueError(f"a curve ends at {reached} environment steps, expected {budget}.")
    ends = np.minimum(ends, budget)
    lengths = np.diff(ends, prepend=0.0)
    return float(lengths @ [point["success"] for point in curve]) / budget


def interquartile_mean(values: Sequence[float] | Floats) -> float:
    """Return the mean of the middle half of the values; a quarter may fall inside a value."""
    return float(interquartile_means(np.asarray(values, dtype=np.float64)[None])[0])


def interquartile_means(drawn: Floats) -> Floats:
    """Return the interquartile mean of each row; a statistic for `bootstrap_interval`.

    Args:
        drawn: Values [draws, S].

    Returns:
        Means of the middle halves [draws].
    """
    ordered = np.sort(drawn, axis=1)
    size = ordered.shape[1]
    places = np.arange(size)
    shares = np.clip(np.minimum(places + 1, 3 * size / 4) - np.maximum(places, size / 4), 0.0, 1.0)
    return ordered @ shares / shares.sum()


def bootstrap_interval(
    values: Sequence[float] | Floats, statistic: Callable[[Floats], Floats] | None = None
) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean over seeds.

    Args:
        values: One value per seed [S].
        statistic: From drawn samples [draws, S] to values [draws]; by default their means.
    """
    found = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(_SEED)
    drawn = found[rng.integers(0, len(found), (_DRAWS, len(found)))]
    results = drawn.mean(axis=1) if statistic is None else statistic(drawn)
    low, high = np.percentile(results, [2.5, 97.5])
    return float(low), float(high)


def probability_of_improvement(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return how often a run of ours beats one of theirs, over all pairs; a tie counts half."""
    gaps = np.subtract.outer(np.asarray(ours), np.asarray(theirs))
    return float(np.mean((gaps > 0) + 0.5 * (gaps == 0)))


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return [low, mean, high] of ours minus theirs, seed by seed, with its 95 % interval."""
    gaps = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    low, high = bootstrap_interval(gaps)
    return low, float(gaps.mean()), high
