"""`rllib-gigpo compare` trains, stops, goes on and tells."""

import json
from pathlib import Path

import pytest

from rllib_gigpo.compare.main import _settings, main
from rllib_gigpo_cli.parsers import compare_parser

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


def test_a_comparison_keeps_to_its_settings(tmp_path: Path, capsys):
    runs = tmp_path / "runs"

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main([*_SMALL, f"--output={tmp_path}", *arguments])
        return capsys.readouterr().err

    # A mistake before anything was trained binds nothing.
    assert "no environment is called 'KeyDor'" in refused("--env=KeyDor")
    (runs / "gigpo-0-60.json").write_text("{}")
    (tmp_path / "settings.json").write_text(
        json.dumps(_settings(compare_parser().parse_args([*_SMALL, "--env=Sokoban"])))
    )
    told = refused("--env=KeyDoor")
    assert "holds results with env='Sokoban', not 'KeyDoor': name another folder with --out" in told


def test_what_is_in_the_names_of_files_binds_nothing():
    one = compare_parser().parse_args(["--algos=gigpo,grpo", "--seeds=2", "--workers=1"])
    other = compare_parser().parse_args(["--algos=gigpo,rloo", "--seeds=5", "--env-steps=9"])
    assert _settings(one) == _settings(other)
