"""What somebody else wrote is read, and never run: run folders, models, and what they name."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rllib_gigpo.evaluate.main import main as evaluate
from rllib_gigpo.models import load_causal_lm, load_tokenizer, materialize
from rllib_gigpo.recording.folder import RunFolder, write_bytes, write_lines
from rllib_gigpo.report import report_html
from rllib_gigpo.report.data import rollout_data, run_data
from rllib_gigpo_cli import app
from tests.recorded import RUN, recorded_rows, write_run
from tests.tiny_runs import tiny_config

ROOT = Path(__file__).parents[2]
PACKAGES = ("rllib_gigpo", "rllib_gigpo_cli", "envs")

# Who unpickles, and what: nothing that `report`, `view`, `receipt` or `compare` reads.
UNPICKLES = {
    "rllib_gigpo/env_checks.py": "a copy of the environment under test, made a line before",
    "rllib_gigpo/settings/derived.py": "a copy of the settings, made by its only caller",
    "rllib_gigpo/gigpo.py": "the episodes played ahead, in a checkpoint that RLlib restores",
    "rllib_gigpo/export.py": "a checkpoint, which its caller has to trust",
    "rllib_gigpo/checkpoints.py": "a checkpoint, which its caller has to trust",
    "rllib_gigpo/trained.py": "a checkpoint, which its caller has to trust",
}
_PICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
_LOADS = {"load", "loads", "Unpickler", "open"}


class Bomb:
    """Pickled, it makes a folder when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = str(mark)

    def __reduce__(self):
        return (os.mkdir, (self.mark,))


@pytest.fixture
def mark(tmp_path):
    """A path that exists only if a bomb went off."""
    path = tmp_path / "went-off"
    yield path
    assert not path.exists()


@pytest.fixture
def bomb(mark) -> bytes:
    return pickle.dumps(Bomb(mark))


def test_the_bomb_works(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "hit")))
    assert (tmp_path / "hit").is_dir()


# The source ---------------------------------------------------------------------------------------


def sources():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


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


# Run folders --------------------------------------------------------------------------------------

# What RLlib, Tune and torch pickle, wherever one of the commands might look.
STRANGE_FILES = (
    "algorithm_state.pkl",
    "class_and_ctor_args.pkl",
    "checkpoint_000001/algorithm_state.pkl",
    "checkpoint/class_and_ctor_args.pkl",
    "params.pkl",
    "experiment_state.json",
    "tuner.pkl",
    "searcher-state.pkl",
    "trainable.pkl",
    "model.pt",
    "pytorch_model.bin",
    "rollouts/000001.pkl",
    "pictures/" + "0" * 32 + ".png",
)
KNOWN_FILES = (
    "run.json",
    "metrics.jsonl",
    "evaluations.jsonl",
    "rollouts/000001.jsonl",
    "rollouts/000001.parquet",
    "receipt.json",
)


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)


def planted(path: Path, bomb: bytes, name: str | None) -> RunFolder:
    """A run folder full of bombs, one of its own files among them."""
    folder = write_run(path / "run", iterations=2)
    for file in STRANGE_FILES:
        write_bytes(folder.path / file, bomb)
    rows = [{**row, "picture": "0" * 32} for row in recorded_rows().rows]
    write_lines(folder.rollout_file(1), rows)
    if name is not None:
        write_bytes(folder.path / name, bomb)
        if name.endswith("parquet"):
            folder.rollout_file(1).unlink()
    return folder


@pytest.mark.parametrize("name", [None, *KNOWN_FILES])
def test_no_command_unpickles_what_lies_in_a_run_folder(name, bomb, tmp_path):
    folder = planted(tmp_path, bomb, name)
    report, receipt = run("report", str(folder.path)), run("receipt", str(folder.path))
    for done in (report, receipt):
        assert done.exit_code in (0, 2), done
    if name == "run.json":
        assert "is not JSON" in report.stderr
    kind = "parquet" if name and name.endswith("parquet") else "jsonl"
    file = str(folder.rollout_file(1, kind))
    done = run("replay", file, "--player", "random", "--from", "1")
    # The recorded episode is made up, so the environment cannot repeat it.
    assert done.exit_code in (1, 2), done


