"""Nothing lost: a run through random kills, beside runs that nobody disturbs.

`python -m benchmarks.faults [--kills 25] [--quick] [--output DIR]`. A tiny model learns KeyDoor
with EnvRunners and a learner in processes of their own. One process of the run after the other is
killed (SIGKILL) or stopped (SIGSTOP) at a random moment of whatever phase that is: an EnvRunner,
the learner, the driver. The same command starts the driver again. Started again with the same
`--output`, the benchmark itself goes on where it was.

Undisturbed runs of several seeds, in one process each, tell what the final success should be. The
first has the seed of the disturbed runs: tasks and draws are functions of their place in the run,
so a disturbed run should end with its weights, to the bit.

Figures: `kills` by kind over all disturbed runs; `groups_trained_twice` and `groups_lost`, counted
in the rows that were trained on; `extra_optimizer_steps`, those in the learner's own count beyond
what the iterations need; `success_disturbed` and `success_undisturbed` on held-out tasks;
`within_spread`, whether each disturbed run lies between the lowest and the highest undisturbed one;
`same_weights`, how many disturbed runs ended with the weights of the undisturbed run of their seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import report
from rllib_gigpo.recording.folder import RunFolder, read_json, read_lines, write_json

KINDS = (
    ("runner", "SIGKILL"),
    ("runner", "SIGSTOP"),
    ("learner", "SIGKILL"),
    ("learner", "SIGSTOP"),
    ("driver", "SIGKILL"),
)
WEIGHTS = (6, 2, 2, 1, 4)
# RLlib wraps a learner's class, whose own name is lost.
_CLASSES = {"runner": "LLMEnvRunner", "learner": "_WrappedExecutable"}
_GROUPS, _GROUP_SIZE, _MINIBATCHES, _RUNNERS = 8, 8, 4, 2
_HEARTBEAT_S = 15.0
_START_S = 600.0


def config_of(folder: Path, seed: int, *, processes: bool) -> Any:
    """Return the settings of a run; with `processes` others than the driver's play and learn."""
    from rllib_gigpo import GiGPOConfig

    return (
        GiGPOConfig()
        .environment("KeyDoor", env_config={"size": 3, "horizon": 8})
        .llm(
            model=str(folder / "warm_start"),
            max_prompt_tokens=64,
            max_response_tokens=8,
            eval_temperature=1.0,
        )
        .training(
            num_groups=_GROUPS,
            group_size=_GROUP_SIZE,
            num_minibatches=_MINIBATCHES,
            lr=1e-3,
            kl_coeff=0.0,
            weight_decay=0.0,
            invalid_action_penalty=0.0,
        )
        .env_runners(num_env_runners=_RUNNERS if processes else 0)
        .learners(num_learners=1 if processes else 0)
        .stepping(lockstep=True)
        .evaluation(evaluation_duration=128)
        .recording(groups=None)
        .fault_tolerance(heartbeat_timeout_s=_HEARTBEAT_S)
        .debugging(seed=seed)
    )


def drive(args: argparse.Namespace) -> None:
    """Train in this process until the iterations are done; write the result."""
    import ray
    import torch

    from rllib_gigpo.resuming import train_to

    torch.set_num_threads(1)
    if args.address:
        ray.init(address=args.address, log_to_driver=False, logging_level=logging.ERROR)
    else:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    run = Path(args.drive)
    config = config_of(Path(args.output), args.seed, processes=bool(args.address))
    write_json(run / "result.json", train_to(config, run, args.iterations, then=_result))
    ray.shutdown()


def _result(algorithm: Any) -> dict[str, Any]:
    packed = algorithm.first_learner(lambda learner: learner.published(0))
    (published,) = packed.values()
    digest = hashlib.sha256(repr(sorted(published.checksums.items())).encode()).hexdigest()
    success = float(algorithm.evaluate()["env_runners"]["success_rate"])
    return {"success": success, "weights": digest}


