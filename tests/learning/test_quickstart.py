"""The quickstart learns: the README's claim, as a test with fixed seeds."""

import json
from pathlib import Path

import pytest

from tests.child import run_python


def _run(folder: Path, *arguments: str) -> dict:
    command = ("-m", "rllib_gigpo.quickstart", "--output", folder, *arguments)
    done = run_python(*command, timeout=580)
    assert str(folder / "learning_curve.png") in done.stdout
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def gigpo(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("gigpo")
    return folder, _run(folder)


def test_gigpo_learns_key_door(gigpo):
    _, summary = gigpo
    assert summary["success_before"] < 0.25
    assert summary["success_after"] >= 0.90


def test_the_summary_holds_what_is_promised(gigpo):
    folder, summary = gigpo
    promised = {
        "success_before",
        "success_after",
        "seconds_total",
        "seconds_training",
        "iterations",
        "env_steps",
    }
    assert promised <= set(summary)
    assert len(summary["curve"]) == summary["iterations"]
    assert summary["env_steps"] == summary["curve"][-1]["env_steps"]
    assert (folder / "learning_curve.png").stat().st_size > 10_000
    assert (folder / "checkpoint" / "rllib_checkpoint.json").exists()


def test_grpo_learns_slower(gigpo, tmp_path):
    """Two thirds of the way GiGPO has left the start behind, and GRPO (both with std) has not."""
    _, summary = gigpo
    iterations = 2 * summary["iterations"] // 3
    grpo = _run(tmp_path, "--algo", "grpo", "--iterations", str(iterations))

    def area(curve):
        return sum(point["success"] for point in curve[:iterations]) / iterations

    assert area(summary["curve"]) > area(grpo["curve"])
