"""Learning curves against environment steps, tokens and wall-clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rllib_gigpo.compare.statistics import Floats
from rllib_gigpo.compare.tables import Results
from rllib_gigpo.presets import PRESETS

AXES = {"env_steps": "environment steps", "tokens": "tokens", "seconds": "seconds of training"}
_POINTS = 60


def plot_curves(results: Results, path: Path, title: str) -> Path:
    """Draw one panel per axis: the mean over seeds, and their range.

    Args:
        results: Runs by algorithm.
        path: PNG to write.
        title: Of the picture.

    Returns:
        `path`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, len(AXES), sharey=True)
    for axes, (name, label) in zip(panels, AXES.items(), strict=True):
        for algo, runs in results.items():
            places, curves = curves_over(runs, name)
            (line,) = axes.plot(places, 100 * curves.mean(axis=0), label=PRESETS[algo].label)
            axes.fill_between(
                places,
                100 * curves.min(axis=0),
                100 * curves.max(axis=0),
                alpha=0.15,
                color=line.get_color(),
            )
        axes.set(xlabel=label, ylim=(-3, 103))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("success of the training episodes (%)")
    panels[-1].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    return path


def curves_over(runs: Sequence[Any], axis: str) -> tuple[Floats, Floats]:
    """Return the success of each run at common places of an axis, as far as all runs reach.

    An iteration's success belongs to the middle of what it took.

    Args:
        runs: S runs of one algorithm.
        axis: A key of `AXES`.

    Returns:
        Places [points] and success [S, points].
    """
    reach = min(run["curve"][-1][axis] for run in runs)
    places = np.linspace(0.0, reach, _POINTS)
    curves = []
    for run in runs:
        ends = np.array([point[axis] for point in run["curve"]], dtype=np.float64)
        middles = ends - np.diff(ends, prepend=0.0) / 2
        curves.append(np.interp(places, middles, [point["success"] for point in run["curve"]]))
    return places, np.array(curves)
