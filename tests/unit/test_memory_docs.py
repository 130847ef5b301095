"""The code of docs/memory.md runs as it stands."""

import re
from pathlib import Path

import pytest

_PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
_BLOCK = re.compile(r"<!-- run: (\w+) -->\n```python\n(.*?)```", re.DOTALL)
_BLOCKS = dict(_BLOCK.findall(_PAGE))


def test_every_block_is_marked():
    assert len(_BLOCKS) == _PAGE.count("```python") == 5


@pytest.mark.parametrize("name", sorted(_BLOCKS))
def test_block_runs(name):
    scope: dict = {}
    exec(compile(_BLOCKS[name], f"docs/memory.md:{name}", "exec"), scope)
    memory = scope["memory"] if "memory" in scope else scope["profile"].memory
    memory.add("a hall", "go on", {})
    _, entries = memory.render()
    assert entries > 0
    assert memory.render(entries) == ("", 0)
