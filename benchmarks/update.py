"""How fast the learner updates, and in how much memory, side by side with others.

    pip install --no-deps trl==1.16.0 datasets dill xxhash multiprocess   # or the extra [bench]
    python -m benchmarks.update            # 20 minutes of CPU time
    python -m benchmarks.update --quick    # shorter rows, one run of each: only that it works

SmolLM2-135M in bf16 on a CPU, one thread; all numbers are of a CPU, a GPU's will differ.

*   `over_floor`: tokens per second of an optimizer step over those of a bare PyTorch loop on the
    same micro-batches (bf16 autocast over fp32 weights, AdamW); median of five runs in turns.
*   `over_trl`: tokens per second of loss and backward over those of TRL 1.16's GRPO trainer on the
    same bf16 model and batch; median of five runs in turns, without generation on either side.
*   `memory_over_trl`: peaks of the same two, each in a process of its own.
*   Peak that two updates add to a process, by sequence length, with and without activation
    checkpointing, beside what `rllib_gigpo.memory_estimate` expects (`estimate_error`, the largest
    relative difference). glibc keeps freed blocks of up to 32 MiB, nearly all activations, for
    later; the first figure is without them (`MALLOC_MMAP_THRESHOLD_`), the second as it comes.
*   Seconds of an iteration by number of groups of KeyDoor, and `linearity`: r^2 of a straight line.
*   `two_learners`: rows per second of two learner processes over those of one, by the clock, so
    only of a machine with two idle cores.

Without TRL its figures are null. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections import ChainMap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import MultiAgentBatch

from benchmarks.report import report, timed
from rllib_gigpo import GiGPOConfig
from rllib_gigpo.rows import RowData

SHAPE = {"rows": 16, "prompt": 120, "response": 12}
QUICK = {"rows": 4, "prompt": 20, "response": 4}
MEMORY = ((256, 8), (512, 4), (1024, 2), (2048, 1))
GROUPS = (4, 8, 16, 32)
# Blocks from 1 MiB on go back to the system as soon as they are free.
FREES = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


def part(*environment: Mapping[str, str], **asked: Any) -> dict[str, Any]:
    """Let a process of its own measure one part.

    Args:
        *environment: Variables of that process.
        **asked: The part, and what it is told.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.update_parts", json.dumps(asked)],
        capture_output=True,
        text=True,
        env=dict(ChainMap(*map(dict, environment), {"OMP_NUM_THREADS": "1"}, dict(os.environ))),
    )
    if done.returncode != 0:
        raise RuntimeError(f"{asked} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def tiny_config(num_groups: int, **learners: Any) -> GiGPOConfig:
    """KeyDoor with a tiny model."""
    return (
        GiGPOConfig()
        .environment("KeyDoor")
        .llm(model="tiny", max_prompt_tokens=64, max_response_tokens=8)
        .training(num_groups=num_groups, group_size=8, kl_coeff=0.0, minibatch_size=None)
        .learners(**learners)
    )


def seconds_by_groups(repeats: int) -> list[float]:
    """CPU seconds of an iteration for each number of groups, the median of some."""
    found = []
    for num_groups in GROUPS:
        algorithm = tiny_config(num_groups).build_algo()
        algorithm.train()
        found.append(float(np.median([timed(algorithm.train)[1] for _ in range(repeats)])))
        algorithm.stop()
    return found


def linearity(x: Sequence[float], y: Sequence[float]) -> float:
    """Return r^2 of the straight line through the points."""
    return float(np.corrcoef(x, y)[0, 1] ** 2)


def learner_rate(num_learners: int, rows: Any, repeats: int) -> float:
    """Rows per second of an update by this many learner processes."""
    config = tiny_config(4, num_learners=num_learners)
    algorithm: Any = config.build_algo()
    batch = MultiAgentBatch({DEFAULT_MODULE_ID: rows}, env_steps=len(rows))
    seconds = []
    for iteration in range(repeats + 1):
        start = time.perf_counter()
        algorithm.learner_group.update(
            training_data=RowData(batch, config.minibatch_plan),
            timesteps={"num_env_steps_sampled_lifetime": 0},
            iteration=iteration,
        )
        seconds.append(time.perf_counter() - start)
    algorithm.stop()
    return len(rows) / float(np.median(seconds[1:]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Measure the learner's update.")
    parser.add_argument("--quick", action="store_true", help="only show that it works")
    quick = parser.parse_args(arguments).quick
    shape, repeats = (QUICK, 1) if quick else (SHAPE, 5)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {"load_at_start": round(load, 1)}

    found = part(part="floor", **shape, repeats=repeats)
    rates = {name: found["tokens"] / np.median(found[name]) for name in ("ours", "bare")}
    rows += [["optimizer step", name, f"{rate:.0f} tokens/s"] for name, rate in rates.items()]
    figures["over_floor"] = rates["ours"] / rates["bare"]

    figures |= {"over_trl": None, "memory_over_trl": None}
    if find_spec("trl") is not None:
        found = part(part="trl", **shape, repeats=repeats)
        rates = {name: found["tokens"] / np.median(found[name]) for name in ("ours", "trl")}
        peaks = {
            name: part(part="loss_memory", what=name, **shape)["peak"] for name in ("ours", "trl")
        }
        for name in ("ours", "trl"):
            rows.append(["loss and backward", name, f"{rates[name]:.0f} tokens/s"])
            rows.append(["loss and backward", name, f"peak {peaks[name]:.2f} GiB"])
            rows.append(["loss and backward", name, f"loss {found['losses'][name]:.6f}"])
        figures["over_trl"] = rates["ours"] / rates["trl"]
        figures["memory_over_trl"] = peaks["ours"] / peaks["trl"]

    errors = []
    for sequence, count in ((64, 2),) if quick else MEMORY:
        for recomputes in (False, True):
            shape_of = {"sequence": sequence, "rows": count, "activation_checkpointing": recomputes}
            needed = part(FREES, part="memory", **shape_of)
            taken = part(part="memory", **shape_of)
            errors.append(abs(needed["estimate"] / needed["peak"] - 1.0))
            rows.append(
                [
                    f"micro-batches of {count} x {sequence} tokens",
                    "checkpointing" if recomputes else "plain",
                    f"peak {needed['peak']:.2f} GiB, estimate {needed['estimate']:.2f}, "
                    f"with what glibc keeps {taken['peak']:.2f}",
                ]
            )
    figures["estimate_error"] = max(errors)

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    seconds = seconds_by_groups(1 if quick else 3)
    rows += [
        [f"{groups} groups of 8", "iteration", f"{spent:.2f} CPU s"]
        for groups, spent in zip(GROUPS, seconds, strict=True)
    ]
    figures["linearity"] = linearity(GROUPS, seconds)

    from benchmarks.update_parts import tiny_rows

    many = tiny_rows(64 if quick else 2048)
    learner_rates = [learner_rate(n, many, 1 if quick else 5) for n in (1, 2)]
    rows += [
        [f"{n} learners", "update", f"{rate:.0f} rows/s"]
        for n, rate in zip((1, 2), learner_rates, strict=True)
    ]
    figures["two_learners"] = learner_rates[1] / learner_rates[0]
    ray.shutdown()
    report(
        f"The learner's update on a CPU, one thread (load {load:.1f} at the start)",
        ["what", "who", "measured"],
        rows,
        {name: value if value is None else round(value, 3) for name, value in figures.items()},
    )


if __name__ == "__main__":
    main()
