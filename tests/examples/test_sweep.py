"""The sweep survives kill -9, and the same command goes on with it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "tuned_examples" / "sweep_gigpo.py"
_PATIENCE_S = 300


def _start(folder: Path, log: Path) -> subprocess.Popen:
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, str(_SCRIPT), "--smoke", "--results", str(folder)],
            cwd=folder.parent,
            # Tune saves the sweep's state by this clock; trials save themselves.
            env={**os.environ, "TUNE_GLOBAL_CHECKPOINT_S": "0"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _iterations(folder: Path) -> dict[str, list[int]]:
    """Per trial, the iterations in the order in which they were reported."""
    found = {}
    for file in sorted((folder / "trials").glob("GiGPO_*/result.json")):
        name = "_".join(file.parent.name.split("_")[:5])
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        found[name] = [line["training_iteration"] for line in lines]
    return found


@pytest.mark.examples
@pytest.mark.ray
def test_goes_on_after_a_kill(tmp_path: Path):
    folder = tmp_path / "sweep"
    log = tmp_path / "log"
    first = _start(folder, log)
    deadline = time.monotonic() + _PATIENCE_S
    while not any(folder.glob("trials/GiGPO_*/checkpoint_*")):
        assert first.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert not (folder / "table.md").exists()
    before = _iterations(folder)

    code = _start(folder, log).wait(timeout=_PATIENCE_S)
    printed = log.read_text()
    assert code == 0, printed[-3000:]
    assert "going on with the sweep in" in printed
    after = _iterations(folder)
    # 2 omegas x 2 seeds, each of 2 iterations; what was done before was kept.
    assert len(after) == 4
    for name, iterations in after.items():
        assert iterations[-1] == 2
        assert iterations[: len(before.get(name, []))] == before.get(name, [])
    table = (folder / "table.md").read_text()
    assert "env_runners/success_rate over 2 seeds" in table
    assert (folder / "heat_map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.examples
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("scheduler", ["asha", "pbt"])
def test_the_schedulers_sweep(scheduler: str, tmp_path: Path, monkeypatch, capsys):
    import importlib

    monkeypatch.syspath_prepend(str(_SCRIPT.parent))
    module = importlib.import_module("sweep_gigpo")
    results = str(tmp_path / "sweep")
    module.main(["--smoke", "--seeds=1", "--scheduler", scheduler, "--results", results])
    assert "env_runners/success_rate over 1 seeds" in capsys.readouterr().out
    # Two omegas, or a population of two.
    assert len(list((tmp_path / "sweep" / "trials").glob("GiGPO_*/result.json"))) == 2
