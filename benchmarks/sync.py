"""How long new weights take from the learner into an engine, and what that is of an iteration.

`python -m benchmarks.sync`, about two minutes on two quiet cores. SmolLM2-135M in bf16, one vLLM
engine actor, the weights by Ray's object store; iterations of 2 groups x 2 KeyDoor episodes, which
is next to nothing, so that the share is the largest that a run could see.

Figures: `sync_s`, seconds from the learner's fp32 weights to an engine that serves them in bf16
(the least of several); `proof_s`, seconds of the checksums and the probe that follow; `sync_share`,
share of both in an iteration; `megabytes` sent; `load`, the machine's load average before and
after.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from typing import Any

import ray

from benchmarks.report import report
from rllib_gigpo import GiGPOConfig

REPEATS = 5


def config_of(model: str, dtype: str) -> GiGPOConfig:
    """Return the settings of the run."""
    return (
        GiGPOConfig()
        .environment("KeyDoor", env_config={"size": 3, "horizon": 4})
        .llm(
            model=model,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            max_prompt_tokens=256,
            max_response_tokens=16,
        )
        .training(num_groups=2, group_size=2, num_minibatches=1, lr=1e-6, kl_coeff=0.0)
        .engines(engine="vllm", engine_options={"kv_cache_memory_bytes": 1 << 27})
    )


def measure(algorithm: Any, repeats: int) -> tuple[dict[str, float], int]:
    """Return an algorithm's least seconds of each part of a sync, and the bytes sent."""
    parts: dict[str, float] = {}
    for _ in range(repeats):
        algorithm.weights.push(algorithm.num_updates)
        for name, seconds in algorithm.weights.seconds.items():
            parts[name] = min(seconds, parts.get(name, seconds))
    packed = algorithm.first_learner(lambda learner: learner.packed_weights())
    size = sum(array.nbytes for tensors in packed.values() for array, _ in tensors.values())
    return parts, size


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Measure the sync of weights.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args(arguments)
    load = [os.getloadavg()[0]]
    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    algorithm = config_of(args.model, args.dtype).build_algo()
    try:
        parts, size = measure(algorithm, args.repeats)
        timers = algorithm.train()["timers"]
    finally:
        algorithm.stop()
    load.append(os.getloadavg()[0])
    iteration = sum(timers[name] for name in ("rollout", "grouping", "learn", "sync"))
    proof = parts["checksums"] + parts["probe"]
    figures = {
        "sync_s": round(parts["publish"] + parts["load"], 3),
        "proof_s": round(proof, 3),
        "sync_share": round(timers["sync"] / iteration, 4),
        "megabytes": round(size / 1e6, 1),
        "load": [round(value, 1) for value in load],
    }
    what = {
        "publish": "learner: cast, checksums, object store",
        "load": "engine: read, load",
        "checksums": "proof: checksums of the engine",
        "probe": "proof: a prompt on both sides",
    }
    report(
        f"{args.model} in {args.dtype}: {size / 1e6:,.0f} MB by Ray's object store",
        ("part", "seconds"),
        [
            *((text, parts[name]) for name, text in what.items()),
            ("one iteration", iteration),
            ("its sync", timers["sync"]),
        ],
        figures,
    )


if __name__ == "__main__":
    main()
