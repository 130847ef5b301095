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
    assert {"appworld_gigpo.py", "cards_gigpo.py", "sokoban_gigpo.py"} <= set(_SCRIPTS)


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
    "sokoban_gigpo.py": (32, 8, 15, 1024, 64, "none"),
    "cards_gigpo.py": (16, 8, 8, 1024, 128, "none"),
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


def test_appworlds_settings_are_valid_for_both_worlds(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(_FOLDER)
    module = importlib.import_module("appworld_gigpo")
    real = ["--python-executable", sys.executable, "--root", str(tmp_path)]
    for arguments, world in ((real, {"python_executable": sys.executable}), ([], {})):
        args = module.parser.parse_args(arguments)
        config = module.paper_config(args).evaluation(evaluation_interval=args.evaluation_interval)
        config.validate()
        assert config.env_config["horizon"] == 50
        assert world.items() <= config.env_config.items()
    module.demo_config(module.parser.parse_args([*real, "--smoke"])).validate()


# Groups, steps, rows per optimizer step, iterations, interval of evaluations: the authors' scripts.
_CARDS = {
    "EZPoints": (16, 8, 128, 100, 5),
    "NumberLine": (16, 10, 16, 20, 5),
    "Blackjack": (32, 15, 32, 200, 10),
}


@pytest.mark.parametrize("game", [*_CARDS, "Points24"])
def test_every_game_of_cards_has_its_settings(game: str, monkeypatch):
    monkeypatch.syspath_prepend(_FOLDER)
    module = importlib.import_module("cards_gigpo")
    args = module.parse(["--game", game])
    config = module.paper_config(args)
    config.validate()
    found = (
        config.num_groups,
        config.env_config["horizon"],
        config.minibatch_size,
        args.stop_iters,
        args.evaluation_interval,
    )
    assert found == _CARDS.get(game, (16, 22, 128, 100, 5))
    assert args.env == config.env == game
    module.demo_config(module.parse(["--game", game, "--smoke"])).validate()


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
