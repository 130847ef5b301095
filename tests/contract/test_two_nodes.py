"""Learners and EnvRunners on different nodes: a local cluster of two node processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.ray


def test_a_sharded_model_learns_on_one_node_from_players_on_another(tmp_path):
    found = tmp_path / "facts.json"
    folder = str(tmp_path / "checkpoint")
    command = [sys.executable, "-m", "tests.two_nodes_run", folder, str(found)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    facts = json.loads(found.read_text())
    assert len(facts["learners"]) == len(facts["players"]) == 1
    assert facts["learners"] != facts["players"]
    # Every sync proves by checksums and a probe that the other node serves the learners' weights.
    assert facts["version"] == 2
    assert facts["gradient_norm"] > 0.0
    assert facts["staleness"] == 0.0
    assert facts["num_episodes"] == 8
    assert facts["third_again"] == facts["third"]
