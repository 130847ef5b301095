"""The tuned examples with pictures: the authors' settings, and a smoke run that sees."""

import importlib
import math
import re
import runpy
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[2] / "tuned_examples"


def _module(script: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(_FOLDER)
    return importlib.import_module(script)


# Model, groups, rows per optimizer step, steps of an episode: the authors' scripts.
_CARDS = {
    "EZPoints": ("Qwen/Qwen2.5-VL-3B-Instruct", 16, 128, 8),
    "NumberLine": ("Qwen/Qwen2-VL-2B-Instruct", 16, 16, 10),
    "Blackjack": ("Qwen/Qwen2.5-VL-3B-Instruct", 32, 32, 15),
}


@pytest.mark.parametrize("game", _CARDS)
def test_cards_take_the_authors_model_and_settings(game: str, monkeypatch: pytest.MonkeyPatch):
    module = _module("cards_gigpo", monkeypatch)
    config = module.paper_config(module.parse(["--game", game, "--view", "rgb"]))
    found = (
        config.llm_model,
        config.num_groups,
        config.minibatch_size,
        config.env_config["horizon"],
    )
    assert found == _CARDS[game]
    assert (config.group_size, config.f_norm, config.max_prompt_tokens) == (8, "none", 1024)
    assert config.env_config["view"] == "rgb"
    assert not config.freeze_vision_tower


def test_sokoban_takes_the_authors_model_and_settings(monkeypatch: pytest.MonkeyPatch):
    module = _module("sokoban_gigpo", monkeypatch)
    config = module.paper_config(module.parser.parse_args(["--view", "rgb"]))
    assert config.llm_model == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert (config.num_groups, config.group_size, config.minibatch_size) == (32, 8, 64)
    assert (config.env_config["view"], config.f_norm) == ("rgb", "none")
    # Where pictures are evaluated on, they are shown too.
    assert config.evaluation_config["env_config"]["view"] == "rgb"


def test_the_text_view_keeps_its_text_model(monkeypatch: pytest.MonkeyPatch):
    module = _module("cards_gigpo", monkeypatch)
    config = module.paper_config(module.parse(["--game", "NumberLine"]))
    assert config.llm_model == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.env_config["view"] == "text"


@pytest.mark.examples
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    "command",
    [["sokoban_gigpo.py"], ["cards_gigpo.py"], ["cards_gigpo.py", "--game", "NumberLine"]],
    ids=["sokoban", "ez_points", "number_line"],
)
def test_smoke_with_pictures(command: list[str], tmp_path: Path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(_FOLDER))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*command, "--view", "rgb", "--smoke"])
    runpy.run_path(str(_FOLDER / command[0]), run_name="__main__")
    printed = capsys.readouterr().out
    assert "iteration 2" in printed
    norms = [float(found) for found in re.findall(r"gradient norm (\S+),", printed)]
    assert len(norms) == 2
    assert all(map(math.isfinite, norms))
    # What was trained has a vision tower.
    config = next(tmp_path.glob("runs/*/warm_start/config.json")).read_text()
    assert '"qwen2_vl"' in config
