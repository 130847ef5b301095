"""`rllib-gigpo evaluate` against a small OpenAI-compatible server and a tiny local model."""

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rllib_gigpo import AgentProfile, ChatTemplate, NoMemory, TagParser
from rllib_gigpo.evaluate.agents import PromptedAgent
from rllib_gigpo.evaluate.endpoint import Endpoint, EndpointError, _sent, cut_after
from rllib_gigpo.evaluate.main import _folder, _Player, _told, fitting_limits, main
from rllib_gigpo.evaluate.panel import Panel, evaluate, read_episodes
from rllib_gigpo.evaluate.results import result_table, summarise
from rllib_gigpo.models import load_causal_lm
from rllib_gigpo.registry import get_env_spec
from rllib_gigpo.trained import find_checkpoint, playable, trained_as
from rllib_gigpo.vision.files import picture_of_png
from rllib_gigpo.vision.pictures import Gallery
from rllib_gigpo_cli.app import app
from rllib_gigpo_cli.parsers import evaluate_parser
from tests.chat_server import ChatServer, echo_profile, serving
from tests.ray_runs import weights_of
from tests.tiny_runs import tiny_config


@pytest.fixture
def server():
    with serving() as running:
        yield running


def _arguments(server: ChatServer, output: Path, model: str, *more: str) -> list[str]:
    shared = ["Echo", f"--endpoint={server.url}", f"--model={model}", f"--output={output}"]
    return [*shared, "--tasks=6", "--workers=3", "--quiet", *more]


def _result(output: Path) -> dict:
    return json.loads((output / "result.json").read_text())


@pytest.mark.parametrize(("model", "won"), [("good", 1.0), ("bad", 0.0)])
def test_a_model_that_repeats_wins_all_and_another_none(model, won, server, tmp_path: Path):
    assert main(_arguments(server, tmp_path, model, "--samples=2")) == 0
    found = _result(tmp_path)
    assert (found["tasks"], found["episodes"]) == (6, 12)
    assert found["success_rate"] == found["any_of_k"] == won
    # Two right answers of 5 each, or one wrong one that ends it; valid in form either way.
    assert found["return_mean"] == 10 * won
    assert found["steps_mean"] == (2 if won else 1)
    assert found["valid_action_rate"] == 1.0
    assert found["numbers"]["score"] == won
    assert sum(kind["tasks"] for kind in found["by_type"].values()) == 6
    # Stop strings are looked for here: what was sent has none, and a seed of its own each time.
    assert all("stop" not in body for body in server.requests)
    seeds = [body["seed"] for body in server.requests]
    assert len(set(seeds)) == len(seeds)
    assert {body["temperature"] for body in server.requests} == {0.4}
    table = (tmp_path / "table.md").read_text()
    assert f"| {model} |" in table
    assert "all" in table.splitlines()[0]
    assert r"\toprule" in (tmp_path / "table.tex").read_text()


def test_two_evaluations_play_the_same_tasks(server, tmp_path: Path):
    for name in ("a", "b"):
        assert main(_arguments(server, tmp_path / name, "good")) == 0
    first, second = (
        {r["task"]: r["env_seed"] for r in read_episodes(tmp_path / name / "episodes.jsonl")}
        for name in ("a", "b")
    )
    assert first == second
    assert all(seed >= 2**30 for seed in first.values())


