"""The runs of a comparison: one per algorithm and seed, each a file when it is finished."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util import ActorPool

from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.presets import get_preset
from rllib_gigpo.recording.folder import write_bytes

# From (algorithm, seed) to the settings of a run.
ConfigOf = Callable[[str, int], GiGPOConfig]


class Run(NamedTuple):
    """One run.

    Attributes:
        algo: Name of the preset.
        seed: Of everything.
        env_steps: At least so many environment steps are trained on.
    """

    algo: str
    seed: int
    env_steps: int

    @property
    def file(self) -> str:
        """Name of its result file."""
        return f"{self.algo}-{self.seed}-{self.env_steps}.json"


def planned_runs(algos: Sequence[str], seeds: int, env_steps: int) -> list[Run]:
    """Return all runs, seed by seed, so that an unfinished comparison is a balanced one.

    Raises:
        ValueError: There is no such algorithm, fewer than two, or no seed.
    """
    names = list(dict.fromkeys(get_preset(name).name for name in algos))
    if len(names) < 2:
        raise ValueError(f"algos={list(algos)}: a comparison needs at least two algorithms")
    for name, value in (("seeds", seeds), ("env_steps", env_steps)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected a whole number of at least 1")
    return [Run(name, seed, env_steps) for seed in range(seeds) for name in names]


def train(run: Run, config: GiGPOConfig, folder: Path) -> dict[str, Any]:
    """Train one run and write its result; a run that is finished is read instead.

    Args:
        run: The run.
        config: Its settings.
        folder: Where results are kept.

    Returns:
        Its `algo` and `seed`, `success` on the evaluation panel after training, and `curve`: per
        iteration the environment steps, tokens and seconds so far, and success and return of its
        episodes.
    """
    path = folder / run.file
    if path.exists():
        return json.loads(path.read_text())
    config.recording(enabled=False)
    algorithm = config.build_algo()
    curve: list[dict[str, float]] = []
    tokens, seconds = 0.0, 0.0
    while not curve or curve[-1]["env_steps"] < run.env_steps:
        start = time.perf_counter()
        found = algorithm.train()["env_runners"]
        seconds += time.perf_counter() - start
        tokens += found["num_prompt_tokens"] + found["num_response_tokens"]
        curve.append(
            {
                "env_steps": float(found["num_env_steps_sampled_lifetime"]),
                "tokens": tokens,
                "seconds": seconds,
                "success": float(found.get("success_rate", float("nan"))),
                "return": float(found["episode_return_mean"]),
            }
        )
    evaluated = algorithm.evaluate()["env_runners"]
    algorithm.stop()
    result = {
        "algo": run.algo,
        "seed": run.seed,
        "success": float(evaluated.get("success_rate", float("nan"))),
        "return": float(evaluated["episode_return_mean"]),
        "curve": curve,
    }
    write_bytes(path, json.dumps(result).encode())
    return result


@ray.remote
class _Worker:
    """Trains one run after the other in its own process, so that imports are paid for once."""

    def train(self, run: Run, config: GiGPOConfig, folder: str) -> Run:
        train(run, config, Path(folder))
        return run


def train_all(
    runs: Sequence[Run],
    config_of: ConfigOf,
    folder: Path,
    *,
    workers: int,
    gpus_per_run: float = 0.0,
) -> Iterator[Run]:
    """Train what is not finished yet, and yield each run as it is done.

    Args:
        runs: All runs.
        config_of: From algorithm and seed to settings.
        folder: Where results are kept.
        workers: Runs at once.
        gpus_per_run: GPUs of the process of a run, in which learner and engine are; a fraction
            shares one.
    """
    waiting: list[Any] = [run for run in runs if not (folder / run.file).exists()]
    if not waiting:
        return
    count = min(workers, len(waiting))
    made = _Worker.options(num_cpus=1, num_gpus=gpus_per_run)  # pyright: ignore[reportAttributeAccessIssue]
    pool: Any = ActorPool([made.remote() for _ in range(count)])
    yield from pool.map_unordered(
        lambda worker, run: worker.train.remote(run, config_of(run.algo, run.seed), str(folder)),
        waiting,
    )


def read_results(runs: Sequence[Run], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return finished runs by algorithm, in order of their seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        found.setdefault(run.algo, []).append(json.loads((folder / run.file).read_text()))
    return found
