"""A whole Ray node process is killed while its EnvRunner plays; a cluster of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_node_changes_nothing_of_the_run(tmp_path):
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.node_killed_run", str(found)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    facts = json.loads(found.read_text())
    assert facts["nodes"] == 2  # the head, and the one that was left
    assert facts["episodes"] == [16, 16, 16]  # 8 groups of 2
    assert facts["groups"] == 8
    assert facts["norms"] == facts["expected"]
    assert min(facts["norms"]) > 0.0
