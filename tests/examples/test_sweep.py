"""The sweep survives kill -9, and the same command goes on with it."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rllib_gigpo import GiGPO
from rllib_gigpo.recording.folder import RunFolder, read_lines
from tests.with_vllm import skip_without_vllm

_SCRIPT = Path(__file__).parents[2] / "tuned_examples" / "sweep_gigpo.py"
_PATIENCE_S = 300


def _start(folder: Path, log: Path) -> subprocess.Popen:
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, str(_SCRIPT), "--smoke", "--seeds=1", "--results", str(folder)],
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
    # 2 omegas, each of 2 iterations; what was done before was kept.
    assert len(after) == 2
    for name, iterations in after.items():
        assert iterations[-1] == 2
        assert iterations[: len(before.get(name, []))] == before.get(name, [])
    table = (folder / "table.md").read_text()
    assert "env_runners/success_rate over 1 seeds" in table
    assert (folder / "heat_map.png").read_bytes().startswith(b"\x89PNG")


def _sweep(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[Path]:
    """Sweep two trials in this process, and return their folders."""
    monkeypatch.syspath_prepend(str(_SCRIPT.parent))
    module = importlib.import_module("sweep_gigpo")
    module.main(["--smoke", "--seeds=1", *arguments, "--results", str(folder)])
    return [file.parent for file in (folder / "trials").glob("GiGPO_*/result.json")]


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    "scheduler",
    # Population-based training does all that ASHA does, and copies trials besides.
    [pytest.param("asha", marks=pytest.mark.slow), pytest.param("pbt", marks=pytest.mark.examples)],
)
def test_the_schedulers_sweep(scheduler: str, tmp_path: Path, monkeypatch, capsys):
    trials = _sweep(tmp_path / "sweep", monkeypatch, "--scheduler", scheduler)
    assert "env_runners/success_rate over 1 seeds" in capsys.readouterr().out
    # Two omegas, or a population of two.
    assert len(trials) == 2


def test_another_sweep_is_refused_in_the_same_folder(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(_SCRIPT.parent))
    module = importlib.import_module("sweep_gigpo")
    # It stops at once, where training would begin.
    monkeypatch.setattr(module, "tuner", lambda args, folder: 1 / 0)
    monkeypatch.setattr(module.ray, "is_initialized", lambda: True)
    for concurrent in ("1", "2"):
        with pytest.raises(ZeroDivisionError):
            module.main([f"--results={tmp_path}", f"--concurrent={concurrent}"])
    with pytest.raises(ValueError, match="holds results with env='KeyDoor', not 'Sokoban'"):
        module.main([f"--results={tmp_path}", "--env=Sokoban"])


def test_an_engine_takes_the_share_that_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(_SCRIPT.parent))
    module = importlib.import_module("sweep_gigpo")
    args = module.parse(
        ["--engine=vllm", "--gpus-per-engine=0.5", "--num-gpus-per-learner=0.5", "--smoke"]
    )
    request = GiGPO.default_resource_request(module.sweep_config(args))
    # The trial itself with its learner, and the engine beside it.
    assert [dict(bundle) for bundle in request.bundles] == [
        {"CPU": 0.5, "GPU": 0.5},
        {"CPU": 1.0, "GPU": 0.5},
    ]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.usefixtures("local_ray")
def test_each_trial_has_an_engine_of_its_own(tmp_path: Path, monkeypatch):
    skip_without_vllm()
    arguments = ["--engine=vllm", "--cpus-per-engine=0.5"]
    trials = _sweep(tmp_path / "sweep", monkeypatch, *arguments)
    assert len(trials) == 2
    for trial in trials:
        rows = read_lines(RunFolder(trial).rollout_file(2))
        # The second iteration was played with the weights of the trial's own first update.
        assert {row["weight_version"] for row in rows} == {1}
        assert len(read_lines(RunFolder(trial).metrics)) == 2
