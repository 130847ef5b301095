"""`rllib-gigpo compare` trains, stops, goes on and tells."""

import json
from pathlib import Path

import pytest

from rllib_gigpo.compare.main import main

_SMALL = [
    "--algos=gigpo,rloo",
    "--seeds=1",
    "--env-steps=60",
    "--episodes=8",
    "--warm-episodes=20",
    "--tasks=4",
    "--workers=2",
]


@pytest.mark.examples
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_compare_trains_each_algorithm_once(tmp_path: Path, capsys):
    arguments = [*_SMALL, f"--output={tmp_path}"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert "2/2 " in first
    assert "2 runs, 0 of them finished before" in first
    for algo in ("gigpo", "rloo"):
        run = json.loads((tmp_path / "runs" / f"{algo}-0-60.json").read_text())
        steps = [point["env_steps"] for point in run["curve"]]
        assert steps[-1] >= 60 > (steps[-2] if len(steps) > 1 else 0)
        assert all(point["tokens"] > 10 * point["env_steps"] for point in run["curve"])
        assert 0 <= run["success"] <= 1
    # Both start from the same weights and play the same tasks in the first iteration.
    starts = [
        json.loads((tmp_path / "runs" / f"{algo}-0-60.json").read_text())["curve"][0]
        for algo in ("gigpo", "rloo")
    ]
    assert starts[0]["env_steps"] == starts[1]["env_steps"]
    assert main(arguments) == 0
    assert "2 runs, 2 of them finished before" in capsys.readouterr().out
