"""What error messages say about missing packages can be carried out: the package is on no index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SOURCES = sorted(file for name in ("rllib_gigpo", "envs") for file in (_ROOT / name).rglob("*.py"))
_HINT = re.compile(r"pip install (?:-e )?['\"]?([^\s'\"`;]+)")
_ELSEWHERE = {"pyarrow", "datasets", "gguf", "--no-deps", "."}


def hints() -> list[tuple[str, str]]:
    found = []
    for file in _SOURCES:
        text = file.read_text(encoding="utf-8")
        found += [(str(file.relative_to(_ROOT)), hint) for hint in _HINT.findall(text)]
    return found


def test_there_are_hints():
    assert len(hints()) > 10


@pytest.mark.parametrize(("file", "hint"), hints())
def test_a_hint_names_an_extra_of_this_folder_or_another_package(file, hint):
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    extra = re.fullmatch(r"\.\[([a-z0-9-]+|\{name\})\]", hint)
    if extra is None:
        assert hint in _ELSEWHERE, file
    else:
        assert extra[1] == "{name}" or extra[1] in extras, file
