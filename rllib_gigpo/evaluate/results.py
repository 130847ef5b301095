"""From episodes to tables as in the paper's Tables 1 and 2: a column per task type, and all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rllib_gigpo.compare.statistics import share_interval

Record = Mapping[str, Any]


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """Return what the episodes of a panel came to.

    A task with k episodes counts once, by their mean; intervals are of 95 % over tasks, by Wilson's
    score.

    Args:
        records: Episodes of `rllib_gigpo.evaluate.evaluate`.

    Returns:
        `tasks`, `episodes`, `success_rate`, `success_interval`, `any_of_k` (share of tasks won at
        least once), `return_mean`, `steps_mean`, `valid_action_rate`, `tries_mean`, `by_type` (per
        task type `success_rate`, `success_interval`, `tasks`), and `numbers`: the mean of every
        number that the environment tells, such as `score`. One that an episode lacks counts as 0,
        and one that was not finite (None) is left out.
    """
    if not records:
        raise ValueError("there is no episode to summarise")
    tasks = _by_task(records)
    success = [float(np.mean([r["won"] for r in episodes])) for episodes in tasks.values()]
    types: dict[str, list[float]] = defaultdict(list)
    for episodes, rate in zip(tasks.values(), success, strict=True):
        if episodes[0]["task_type"] is not None:
            types[episodes[0]["task_type"]].append(rate)
    numbers = {name for r in records for name, value in r["numbers"].items() if value is not None}
    return {
        "tasks": len(tasks),
        "episodes": len(records),
        "success_rate": float(np.mean(success)),
        "success_interval": list(share_interval(success)),
        "any_of_k": float(np.mean([any(r["won"] for r in found) for found in tasks.values()])),
        "return_mean": _mean(tasks, lambda record: record["return"]),
        "steps_mean": _mean(tasks, lambda record: record["steps"]),
        "valid_action_rate": _mean(tasks, lambda record: record["valid_action_rate"]),
        "tries_mean": _mean(tasks, lambda record: record["tries"]),
        "by_type": {
            name: {
                "success_rate": float(np.mean(rates)),
                "success_interval": list(share_interval(rates)),
                "tasks": len(rates),
            }
            for name, rates in sorted(types.items())
        },
        "numbers": {
            name: _mean(_finite(tasks, name), lambda r, name=name: r["numbers"].get(name, 0.0))
            for name in sorted(numbers)
        },
    }


def _by_task(records: Sequence[Record]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        found[record["task"]].append(record)
    return found


def _finite(tasks: Mapping[int, Sequence[Record]], name: str) -> dict[int, list[Record]]:
    """Return the episodes that tell a number or lack it, by task."""
    kept = [r for found in tasks.values() for r in found if r["numbers"].get(name, 0.0) is not None]
    return _by_task(kept)


def _mean(tasks: Mapping[int, Sequence[Record]], of: Any) -> float:
    return float(np.mean([np.mean([of(record) for record in found]) for found in tasks.values()]))


def result_table(name: str, summary: Mapping[str, Any]) -> tuple[tuple[str, ...], list[list[Any]]]:
    """Return the header and the row of one evaluation, success in percent.

    Args:
        name: Of the model or agent.
        summary: What `summarise` returned.
    """
    types = summary["by_type"]
    score = summary["numbers"].get("score")
    low, high = (100 * bound for bound in summary["success_interval"])
    header = ["agent", *types, *(["score"] if score is not None else []), "all", "95 %", "any of k"]
    row: list[Any] = [
        name,
        *(100 * found["success_rate"] for found in types.values()),
        *([100 * score] if score is not None else []),
        100 * summary["success_rate"],
        f"[{low:.1f}, {high:.1f}]",
        100 * summary["any_of_k"],
    ]
    return tuple(header), [row]
