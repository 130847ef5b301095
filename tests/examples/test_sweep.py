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


def _command(folder: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(_SCRIPT), "--smoke", "--results", str(folder), *arguments],
        cwd=folder.parent,
        # Tune saves the sweep's state by this clock; trials save themselves.
        env={**os.environ, "TUNE_GLOBAL_CHECKPOINT_S": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
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
    first = _command(folder)
    deadline = time.monotonic() + _PATIENCE_S
    while not any(folder.glob("trials/GiGPO_*/checkpoint_*")):
        assert first.poll() is None, first.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert not (folder / "table.md").exists()
    before = _iterations(folder)

    second = _command(folder)
    printed, _ = second.communicate(timeout=_PATIENCE_S)
    assert second.returncode == 0, printed[-3000:]
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
    module.main(["--smoke", "--scheduler", scheduler, "--results", str(tmp_path / "sweep")])
    assert "env_runners/success_rate over 2 seeds" in capsys.readouterr().out
    # Grid: 2 omegas x 2 seeds; population: 2 trials per seed.
    assert len(list((tmp_path / "sweep" / "trials").glob("GiGPO_*/result.json"))) == 4
