"""Learners and EnvRunners on different nodes: a local cluster of two node processes."""

from __future__ import annotations

import json

import pytest

from tests.child import run_python

pytestmark = pytest.mark.ray


def test_a_sharded_model_learns_on_one_node_from_players_on_another(tmp_path):
    found = tmp_path / "facts.json"
    run_python("-m", "tests.two_nodes_run", tmp_path / "checkpoint", found)
    facts = json.loads(found.read_text())
    assert len(facts["learners"]) == len(facts["players"]) == 1
    assert facts["learners"] != facts["players"]
    # Every sync proves by checksums and a probe that the other node serves the learners' weights.
    assert facts["version"] == 2
    assert facts["gradient_norm"] > 0.0
    assert facts["staleness"] == 0.0
    assert facts["num_episodes"] == 8
    assert facts["third_again"] == facts["third"]
