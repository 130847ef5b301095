"""How often the watchdog is wrong about runs that learn, and how soon it sees those that collapse.

    python -m benchmarks.watchdog
    python -m benchmarks.watchdog --presets gigpo grpo --seeds 0 1 --budget 10000

Runs are those of `benchmarks.learning` (KeyDoor, a warm start, several algorithms and seeds), with
a KL so small that it only gives that signal a number. Good are those that end with no less success
than they began with; the others have fallen by themselves, and an alarm about them is right. Bad
ones are the same runs, whose learning rate is multiplied by `--too-large` after some iterations.
Every run is watched with the defaults and goes on to its end. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import methodcaller
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch

from benchmarks.learning_runs import TASKS, Run, config_of, warm_model

_TASK = "KeyDoor"


def watch(run: Run, models: Path, *, factor: float, healthy: int, after: int) -> dict[str, Any]:
    """Train a run to its budget and note what the watchdog said.

    Args:
        run: The run.
        models: Where warm-started models are kept.
        factor: Of the learning rates after `healthy` iterations; 1 leaves the run alone.
        healthy: Iterations before that.
        after: Iterations after it, in place of the budget, where the factor is not 1.

    Returns:
        `iterations`; `success` of the first and the last; `alarms`, the first iteration of each
        signal.
    """
    task = TASKS[run.task]
    config = config_of(run, task, warm_model(task, run.seed, models))
    config.training(kl_coeff=1e-3, old_logp="recompute").recording(enabled=False)
    algorithm: Any = config.build_algo()
    alarms: dict[str, int] = {}
    success: list[float] = []
    steps = 0
    while steps < run.budget if factor == 1 else len(success) < healthy + after:
        if factor != 1 and len(success) == healthy:
            algorithm.learner_group.foreach_learner(methodcaller("set_lr_factor", factor))
        result = algorithm.train()
        steps = int(result["env_runners"]["num_env_steps_sampled_lifetime"])
        success.append(float(result["env_runners"]["success_rate"]))
        for alarm in algorithm.watchdog.alarms:
            alarms.setdefault(alarm.signal, len(success))
    algorithm.stop()
    return {
        "iterations": len(success),
        "success": [round(success[0], 3), round(success[-1], 3)],
        "alarms": alarms,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what the command line names and print the rates."""
    args = _parser().parse_args(arguments)
    logging.getLogger("rllib_gigpo.watching").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    runs = [Run(_TASK, preset, seed, args.budget) for preset in args.presets for seed in args.seeds]
    alone, bad = [], []
    with tempfile.TemporaryDirectory() as folder:
        for kind, factor, found in (("alone", 1.0, alone), ("bad", args.too_large, bad)):
            for run in runs:
                found.append(
                    watch(
                        run,
                        args.models or Path(folder),
                        factor=factor,
                        healthy=args.healthy,
                        after=args.after,
                    )
                )
                print(f"{kind} {run.preset} {run.seed}: {found[-1]}", flush=True)
    ray.shutdown()
    print(json.dumps(summary(alone, bad, args.healthy)))


def summary(
    runs: Sequence[dict[str, Any]], bad: Sequence[dict[str, Any]], healthy: int
) -> dict[str, Any]:
    """Return the rates.

    Args:
        runs: What `watch` returned of the runs that were left alone.
        bad: Of those that were not.
        healthy: Iterations before they were disturbed.
    """
    good = [found for found in runs if found["success"][1] >= found["success"][0]]
    fallen = [found for found in runs if found not in good]
    noticed = [min(found["alarms"].values()) for found in bad if found["alarms"]]
    return {
        "good_runs": len(good),
        "good_iterations": sum(found["iterations"] for found in good),
        "good_success": [_mean(found["success"][place] for found in good) for place in (0, 1)],
        "good_runs_with_alarm": sum(bool(found["alarms"]) for found in good),
        "false_alarms": dict(Counter(signal for found in good for signal in found["alarms"])),
        "fallen_runs": len(fallen),
        "fallen_runs_with_alarm": sum(bool(found["alarms"]) for found in fallen),
        "bad_runs": len(bad),
        "bad_success": _mean(found["success"][1] for found in bad),
        "bad_runs_with_alarm": len(noticed),
        # The iteration of the first destroying update is still played by good weights.
        "bad_iterations_until_alarm": median(n - healthy - 1 for n in noticed) if noticed else None,
        "seen_by": dict(Counter(signal for found in bad for signal in found["alarms"])),
    }


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(sum(found) / len(found), 3) if found else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watchdog",
        description="How often the watchdog is wrong, and how soon it sees a collapse.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--presets", nargs="+", default=["gigpo", "grpo", "rloo", "gspo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--budget", type=int, default=30_000, help="environment steps of a run")
    parser.add_argument("--too-large", type=float, default=300.0, help="factor of the lr")
    parser.add_argument("--healthy", type=int, default=4, help="iterations before it")
    parser.add_argument("--after", type=int, default=6, help="iterations after it")
    parser.add_argument("--models", type=Path, help="folder that keeps the warm-started models")
    return parser


if __name__ == "__main__":
    main()
