"""Compares algorithms over seeds: curves, intervals, probabilities of improvement.

The statistics are those of Agarwal et al., arXiv 2108.13264.
"""

from rllib_gigpo.compare.statistics import (
    area_under_curve,
    bootstrap_interval,
    interquartile_mean,
    probability_of_improvement,
)

__all__ = [
    "area_under_curve",
    "bootstrap_interval",
    "interquartile_mean",
    "probability_of_improvement",
]
