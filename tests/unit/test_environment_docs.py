"""Every bundled environment has a page that says what it is, and says it truly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from envs.catalog import ENVIRONMENTS, make
from tests.missing import skip_or_fail

_FOLDER = Path(__file__).parents[2] / "docs" / "environments"
_ROWS = ("Task", "Observation", "Action", "Reward", "Horizon", "Anchor", "Data", "Licence")


def page_of(name: str) -> str:
    (link,) = re.findall(
        rf"^\| `{name}` \|.*\[\w+\.md\]\((\w+\.md)\) \|$",
        (_FOLDER / "index.md").read_text(),
        re.MULTILINE,
    )
    return (_FOLDER / link).read_text()


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_page_names_every_property_and_a_command(name):
    page = page_of(name)
    for row in _ROWS:
        assert re.search(rf"^\| {row} \| .+ \|$", page, re.MULTILINE), f"{name}: no row {row!r}"
    assert re.search(r"^(python|make) ", page, re.MULTILINE)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_horizon_is_the_environments(name):
    entry = ENVIRONMENTS[name]
    try:
        env = make(name, **entry.contract_kwargs)
    except ImportError as error:
        skip_or_fail(str(error))
    (row,) = re.findall(r"^\| Horizon \| (.+) \|$", page_of(name), re.MULTILINE)
    # A page of several environments names each: "10 (`NumberLine`), 8 (`EZPoints`)".
    told = re.search(rf"(\d+) \(`{name}`\)", row) or re.match(r"(\d+)", row)
    assert told
    assert int(told[1]) == env.horizon


@pytest.mark.parametrize("page", sorted(path.name for path in _FOLDER.glob("*.md")))
def test_links_lead_somewhere_and_no_placeholder_is_left(page):
    text = (_FOLDER / page).read_text()
    for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
        assert (_FOLDER / target).exists(), target
    assert not re.search(r"^[A-Z_]{6,}$", text, re.MULTILINE)


@pytest.mark.parametrize("page", sorted(path.name for path in _FOLDER.glob("*.md")))
def test_the_modules_and_scripts_of_the_commands_exist(page):
    root = _FOLDER.parents[1]
    text = (_FOLDER / page).read_text()
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert (root / (module.replace(".", "/") + ".py")).exists(), module
    for script in re.findall(r"python (\w+/\w+\.py)", text):
        assert (root / script).exists(), script
