"""The console script: quick to answer, one shell around the functions, sentences for errors."""

import importlib.metadata
import importlib.util
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest

from rllib_gigpo_cli import app, parsers
from tests.child import run_python
from tests.command_line import run
from tests.recorded import write_run

NAMES = (
    "quickstart",
    "check",
    "check-env",
    "record",
    "sft",
    "compare",
    "evaluate",
    "export",
    "report",
    "view",
    "receipt",
    "play",
    "replay",
)


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from rllib_gigpo_cli import main\n"
        "sys.argv = ['rllib-gigpo', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'ray', 'transformers', 'numpy', 'gymnasium', 'rllib_gigpo'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = run_python("-c", code)
    for name in NAMES:
        assert f"  {name} " in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2]  # no sentence is cut off


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_command_imports_nothing_heavy(name):
    code = (
        "import sys\n"
        "from rllib_gigpo_cli import main\n"
        f"sys.argv = ['rllib-gigpo', '{name}', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'ray', 'rllib_gigpo'} & set(sys.modules)\n"
    )
    run_python("-c", code)


def test_the_docs_name_every_command():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"^\| `([\w-]+)", page, re.MULTILINE)) == known
    assert known == set(NAMES)


def test_the_script_is_installed_with_the_package():
    scripts = importlib.metadata.entry_points(group="console_scripts", name="rllib-gigpo")
    assert [script.value for script in scripts] == ["rllib_gigpo_cli:main"]


def test_the_version_is_told():
    assert run("--version").stdout.strip() == importlib.metadata.version("rllib-gigpo")


@pytest.mark.parametrize("name", ["record", "sft", "export", "check-env", "quickstart"])
def test_options_reach_the_parser_of_the_module(name, capsys):
    with pytest.raises(SystemExit) as end:
        app([name, "--help"], standalone_mode=False)
    assert end.value.code == 0
    assert f"usage: python -m rllib_gigpo.{name.replace('-', '_')}" in capsys.readouterr().out


def test_the_parsers_repeat_the_defaults_of_what_they_start():
    from rllib_gigpo.export import Dtype, Kind
    from rllib_gigpo.grouping import AnchorRule
    from rllib_gigpo.sft import WarmStart

    sft = vars(parsers.sft_parser().parse_args(["--model=m", "--data=d", "--output=o"]))
    defaults = asdict(WarmStart())
    assert sft["lr"] is None
    assert {name: sft[name] for name in defaults if name != "lr"} == {
        name: value for name, value in defaults.items() if name != "lr"
    }
    rule, check_env = AnchorRule(), parsers.check_env_parser()
    assert check_env.parse_args(["KeyDoor"]).anchor == rule.kind
    # Those that go with one anchor only are left open where they are not named.
    told = {action.dest: str(action.help).rpartition(", ")[2] for action in check_env._actions}
    assert told["similarity_threshold"] == str(rule.threshold)
    assert told["similarity_measure"] == rule.measure
    choices = {action.dest: action.choices for action in parsers.export_parser()._actions}
    assert (choices["kind"], choices["dtype"]) == (get_args(Kind), get_args(Dtype))