def test_it_goes_on_where_it_was_stopped(server, tmp_path: Path, capsys):
    server.failures, server.status = 1, 400
    assert main(_arguments(server, tmp_path, "good", "--workers=1")) == 2
    told = capsys.readouterr().err
    assert "HTTP 400" in told
    assert "the same command goes on from here" in told
    assert not (tmp_path / "result.json").exists()

    assert main(_arguments(server, tmp_path, "good", "--workers=1")) == 0
    before = (tmp_path / "episodes.jsonl").read_text()
    # A line that was cut off by a crash is played again, the others are not.
    lines = before.splitlines(keepends=True)
    (tmp_path / "episodes.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    asked = len(server.requests)
    assert main(_arguments(server, tmp_path, "good", "--workers=1")) == 0
    assert len(server.requests) == asked + 2
    assert (tmp_path / "episodes.jsonl").read_text() == before
    with pytest.raises(SystemExit):
        main(_arguments(server, tmp_path, "good", "--samples=3"))
    assert "holds an evaluation with samples=1, not 3" in capsys.readouterr().err


def test_react_keeps_its_own_turns(server, tmp_path: Path):
    assert main(_arguments(server, tmp_path, "good", "--prompting=react", "--tasks=1")) == 0
    first, second = server.requests
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    roles = [m["role"] for m in second["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    # The response as it was read: up to the stop string.
    assert second["messages"][2]["content"].endswith("</action>")
    assert second["messages"][1] == first["messages"][1]


def test_reflexion_tries_again_with_what_it_learned(server, tmp_path: Path):
    arguments = _arguments(server, tmp_path, "learner", "--prompting=reflexion", "--tries=3")
    assert main(arguments) == 0
    found = _result(tmp_path)
    assert (found["success_rate"], found["tries_mean"]) == (1.0, 2.0)
    reflecting = [b for b in server.requests if "did not complete it" in str(b["messages"])]
    assert len(reflecting) == 6
    assert "You: <action> 0 </action>" in reflecting[0]["messages"][0]["content"]


def test_a_passing_failure_is_tried_again_and_a_lasting_one_named(server):
    chat = Endpoint(server.url, "good", pause_s=0.001, api_key="secret")
    messages = [{"role": "user", "content": "say 12"}]
    server.failures = 2
    assert chat(messages, {}, 0) == "<action> 12 </action> and so on"
    assert len(server.requests) == 3
    assert server.headers[0]["Authorization"] == "Bearer secret"
    server.failures = 99
    with pytest.raises(EndpointError, match="did not answer in 5 tries; the last one: HTTP 503"):
        chat(messages, {}, 0)
    with pytest.raises(ValueError, match="expected an address such as"):
        Endpoint("127.0.0.1:8000", "good")


def test_responses_end_with_the_first_stop_string():
    assert cut_after("a</b>c</d>", ["</d>", "</b>"]) == "a</b>"
    assert cut_after("abc", ["</b>"]) == "abc"


def test_pictures_are_sent_as_parts():
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    picture = Gallery().hang(pixels)
    message = {"role": "user", "content": f"look {picture.mark} here"}
    content = _sent(message, {picture.name: picture})["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "text"]
    head, data = content[1]["image_url"]["url"].split(",")
    assert head == "data:image/png;base64"
    assert (picture_of_png(data).pixels == pixels).all()


def test_summaries_by_hand():
    def record(task: int, sample: int, won: bool, kind: str) -> dict:
        return {
            "task": task, "sample": sample, "won": won, "task_type": kind, "return": 10.0 * won,
            "steps": 4, "valid_action_rate": 0.5, "tries": 1, "numbers": {"score": 0.25},
        }  # fmt: skip

    records = [
        record(0, 0, True, "Pick"), record(0, 1, False, "Pick"),
        record(1, 0, True, "Pick"), record(1, 1, True, "Pick"),
        record(2, 0, False, "Heat"), record(2, 1, False, "Heat"),
    ]  # fmt: skip
    found = summarise(records)
    # Tasks are won at 1/2, 1 and 0.
    assert found["success_rate"] == pytest.approx(0.5)
    assert found["any_of_k"] == pytest.approx(2 / 3)
    assert found["by_type"]["Pick"]["success_rate"] == pytest.approx(0.75)
    # Wilson's of share .5 of 3 tasks, see test_benchmark_learning.py.
    assert found["success_interval"] == pytest.approx([0.125335, 0.874665], abs=1e-5)
    header, rows = result_table("me", found)
    assert header == ("agent", "Heat", "Pick", "score", "all", "95 %", "any of k")
    assert rows == [["me", 0.0, 75.0, 25.0, 50.0, "[12.5, 87.5]", pytest.approx(200 / 3)]]
    with pytest.raises(ValueError, match="no episode"):
        summarise([])


@pytest.mark.parametrize("name", ["settings.json", "result.json", "table.md", "table.tex"])
def test_a_file_of_results_is_whole_or_the_one_before(name, server, tmp_path: Path, monkeypatch):
    assert main(_arguments(server, tmp_path, "good", "--tasks=1")) == 0
    before = (tmp_path / name).read_bytes()
    if name == "settings.json":
        (tmp_path / name).unlink()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises((OSError, SystemExit)):
        main(_arguments(server, tmp_path, "good", "--tasks=1"))
    found = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else b""
    assert found == (b"" if name == "settings.json" else before)


def test_a_secret_in_the_name_of_an_environment_names_no_folder(capsys):
    args = evaluate_parser().parse_args(["mcp:server --token HUSH", "--model=m"])
    player = _Player("m", args.what, None, None, {}, None, {}, None)
    assert "HUSH" not in _folder(args, player)


def test_bad_panels_are_refused():
    with pytest.raises(ValueError, match="only 'reflexion' tries again"):
        Panel("m", "Echo", {}, (1,), tries=2)
    with pytest.raises(ValueError, match="at least one task"):
        Panel("m", "Echo", {}, ())
    with pytest.raises(ValueError, match="expected one of plain, react, reflexion"):
        PromptedAgent(lambda messages, pictures, seed: "", "cot", echo_profile())


def test_a_prompt_that_is_too_long_loses_its_oldest_history(tmp_path: Path):
    from rllib_gigpo.encoding import PromptTooLongError

    seen: list[int] = []

    def chat(messages, pictures, seed):
        if len(messages) > 2:
            raise PromptTooLongError("too long")
        seen.append(len(messages))
        number = messages[-1]["content"].rsplit("say ", 1)[-1]
        return f"<action> {number} </action>"

    panel = Panel("m", "Echo", {}, (1,), prompting="react")
    (record,) = evaluate(panel, chat, get_env_spec("Echo"), echo_profile(), tmp_path, workers=1)
    assert record["won"]
    assert seen == [2, 2]


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_a_checkpoint_brings_environment_agent_and_limits(tmp_path: Path, capsys, monkeypatch):
    asks = "look: {observation}"
    profile = AgentProfile(ChatTemplate(user=asks), memory=NoMemory(), parser=TagParser())
    config = tiny_config().agent(profile=profile, max_episode_steps=4).llm(eval_temperature=0.7)
    config.evaluation(evaluation_interval=1000, evaluation_config={"env_config": {"size": 3}})
    run = tmp_path / "run"
    algorithm = config.recording(enabled=False).build_algo()
    algorithm.save_to_path(str(run / "checkpoint"))
    weights = weights_of(algorithm)
    algorithm.num_updates = 1
    algorithm.save_to_path(str(tmp_path / "newer"))
    algorithm.stop()

    found = trained_as(run / "checkpoint")
    # tiny_config's horizon, and the size of evaluation on top of it.
    assert (found.env, found.env_config) == ("KeyDoor", {"horizon": 6, "size": 3})
    assert found.profile is not None
    assert found.profile.prompt.user == asks
    with playable(str(run)) as folder:
        loaded = load_causal_lm(folder).state_dict()
        shared = set(weights) & set(loaded)
        assert len(shared) > 5
        assert all((weights[name] == loaded[name]).all() for name in shared)
    assert not Path(folder).exists()

    def played(name: str, *arguments: str) -> dict:
        assert main([*arguments, "--tasks=2", "--quiet", f"--output={tmp_path / name}"]) == 0
        assert _result(tmp_path / name)["episodes"] == 2
        return json.loads((tmp_path / name / "settings.json").read_text())

    # The run's folder is enough: everything is its checkpoint's.
    settings = played("own", str(run))
    assert settings["env_config"] == {"horizon": 6, "size": 3}
    limits = {"max_prompt_tokens": 64, "max_response_tokens": 6, "temperature": 0.7}
    digest = sha256((run / "checkpoint" / "manifest.json").read_bytes()).hexdigest()
    always = {"endpoint": None, "profile": None, "checkpoint": digest}
    assert settings["decoding"] == limits | always
    assert settings["model"] == str(run / "checkpoint")
    assert settings["max_steps"] == 4
    assert "max_response_tokens=6, temperature=0.7" in capsys.readouterr().out
    assert _result(tmp_path / "own")["steps_mean"] <= 4

    # Options replace what they name and nothing else.
    more = ["--env-config", '{"horizon": 3}', "--max-response-tokens=4", "--temperature=0"]
    settings = played("other", "KeyDoor", f"--model={run / 'checkpoint'}", *more)
    assert settings["env_config"] == {"horizon": 3, "size": 3}
    limits = {"max_prompt_tokens": 64, "max_response_tokens": 4, "temperature": 0.0}
    assert settings["decoding"] == limits | always

    # Whoever plays with it sees its prompts.
    shown = CliRunner().invoke(app, ["play", "KeyDoor", f"--model={run}", "--max-steps=1"])
    assert (shown.exit_code, "[user]\nlook: at" in shown.stdout) == (0, True)

    # Another environment has settings of its own; the limits are still the policy's.
    settings = played("local", "KeyDoorLocal", f"--model={run}", "--max-steps=2")
    assert "it was trained on KeyDoor: what it says of that" in capsys.readouterr().out
    assert (settings["env_config"], settings["max_steps"]) == ({}, 2)
    assert settings["decoding"]["max_prompt_tokens"] == 64

    # The run is trained on: the same command evaluates the newer checkpoint, in a place of its own.
    monkeypatch.chdir(tmp_path)
    same = [str(run), "--tasks=1", "--max-steps=1", "--quiet"]
    assert main(same) == 0
    (first,) = (tmp_path / "runs" / "evaluate").iterdir()
    shutil.rmtree(run / "checkpoint")
    (tmp_path / "newer").rename(run / "checkpoint")
    assert main(same) == 0
    (second,) = set((tmp_path / "runs" / "evaluate").iterdir()) - {first}
    for folder in (first, second):
        assert len(read_episodes(folder / "episodes.jsonl")) == 1
    newer = sha256((run / "checkpoint" / "manifest.json").read_bytes()).hexdigest()
    # Episodes of two checkpoints are never in one table.
    with pytest.raises(SystemExit):
        main([*same, f"--output={first}"])
    assert (
        f"{first} holds an evaluation with decoding={{'checkpoint': {digest!r}}}, not "
        f"{{'checkpoint': {newer!r}}}: name another --output, or repeat the old settings"
    ) in capsys.readouterr().err


def test_an_environment_without_a_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["KeyDoor"])
    assert "'KeyDoor' is no checkpoint, nor a folder in which" in capsys.readouterr().err


def test_the_newest_checkpoint_of_a_trial_is_found(tmp_path: Path):
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "none") is None
    for name in ("checkpoint_000002", "checkpoint_000010", "checkpoint_000030"):
        (tmp_path / name).mkdir()
    # The last one holds nothing: it was cut off.
    for name in ("checkpoint_000002", "checkpoint_000010"):
        (tmp_path / name / "class_and_ctor_args.pkl").write_bytes(b"no pickle")
    found = find_checkpoint(tmp_path)
    assert found == tmp_path / "checkpoint_000010"
    assert find_checkpoint(found) == found
    with pytest.raises(ValueError, match=r"checkpoint_000010.* cannot be read"):
        trained_as(found)


@pytest.mark.parametrize("below", ["", "trials"])
def test_the_one_trial_of_a_run_that_has_trained_is_found(below, tmp_path: Path):
    for name in ("GiGPO_a", "GiGPO_b"):
        (tmp_path / below / name / "checkpoint_000000").mkdir(parents=True)
    settings = "checkpoint_000000/class_and_ctor_args.pkl"
    (tmp_path / below / "GiGPO_a" / settings).write_bytes(b"no pickle")
    (tmp_path / below / "GiGPO_b" / "checkpoint_000000").rmdir()
    found = tmp_path / below / "GiGPO_a" / "checkpoint_000000"
    assert find_checkpoint(tmp_path) == found
    # With two of them nobody can tell which one is meant.
    (tmp_path / below / "GiGPO_b" / "checkpoint_000000").mkdir()
    (tmp_path / below / "GiGPO_b" / settings).write_bytes(b"no pickle")
    assert find_checkpoint(tmp_path) is None


_OWN_ENVIRONMENT = """
from dataclasses import replace

from envs.key_door import KeyDoor
from rllib_gigpo import ChatTemplate, register_llm_env
from rllib_gigpo.agent.profiles.key_door import profile


def asked():
    return replace(profile(), prompt=ChatTemplate(user="own: {observation}"))


register_llm_env("OnlyRegistered", lambda config: KeyDoor(**config), asked)
"""


def test_a_run_on_an_environment_that_a_script_registers_is_evaluated_as_it_was_trained(
    tmp_path: Path, capsys
):
    script = tmp_path / "registering.py"
    script.write_text(_OWN_ENVIRONMENT)
    train = tmp_path / "train.py"
    train.write_text(
        "import registering\n"
        "from tests.tiny_runs import tiny_config\n"
        "config = tiny_config().environment('OnlyRegistered').recording(enabled=False)\n"
        "algorithm = config.build_algo()\n"
        f"algorithm.save_to_path({str(tmp_path / 'kept')!r})\n"
        "algorithm.stop()\n"
    )
    # In a process of its own: here nobody knows the name.
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    subprocess.run([sys.executable, train], env={**os.environ, "PYTHONPATH": paths}, check=True)
    rest = ["--tasks=1", "--max-steps=1", "--quiet", f"--output={tmp_path / 'found'}"]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "kept"), *rest])
    assert "import what registers it, as in --import my_run.py" in capsys.readouterr().err
    assert main([str(tmp_path / "kept"), f"--import={script}", *rest]) == 0
    told = json.loads((tmp_path / "found" / "settings.json").read_text())
    assert told["env"] == "OnlyRegistered"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_fills_no_log(is_terminal: bool, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    for done in range(1, 101):
        _told(done, 100)
    printed = capsys.readouterr().out
    assert printed.endswith("100/100 episodes\n")
    # One line that is written over and over, or one line per tenth.
    assert printed.count("\n") == (1 if is_terminal else 10)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ((None, None), (1536, 512)),
        ((None, 4), (2044, 4)),
        ((2000, None), (2000, 48)),
        ((1000, None), (1000, 512)),
        ((3000, None), (3000, 1)),
        ((100, 8), (100, 8)),
    ],
)
def test_limits_that_nobody_named_fit_into_the_model(named, expected):
    found = fitting_limits(2048, *named)
    assert (found["max_prompt_tokens"], found["max_response_tokens"]) == expected