class Disturbed:
    """A run, and the kills it goes through.

    Args:
        output: Folder of the benchmark.
        number: Which run; decides the kills.
        args: The command line.
    """

    def __init__(self, output: Path, number: int, args: argparse.Namespace):
        self.run = output / f"disturbed{number}"
        self.args = args
        self.kills_file = self.run / "kills.jsonl"
        self.number = number
        self.driver: subprocess.Popen | None = None

    def finish(self, address: str) -> None:
        """Kill and go on until both the kills and the iterations are done."""
        self.run.mkdir(parents=True, exist_ok=True)
        done = len(read_lines(self.kills_file)) if self.kills_file.exists() else 0
        while not (self.run / "result.json").exists():
            self._start(address)
            if done < self.args.kills:
                draw = random.Random(f"{self.args.seed}:{self.number}:{done}")
                ((role, how),) = draw.choices(KINDS, WEIGHTS)
                # Spread over the run, so that the last one comes before its end.
                self._wait_for(int(done * self.args.iterations / (self.args.kills + 1)) + 1)
                time.sleep(draw.uniform(0.0, self.args.longest_wait))
                if self._kill(role, how):
                    done += 1
            elif self.driver is not None and self.driver.poll() is None:
                time.sleep(0.5)

    def _start(self, address: str) -> None:
        """Start the driver, unless it runs; always the same command."""
        if self.driver is not None and self.driver.poll() is None:
            return
        command = [sys.executable, "-m", "benchmarks.faults", "--drive", str(self.run)]
        command += ["--address", address, "--seed", str(self.args.seed)]
        command += ["--iterations", str(self.args.iterations), "--output", str(self.args.output)]
        with (self.run / "driver.log").open("ab") as log:
            self.driver = subprocess.Popen(command, stdout=log, stderr=log)

    def _wait_for(self, iteration: int) -> None:
        """Wait until an iteration has been reached, and something has happened since the last kill.

        The second is for the driver to be up again: the metrics grow.
        """
        before, since = _size(self.run), time.monotonic()
        while _iterations(self.run) < iteration or _size(self.run) == before:
            if self.driver is None or self.driver.poll() is not None:
                return
            if time.monotonic() - since > _START_S:
                raise RuntimeError(f"no iteration for {_START_S:g} s: see {self.run}/driver.log")
            time.sleep(0.1)

    def _kill(self, role: str, how: str) -> bool:
        """Send the signal to a process of the run; False where there is none of its kind now."""
        if self.driver is None or self.driver.poll() is not None:
            return False
        victims = [self.driver.pid] if role == "driver" else _pids(_CLASSES[role])
        if not victims:
            return False
        pid = random.Random(time.monotonic_ns()).choice(victims)
        try:
            os.kill(pid, getattr(signal, how))
        except ProcessLookupError:
            return False
        told = {"role": role, "signal": how, "iteration": _iterations(self.run)}
        with self.kills_file.open("a") as file:
            file.write(json.dumps(told) + "\n")
        print(
            f"  {self.run.name}: {how} to a {role} in iteration {told['iteration'] + 1}", flush=True
        )
        if role == "driver":
            self.driver.wait()
        return True


def _pids(class_name: str) -> list[int]:
    """Return the living processes of an actor class."""
    from ray._private.state import actors

    return sorted(
        actor["Pid"]
        for actor in actors(actor_state_name="ALIVE").values()
        if class_name in actor["ActorClassName"]
    )


def _size(run: Path) -> int:
    file = RunFolder(run).metrics
    return file.stat().st_size if file.exists() else 0


def _iterations(run: Path) -> int:
    file = RunFolder(run).metrics
    lines = read_lines(file) if file.exists() else []
    return lines[-1]["iteration"] if lines else 0


