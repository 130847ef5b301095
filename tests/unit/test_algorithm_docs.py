"""The pages on algorithms say what the code does."""

import re
from pathlib import Path
from typing import get_args

import pytest

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.losses import Aggregation
from rllib_gigpo.presets import PRESETS

_FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_has_the_presets_own_row(name):
    preset = PRESETS[name]
    settings = ", ".join(f"`{key}={value!r}`" for key, value in preset.settings.items())
    cells = (f"`{name}`", preset.label, preset.formula, settings or "the defaults", preset.source)
    assert f"| {' | '.join(cells)} |" in (_FOLDER / "index.md").read_text()


@pytest.mark.parametrize("page", ["index.md", "loss_parts.md"])
def test_links_and_settings_exist(page):
    text = (_FOLDER / page).read_text()
    for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
        assert (_FOLDER / target).exists(), target
    config = GiGPOConfig()
    for setting in re.findall(r"`(\w+)=", text):
        assert hasattr(config, setting), setting


def test_every_aggregation_is_there():
    text = (_FOLDER / "loss_parts.md").read_text()
    assert all(f'"{mode}"' in text for mode in get_args(Aggregation))


@pytest.mark.parametrize(
    "code", re.findall(r"```python\n(.*?)```", (_FOLDER / "index.md").read_text(), re.DOTALL)
)
def test_the_code_runs(code):
    found: dict = {}
    exec(compile(code, "docs/algorithms/index.md", "exec"), found)
    config = found["config"]
    if config.env is None:
        config.environment("KeyDoor").llm(model="tiny")
    config.validate()
