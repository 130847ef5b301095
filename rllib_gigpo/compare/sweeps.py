"""What a sweep over omega, gamma and F_norm found: a table and a heat map."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rllib_gigpo.compare.statistics import interquartile_mean, mean_interval
from rllib_gigpo.compare.tables import interval_text

HEADER = ("f_norm", "gamma", "omega", "seeds", "mean", "95 %", "IQM", "iterations")


class Trial(NamedTuple):
    """One trial.

    Attributes:
        omega: Weight of the step advantage.
        gamma: Discount of the step returns.
        f_norm: "std" or "none".
        seed: Of the run.
        value: The metric at its end, as a share.
        iterations: How many it trained.
    """

    omega: float
    gamma: float
    f_norm: str
    seed: int
    value: float
    iterations: int


def trials_of(results: Iterable[Any], metric: str) -> list[Trial]:
    """Return the trials of a `tune.ResultGrid` that reported the metric.

    Args:
        results: Tune's results.
        metric: Slash-separated key of `Algorithm.train()`'s result.
    """
    found = []
    for result in results:
        value = _at(result.metrics or {}, metric)
        if value is None:
            continue
        config = result.config
        found.append(
            Trial(
                float(config["omega"]),
                float(config["gamma"]),
                str(config["f_norm"]),
                int(config["seed"]),
                float(value),
                int(result.metrics["training_iteration"]),
            )
        )
    return found


def _at(metrics: Mapping[str, Any], path: str) -> Any:
    found: Any = metrics
    for name in path.split("/"):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def sweep_rows(trials: Sequence[Trial]) -> list[list[Any]]:
    """Return one row per setting, the best mean over seeds first.

    Returns:
        Rows under `HEADER`; means and bounds are shares.
    """
    groups: dict[tuple[str, float, float], list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[trial.f_norm, trial.gamma, trial.omega].append(trial)
    rows = []
    for setting, members in groups.items():
        values = [trial.value for trial in members]
        rows.append(
            [
                *setting,
                len(members),
                float(np.mean(values)),
                interval_text(*mean_interval(values, within=(0.0, 1.0))),
                interquartile_mean(values),
                max(trial.iterations for trial in members),
            ]
        )
    return sorted(rows, key=lambda row: -row[4])


def heat_map(trials: Sequence[Trial], path: Path, title: str) -> Path:
    """Draw the mean over seeds by omega and gamma, one panel per F_norm.

    Args:
        trials: The trials, at least one.
        path: PNG to write.
        title: What the colour is.

    Returns:
        `path`.

    Raises:
        ValueError: There is no trial.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not trials:
        raise ValueError("no trial has reported anything: there is nothing to draw")
    omegas = sorted({trial.omega for trial in trials})
    gammas = sorted({trial.gamma for trial in trials})
    norms = sorted({trial.f_norm for trial in trials}, reverse=True)
    grids = {norm: _grid([t for t in trials if t.f_norm == norm], omegas, gammas) for norm in norms}
    known = np.concatenate([grid.ravel() for grid in grids.values()])
    low, high = float(np.nanmin(known)), float(np.nanmax(known))
    figure = Figure(
        figsize=(2.2 + (1.2 + 0.8 * len(omegas)) * len(norms), 1.8 + 0.6 * len(gammas)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(norms), squeeze=False)[0]
    for axes, norm in zip(panels, norms, strict=True):
        image = axes.imshow(grids[norm], origin="lower", aspect="auto", vmin=low, vmax=high)
        axes.set(xlabel="ω", ylabel="γ", title=f"F = {'std' if norm == 'std' else '1'}")
        axes.set_xticks(range(len(omegas)), [f"{omega:.3g}" for omega in omegas])
        axes.set_yticks(range(len(gammas)), [f"{gamma:.3g}" for gamma in gammas])
        for (row, column), value in np.ndenumerate(grids[norm]):
            if not np.isnan(value):
                dark = value < (low + high) / 2
                axes.text(
                    column,
                    row,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    color="white" if dark else "black",
                )
        if axes is panels[-1]:
            figure.colorbar(image, ax=axes)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    return path


def _grid(trials: Sequence[Trial], omegas: list[float], gammas: list[float]) -> np.ndarray:
    """Return means over seeds [gammas, omegas]; NaN where nothing ran."""
    grid = np.full((len(gammas), len(omegas)), np.nan)
    for row, gamma in enumerate(gammas):
        for column, omega in enumerate(omegas):
            values = [t.value for t in trials if (t.omega, t.gamma) == (omega, gamma)]
            if values:
                grid[row, column] = np.mean(values)
    return grid
