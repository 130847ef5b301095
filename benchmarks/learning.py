"""Every algorithm of the family learns: curves over seeds, with intervals.

    python -m benchmarks.learning            # everything: 40 minutes on two cores
    python -m benchmarks.learning --quick    # two seeds: under 20 minutes

Every preset plays KeyDoor; GiGPO, its ablations, GRPO and RLOO also KeyDoor with a local view and
Sokoban (sixteen rooms of 6 x 6 cells with one box). All runs of a task and seed start from the same
warm-started tiny model, and play the same number of environment steps. A finished run is a JSON
file in the output folder: the same command goes on where it was stopped.

The table shows, per task and preset: success in 128 evaluation episodes at the end, mean success
over the environment steps (the area under the curve of the training episodes) with its 95 %
interval over seeds (Student's t) and interquartile mean, episode length at the end, and how likely
a GiGPO run is to have the larger area. The last line is one JSON object: per task and preset
`success` and `auc`, and per task of several seeds `gigpo_minus_grpo` = [low, mean, high], the
difference of areas paired by seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util import ActorPool

from benchmarks.learning_plot import plot_task
from benchmarks.learning_runs import TASKS, Run, train, twin_of, warm_model
from benchmarks.report import report
from rllib_gigpo.compare.statistics import (
    area_under_curve,
    interquartile_mean,
    mean_interval,
    paired_difference,
    probability_of_improvement,
)
from rllib_gigpo.compare.tables import interval_text
from rllib_gigpo.presets import PRESETS

Results = dict[str, dict[str, list[dict[str, Any]]]]


@ray.remote(num_cpus=1)
class _Worker:
    """Trains one run after the other in its own process, so that imports are paid for once."""

    def prepare(self, task: str, seed: int, output: str) -> None:
        warm_model(TASKS[task], seed, Path(output) / "models")

    def train(self, run: Run, output: str) -> Run:
        train(run, Path(output))
        return run


def planned_runs(tasks: Sequence[str], presets: Sequence[str] | None, seeds: int) -> list[Run]:
    """Return all runs, seed by seed, so that an unfinished benchmark is a balanced one.

    Presets with equal settings are one run.
    """
    runs = [
        Run(task, twin_of(preset), seed, TASKS[task].budget)
        for seed in range(seeds)
        for task in tasks
        for preset in TASKS[task].presets
        if presets is None or preset in presets
    ]
    return list(dict.fromkeys(runs))


def train_all(runs: Sequence[Run], output: Path, workers: int) -> None:
    """Train what is not finished yet."""
    waiting = [run for run in runs if not (output / run.file).exists()]
    print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished before", flush=True)
    if not waiting:
        return
    ray.init(
        address="local",
        num_cpus=workers,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    pool = ActorPool([_Worker.remote() for _ in range(workers)])
    starts: list[Any] = list(dict.fromkeys((run.task, run.seed) for run in waiting))
    models = pool.map_unordered(lambda w, start: w.prepare.remote(*start, str(output)), starts)
    _wait(models, len(starts), "warm starts")
    left: list[Any] = list(waiting)
    done = pool.map_unordered(lambda w, run: w.train.remote(run, str(output)), left)
    _wait(done, len(left), "runs")
    ray.shutdown()


def _wait(results: Iterable[Any], total: int, what: str) -> None:
    start = time.perf_counter()
    for number, found in enumerate(results, 1):
        seconds = time.perf_counter() - start
        left = seconds / number * (total - number)
        named = f" ({found.task} {found.preset} seed {found.seed})" if found else ""
        print(
            f"{number}/{total} {what}{named}: {seconds:.0f} s, about {left:.0f} s left", flush=True
        )


def read_results(runs: Sequence[Run], output: Path) -> Results:
    """Return finished runs by task and preset, in order of their seeds; twins share them."""
    found: Results = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda run: run.seed):
        result = json.loads((output / run.file).read_text())
        result["auc"] = area_under_curve(result["curve"], run.budget)
        for preset in TASKS[run.task].presets:
            if twin_of(preset) == run.preset:
                found[run.task][preset].append(result)
    return found


def tabulate(results: Results) -> tuple[list[list[Any]], dict[str, Any]]:
    """Return the rows of the table and the figures of the last line."""
    rows, figures = [], {}
    for task, presets in results.items():
        areas = {name: [run["auc"] for run in runs] for name, runs in presets.items()}
        figures[task] = {}
        for name, runs in presets.items():
            success = [run["success"] for run in runs]
            mean = sum(areas[name]) / len(runs)
            beaten = (
                f"{probability_of_improvement(areas['gigpo'], areas[name]):.2f}"
                if "gigpo" in areas and name != "gigpo"
                else ""
            )
            rows.append(
                [
                    task,
                    PRESETS[name].label,
                    sum(run["before"] for run in runs) / len(runs),
                    sum(success) / len(runs),
                    interval_text(*mean_interval(success, within=(0.0, 1.0))),
                    mean,
                    interval_text(*mean_interval(areas[name], within=(0.0, 1.0))),
                    interquartile_mean(areas[name]),
                    sum(run["length"] for run in runs) / len(runs),
                    beaten,
                ]
            )
            figures[task][name] = {"success": rows[-1][3], "auc": mean}
        if {"gigpo", "grpo"} <= set(areas) and len(areas["gigpo"]) > 1:
            gap = paired_difference(areas["gigpo"], areas["grpo"])
            figures[task]["gigpo_minus_grpo"] = list(gap)
    return rows, figures


_HEADER = (
    "task",
    "algorithm",
    "before",
    "success",
    "95 %",
    "area",
    "95 %",
    "IQM",
    "length",
    "P(GiGPO better)",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, tabulate and plot."""
    args = _parse(arguments)
    output = Path(args.output).absolute()
    (output / "models").mkdir(parents=True, exist_ok=True)
    seeds = args.seeds or (2 if args.quick else 5)
    runs = planned_runs(args.tasks, args.presets, seeds)
    train_all(runs, output, args.workers)
    results = read_results(runs, output)
    for task, presets in results.items():
        picture = plot_task(task, presets, TASKS[task].budget, output / f"{task}.png")
        print(f"plot: {picture}")
    rows, figures = tabulate(results)
    report(f"{seeds} seeds, after the same number of environment steps", _HEADER, rows, figures)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="two seeds")
    parser.add_argument("--seeds", type=int, help="seeds, 5 by default")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--presets", nargs="+", choices=PRESETS, help="by default each task's own")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", default="runs/learning", help="folder of the finished runs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
