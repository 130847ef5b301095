"""The arrows of the package point one way: who may import what."""

import ast
import sys
from pathlib import Path

import pytest

from tests.child import run_python

_ROOT = Path(__file__).parents[2]
_STDLIB = sys.stdlib_module_names

# Simulators and readers that single environments may import inside a function.
_SIMULATORS = {
    "alfworld": {"alfworld", "textworld"},
    "webshop": {"bm25s", "spacy", "rapidfuzz"},
    "gym_cards": {"PIL"},
    "adapters": {"minigrid", "skyrl_gym", "textworld", "websockets"},
    "search": {"bm25s", "faiss", "sentence_transformers", "datasets", "pyarrow"},
}
_RAY_FILES = {
    "rllib_gigpo/__init__.py",
    "rllib_gigpo/callbacks.py",
    "rllib_gigpo/check/one_step.py",
    "rllib_gigpo/compare/main.py",
    "rllib_gigpo/compare/runs.py",
    "rllib_gigpo/config.py",
    "rllib_gigpo/demo.py",
    "rllib_gigpo/env_runner.py",
    "rllib_gigpo/evaluation.py",
    "rllib_gigpo/export.py",
    "rllib_gigpo/family.py",
    "rllib_gigpo/games.py",
    "rllib_gigpo/gigpo.py",
    "rllib_gigpo/group_player.py",
    "rllib_gigpo/grouped_learner.py",
    "rllib_gigpo/heartbeat.py",
    "rllib_gigpo/learner.py",
    "rllib_gigpo/learner_group.py",
    "rllib_gigpo/metrics.py",
    "rllib_gigpo/module.py",
    "rllib_gigpo/optimizers.py",
    "rllib_gigpo/quickstart.py",
    "rllib_gigpo/recording/recorder.py",
    "rllib_gigpo/recording/rollout_rows.py",
    "rllib_gigpo/registry.py",
    "rllib_gigpo/rllib_checks.py",
    "rllib_gigpo/rollout_types.py",
    "rllib_gigpo/rows.py",
    "rllib_gigpo/sampler.py",
    "rllib_gigpo/starting.py",
    "rllib_gigpo/update_rows.py",
    "rllib_gigpo/tune_results.py",
    "rllib_gigpo/validation.py",
    "rllib_gigpo/watched_actors.py",
    "rllib_gigpo/watching.py",
    "rllib_gigpo/weight_sync.py",
    "rllib_gigpo/whole_checkpoints.py",
}


def _imports(path: Path) -> set[str]:
    """Top-level names of all imports of a file, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found - set(_STDLIB)


def _files(folder: str) -> list[str]:
    return sorted(str(path.relative_to(_ROOT)) for path in (_ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("file", _files("envs"))
def test_envs_know_gymnasium_and_their_simulators_only(file: str):
    allowed = {"envs", "gymnasium", "numpy", "rllib_gigpo_wire"}
    for name, simulators in _SIMULATORS.items():
        if file.startswith(f"envs/{name}"):
            allowed |= simulators
    if file.endswith("_team.py"):
        allowed.add("ray")
    assert _imports(_ROOT / file) <= allowed


@pytest.mark.parametrize("file", _files("rllib_gigpo"))
def test_rllib_gigpo_never_imports_envs(file: str):
    assert "envs" not in _imports(_ROOT / file)


@pytest.mark.parametrize("file", _files("rllib_gigpo_wire"))
def test_what_asks_servers_imports_the_standard_library_alone(file: str):
    assert _imports(_ROOT / file) == set()


@pytest.mark.parametrize("file", _files("rllib_gigpo"))
def test_ray_stays_in_its_rooms(file: str):
    if file in _RAY_FILES or file.startswith(("rllib_gigpo/engines/vllm", "rllib_gigpo/settings")):
        return
    assert "ray" not in _imports(_ROOT / file)


@pytest.mark.parametrize(
    "file",
    [
        *_files("rllib_gigpo/advantages"),
        "rllib_gigpo/critic.py",
        "rllib_gigpo/embedding_anchors.py",
        "rllib_gigpo/grouping.py",
        "rllib_gigpo/losses.py",
        "rllib_gigpo/state_keys.py",
    ],
)
def test_mathematics_knows_arrays_only(file: str):
    assert _imports(_ROOT / file) <= {"numpy", "torch", "rapidfuzz", "rllib_gigpo"}


@pytest.mark.parametrize("module", ["envs.key_door", "envs.catalog", "envs.alfworld"])
def test_light_modules_load_without_heavy_ones(module: str):
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    run_python("-c", code)
