"""What the source may do: what it unpickles, runs and imports, and how that is documented."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from envs.catalog import SCHEMES
from rllib_gigpo.registry import load_object

ROOT = Path(__file__).parents[2]
PACKAGES = ("rllib_gigpo", "rllib_gigpo_cli", "rllib_gigpo_wire", "envs")

# Who unpickles, and what: nothing that `report`, `view`, `receipt` or `compare` reads.
UNPICKLES = {
    "rllib_gigpo/env_checks.py": "a copy of the environment under test, made a line before",
    "rllib_gigpo/settings/derived.py": "a copy of the settings, made by its only caller",
    "rllib_gigpo/sampler.py": "the episodes played ahead, in a checkpoint that RLlib restores",
    "rllib_gigpo/safe_pickle.py": "anything, with names that stand for nothing",
    "rllib_gigpo/export.py": "a checkpoint whose author is trusted (trust=True)",
    "rllib_gigpo/trained.py": "a checkpoint whose author is trusted (trust=True)",
}
_PICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
_LOADS = {"load", "loads", "Unpickler", "open"}


@cache
def sources():
    return [
        (path.relative_to(ROOT).as_posix(), ast.parse(path.read_text()))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def calls(tree: ast.AST):
    """(module or object, function, keywords) of every call `a.b(...)`, through import aliases."""
    alias = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            alias |= {(a.asname or a.name): a.name.split(".")[-1] for a in node.names}
        if isinstance(node, ast.ImportFrom):
            alias |= {(a.asname or a.name): a.name for a in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        keywords = {k.arg: k.value for k in node.keywords}
        if isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            yield alias.get(owner, owner), node.func.attr, keywords
        elif isinstance(node.func, ast.Name):
            yield "", node.func.id, keywords


def test_only_known_files_unpickle():
    found = {
        name
        for name, tree in sources()
        for owner, function, _ in calls(tree)
        if owner in _PICKLERS and function in _LOADS
    }
    assert found <= set(UNPICKLES), found - set(UNPICKLES)


def test_pickles_are_imported_by_module():
    """So that the test above sees every use of them."""
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in _PICKLERS:
                raise AssertionError(f"{name} imports from {node.module}")


def test_what_can_hold_pickles_is_read_without_them():
    for name, tree in sources():
        for owner, function, keywords in calls(tree):
            if (owner, function) == ("torch", "load"):
                assert ast.unparse(keywords["weights_only"]) == "True", name
            if function == "load" and owner in ("np", "numpy"):
                assert "allow_pickle" not in keywords, name
            assert (owner, function) not in {("yaml", "load"), ("yaml", "unsafe_load")}, name
            assert function != "read_pickle", name


def test_no_text_becomes_code_or_a_shell_command():
    for name, tree in sources():
        for owner, function, keywords in calls(tree):
            assert not (owner == "" and function in ("eval", "exec", "compile")), name
            assert (owner, function) not in {("os", "system"), ("os", "popen")}, name
            assert "shell" not in keywords, name


def test_code_of_a_model_is_never_run():
    loads = 0
    for name, tree in sources():
        for owner, function, keywords in calls(tree):
            asked = keywords.get("trust_remote_code")
            assert asked is None or ast.unparse(asked) == "False", name
            is_auto = owner.rpartition(".")[2].startswith("Auto")
            if function == "from_pretrained" and is_auto:
                assert asked is not None, name
                loads += 1
    assert loads >= 8


# Environments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "envs.appworld.env:AppWorld",
        "envs.adapters.mcp:MCPEnv",
        "envs.adapters.trl:TRLEnv",
        "envs.adapters.openenv:OpenEnv",
        "envs.adapters.skyrl:SkyRLEnv",
        "envs.adapters.tool_env:ToolEnv",
    ],
)
def test_what_runs_the_policys_actions_states_its_isolation(name):
    assert "\n    Isolation: " in (load_object(name).__doc__ or "")


def test_every_kind_of_environment_has_its_place_in_the_docs():
    page = (ROOT / "docs" / "faults.md").read_text()
    table = page[page.index("| environment | where") :].split("\n\n")[0]
    for scheme in set(SCHEMES) - {"textworld:"}:  # a game engine: actions are no code
        assert f"`{scheme}`" in table
