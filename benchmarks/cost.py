"""GiGPO costs what GRPO costs: generated tokens and peak memory (paper, Sec. 5.6).

`python -m benchmarks.cost`, about a minute. Each algorithm trains two iterations of 16 groups of 8
episodes in a process of its own, at learning rate 0: both play the same episodes, so whatever one
of them needs more is the algorithm's. The KL is that of the paper (0.01), so every row goes through
the loss of both. Without a KL the learner leaves out rows without advantage, of which GRPO has
more: then the difference is what GRPO does not learn from. Memory is the median of three processes.

Figures: `tokens_ratio` and `memory_ratio`, GiGPO over GRPO; `advantages_ms` and `grouping_ms`,
milliseconds per iteration of GiGPO; `iteration_share`, their share of the iteration.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.report import report

_ITERATIONS = 2
_REPEATS = 3
_PRESETS = ("gigpo", "grpo")


def measure(preset: str) -> dict[str, float]:
    """Train in this process; return tokens, peak memory in MiB and seconds per iteration."""
    import ray
    import torch

    from rllib_gigpo import GiGPOConfig

    torch.set_num_threads(1)
    # A Ray of its own, whatever else runs on this machine.
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = (
        GiGPOConfig.preset(preset)
        .environment("KeyDoor")
        .llm(model="tiny", max_prompt_tokens=64, max_response_tokens=8)
        .training(lr=0.0, num_minibatches=10)
    )
    algorithm = config.build_algo()
    tokens, seconds, advantages, grouping = 0, 0.0, 0.0, 0.0
    for _ in range(_ITERATIONS):
        result = algorithm.train()
        found, timers = result["env_runners"], result["timers"]
        tokens += int(found["num_prompt_tokens"] + found["num_response_tokens"])
        seconds += float(result["time_this_iter_s"])
        advantages += float(timers["advantages"])
        grouping += float(timers["grouping"])
    algorithm.stop()
    ray.shutdown()
    return {
        "tokens": tokens,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "seconds": seconds / _ITERATIONS,
        "advantages": advantages / _ITERATIONS,
        "grouping": grouping / _ITERATIONS,
    }


def _in_a_process(preset: str) -> dict[str, Any]:
    # One thread and one arena: an allocator's luck is not to decide about per cents.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-m", "benchmarks.cost", preset]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"the process of {preset!r} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    """Measure both in processes of their own and compare."""
    runs = {preset: [] for preset in _PRESETS}
    for _ in range(_REPEATS):
        for preset in _PRESETS:
            runs[preset].append(_in_a_process(preset))
    found = {preset: _median(measured) for preset, measured in runs.items()}
    gigpo, grpo = found["gigpo"], found["grpo"]
    credit = gigpo["advantages"] + gigpo["grouping"]
    rows = [
        [
            name.upper().replace("GIGPO", "GiGPO"),
            int(m["tokens"]),
            m["memory"],
            1e3 * m["grouping"],
            1e3 * m["advantages"],
            m["seconds"],
        ]
        for name, m in found.items()
    ]
    report(
        "two iterations of 16 x 8 episodes of KeyDoor at learning rate 0",
        ("algorithm", "tokens", "peak MiB", "grouping ms", "advantages ms", "seconds"),
        rows,
        {
            "tokens_ratio": gigpo["tokens"] / grpo["tokens"],
            "memory_ratio": round(gigpo["memory"] / grpo["memory"], 4),
            "advantages_ms": round(1e3 * gigpo["advantages"], 2),
            "grouping_ms": round(1e3 * gigpo["grouping"], 2),
            "iteration_share": round(credit / gigpo["seconds"], 5),
        },
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
