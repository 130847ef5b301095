"""The README's marked code blocks run as they stand."""

import re
from pathlib import Path

import pytest

from tests.child import run_python

_README = Path(__file__).parents[2] / "README.md"
_BLOCK = re.compile(r"<!-- run: (?P<name>[^>]+) -->\n```python\n(?P<code>.*?)```", re.DOTALL)
_BLOCKS = {m["name"]: m["code"] for m in _BLOCK.finditer(_README.read_text())}

# What a reader does next with the config that a block leaves behind.
_TRAIN = """
config.training(num_groups=2, group_size=2, kl_coeff=0.0, minibatch_size=None)
algorithm = config.build_algo()
result = algorithm.train()["env_runners"]
assert result["num_episodes"] == 4, result
algorithm.stop()
"""
_AFTER = {
    "first lines": "",
    "own environment": _TRAIN,
    "own agent": "config.validate()\n",
    "sweep": "",
}


def test_every_marked_block_is_known():
    assert set(_BLOCKS) == set(_AFTER)


@pytest.mark.examples
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("name", sorted(_AFTER))
def test_block_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(_BLOCKS[name] + _AFTER[name], name, "exec"), {"__name__": "readme"})


@pytest.mark.examples
def test_the_own_environment_passes_the_checker(tmp_path: Path):
    (tmp_path / "my_module.py").write_text(_BLOCKS["own environment"])
    command = ("-m", "rllib_gigpo.check_env", "my_module:GuessTheNumber")
    done = run_python(*command, cwd=tmp_path, timeout=300)
    assert "GiGPO will help here" in done.stdout


def test_the_own_environment_example_is_short():
    code = _BLOCKS["own environment"]
    body = code[code.index("class ") : code.index('register_llm_env("')]
    assert len([line for line in body.splitlines() if line.strip()]) <= 15
