"""Every tuned example has a header that says what to expect, and runs with --smoke."""

import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[2] / "tuned_examples"
_SCRIPTS = sorted(p.name for p in _FOLDER.glob("*.py") if not p.name.startswith("_"))


def test_there_are_examples():
    assert {"alfworld_gigpo.py", "search_gigpo.py", "webshop_gigpo.py"} <= set(_SCRIPTS)


@pytest.mark.parametrize("script", _SCRIPTS)
def test_header_states_command_hardware_and_result(script: str):
    header = (_FOLDER / script).read_text().split('"""')[1]
    for needed in ("How to run this script", f"tuned_examples/{script}", "Hardware", "Results to"):
        assert needed in header, f"{script}: the header lacks {needed!r}"


@pytest.mark.examples
@pytest.mark.parametrize("script", _SCRIPTS)
def test_smoke(script: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(_FOLDER / script), "--smoke"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration 2" in done.stdout
    assert "gradient norm" in done.stdout
