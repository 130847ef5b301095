"""The marked code blocks of the docs run as they stand."""

import re
from pathlib import Path

import pytest

_DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"<!-- run: (?P<name>[^>]+) -->\n```python\n(?P<code>.*?)```", re.DOTALL)
_BLOCKS = {
    f"{page.relative_to(_DOCS)}: {found['name']}": found["code"]
    for page in sorted(_DOCS.rglob("*.md"))
    for found in _BLOCK.finditer(page.read_text())
}


def test_marks_are_followed_by_a_block():
    marks = sum(page.read_text().count("<!-- run: ") for page in _DOCS.rglob("*.md"))
    assert marks == len(_BLOCKS) > 0


@pytest.mark.examples
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("name", _BLOCKS)
def test_block_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(_BLOCKS[name], name, "exec"), {"__name__": "docs"})