def parser_name(name: str) -> str:
    return f"{name.replace('-', '_')}_parser"


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(parsers, parser_name(name))])
def test_help_names_a_command_that_exists(name, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/rllib-gigpo"])
    assert parsers.program(name) == f"rllib-gigpo {name}"
    monkeypatch.setattr("sys.argv", ["/somewhere/main.py"])
    program = getattr(parsers, parser_name(name))().prog
    if program != f"rllib-gigpo {name}":
        module = program.removeprefix("python -m ")
        source = Path(importlib.util.find_spec(module).origin).read_text()
        assert '__name__ == "__main__"' in source


@pytest.mark.parametrize("name", ["export", "evaluate", "play", "replay"])
def test_the_help_says_what_trust_in_a_checkpoint_runs(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    help_text = " ".join(run(name, "--help").stdout.split())
    told = help_text.partition(" --trust-checkpoint ")[2].partition(" --")[0]
    assert told.strip().startswith("unpickle the checkpoint")
    # Only `evaluate` may take the environment from a checkpoint.
    assert ("environment" in told) == (name == "evaluate")


def test_a_check_takes_its_options_before_and_behind_the_config():
    example = ["--model", "qwen2.5-7b", "--gpus-per-engine", "1", "--lora"]
    for arguments in (
        ["--no-step", "--gpu-gib", "80", "run.py", *example],
        ["run.py", *example[:2], "--no-step", *example[2:], "--gpu-gib=80"],
    ):
        found = parsers.check_parser().parse_args(arguments)
        assert (found.config, found.no_step, found.gpu_gib) == ("run.py", True, 80.0)
        assert found.arguments == example
    found = parsers.check_parser().parse_args(["run.py", "--no"])
    assert (found.no_step, found.gpu_gib, found.arguments) == (False, None, ["--no"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("quickstart", "--algo", "nope"), "--algo: no preset is named 'nope': choose one of"),
        (("record", "KeyDoor", "--policy", "no", "--output", "{}/x"), "or one of ['expert', 'ran"),
        (("sft", "--model", "tiny", "--data", "{}/none", "--output", "{}/m"), "No such file"),
        (("compare", "--set", "{{", "--output", "{}"), "--set '{{' is not JSON"),
        (
            ("compare", "--config", "x.py:f", "--import", "{}/no.py", "--output", "{}"),
            "no.py': name one, such as my_run.py",
        ),
    ],
)
def test_mistakes_are_one_sentence_of_the_parser(arguments, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        app([text.format(tmp_path) for text in arguments], standalone_mode=False)
    assert end.value.code == 2
    assert sentence.format() in capsys.readouterr().err


def test_record_writes_what_the_module_writes(tmp_path):
    target = tmp_path / "steps.jsonl"
    result = run(
        "record", "KeyDoor", "--episodes", "2", "--policy", "random", "--output", str(target)
    )
    assert result.exit_code == 0
    assert "random policy on KeyDoor: 2 episodes" in result.stdout
    assert all("messages" in json.loads(line) for line in target.read_text().splitlines())


def test_report_and_receipt_of_a_run(tmp_path):
    write_run(tmp_path)
    result = run("report", str(tmp_path), "--output", str(tmp_path / "x.html"))
    assert result.exit_code == 0
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
    result = run("receipt", str(tmp_path))
    assert "- 2.000 hours: rollout 1.000, update 0.500, other 0.500" in result.stdout
    result = run("receipt", str(tmp_path), "--json")
    assert json.loads(result.stdout)["cost"]["price"] == 8.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("report", "{}"), "holds no run.json"),
        (("view", "{}/none"), "is no folder"),
        (("receipt", "{}"), "holds no run.json"),
        (("play", "KeyDor"), "did you mean 'KeyDoor'?"),
        (("play", "KeyDoor", "--env-config", "{{"), "is not JSON"),
        (("play", "KeyDoor", "--player", "dog"), "--player dog: expected person, expert"),
        (("play", "KeyDoor", "--player", "model"), "say which one with --model"),
        (("replay", "{}/rollouts/1.jsonl"), "is no file"),
    ],
)
def test_errors_are_one_sentence(arguments, sentence, tmp_path):
    result = run(*(text.format(tmp_path) for text in arguments))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr
    assert "Traceback" not in result.output


