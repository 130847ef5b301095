"""The table of a comparison, as Markdown and LaTeX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rllib_gigpo.compare.statistics import (
    area_under_curve,
    interquartile_mean,
    mean_interval,
    probability_of_improvement,
)
from rllib_gigpo.presets import PRESETS

HEADER = (
    "algorithm",
    "seeds",
    "success",
    "success 95 %",
    "IQM",
    "area",
    "area 95 %",
    "P(first better)",
)

_SHARES = (0.0, 1.0)

Results = Mapping[str, Sequence[Mapping[str, Any]]]


def comparison_rows(results: Results, env_steps: int) -> list[list[Any]]:
    """Return one row per algorithm, in the order in which they were named.

    `success` is the mean over seeds on the evaluation panel after training, in percent; IQM its
    interquartile mean; `area` the mean success of the training episodes over the first `env_steps`
    environment steps; P(first better) how often a run of the first algorithm beats one of this one
    by its success on the panel (Agarwal et al., arXiv 2108.13264).
    """
    first = [run["success"] for run in next(iter(results.values()))]
    rows = []
    for name, runs in results.items():
        success = [run["success"] for run in runs]
        areas = [area_under_curve(run["curve"], env_steps) for run in runs]
        rows.append(
            [
                PRESETS[name].label,
                len(runs),
                100 * float(np.mean(success)),
                _interval(mean_interval(success, within=_SHARES)),
                100 * interquartile_mean(success),
                100 * float(np.mean(areas)),
                _interval(mean_interval(areas, within=_SHARES)),
                probability_of_improvement(first, success),
            ]
        )
    return rows


def _interval(bounds: tuple[float, float]) -> str:
    return interval_text(*bounds, scale=100, digits=1)


def interval_text(low: float, high: float, *, scale: float = 1, digits: int = 2) -> str:
    """Return "[low, high]", or a dash for the interval of a single value."""
    if math.isnan(low):
        return "–"
    return f"[{scale * low:.{digits}f}, {scale * high:.{digits}f}]"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [
        list(header),
        ["---"] * len(header),
        *([_cell(value) for value in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def latex_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a LaTeX table for `booktabs`."""
    body = [[_cell(value) for value in row] for row in rows]
    lines = [" & ".join(map(_latex, line)) + r" \\" for line in [list(header), *body]]
    columns = "l" + "r" * (len(header) - 1)
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _latex(text: str) -> str:
    for character in "%&_#$":
        text = text.replace(character, f"\\{character}")
    return text.replace("ω", r"$\omega$").replace("±", r"$\pm$")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if np.isnan(value) else f"{value:.1f}" if abs(value) > 1 else f"{value:.2f}"
    return str(value)
