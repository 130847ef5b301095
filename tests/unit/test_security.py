"""Run folders and models that somebody else wrote are read, never run; no secret is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from envs.adapters.mcp_client import MCPClient, MCPError
from envs.key_door import KeyDoor
from envs.search.client import HttpRetriever
from rllib_gigpo import register_llm_env
from rllib_gigpo.compare.runs import Run, read_results
from rllib_gigpo.evaluate.endpoint import Endpoint, EndpointError
from rllib_gigpo.evaluate.main import main as evaluate
from rllib_gigpo.models import load_causal_lm, load_tokenizer, materialize
from rllib_gigpo.recording.folder import RunFolder, write_bytes, write_lines
from rllib_gigpo.report import report_html
from rllib_gigpo.report.data import rollout_data, run_data
from tests.command_line import run
from tests.recorded import RUN, recorded_rows, write_run
from tests.tiny_runs import tiny_config

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


# Secrets ------------------------------------------------------------------------------------------


class Guarded(KeyDoor):
    """Takes settings that nobody may read."""

    def __init__(self, *, password: str, url: str):
        super().__init__(size=3)


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
