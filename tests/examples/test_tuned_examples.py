"""Every tuned example has a header that says what to expect, and runs with --smoke."""

import importlib
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


# Groups, episodes per group, steps of an episode, prompt tokens, rows per optimizer step, F_norm:
# the paper's App. E.1 and the authors' scripts.
_PAPER = {
    "alfworld_gigpo.py": (16, 8, 50, 2048, 256, "std"),
    "webshop_gigpo.py": (16, 8, 15, 4096, 64, "none"),
    "search_gigpo.py": (256, 5, 4, 4096, 512, "std"),
}


@pytest.mark.parametrize("script", _PAPER)
def test_defaults_are_the_papers_and_all_settings_are_valid(script: str, monkeypatch):
    monkeypatch.syspath_prepend(_FOLDER)
    module = importlib.import_module(script.removesuffix(".py"))
    args = module.parser.parse_args([])
    config = module.paper_config(args).evaluation(evaluation_interval=args.evaluation_interval)
    config.validate()
    found = (
        config.num_groups,
        config.group_size,
        config.env_config["horizon"],
        config.max_prompt_tokens,
        config.minibatch_size,
        config.f_norm,
    )
    assert found == _PAPER[script]
    assert (config.omega, config.gamma, config.lr) == (1.0, 0.95, 1e-6)
    module.demo_config(module.parser.parse_args(["--smoke"])).validate()


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
