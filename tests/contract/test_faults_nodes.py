"""A whole Ray node process is killed while its EnvRunner plays; a cluster of its own."""

import json

import pytest

from tests.child import run_python


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_node_changes_nothing_of_the_run(tmp_path):
    found = tmp_path / "found.json"
    run_python("-m", "tests.node_killed_run", found)
    facts = json.loads(found.read_text())
    assert facts["nodes"] == 2  # the head, and the one that was left
    assert facts["episodes"] == [16, 16, 16]  # 8 groups of 2
    assert facts["groups"] == 8
    assert facts["norms"] == facts["expected"]
    assert min(facts["norms"]) > 0.0
