"""What the tests on a real Ray share: a fragile environment, runs, and what to compare of them."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from envs.key_door import KeyDoor
from rllib_gigpo import GiGPO, GiGPOConfig, register_llm_env
from rllib_gigpo.agent.profiles.key_door import profile
from rllib_gigpo.engines.packing import unpack
from rllib_gigpo.models import materialize
from rllib_gigpo.record import expert, record
from rllib_gigpo.sft import WarmStart, warm_start
from tests.child import run_python
from tests.tiny_runs import tiny_config


class Fragile(KeyDoor):
    """KeyDoor that breaks once at its next step when a file says so, and is whole without it.

    Args:
        flag: The file. "exit" ends the process, "stop" stops it (SIGSTOP), "raise" raises
            ZeroDivisionError. It is removed first, so that only one environment of all processes
            breaks. A file beside it, `.made`, kills or stops ("SIGKILL", "SIGSTOP") the process of
            the next one that is made, but never the process whose number stands in it.
    """

    def __init__(self, *, flag: str = "", **arguments: Any):
        super().__init__(**arguments)
        self._flag = Path(flag)
        when_made = Path(f"{flag}.made")
        if when_made.is_file():
            how, spared = when_made.read_text().split()
            if int(spared) != os.getpid():
                when_made.unlink(missing_ok=True)
                os.kill(os.getpid(), getattr(signal, how))

    def step(self, action: str):
        if self._flag.is_file():
            what = self._flag.read_text()
            try:
                self._flag.unlink()
            except FileNotFoundError:  # another one was faster
                return super().step(action)
            if what == "exit":
                os._exit(1)
            if what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                return super().step(action)
            raise ZeroDivisionError("the key broke")
        return super().step(action)


register_llm_env("Fragile", Fragile, profile)


def warm_started_model(folder: Path) -> Path:
    """A tiny model that has seen an expert and acts validly most of the time."""
    config = run_config("tiny", flag="")
    examples = record(
        lambda: config.env_spec.make(config.env_config),
        config.agent_profile,
        policy=expert,
        episodes=60,
    )
    spec = tiny_config().model_spec
    settings = WarmStart(steps=25, batch_size=32, lr=1e-2, warmup_steps=5)
    return warm_start(materialize(spec), examples, folder, settings=settings)


def run_config(model: Path | str, *, flag: Path | str = "", **training: Any) -> GiGPOConfig:
    """A run with everything on: KL, AdamW, warm-up, minibatches, penalty."""
    settings = {
        "num_groups": 3,
        "group_size": 3,
        "optimizer_name": "adamw",
        "lr": 3e-3,
        "lr_warmup_steps": 8,
        "grad_clip": 1.0,
        "kl_coeff": 0.05,
        "num_minibatches": 2,
        "invalid_action_penalty": 0.1,
    }
    return (
        tiny_config(**{**settings, **training})
        .environment("Fragile", env_config={"size": 3, "horizon": 8, "flag": str(flag)})
        .llm(model=str(model), options={})
        .debugging(seed=7)
    )


def weights_of(algorithm: GiGPO) -> dict[str, torch.Tensor]:
    """A copy of the learner's weights."""
    learner: Any = algorithm.learner_group._learner
    if learner is None:
        answers = algorithm.learner_group.foreach_learner(lambda each: each.packed_weights())
        packed = next(iter(answers)).get()
    else:
        packed = learner.packed_weights()
    return {name: tensor.clone() for name, tensor in unpack(packed["default_policy"]).items()}


# What depends on the clock, the machine, or how often a process was started: whole branches,
# and names.
_BRANCHES = {"timers", "perf", "config", "env_runner_group", "fault_tolerance"}
_NAMES = {
    "date",
    "timestamp",
    "hostname",
    "node_ip",
    "pid",
    "trial_id",
    "time_this_iter_s",
    "time_total_s",
    "time_since_restore",
    "iterations_since_restore",
    # RLlib logs these once per process and reports NaN from then on.
    "num_trainable_parameters",
    "num_non_trainable_parameters",
}


def _is_of_the_moment(key: str) -> bool:
    """Whether a result's key may differ in a repeated run; counters of a lifetime may not."""
    parts = key.split("/")
    is_timing = any(part.startswith("seconds_") or part.endswith("_throughput") for part in parts)
    return parts[0] in _BRANCHES or parts[-1] in _NAMES or is_timing


def facts_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of a result that a repeated run must repeat, flat; NaN as text."""
    return {
        key: "nan" if isinstance(value, float) and math.isnan(value) else value
        for key, value in _flat(result, "")
        if not _is_of_the_moment(key)
    }


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}/{name}" if key else str(name))
    elif isinstance(value, np.generic):
        yield key, value.item()
    else:
        yield key, value


def continued(runs: Sequence[tuple[str, Path]]) -> list[dict[str, Any]]:
    """Continue runs for two iterations in a new process of this one's Ray.

    Args:
        runs: A checkpoint and a file to write of each.

    Returns:
        Of each what tests/restored_run.py writes.
    """
    address = ray.get_runtime_context().gcs_address
    files = [str(file) for run in runs for file in run]
    done = run_python("-m", "tests.restored_run", address, "2", *files, timeout=300)
    assert "Traceback" not in done.stderr
    return [torch.load(output, weights_only=False) for _, output in runs]
