"""Compares algorithms over seeds: curves, intervals, probabilities of improvement.

Interquartile means and probabilities are those of Agarwal et al., arXiv 2108.13264.
"""

from rllib_gigpo.compare.statistics import (
    area_under_curve,
    interquartile_mean,
    mean_interval,
    probability_of_improvement,
    share_interval,
)

__all__ = [
    "area_under_curve",
    "interquartile_mean",
    "mean_interval",
    "probability_of_improvement",
    "share_interval",
]
