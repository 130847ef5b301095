"""The soak's judgement on made-up series, and how it sees a process from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import soak as benchmark
from benchmarks import soak_processes
from benchmarks.soak import Clock, Soak, training
from benchmarks.soak_analysis import (
    Series,
    judge,
    least_growth,
    memory_growth,
    role_of,
    slope,
)
from benchmarks.soak_processes import half_written, look_at, marked, name_of, shared_bytes
from rllib_gigpo.recording.folder import read_lines, write_json, write_lines

# The window of 45 minutes: the last 30, a sample every 5 seconds.
WINDOW = np.arange(900.0, 2700.0, 5.0)
NOISE = np.random.default_rng(0).normal(0.0, 5.0, len(WINDOW))


def memory(values) -> Series:
    return Series(WINDOW, np.asarray(values, dtype=float))


def saw(height: float, seconds: float) -> np.ndarray:
    """Rises to its height and falls at once, as memory does between garbage collections."""
    return height * (WINDOW % seconds) / seconds


def test_the_slope_is_the_median_of_all_pairs():
    # Slopes of the pairs: (1 - 0) / 1 = 1, (5 - 0) / 2 = 2.5, (6 - 0) / 3 = 2, (5 - 1) / 1 = 4,
    # (6 - 1) / 2 = 2.5, (6 - 5) / 1 = 1; sorted 1, 1, 2, 2.5, 2.5, 4: the median is 2.25.
    assert slope(Series.of([(0, 0), (1, 1), (2, 5), (3, 6)])) == 2.25


def test_one_sample_has_no_slope():
    with pytest.raises(ValueError, match="1 samples: expected at least 2"):
        slope(Series.of([(0, 0)]))


def test_a_leak_of_a_mebibyte_a_minute_is_found():
    found = memory_growth(memory(400 + WINDOW / 60))
    # Both estimates: 1 MiB/min over the 1795 s between the first and the last sample, 29.9 MiB;
    # the second from halves of 180 samples, whose low tenths are 900 s apart: 2 * 900 / 60 = 30.
    assert found.growth == pytest.approx(1795 / 60)
    assert not found.is_flat
    # 400 + 15 at the beginning of the window, and the middle of the first 300 s: 2.5 MiB more.
    assert found.start == pytest.approx(400 + 15 + 2.5, abs=0.1)
    assert found.end == pytest.approx(400 + 45 - 2.5, abs=0.2)


@pytest.mark.parametrize("hidden_by", [NOISE, saw(60, 120), NOISE + saw(200, 300)])
def test_a_leak_is_found_below_noise_and_garbage(hidden_by):
    found = memory_growth(memory(400 + WINDOW / 60 + hidden_by))
    assert found.growth == pytest.approx(30, rel=0.25)
    assert not found.is_flat


@pytest.mark.parametrize("height", [20, 60, 200])
@pytest.mark.parametrize("seconds", [60, 120, 300])
def test_garbage_that_is_collected_is_flat(height, seconds):
    assert memory_growth(memory(400 + NOISE + saw(height, seconds))).is_flat


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 20.0))
def test_noise_is_flat(seed, size):
    noise = np.random.default_rng(seed).normal(0.0, size, len(WINDOW))
    assert memory_growth(memory(400 + noise)).is_flat


def test_bursts_and_a_late_step_are_flat():
    bursts = np.where(np.arange(len(WINDOW)) % 10 == 0, 300.0, 0.0)
    assert memory_growth(memory(400 + bursts)).growth == pytest.approx(0)
    # After 75 % of the window. Pairs that lie on both sides of it: 2 * 0.75 * 0.25 = 38 % of all.
    assert memory_growth(memory(400 + 30 * (WINDOW >= 2250))).growth == pytest.approx(0)


@pytest.mark.parametrize(("level", "is_flat"), [(100, False), (400, False), (600, True)])
def test_the_limit_is_eight_mebibytes_or_two_per_cent(level, is_flat):
    # 10 MiB over the window: above 8 (2 % of 400), below 2 % of 600.
    assert memory_growth(memory(level + 10 * (WINDOW - 900) / 1795)).is_flat == is_flat


def test_the_least_of_both_halves_is_what_stays_open():
    series = Series.of([(0, 9), (1, 7), (2, 12), (3, 10), (4, 8), (5, 11)])
    # The middle is 2.5 s: least 7 before it, 8 after it.
    assert least_growth(series, 1) == (7, 8, 1, True)
    assert not least_growth(series, 0).is_flat


def sample(second, **processes):
    return {
        "seconds": second,
        "processes": {key: list(numbers) for key, numbers in processes.items()},
        "shm_mib": 5.0,
        "files": {"temp": 3},
        "values": {"keys": 2.0},
    }


def test_the_first_third_is_left_out_and_roles_are_judged_by_their_worst_process():
    samples = []
    for n in range(90):
        # Seconds 0 to 890; the window begins at 296.7, so its first sample is at 300 s.
        found = sample(
            10.0 * n,
            a=("Learner" if n else "IDLE", 100.0, 20, 7 + (n >= 60) * 4),
            # 10 MiB a minute until the window begins, and not a byte afterwards.
            b=("Learner", 100.0 + 10.0 * min(n, 30) / 6, 20 + (n == 50), 7),
            # 1 MiB a minute; two descriptors more in the second half of the window.
            c=("Runner", 100.0 + n / 6, 20 + (n >= 60) * 2, 7),
        )
        if n > 70:
            found["processes"]["d"] = ["Runner", 50.0, 5, 1]
        samples.append(found)
    judged = judge(samples, {"keys": 0})
    learner, runner = judged.roles["Learner"], judged.roles["Runner"]
    assert (learner.processes, learner.came_later) == (2, 0)
    assert (learner.start_mib, learner.end_mib, learner.growth_mib) == (250.0, 250.0, 0.0)
    assert (learner.fds_growth, learner.threads_growth) == (0, 4)
    assert learner.is_flat
    assert (runner.processes, runner.came_later) == (1, 1)
    # 59 steps of 1/6 MiB: 9.83 MiB, more than 8.
    assert runner.growth_mib == pytest.approx(59 / 6)
    assert (runner.fds_growth, runner.threads_growth) == (2, 0)
    assert not runner.is_flat
    assert judged.shared.is_flat
    assert judged.files["temp"].is_flat
    assert not judged.is_flat


def test_a_file_or_a_key_that_stays_is_growth():
    samples = [sample(10.0 * n, a=("Runner", 100.0, 20, 7)) for n in range(90)]
    assert judge(samples, {"keys": 0}).is_flat
    for n, found in enumerate(samples):
        found["files"] = {"temp": 3 + n // 10}
        found["values"] = {"keys": float(n // 40)}
    judged = judge(samples, {"keys": 0})
    # Least at 300 s and at 600 s: 3 + 3 and 3 + 6; keys 0 and 1.
    assert judged.files["temp"].growth == 3
    assert judged.values["keys"].growth == 1
    assert not judged.is_flat


def test_too_few_samples_are_refused():
    samples = [sample(10.0 * n, a=("Runner", 100.0, 20, 7)) for n in range(6)]
    with pytest.raises(ValueError, match="expected at least 6; run for longer"):
        judge(samples, {})


def test_an_idle_worker_is_what_it_became():
    assert role_of({"IDLE": 90, "LLMEnvRunner": 2}) == "LLMEnvRunner"
    assert role_of({"IDLE": 90}) == "IDLE"


def test_only_samples_with_all_trials_training_count():
    def found(alive, iterations):
        processes = {str(n): ["GiGPO", 1.0, 1, 1] for n in range(alive)}
        return {"processes": processes, "iterations": iterations}

    starting, late, whole, ending = found(2, []), found(2, [1]), found(2, [2, 1]), found(1, [3, 2])
    assert list(training([starting, late, whole, ending], 2)) == [whole]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (b"ray::GiGPO.train\0\0\0", "GiGPO"),
        (b"ray::IDLE", "IDLE"),
        (b"ray::LLMEnvRunner", "LLMEnvRunner"),
        (b"/a/ray/gcs/gcs_server\0--log_dir=/tmp", "gcs_server"),
        (b"/a/bin/python3.11\0-u\0/a/ray/_private/log_monitor.py\0--x=y.py", "log_monitor"),
        (b"python\0-m\0benchmarks.soak\0--drive", "benchmarks.soak"),
        (b"", "?"),
    ],
)
def test_names_of_processes(command, name):
    assert name_of(command) == name


_HOLDER = """
import os, sys, threading
kept = bytearray(os.urandom(1)) * (64 << 20)
files = [open(os.devnull) for _ in range(10)]
shared = os.memfd_create("x")
hidden = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
os.truncate(hidden, 1 << 30)
os.write(hidden, bytes(3 << 20))
threading.Thread(target=sys.stdin.read, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_is_seen_from_outside(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            assert marked("TMPDIR", str(tmp_path)) == [child.pid]
            found = look_at(child.pid)
            assert found is not None
            assert found.key.startswith(f"{child.pid}:")
            # 64 MiB, and what an interpreter has.
            assert 64 < found.memory_mib < 100
            # Three streams, ten files, two in memory.
            assert found.fds == 15
            assert found.threads == 2
            # Of 1 GiB three MiB were written.
            assert shared_bytes([child.pid, child.pid]) == 3 << 20
        finally:
            child.kill()
    assert look_at(child.pid) is None
    assert marked("TMPDIR", str(tmp_path)) == []


def test_a_process_that_ends_while_it_is_looked_at_is_not_counted(tmp_path, monkeypatch):
    # Memory and `stat` were read before it gave its memory up, which its command line is part of.
    place = tmp_path / "7"
    (place / "fd").mkdir(parents=True)
    (place / "smaps_rollup").write_text("Pss_Anon: 2048 kB\nSwapPss: 0 kB\n")
    # Fields 3 to 22 of proc(5)'s `stat`: 3 threads (20), start at 99 (22).
    (place / "stat").write_text("7 (py) " + " ".join(["S", *["0"] * 16, "3", "0", "99"]))
    (place / "cmdline").write_bytes(b"python\0-c\0pass\0")
    monkeypatch.setattr(soak_processes, "_PROC", tmp_path)
    assert look_at(7) == ("7:99", "python", 2.0, 0, 3)
    (place / "cmdline").write_bytes(b"")
    assert look_at(7) is None


def test_half_written_files_are_known_by_their_names(tmp_path):
    whole = ["metrics.jsonl", "checkpoint_000001/manifest.json", "rollouts/000012.parquet", ".env"]
    unfinished = [
        ".metrics.jsonl.4711",
        ".checkpoint_000002.partial-0a1b2c3d/weights",
        "result.json.tmp",
        "tmpabc123/x",
    ]
    for name in (*whole, *unfinished):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert half_written(tmp_path) == [
        ".checkpoint_000002.partial-0a1b2c3d",
        ".metrics.jsonl.4711",
        "result.json.tmp",
        "tmpabc123",
    ]


_DRIVER = """
import json, pathlib, subprocess, sys, tempfile, time
output = pathlib.Path(sys.argv[1])
trial = output / "trials" / "a"
(trial / "checkpoint_000001").mkdir(parents=True)
(trial / ".checkpoint_000002.partial-00ff").mkdir()
(trial / "metrics.jsonl").write_text('{"iteration": 2}\\n{"iteration": 3}\\n{"itera')
(output / "ray.json").write_text('{"object_store_mib": 1.5, "kv_keys": 4}')
pathlib.Path(tempfile.gettempdir(), "forgotten").touch()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
time.sleep(3)
(output / "errors.json").write_text('["a trial failed"]')
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_is_left_is_named(tmp_path, monkeypatch):
    output, temp = tmp_path / "output", tmp_path / "temp"
    output.mkdir()
    temp.mkdir()
    monkeypatch.setattr(benchmark, "_LEAVE_S", 0.5)
    monkeypatch.setattr(Soak, "command", lambda self: [sys.executable, "-c", _DRIVER, str(output)])
    soak = Soak(benchmark._parse(["--every", "0.2", "--output", str(output)]), temp)
    try:
        left = soak.run()
    finally:
        for pid in marked("TMPDIR", soak.mark):
            os.kill(pid, signal.SIGKILL)
    assert len(left["processes_left"]) == 1
    assert left["processes_left"][0].startswith("python")
    assert left["files_left"] == ["forgotten"]
    assert left["half_written"] == ["trials/a/.checkpoint_000002.partial-00ff"]
    assert left["checkpoints"] == [1]
    assert left["errors"] == ["a trial failed"]
    last = read_lines(output / "samples.jsonl")[-1]
    assert last["iterations"] == [3]
    assert last["values"] == {"object_store_mib": 1.5, "kv_keys": 4}
    assert last["files"] == {"temp": 1, "ray": 0}
    assert {name[:6] for name, *_ in last["processes"].values()} == {"python"}


@pytest.mark.parametrize("leaks", [False, True])
def test_samples_can_be_judged_again(leaks, tmp_path, capsys):
    # Ten minutes, a sample every 10 s: the window is that of the samples 20 to 59, 390 s long.
    samples = [
        {
            **sample(10.0 * n, a=("GiGPO", 200.0 + leaks * n, 30, 9), b=("raylet", 20.0, 50, 20)),
            "files": {"temp": 2, "ray": 40},
            "values": {"object_store_mib": 1.0, "kv_keys": 0},
            "iterations": [n + 1],
        }
        for n in range(60)
    ]
    write_lines(tmp_path / "samples.jsonl", samples)
    nothing = ("processes_left", "shm_left", "files_left", "half_written", "errors")
    left = {**{name: [] for name in nothing}, "checkpoints": [2], "ray_files": 40}
    write_json(tmp_path / "left.json", left)
    benchmark.main(["--judge", "--trials", "1", "--output", str(tmp_path)])
    out = capsys.readouterr().out
    figures = json.loads(out.splitlines()[-1])
    assert figures == json.loads((tmp_path / "result.json").read_text())
    assert figures["clean"]
    assert (figures["minutes"], figures["iterations"]) == (9.8, [60])
    assert figures["flat"] == (not leaks)
    assert ("GROWS" in out) == leaks
    role = figures["roles"]["GiGPO"]
    # One MiB with every sample; 59 * 10 s from the first to the last.
    assert role["growth_mib"] == (39.0 if leaks else 0.0)
    assert role["flat"] == (not leaks)
    assert figures["roles"]["raylet"]["flat"]


def test_a_folder_that_holds_a_soak_is_not_written_over(tmp_path):
    (tmp_path / "samples.jsonl").touch()
    with pytest.raises(SystemExit, match="holds a soak: give --output another folder"):
        benchmark.main(["--output", str(tmp_path)])


def test_trials_stop_by_the_clock_once_all_of_them_train(monkeypatch):
    now = 100.0
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now)
    clock = Clock(60.0, trials=2)
    assert not clock("first", {})
    now = 170.0  # 70 s alone count for nothing
    assert not clock("first", {})
    assert not clock("second", {})
    now = 229.9
    assert not clock("first", {})
    now = 230.0  # 170 + 60
    assert clock("second", {})
    assert clock("first", {})
