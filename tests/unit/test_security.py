"""What somebody else wrote is read, and never run: run folders, models, and what they name."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pickle
import shutil
from collections import OrderedDict
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle
from safetensors.torch import load_file
from typer.testing import CliRunner

from envs.adapters.mcp_client import MCPClient, MCPError
from envs.catalog import SCHEMES
from envs.key_door import KeyDoor
from envs.search.client import HttpRetriever
from rllib_gigpo import AgentProfile, GiGPO, LoRASettings, register_llm_env, safe_pickle
from rllib_gigpo.agent.parsing import Action
from rllib_gigpo.compare.runs import Run, read_results
from rllib_gigpo.evaluate.endpoint import Endpoint, EndpointError
from rllib_gigpo.evaluate.main import main as evaluate
from rllib_gigpo.export import export
from rllib_gigpo.models import load_causal_lm, load_tokenizer, materialize
from rllib_gigpo.recording.folder import RunFolder, write_bytes, write_lines
from rllib_gigpo.registry import load_object
from rllib_gigpo.report import report_html
from rllib_gigpo.report.data import rollout_data, run_data
from rllib_gigpo.trained import trained_as
from rllib_gigpo_cli import app
from tests.recorded import RUN, recorded_rows, write_run
from tests.tiny_runs import build_learner, module_of, tiny_config

ROOT = Path(__file__).parents[2]
PACKAGES = ("rllib_gigpo", "rllib_gigpo_cli", "envs")

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
    one = Run("grpo", 0, 8)
    write_bytes(tmp_path / one.file, bomb)
    with pytest.raises(ValueError, match="utf-8"):
        read_results([one], tmp_path)


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


# Checkpoints --------------------------------------------------------------------------------------


class Guarded(KeyDoor):
    """Takes settings that nobody may read."""

    def __init__(self, *, password: str, url: str):
        super().__init__(size=3)


def answer_at_once(response: str) -> Action:
    """A parser of one's own."""
    return Action(response, True)


class Own(AgentProfile):
    """A profile of a class of one's own."""


@pytest.fixture(scope="module")
def learner():
    return build_learner()


def checkpoint_of(learner, path: Path, **settings) -> Path:
    """What `algorithm.save_to_path` writes of settings and policy, without Ray."""
    config = tiny_config()
    told = {**config.to_dict(), "profile": config.agent_profile, **settings}
    content = {"class": GiGPO, "ctor_args_and_kwargs": ((told,), {})}
    write_bytes(path / "class_and_ctor_args.pkl", cloudpickle.dumps(content))
    module = path / "learner_group" / "learner" / "rl_module" / "default_policy"
    module_of(learner).save_to_path(str(module))
    return path


@pytest.fixture
def checkpoint(learner, tmp_path) -> Path:
    return checkpoint_of(learner, tmp_path / "checkpoint")


