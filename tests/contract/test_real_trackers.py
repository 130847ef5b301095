"""The trackers' own packages, each writing to a folder: a resumed run goes on as the same one.

Their dependencies do not go together with vLLM's pins, so that CI runs the fakes of
tests/fake_trackers.py instead, and these where the packages can be imported:

    pip install --no-deps --target trackers wandb mlflow-skinny trackio ...
    PYTHONPATH=trackers python -m pytest tests/contract/test_real_trackers.py
"""

import importlib.util
import json
import re
import sqlite3
from pathlib import Path

import pytest

from tests.child import run_python

# A process of its own for each start, as a resumed run has.
_START = """
import json, pathlib, sys
from rllib_gigpo.recording.trackers import start_trackers
from tests.recorded import RUN
name, folder, step, known = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
run = {**RUN, "trackers": json.loads(known)}
(tracker,) = start_trackers([name], run, folder)
tracker.log(step, {"a/b": 0.5 * step, "step_groups/group_share/>=50": 0.25})
tracker.finish()
print("\\nids: " + json.dumps(run["trackers"]))
"""


def _start_twice(name: str, folder: Path) -> dict[str, str]:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    environment = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": folder.as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(folder),
    }
    known: dict[str, str] = {}
    for step in (1, 2):
        arguments = (name, folder, str(step), json.dumps(known))
        done = run_python("-c", _START, *arguments, env=environment, timeout=300)
        (told,) = re.findall(r"^ids: (.*)$", done.stdout, re.MULTILINE)
        known = json.loads(told)
    return known


def test_wandb_offline(tmp_path: Path):
    _start_twice("wandb", tmp_path)
    parts = sorted((tmp_path / "wandb").glob("offline-run-*"))
    # Offline, each start writes a part; both are of the run "abc", which `wandb sync` joins.
    assert len(parts) == 2
    assert all(part.name.endswith("-abc") and (part / "run-abc.wandb").exists() for part in parts)


def test_mlflow_in_a_folder(tmp_path: Path):
    run = _start_twice("mlflow", tmp_path)["mlflow"]
    (found,) = tmp_path.glob(f"*/{run}")
    lines = (found / "metrics" / "a" / "b").read_text().splitlines()
    # timestamp, value, step
    assert [line.split()[1:3] for line in lines] == [["0.5", "1"], ["1.0", "2"]]
    assert (found / "metrics" / "step_groups" / "group_share" / "__50").exists()
    assert "status: 3" in (found / "meta.yaml").read_text()  # finished


def test_trackio_in_a_folder(tmp_path: Path):
    _start_twice("trackio", tmp_path)
    with sqlite3.connect(tmp_path / "rllib-gigpo-KeyDoor.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert {(name, step) for name, step, _ in rows} == {
        ("GiGPO-KeyDoor-abc", 1),
        ("GiGPO-KeyDoor-abc", 2),
    }
    assert sorted(json.loads(numbers)["a/b"] for *_, numbers in rows) == [0.5, 1.0]
