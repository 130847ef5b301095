"""docs/settings.md has every setting of GiGPOConfig, as the code has it."""

import importlib.util
from pathlib import Path

import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_gigpo import GiGPOConfig

_DOCS = Path(__file__).parents[2] / "docs"
# What is no setting of a user: the config itself writes it.
_WRITTEN = {"record_command", "algorithm_name"}


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location("docs_settings", _DOCS / "_settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_setting_is_there_once_with_default_and_meaning(page):
    added = set(vars(GiGPOConfig())) - set(vars(AlgorithmConfig())) - _WRITTEN
    settings = [setting for method in page.METHODS for setting in page.settings_of(method)]
    names = [setting.name for setting in settings]
    assert sorted(names) == sorted(name for name in added if not name.startswith("_"))
    for setting in settings:
        assert setting.meaning.endswith("."), setting
        assert setting.default == repr(getattr(GiGPOConfig(), setting.name))


def test_a_setting_of_another_name_than_its_argument_is_told_with_both(page):
    rows = page.tables().splitlines()
    (row,) = (row for row in rows if row.startswith("| `model` "))
    assert row.startswith(
        "| `model` (`llm_model`) | `'Qwen/Qwen2.5-1.5B-Instruct'` | \"tiny\" (from"
    )


def test_meanings_are_those_of_the_docstring_on_one_line(page):
    (omega,) = (s for s in page.settings_of("training") if s.name == "omega")
    assert omega.meaning == "Weight of the step advantage (Eq. 8); 0 is GRPO."
    (kept,) = (s for s in page.settings_of("recording") if s.argument == "groups")
    # Two lines in the docstring.
    assert kept.meaning == (
        "Groups of an iteration whose rollouts are written, the first ones; None writes all."
    )


def test_rllibs_settings_with_another_default_are_told(page):
    changed = page.changed_defaults()
    # RLlib: 0.99 and 0.001.
    assert ("gamma", "0.99", "0.95") in changed
    assert ("lr", "0.001", "1e-06") in changed
    assert "num_epochs" not in [name for name, _, _ in changed]


def test_the_page_has_a_place_for_the_tables(page):
    assert (_DOCS / "settings.md").read_text().count(page.MARK) == 1
