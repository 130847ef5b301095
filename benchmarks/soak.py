"""Soak: three trials at once for 45 minutes, and whether anything that they hold grows.

`python -m benchmarks.soak [--minutes 45] [--trials 3] [--quick] [--output DIR]`. Ray Tune trains
trials of a tiny model on KeyDoor, each with its algorithm, an EnvRunner and a learner in processes
of their own, and with what a run has switched on: evaluation, checkpoints of which two are kept,
the run folder with all trajectories, a reference model. Ray and everything else write their
temporary files below one folder, so that they can be counted.

Every few seconds all processes are looked at from outside (`benchmarks.soak_processes`). What
counts as growth says `benchmarks.soak_analysis`: the first third warms up and is left out. After
the run everything is counted once more: processes, shared memory, files.

`--output` holds `samples.jsonl`, `result.json` and the trials. Figures: `roles`, per kind of
process the memory of all at the start and the end of the window, and the growth of the one that
grew most (`growth_mib`, `fds_growth`, `threads_growth`); `shm_growth_mib`,
`object_store_growth_mib` and `kv_keys_growth` (signs of life in Ray's key-value store) of the run;
`temp_files_growth` and `ray_files_growth`; `processes_left`, `shm_left`, `files_left` and
`half_written` after it; `flat`, whether nothing grew, and `clean`, whether nothing is left.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.report import report
from benchmarks.soak_analysis import COUNT_ALLOWED, MIB_ALLOWED, Judged, judge
from benchmarks.soak_processes import MIB, count_files, half_written, marked, sample, shared_names
from rllib_gigpo.recording.folder import RunFolder, append_line, read_json, read_lines, write_json
from rllib_gigpo.tune_results import release_results

_VALUES = {"object_store_mib": MIB_ALLOWED, "kv_keys": float(COUNT_ALLOWED)}
_TRAINABLE = "GiGPO"
_KEPT = 2
_EVERY = 10
_START_S = 600.0
_END_S = 300.0
_LEAVE_S = 30.0
# Ray keeps the last 100,000 tasks for its state API: the GCS would grow for as long as it takes to
# fill that. With fewer, what grows is something else.
_TASKS_KEPT = 2000


def config_of(model: Path, trials: int) -> Any:
    """Return the settings of the trials: they differ by their seed."""
    from ray import tune

    from rllib_gigpo import GiGPOConfig

    return (
        GiGPOConfig()
        .environment("KeyDoor", env_config={"size": 3, "horizon": 8})
        .llm(model=str(model), max_prompt_tokens=64, max_response_tokens=8, eval_temperature=1.0)
        .training(num_groups=4, group_size=8, num_minibatches=4, lr=1e-3, kl_coeff=0.01)
        .env_runners(num_env_runners=1)
        .learners(num_learners=1)
        .evaluation(evaluation_interval=_EVERY, evaluation_duration=16)
        .recording(groups=None)
        .debugging(seed=tune.grid_search(list(range(trials))))  # pyright: ignore[reportArgumentType]
    )


class Clock:
    """Say when a trial has trained long enough beside all the others.

    By the clock, for `time_total_s` counts what is spent inside of `train()` alone.

    Args:
        seconds: How long, since every trial has trained once.
        trials: How many there are.
    """

    def __init__(self, seconds: float, trials: int):
        self.seconds, self.trials = seconds, trials
        self.seen: set[str] = set()
        self.began = 0.0

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        """Return whether the trial stops."""
        if len(self.seen) < self.trials:
            self.seen.add(trial_id)
            self.began = time.monotonic()
        is_together = len(self.seen) == self.trials
        return is_together and time.monotonic() - self.began >= self.seconds


def drive(args: argparse.Namespace) -> None:
    """Train the trials in a cluster of this process; write what went wrong."""
    import ray
    from ray import tune

    output = Path(args.output)
    release_results()
    ray.init(
        address="local",
        num_cpus=4 * args.trials,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=args.ray_files,
        _system_config={"task_events_max_num_task_in_gcs": _TASKS_KEPT},
    )
    is_over = threading.Event()
    watcher = ThreadPoolExecutor(1)
    watching = watcher.submit(_watch_ray, output / "ray.json", args.every, is_over)
    try:
        results = tune.Tuner(
            _TRAINABLE,
            param_space=config_of(output / "models" / "KeyDoor-0", args.trials),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=str(output),
                stop=Clock(60.0 * args.minutes, args.trials),
                checkpoint_config=tune.CheckpointConfig(
                    checkpoint_frequency=_EVERY, num_to_keep=_KEPT, checkpoint_at_end=True
                ),
                verbose=0,
            ),
        ).fit()
    finally:
        is_over.set()
        watcher.shutdown()
        ray.shutdown()
    watching.result()
    write_json(output / "errors.json", [str(error) for error in results.errors])


def _watch_ray(file: Path, every_s: float, is_over: threading.Event) -> None:
    """Write down what only a process of the cluster can see."""
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc
    from ray.experimental.internal_kv import _internal_kv_list

    from rllib_gigpo.heartbeat import NAMESPACE

    (node,) = ray.nodes()
    channel = init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
    raylet = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
    messages: Any = node_manager_pb2  # protobuf makes its classes at import
    request = messages.GetNodeStatsRequest(include_memory_info=False)
    while not is_over.wait(every_s):
        store = raylet.GetNodeStats(request, timeout=30.0).store_stats
        keys = _internal_kv_list(b"", namespace=NAMESPACE)
        mib = store.object_store_bytes_used / MIB
        write_json(file, {"object_store_mib": mib, "kv_keys": len(keys)})
    channel.close()


class Soak:
    """A run, and what is seen of it from outside.

    Args:
        args: The command line.
        temp: Folder of all temporary files.
    """

    def __init__(self, args: argparse.Namespace, temp: Path):
        self.args = args
        self.output = Path(args.output)
        self.folders = {"temp": temp / "tmp", "ray": temp / "ray"}
        for folder in self.folders.values():
            folder.mkdir()
        self.mark = str(self.folders["temp"])
        self.samples = self.output / "samples.jsonl"

    def command(self) -> list[str]:
        """Return the command of the driver."""
        command = [sys.executable, "-m", "benchmarks.soak", "--drive"]
        command += ["--minutes", str(self.args.minutes), "--trials", str(self.args.trials)]
        command += ["--every", str(self.args.every), "--output", str(self.output)]
        return [*command, "--ray-files", str(self.folders["ray"])]

    def run(self) -> dict[str, Any]:
        """Train, take samples, and return what is left."""
        before = shared_names()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": self.mark}
        with (self.output / "driver.log").open("wb") as log:
            driver = subprocess.Popen(self.command(), stdout=log, stderr=log, env=environment)
            try:
                self._take_samples(driver)
            finally:
                self._end(driver)
        if driver.returncode:
            raise SystemExit(f"the driver ended with {driver.returncode}: see {log.name}")
        return self._left(before)

    def _take_samples(self, driver: subprocess.Popen) -> None:
        """Take samples until the driver ends; print a line every minute."""
        began, told = time.monotonic(), 0
        latest = began + _START_S + 60.0 * self.args.minutes + _END_S
        while driver.poll() is None:
            seconds = time.monotonic() - began
            found = {
                "seconds": round(seconds, 2),
                **sample(marked("TMPDIR", self.mark), self.folders),
            }
            found["iterations"] = [_iterations(folder) for folder in _trials(self.output)]
            values = self.output / "ray.json"
            found["values"] = read_json(values) if values.exists() else {}
            append_line(self.samples, found)
            if seconds // 60 > told:
                told = seconds // 60
                print(_progress(found), flush=True)
            if time.monotonic() > latest:
                raise SystemExit(f"the trials have not ended in time: see {self.output}/driver.log")
            time.sleep(self.args.every)

    def _end(self, driver: subprocess.Popen) -> None:
        """End the driver, which ends its cluster, where an error or Ctrl-C came first."""
        if driver.poll() is None:
            driver.terminate()
            driver.wait(60.0)

    def _left(self, before: set[str]) -> dict[str, Any]:
        """Count what is there after the end, once processes have had time for theirs."""
        deadline = time.monotonic() + _LEAVE_S
        while (pids := marked("TMPDIR", self.mark)) and time.monotonic() < deadline:
            time.sleep(0.5)
        processes = sample(pids, {})["processes"].values()
        trials = _trials(self.output)
        checkpoints = [len(list(trial.glob("checkpoint_*"))) for trial in trials]
        temp = self.folders["temp"]
        return {
            "processes_left": [name for name, *_ in processes],
            "shm_left": sorted(shared_names() - before),
            "files_left": sorted(str(path.relative_to(temp)) for path in temp.rglob("*")),
            "half_written": half_written(self.output),
            "checkpoints": checkpoints,
            "ray_files": count_files(self.folders["ray"]),
            "errors": read_json(self.output / "errors.json"),
        }


def _trials(output: Path) -> list[Path]:
    return sorted(path.parent for path in output.glob(f"trials/*/{RunFolder('').metrics.name}"))


def _iterations(trial: Path) -> int:
    """Return the iterations of a trial, reading the end of its file alone."""
    with RunFolder(trial).metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1])["iteration"] if lines else 0


def _progress(found: Mapping[str, Any]) -> str:
    processes = found["processes"].values()
    _, memory, fds, threads = zip(*processes, strict=True) if processes else ((), (), (), ())
    iterations = ", ".join(map(str, found["iterations"])) or "none"
    return (
        f"{found['seconds'] / 60:5.1f} min: iterations {iterations}; {len(processes)} processes, "
        f"{sum(memory):.0f} MiB, {sum(fds)} descriptors, {sum(threads)} threads, "
        f"{found['shm_mib']:.1f} MiB shared, {found['files']['temp']} temporary files"
    )


def training(samples: Sequence[Mapping[str, Any]], trials: int) -> Iterator[Mapping[str, Any]]:
    """Yield the samples in which all trials were training."""
    for found in samples:
        alive = sum(name == _TRAINABLE for name, *_ in found["processes"].values())
        if alive == trials == len(found["iterations"]) and min(found["iterations"]) > 0:
            yield found


def figures_of(judged: Judged, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what grew, as plain JSON."""
    seconds = samples[-1]["seconds"] - samples[0]["seconds"]
    return {
        "minutes": round(seconds / 60, 1),
        "samples": len(samples),
        "iterations": samples[-1]["iterations"],
        "roles": {name: role.figures() for name, role in judged.roles.items()},
        "shm_mib": round(judged.shared.end, 2),
        "shm_growth_mib": round(judged.shared.growth, 2),
        "object_store_growth_mib": round(judged.values["object_store_mib"].growth, 2),
        "kv_keys_growth": int(judged.values["kv_keys"].growth),
        "temp_files_growth": int(judged.files["temp"].growth),
        "ray_files_growth": int(judged.files["ray"].growth),
        "flat": judged.is_flat,
    }


