"""Tables and curves of a comparison, and the command on runs that are finished."""

import json
from pathlib import Path

import numpy as np
import pytest

from rllib_gigpo.compare.main import _import_path, main
from rllib_gigpo.compare.plots import curves_over
from rllib_gigpo.compare.runs import planned_runs, read_results
from rllib_gigpo.compare.tables import HEADER, comparison_rows, latex_table, markdown_table
from rllib_gigpo_cli.parsers import compare_parser


def _run(algo: str, seed: int, success: float, curve: list[float]) -> dict:
    """A run of 100 environment steps, 1000 tokens and 2 seconds per iteration."""
    points = [
        {
            "env_steps": 100.0 * i,
            "tokens": 1000.0 * i,
            "seconds": 2.0 * i,
            "success": s,
            "return": s,
        }
        for i, s in enumerate(curve, 1)
    ]
    return {"algo": algo, "seed": seed, "success": success, "return": success, "curve": points}


def _results() -> dict[str, list[dict]]:
    return {
        "gigpo": [_run("gigpo", 0, 0.8, [0.2, 0.6]), _run("gigpo", 1, 0.6, [0.4, 0.8])],
        "grpo": [_run("grpo", 0, 0.6, [0.1, 0.3]), _run("grpo", 1, 0.5, [0.1, 0.5])],
    }


def test_rows_by_hand():
    gigpo, grpo = (dict(zip(HEADER, row, strict=True)) for row in comparison_rows(_results(), 200))
    assert (gigpo["algorithm"], grpo["algorithm"]) == ("GiGPO", "GRPO")
    # Mean of 0.8 and 0.6; mean of two values is also what lies between their quartiles.
    assert (gigpo["success"], gigpo["IQM"]) == (pytest.approx(70), pytest.approx(70))
    # Areas over 200 steps: (0.2 + 0.6) / 2 = 0.4 and (0.4 + 0.8) / 2 = 0.6.
    assert gigpo["area"] == pytest.approx(50)
    # t of one degree is 12.7: 0.5 +- 1.27, cut at 0 and 1.
    assert gigpo["area 95 %"] == gigpo["success 95 %"] == "[0.0, 100.0]"
    # Pairs: 0.8 > 0.6, 0.8 > 0.5, 0.6 = 0.6 counts half, 0.6 > 0.5: 3.5 of 4.
    assert grpo["P(first better)"] == pytest.approx(3.5 / 4)
    # An algorithm against itself: of 4 pairs one is won, one lost and two are ties.
    assert gigpo["P(first better)"] == pytest.approx(0.5)


def test_curves_are_read_at_the_middle_of_iterations():
    results = _results()["gigpo"]
    for axis, end in (("env_steps", 200.0), ("tokens", 2000.0), ("seconds", 4.0)):
        places, curves = curves_over(results, axis)
        assert (places[0], places[-1]) == (0.0, end)
        # Iterations have their middles at a quarter and three quarters of the way.
        at = np.array([np.interp([end / 4, end / 2, 3 * end / 4], places, c) for c in curves])
        assert at == pytest.approx(np.array([[0.2, 0.4, 0.6], [0.4, 0.6, 0.8]]), abs=0.01)


def test_curves_end_where_the_shortest_run_ends():
    runs = [_run("gigpo", 0, 1.0, [0.1, 0.2, 0.3]), _run("gigpo", 1, 1.0, [0.1])]
    places, curves = curves_over(runs, "env_steps")
    assert places[-1] == 100.0
    assert curves.shape == (2, len(places))


def test_tables_in_markdown_and_latex():
    rows = [["GiGPO", 2, 70.0, 0.5], ["Dr_GRPO", 2, 5.0, float("nan")]]
    header = ("algorithm", "seeds", "success 95 %", "P")
    assert markdown_table(header, rows) == (
        "| algorithm | seeds | success 95 % | P |\n"
        "| --- | --- | --- | --- |\n"
        "| GiGPO | 2 | 70.0 | 0.50 |\n"
        "| Dr_GRPO | 2 | 5.0 | – |\n"
    )
    lines = latex_table(header, rows).splitlines()
    assert lines[0] == r"\begin{tabular}{lrrr}"
    assert lines[2] == r"algorithm & seeds & success 95 \% & P \\"
    assert lines[5] == r"Dr\_GRPO & 2 & 5.0 & – \\"


def test_plans_are_balanced_and_refuse_nonsense():
    runs = planned_runs(["gigpo", "GRPO", "grpo"], 2, 100)
    assert [(r.algo, r.seed) for r in runs] == [
        ("gigpo", 0), ("grpo", 0), ("gigpo", 1), ("grpo", 1)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="at least two algorithms"):
        planned_runs(["grpo", "GRPO"], 2, 100)
    with pytest.raises(ValueError, match="seeds=0"):
        planned_runs(["gigpo", "grpo"], 0, 100)
    with pytest.raises(ValueError, match="no preset is named 'grop'"):
        planned_runs(["gigpo", "grop"], 1, 100)


def test_the_command_reads_what_is_finished(tmp_path: Path, capsys):
    file = tmp_path / "my_runs.py"
    file.write_text(
        "from rllib_gigpo import GiGPOConfig\n"
        "def config(algo, seed):\n"
        "    return GiGPOConfig.preset(algo).environment('KeyDoor').llm(model='tiny')\n"
    )
    runs = planned_runs(["gigpo", "grpo"], 2, 200)
    (tmp_path / "out" / "runs").mkdir(parents=True)
    for run in runs:
        result = _results()[run.algo][run.seed]
        (tmp_path / "out" / "runs" / run.file).write_text(json.dumps(result))
    assert read_results(runs, tmp_path / "out" / "runs") == _results()
    arguments = ["--algos=gigpo,grpo", "--seeds=2", "--env-steps=200", f"--config={file}:config"]
    assert main([*arguments, f"--output={tmp_path / 'out'}"]) == 0
    assert "4 runs, 4 of them finished before" in capsys.readouterr().out
    assert "| GiGPO | 2 | 70.0 |" in (tmp_path / "out" / "comparison.md").read_text()
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["algorithm"] for row in told["rows"]] == ["GiGPO", "GRPO"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--algos", "gigpo"], "at least two algorithms"),
        (["--env", "KeyDor"], "KeyDor"),
        (["--set", '{"omegaa": 1}'], "omegaa"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], told: str, tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--output", str(tmp_path), "--warm-episodes", "2"])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_workers_find_what_lies_beside_the_named_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    args = compare_parser().parse_args(
        ["--import", "a/my.py", "--import", "pkg", "--config=b/c.py:f"]
    )
    assert _import_path(args) == {"PYTHONPATH": f"{tmp_path}/a:{tmp_path}/b:/theirs"}
    monkeypatch.delenv("PYTHONPATH")
    assert _import_path(args) == {"PYTHONPATH": f"{tmp_path}/a:{tmp_path}/b"}
    assert _import_path(compare_parser().parse_args([])) == {}