def test_a_taken_port_is_named(tmp_path):
    import socket

    write_run(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("view", str(tmp_path), "--port", str(port))
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in result.stderr


class TestPlay:
    def test_a_person_sees_the_prompt_and_plays(self):
        result = run("play", "KeyDoor", "--seed", "3", typed="go north\n/quit\n")
        assert result.exit_code == 0
        assert "[user]\nat 2 1 ." in result.stdout
        assert "step 0, agent: 'go north', reward 0\n" in result.stdout
        assert result.stdout.endswith("ended by the player\n")

    def test_a_person_can_ask_for_the_possible_actions(self):
        result = run("play", "KeyDoor", "--seed", "3", typed="/actions\n\n/quit\n")
        assert "go north\ngo south\ngo east\ngo west\n" in result.stdout
        # Neither that question nor an empty line is a step.
        assert "--- step 1," not in result.stdout

    @pytest.mark.parametrize("error", [None, OSError("no licence left")], ids=["ends", "fails"])
    def test_whatever_happens_what_was_made_is_closed(self, error, monkeypatch):
        from rllib_gigpo import registry
        from tests.fakes import Countdown

        made = []

        class Failing(Countdown):
            def reset(self, **arguments):
                if error is not None:
                    raise error
                return super().reset(**arguments)

        def make(env_config):
            made.append(Failing(start=1))
            return made[-1]

        spec = registry.LLMEnvSpec("Failing", make)
        monkeypatch.setitem(registry._registered, "Failing", spec)
        result = run("play", "Failing", "--player", "random")
        assert result.exit_code == (0 if error is None else 2)
        assert "no licence left" in result.stderr or error is None
        assert len(made) == 2  # one to try the settings, one to play
        assert all(env.closed for env in made)

    def test_the_expert_plays_to_the_end(self):
        result = run("play", "KeyDoor", "--seed", "3", "--player", "expert")
        assert result.exit_code == 0
        assert "return 1, won" in result.stdout


class TestReplay:
    @pytest.fixture
    def file(self, tmp_path):
        from envs.key_door import KeyDoor
        from rllib_gigpo.agent.profiles.key_door import profile
        from rllib_gigpo.playing import ScriptedPlayer, play
        from rllib_gigpo.recording.folder import RunFolder, write_json, write_lines
        from rllib_gigpo.recording.rollout_rows import rollouts_of
        from rllib_gigpo.scripted import random_legal
        from tests.recorded import iteration_of

        player = ScriptedPlayer(random_legal, profile(), seed=5)
        played = play(KeyDoor(size=5), profile(), player, seed=3, max_steps=3)
        rollouts = rollouts_of(
            iteration_of([played.episode]), lambda ids: played.asked[ids[0]][1], None
        )
        folder = RunFolder(tmp_path)
        write_lines(folder.rollout_file(1), rollouts.rows)
        write_json(folder.run, {"env": "KeyDoor", "env_config": {"size": 5}})
        return folder.rollout_file(1)

    def test_goes_on_with_another_player(self, file):
        result = run("replay", str(file), "--from", "2", "--player", "expert")
        assert result.exit_code == 0
        assert "re-creating 2 of 3 steps (seed 3) ..." in result.stdout
        assert "--- step 1," not in result.stdout
        assert "--- step 2," in result.stdout
        assert "return 1, won" in result.stdout

    @pytest.mark.parametrize("command", ["play", "replay", "record"])
    def test_what_is_imported_may_register_first(self, command, file, tmp_path):
        script = tmp_path / "registers.py"
        script.write_text(
            "from envs.key_door import KeyDoor\n"
            "from rllib_gigpo import register_llm_env\n"
            "from rllib_gigpo.agent.profiles.key_door import profile\n"
            f"register_llm_env('Only of {command}', lambda c: KeyDoor(**c), profile)\n"
        )
        name = f"Only of {command}"
        words = {
            "play": ["play", name, "--player", "expert"],
            "replay": ["replay", str(file), "--env", name, "--player", "expert"],
            "record": ["record", name, "--episodes=1", f"--output={tmp_path / 'x'}"],
        }[command]
        assert run(*words).exit_code == 2
        found = run(*words, "--import", str(script))
        assert (found.exit_code, found.stderr) == (0, "")

    def test_a_step_that_the_episode_lacks_is_named_first_of_all(self, file):
        result = run("replay", str(file), "--from", "9", "--player", "expert")
        assert result.exit_code == 2
        assert "step 9 is not in the episode, which has 3 steps" in result.stderr
        assert result.stdout == ""

    def test_says_so_where_the_environment_is_another(self, file):
        result = run("replay", str(file), "--from", "2", "--env-config", '{"size": 3}')
        assert result.exit_code == 2
        assert "step 0: the recorded observation is" in result.stderr