def main(arguments: list[str] | None = None) -> None:
    """Run, and report."""
    args = _parse(arguments)
    if args.drive:
        drive(args)
        return
    output = Path(args.output)
    if args.judge:
        left = read_json(output / "left.json")
    else:
        if (output / "samples.jsonl").exists():
            raise SystemExit(f"{output} holds a soak: give --output another folder, or --judge it")
        output.mkdir(parents=True, exist_ok=True)
        _prepare(output)
        # Short, for the paths of Ray's sockets; where the run fails it stays, with Ray's logs.
        temp = Path(tempfile.mkdtemp(prefix="soak-"))
        # Ended from outside, it ends the driver too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        print(f"temporary files are in {temp}", flush=True)
        left = Soak(args, temp).run()
        write_json(output / "left.json", left)
        shutil.rmtree(temp)
    samples = list(training(read_lines(output / "samples.jsonl"), args.trials))
    if not samples:
        raise SystemExit(f"no sample shows {args.trials} trials training: see {output}/driver.log")
    figures = {**figures_of(judge(samples, _VALUES), samples), **left}
    nothing = ("processes_left", "shm_left", "files_left", "half_written", "errors")
    is_kept = all(count <= _KEPT for count in left["checkpoints"])
    figures["clean"] = is_kept and not any(left[name] for name in nothing)
    write_json(output / "result.json", figures)
    header = (
        "process",
        "how many",
        "MiB at first",
        "at last",
        "growth",
        "descriptors",
        "threads",
        "",
    )
    rows = [
        [
            name,
            *list(role.values())[:1],
            *list(role.values())[2:-1],
            "" if role["flat"] else "GROWS",
        ]
        for name, role in figures["roles"].items()
    ]
    report(f"{args.trials} trials for {figures['minutes']} minutes", header, rows, figures)


def _prepare(output: Path) -> None:
    """Teach a tiny model the format, so that there is something to learn from."""
    from benchmarks.learning_runs import TASKS, warm_model

    warm_model(TASKS["KeyDoor"], 0, output / "models")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train for long, and see whether anything grows.")
    parser.add_argument("--minutes", type=float, default=45.0, help="of training in each trial")
    parser.add_argument("--trials", type=int, default=3, help="at once")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--output", default="runs/soak")
    parser.add_argument("--quick", action="store_true", help="two trials for a minute")
    parser.add_argument("--judge", action="store_true", help="only judge the samples in --output")
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ray-files", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.quick:
        args.minutes, args.trials, args.every = 1.0, 2, 1.0
    args.output = str(Path(args.output).absolute())
    return args


if __name__ == "__main__":
    main()