def test_a_comparison_reads_json_alone(bomb, mark, tmp_path):
    for algo in ("grpo", "gigpo"):
        write_bytes(tmp_path / "out" / "runs" / f"{algo}-0-8.json", bomb)
    arguments = ["--algos", "grpo,gigpo", "--seeds", "1", "--env-steps", "8"]
    done = run("compare", *arguments, "--output", str(tmp_path / "out"))
    assert done.exit_code != 0


def test_an_evaluation_reads_json_alone(bomb, mark, tmp_path):
    for name in ("settings.json", "episodes.jsonl", "result.json"):
        write_bytes(tmp_path / name, bomb)
    with pytest.raises(SystemExit):
        evaluate(["KeyDoor", "--model=tiny", "--tasks=1", f"--output={tmp_path}", "--quiet"])


@pytest.mark.parametrize(
    "name",
    ["run.json", "metrics.jsonl", "rollouts/000001.jsonl", "pictures/" + "a" * 32 + ".png"],
)
def test_a_link_out_of_a_run_folder_is_not_followed(name, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"iteration": 1, "password": "sesame"}\n')
    folder = write_run(tmp_path / "run", iterations=1)
    rows = [{**row, "picture": "a" * 32} for row in recorded_rows().rows]
    write_lines(folder.rollout_file(1), rows)
    path = folder.path / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(secret)
    with pytest.raises(ValueError, match="is a link out of the run folder"):
        report_html(RunFolder(folder.path))
    done = run("report", str(folder.path))
    assert done.exit_code == 2
    assert not (folder.path / "report.html").exists()


def test_links_inside_a_run_folder_and_to_it_are_followed(tmp_path):
    folder = write_run(tmp_path / "run", iterations=1)
    folder.metrics.rename(folder.path / "all.jsonl")
    folder.metrics.symlink_to("all.jsonl")
    (tmp_path / "link").symlink_to(folder.path)
    found = RunFolder(tmp_path / "link")
    assert len(run_data(found)["metrics"]) == 1
    assert rollout_data(found, 1)["rows"]


def test_a_receipt_cannot_steer_the_terminal(tmp_path):
    folder = write_run(tmp_path, run={**RUN, "command": "\x1b[2J\x1b]0;hit\x07 train.py"})
    done = run("receipt", str(folder.path))
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert "\x07" not in done.output


# Models -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(materialize(tiny_config().model_spec), folder)
    return folder


@pytest.fixture
def copied(model, tmp_path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "training_args.bin"])
def test_weights_are_read_from_safetensors_alone(name, copied, bomb, mark):
    whole = load_causal_lm(str(copied)).state_dict()
    write_bytes(copied / name, bomb)
    again = load_causal_lm(str(copied)).state_dict()
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    for file in copied.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match="safetensors"):
        load_causal_lm(str(copied))
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        materialize(tiny_config().llm(model=str(copied), options={}).model_spec)
    with pytest.raises(SystemExit):
        evaluate(["KeyDoor", f"--model={copied}", "--tasks=1", "--quiet"])


@pytest.mark.parametrize("known", [True, False], ids=["known type", "own type"])
def test_python_files_of_a_model_are_not_imported(known, copied, mark):
    (copied / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    auto = {
        name: f"evil.{name}"
        for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    }
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((copied / name).read_text())
        settings["auto_map"] = {**auto, "AutoTokenizer": ["evil.A", "evil.B"]}
        if not known and name == "config.json":
            settings["model_type"] = "evil"
        (copied / name).write_text(json.dumps(settings))
    if known:
        assert load_causal_lm(str(copied)).config.model_type == "llama"
        load_tokenizer(str(copied))
    else:
        with pytest.raises(ValueError, match="remote code is never run"):
            load_causal_lm(str(copied))