def audit(run: Path, iterations: int) -> Counter[str]:
    """Count, in the rows that were trained on, groups that are there twice or not at all."""
    folder, found = RunFolder(run), Counter()
    for iteration in range(1, iterations + 1):
        rows = read_lines(folder.rollout_file(iteration))
        starts = Counter((row["group"], row["member"]) for row in rows if row["step"] == 0)
        for group in range(_GROUPS):
            counts = [starts[group, member] for member in range(_GROUP_SIZE)]
            found["twice"] += max(counts) > 1
            found["lost"] += min(counts) < 1
    lines = read_lines(folder.metrics)
    numbers = [line["iteration"] for line in lines]
    found["twice"] += len(numbers) - len(set(numbers))
    steps = lines[-1]["learners"]["default_policy"]["optimizer_steps"]
    found["extra_steps"] = int(steps) - iterations * _MINIBATCHES
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run everything that is not done yet, and report."""
    args = _parse(arguments)
    if args.drive:
        drive(args)
        return
    import ray

    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    _prepare(output)
    for seed in range(args.seed, args.seed + args.undisturbed):
        run = output / f"undisturbed{seed}"
        if not (run / "result.json").exists():
            print(f"undisturbed run of seed {seed} ...", flush=True)
            command = [sys.executable, "-m", "benchmarks.faults", "--drive", str(run)]
            command += ["--seed", str(seed), "--iterations", str(args.iterations)]
            subprocess.run([*command, "--output", str(output)], check=True)
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    address = ray.get_runtime_context().gcs_address
    for number in range(args.runs):
        Disturbed(output, number, args).finish(address)
    ray.shutdown()
    _report(output, args)


def _prepare(output: Path) -> None:
    """Teach a tiny model the format, so that there is something to learn from."""
    if (output / "warm_start.json").exists():
        return
    from rllib_gigpo.models import materialize
    from rllib_gigpo.record import record
    from rllib_gigpo.sft import WarmStart, warm_start

    config = config_of(output, 0, processes=False).llm(model="tiny", options={"hidden_size": 64})
    examples = record(
        lambda: config.env_spec.make(config.env_config), config.agent_profile, episodes=200
    )
    settings = WarmStart(steps=120, batch_size=64, lr=3e-3)
    folder = warm_start(
        materialize(config.model_spec), examples, output / "warm_start", settings=settings
    )
    write_json(output / "warm_start.json", {"model": str(folder), "examples": len(examples)})


def _report(output: Path, args: argparse.Namespace) -> None:
    seeds = range(args.seed, args.seed + args.undisturbed)
    calm = [read_json(output / f"undisturbed{seed}" / "result.json") for seed in seeds]
    runs = [output / f"disturbed{number}" for number in range(args.runs)]
    stormy = [read_json(run / "result.json") for run in runs]
    kills = [read_lines(run / "kills.jsonl") for run in runs]
    audits = [audit(run, args.iterations) for run in runs]
    low, high = (bound(result["success"] for result in calm) for bound in (min, max))
    rows = [
        [run.name, len(killed), counts["twice"], counts["lost"], result["success"]]
        for run, killed, counts, result in zip(runs, kills, audits, stormy, strict=True)
    ]
    rows += [[f"undisturbed{s}", 0, 0, 0, r["success"]] for s, r in zip(seeds, calm, strict=True)]
    kinds = Counter(f"{k['role']} {k['signal']}" for killed in kills for k in killed)
    figures: Mapping[str, object] = {
        "kills": dict(sorted(kinds.items())),
        "num_kills": sum(kinds.values()),
        "iterations": args.iterations,
        "groups_trained_twice": sum(counts["twice"] for counts in audits),
        "groups_lost": sum(counts["lost"] for counts in audits),
        "extra_optimizer_steps": sum(counts["extra_steps"] for counts in audits),
        "success_disturbed": [result["success"] for result in stormy],
        "success_undisturbed": [result["success"] for result in calm],
        "within_spread": all(low <= result["success"] <= high for result in stormy),
        "same_weights": sum(result["weights"] == calm[0]["weights"] for result in stormy),
    }
    report(
        f"{args.iterations} iterations of {_GROUPS} x {_GROUP_SIZE} episodes of KeyDoor",
        ("run", "kills", "groups twice", "groups lost", "final success"),
        rows,
        figures,
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill processes of a run at random.")
    parser.add_argument("--kills", type=int, default=25, help="per disturbed run")
    parser.add_argument("--runs", type=int, default=2, help="disturbed runs")
    parser.add_argument("--undisturbed", type=int, default=4, help="seeds of undisturbed runs")
    parser.add_argument("--iterations", type=int, default=75)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest-wait", type=float, default=1.5, help="seconds before a kill")
    parser.add_argument("--output", default="runs/faults")
    parser.add_argument("--quick", action="store_true", help="4 kills, one run, 6 iterations")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.quick:
        args.kills, args.runs, args.undisturbed, args.iterations = 4, 1, 2, 6
    args.output = str(Path(args.output).absolute())
    return args


if __name__ == "__main__":
    main()
