"""The complaints of `docs/complaints.md`: its table is true; and the tests it needed besides."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo.encoding import PromptEncoder
from rllib_gigpo.grouping import AnchorRule
from rllib_gigpo.rows import MinibatchPlan, episodes_to_batch
from tests.fakes import ScriptedEngine
from tests.stage import PROFILE, TOKENIZER, Stage, task

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (\d+) \|", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py::[\w:]+)`")


def table() -> dict[int, list[str]]:
    """Test ids by number of the complaint."""
    lines = (ROOT / "docs" / "complaints.md").read_text().splitlines()
    return {int(found[1]): _TEST.findall(line) for line in lines if (found := _ROW.match(line))}


def test_every_complaint_has_tests():
    found = table()
    assert sorted(found) == list(range(1, 26))
    assert all(found.values())


def test_every_test_of_the_table_is_collected():
    """By pytest itself, with the marks that `make test` runs."""
    ids = sorted({test for tests in table().values() for test in tests})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *ids],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    collected = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    assert collected == set(ids)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=8, max_size=64),
    wanted=st.integers(1, 8),
    iteration=st.integers(0, 5),
)
def test_2_the_number_of_optimizer_steps_does_not_follow_the_rows(lengths, wanted, iteration):
    """Eight groups whose episodes have any numbers of steps: as many optimizer steps as asked."""
    rows = sum(lengths)
    steps = MinibatchPlan(None, wanted, seed=3).draw(rows, iteration, epoch=0)
    assert len(steps) == wanted
    assert sorted(np.concatenate(steps).tolist()) == list(range(rows))


THOUGHT = "<think> count to 0 </think> <action> down </action>"
_ASSISTANT = "{% if add_generation_prompt %}<assistant> {% endif %}"
_WHOLE = "{{ m['content'] }}"
_CUT = "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}"


def turns(content: str) -> str:
    return "{% for m in messages %}<{{ m['role'] }}> " + content + " {% endfor %}"


# What the templates of the families make of thoughts, in the words of the tiny vocabulary.
TEMPLATES = {
    "Qwen2.5, which keeps them": turns(_WHOLE) + _ASSISTANT,
    "Qwen3, which cuts them out of earlier turns": turns(_CUT) + _ASSISTANT,
    "Qwen3 without thinking, which opens with an empty thought": turns(_CUT)
    + "{% if add_generation_prompt %}<assistant> <think> </think> {% endif %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_11_no_template_changes_the_rows(template):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    stage = Stage(THOUGHT)
    stage.engine = ScriptedEngine(tokenizer, lambda request: THOUGHT, weight_version=7)
    stage.encoder = PromptEncoder(tokenizer, PROFILE, 200)
    played = stage.play(task(0, size=2, start=3))
    rows = episodes_to_batch(played, AnchorRule(), lambda agent: "default_policy")
    columns = rows.policy_batches["default_policy"]
    said = TOKENIZER(THOUGHT, add_special_tokens=False)["input_ids"]
    assert len(columns["response_ids"]) == 6
    for response in columns["response_ids"]:
        np.testing.assert_array_equal(response, said)
    asked = sorted(request.prompt_ids.tolist() for request in stage.engine.requests)
    assert sorted(prompt.tolist() for prompt in columns["prompt_ids"]) == asked


def test_19_alfworld_is_pinned_to_one_version():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = (p for p in extras["optional-dependencies"]["alfworld"] if p.startswith("alfworld"))
    assert re.fullmatch(r"alfworld==\d+\.\d+\.\d+", pin)


def test_20_alfworlds_page_trains_and_evaluates():
    page = (ROOT / "docs" / "environments" / "alfworld.md").read_text()
    for command in (
        "pip install",
        "alfworld-download",
        "tuned_examples/alfworld",
        "rllib-gigpo evaluate",
    ):
        assert command in page