def test_a_small_model_shares_its_positions_and_a_large_one_gets_the_defaults():
    assert fitting_limits(600, None, None) == {"max_prompt_tokens": 300, "max_response_tokens": 300}
    whole = {"max_prompt_tokens": 2048, "max_response_tokens": 512}
    assert fitting_limits(32768, None, None) == fitting_limits(2560, None, None) == whole


def test_default_limits_are_cut_to_what_a_local_model_can_hold(tmp_path: Path, capsys):
    # Tiny models have 2048 positions: 2044 for the prompt are left beside 4 for the response.
    arguments = ["KeyDoor", "--model=tiny", "--tasks=1", "--max-steps=1", "--quiet"]
    assert main([*arguments, "--max-response-tokens=4", f"--output={tmp_path}"]) == 0
    told = "model 'tiny' has 2048 positions, so --max-prompt-tokens=2044 --max-response-tokens=4\n"
    assert told in capsys.readouterr().out
    decoding = json.loads((tmp_path / "settings.json").read_text())["decoding"]
    assert (decoding["max_prompt_tokens"], decoding["max_response_tokens"]) == (2044, 4)


def test_named_limits_that_a_local_model_cannot_hold_are_refused_by_their_names(tmp_path, capsys):
    limits = ["--max-prompt-tokens=2048", "--max-response-tokens=4"]
    with pytest.raises(SystemExit):
        main(["KeyDoor", "--model=tiny", "--tasks=1", *limits, f"--output={tmp_path / 'out'}"])
    assert (
        "--max-prompt-tokens=2048 and --max-response-tokens=4 are 2052 tokens together, but the "
        "model has 2048 positions: lower one of them"
    ) in capsys.readouterr().err


def test_a_local_model_is_evaluated_the_same_way(tmp_path: Path):
    arguments = [
        "KeyDoor", "--model=tiny", "--tasks=3", "--samples=2", "--max-prompt-tokens=128",
        "--max-response-tokens=8", "--workers=4", "--quiet", "--temperature=1",
    ]  # fmt: skip
    for name in ("a", "b"):
        assert main([*arguments, f"--output={tmp_path / name}"]) == 0
    first, second = (_result(tmp_path / name) for name in ("a", "b"))
    assert first == second
    assert (first["tasks"], first["episodes"]) == (3, 6)
    assert 0 <= first["valid_action_rate"] < 1
