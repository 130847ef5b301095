"""Learning curves over environment steps: mean over seeds, and the range of those compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rllib_gigpo.presets import PRESETS

_POINTS = 60
# The ranges of more curves than these cannot be told apart.
_MOST_RANGES = 6
_COMPARED = ("gigpo", "grpo")


def plot_task(
    task: str, presets: Mapping[str, Sequence[Mapping[str, Any]]], budget: int, path: Path
) -> Path:
    """Draw one line per preset, and the range of its seeds: of many presets GiGPO's and GRPO's.

    Args:
        task: Name of the task.
        presets: Results of its runs, by preset.
        budget: Environment steps to show.
        path: PNG to write.

    Returns:
        `path`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = np.linspace(0, budget, _POINTS)
    ranged, shown = tuple(presets), "their ranges"
    if len(presets) > _MOST_RANGES:
        ranged = _COMPARED
        shown = f"the ranges of {' and '.join(PRESETS[name].label for name in ranged)}"
    for number, (name, runs) in enumerate(presets.items()):
        curves = 100 * np.array([_success_at(steps, run["curve"]) for run in runs])
        style = "-" if number < 10 else "--"  # the colours repeat after ten
        width = 2.0 if name in ranged else 1.0
        (line,) = axes.plot(
            steps, curves.mean(axis=0), style, label=PRESETS[name].label, linewidth=width
        )
        if name in ranged:
            lowest, highest = curves.min(axis=0), curves.max(axis=0)
            axes.fill_between(steps, lowest, highest, alpha=0.12, color=line.get_color())
    axes.set(
        xlabel="environment steps",
        ylabel="success of the training episodes (%)",
        ylim=(-3, 103),
        title=f"{task}: means over {max(map(len, presets.values()))} seeds and {shown}",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.savefig(path, dpi=150)
    return path


def _success_at(steps: np.ndarray, curve: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Success of the iteration that each of the steps belongs to, linear between their middles."""
    ends = np.array([point["env_steps"] for point in curve], dtype=np.float64)
    middles = ends - np.diff(ends, prepend=0.0) / 2
    return np.interp(steps, middles, [point["success"] for point in curve])