def test_a_checkpoint_is_read_without_running_it(learner, checkpoint, tmp_path, monkeypatch):
    whole = export(checkpoint, tmp_path / "trusted", trust=True)
    trusted = trained_as(checkpoint, trust=True)

    def refuse(*arguments, **options):
        raise AssertionError("unpickled")

    for name in ("load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
        monkeypatch.setattr(cloudpickle, name, refuse)
    found = trained_as(checkpoint)
    assert (found.env, found.env_config) == ("KeyDoor", {"horizon": 6})
    assert (found.max_prompt_tokens, found.eval_temperature) == (64, trusted.eval_temperature)
    assert found.profile.prompt == trusted.profile.prompt
    plain = export(checkpoint, tmp_path / "plain")
    left, right = (load_file(folder / "model.safetensors") for folder in (whole, plain))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ({"lora": LoRASettings(rank=2)}, "adapter"),
        ({"lora": LoRASettings(rank=2, targets=("q_proj",))}, "merged"),
        ({"model": "tiny-vision", "options": {}}, "full"),
    ],
    ids=["adapter", "merged", "vision"],
)
def test_every_kind_of_policy_is_read_without_trust(model, kind, tmp_path):
    learner = build_learner(tiny_config().llm(**model))
    path = checkpoint_of(learner, tmp_path / "checkpoint")
    for name, trust in (("plain", False), ("trusted", True)):
        export(path, tmp_path / name, kind, trust=trust)
    (file,) = (found.name for found in (tmp_path / "plain").glob("*model.safetensors"))
    left, right = (load_file(tmp_path / name / file) for name in ("plain", "trusted"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize(
    "name",
    [
        "class_and_ctor_args.pkl",
        "learner_group/learner/rl_module/default_policy/class_and_ctor_args.pkl",
        "learner_group/learner/rl_module/default_policy/module_state.pkl",
        "algorithm_state.pkl",
        "learner_group/state.pkl",
    ],
)
def test_a_bomb_in_a_checkpoint_does_not_go_off(name, checkpoint, bomb, mark, tmp_path):
    write_bytes(checkpoint / name, bomb)
    run("evaluate", str(checkpoint), "--tasks", "1", "--output", str(tmp_path / "out"))
    run("export", str(checkpoint), str(tmp_path / "model"))
    run("play", "KeyDoor", "--max-steps", "1", "--model", str(checkpoint))


def test_a_bomb_hidden_in_the_settings_stays_whole(learner, mark, tmp_path):
    for settings in ({"callbacks_class": Bomb(mark)}, {"learner_config_dict": {"x": Bomb(mark)}}):
        path = checkpoint_of(learner, tmp_path / "one", **settings)
        assert trained_as(path).env == "KeyDoor"
    for settings in ({"env_config": {"size": Bomb(mark)}}, {"env": Bomb(mark)}):
        path = checkpoint_of(learner, tmp_path / "two", **settings)
        with pytest.raises(ValueError, match=r"posix\.mkdir.*--trust-checkpoint"):
            trained_as(path)


@pytest.mark.parametrize("own", [lambda: Own, lambda: answer_at_once], ids=["class", "function"])
def test_a_profile_of_ones_own_needs_trust(own, learner, tmp_path):
    made = own()
    usual = tiny_config().agent_profile
    fields = {name: getattr(usual, name) for name in usual.__dataclass_fields__}
    profile = Own(**fields) if made is Own else replace(usual, parser=made)
    path = checkpoint_of(learner, tmp_path / "own", profile=profile)
    with pytest.raises(ValueError, match=r"tests\.unit\.|test_security.*--trust-checkpoint"):
        trained_as(path)
    assert trained_as(path, trust=True).profile.prompt == usual.prompt


def test_names_that_look_like_the_packages_lead_nowhere(tmp_path, mark):
    """Such as `rllib_gigpo.agent.parsing.re`, or a function that such a module imports."""
    for module, name in (
        ("rllib_gigpo.agent.parsing", "re.compile"),
        ("rllib_gigpo.agent.parsing", "dataclass"),
        ("rllib_gigpo.agent.prompt", "Formatter"),
        ("rllib_gigpo.agent.no_such_module", "x"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("numpy", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("rllib_gigpo.export", "export"),
    ):
        call = f"c{module}\n{name}\n(S'a'\ntR.".encode()
        (tmp_path / "p.pkl").write_bytes(call)
        found = safe_pickle.read(tmp_path / "p.pkl")
        assert isinstance(found, safe_pickle.Unknown)
        assert found.name == f"{module}.{name}"


def test_arrays_and_containers_come_back(tmp_path):
    value = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": [np.float64(0.5), {1, 2}, (True, None, b"x", "y")],
        "c": OrderedDict(x=slice(1, 2)),
    }
    (tmp_path / "p.pkl").write_bytes(pickle.dumps(value))
    found = safe_pickle.read(tmp_path / "p.pkl")
    safe_pickle.check_known("it", found)
    np.testing.assert_array_equal(found.pop("a"), value.pop("a"))
    assert found == value


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_fail(content):
    with TemporaryDirectory() as folder:
        path = Path(folder, "p.pkl")
        path.write_bytes(content)
        with contextlib.suppress(ValueError, EOFError, pickle.UnpicklingError):
            safe_pickle.read(path)


# Environments and secrets -------------------------------------------------------------------------


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


def test_an_evaluation_writes_no_secret(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SOME_API_KEY", "plain-words-of-a-key")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-another-plain-key")
    register_llm_env("Guarded", Guarded, tiny_config().agent_profile)
    secrets = {"password": "open-sesame", "url": "http://me:pass-phrase@host/plain-words-of-a-key"}
    done = evaluate(
        [
            *("Guarded", "--model=tiny", "--tasks=1", "--max-steps=1", "--max-response-tokens=4"),
            "--max-prompt-tokens=64",
            *("--env-config", json.dumps(secrets), f"--output={tmp_path}"),
        ]
    )
    assert done == 0
    told = capsys.readouterr()
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) >= 4
    for text in (*texts, told.out, told.err):
        for secret in ("open-sesame", "pass-phrase", "plain-words-of-a-key", "sk-another"):
            assert secret not in text


def test_a_key_of_an_endpoint_is_in_no_error():
    chat = Endpoint("http://127.0.0.1:9/v1", "m", api_key="sk-very-secret", pause_s=0.0)
    with pytest.raises(EndpointError) as error:
        chat([{"role": "user", "content": "hi"}], {}, 0)
    assert "secret" not in str(error.value)
    for refused in (
        lambda: Endpoint("http://me:secret@host/v1", "m"),
        lambda: HttpRetriever("http://me:secret@host"),
        lambda: MCPClient("http://me:secret@host", 1.0),
    ):
        with pytest.raises((ValueError, MCPError), match="user name") as refusal:
            refused()
        assert "secret" not in str(refusal.value)
