"""An environment that somebody else's file names is made only where that runs nothing of theirs."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.catalog import ENVIRONMENTS, SCHEMES
from envs.key_door import KeyDoor
from rllib_gigpo import register_llm_env, registry
from rllib_gigpo.playing.replay import load_episode, recorded_env
from rllib_gigpo.recording.folder import write_json
from rllib_gigpo.strangers import check_name, check_settings
from tests.command_line import run
from tests.fakes import Countdown
from tests.recorded import RUN, write_run
from tests.strange_values import VALUES

# Names that import, start, fetch or read something, whatever the settings.
DANGEROUS_NAMES = [
    "os:system",
    "os:makedirs",
    "subprocess:run",
    "tests.fakes:Countdown",
    "envs.key_door:KeyDoor",
    "no.such.module:x",
    "mcp:touch it",
    "mcp:http://127.0.0.1:9",
    "openenv:http://127.0.0.1:9",
    "trl:os:system",
    "skyrl:os:system",
    "gym:os:CartPole-v1",
    "gym:NoSuchThing-v0",
    "os:CartPole-v1",
    "textworld:/etc/passwd",
    *SCHEMES,
    "",
    ":",
    "NoSuchThing",
]
HARMLESS_NAMES = [*ENVIRONMENTS, "CartPole-v1", "gym:FrozenLake-v1"]
# Settings that start, fetch or read something in one of the bundled environments.
DANGEROUS_SETTINGS = [
    {"python_executable": "/tmp/evil"},
    {"python_executable": "reboot"},
    {"server": "http://127.0.0.1:9"},
    {"server": ["http://127.0.0.1:9"]},
    {"root": "data"},
    {"data_dir": "/home"},
    {"levels": "levels"},
    {"products": "/home"},
    {"products": "items"},
    {"questions": ["generated", "/etc/passwd"]},
    {"questions": "someone/questions"},
    {"corpus": "/etc/passwd"},
    {"retriever": "http://127.0.0.1:9"},
    {"retriever": "dense"},
    {"retriever_settings": {"model": "someone/model"}},
    {"view": "os:system"},
    {"view": "os.system"},
    {"view": "../view"},
    {"kwargs": {"entry_point": "os:system"}},
    {"target": "mcp"},
    {"command": "reboot"},
    {"split": {"nested": ["reboot"]}},
    {"split": "-c"},
    {"split": ""},
    {"split": b"train"},
    {"split": Path("train")},
    {"size": print},
]
HARMLESS_SETTINGS = [
    {},
    {"size": 5, "horizon": np.int64(3), "view": "local"},
    {"size": (6, 6), "num_levels": None, "show_task": True, "search_depth": 3.0},
    {"games": "shipped", "split": "valid_seen", "task_types": ["Pick", "Heat"], "engine": "fast"},
    {"world": "shipped", "split": "test_normal"},
    {"products": "generated", "reward": "binary"},
    {"questions": "generated", "retriever": "bm25", "corpus": "questions", "topk": 3},
    {"kwargs": {"is_slippery": False}},
]


@pytest.fixture(autouse=True)
def _nobody_has_typed_one(monkeypatch):
    """Another test's process may have, and a name that was typed is known from then on."""
    monkeypatch.setattr(registry, "_announced_spec", lambda name: None)


@pytest.mark.parametrize("name", DANGEROUS_NAMES)
def test_a_name_that_may_run_something_is_refused(name):
    with pytest.raises(ValueError, match=r"the file names the environment .*: say so"):
        check_name(name, named_by="the file", cure="say so")


@pytest.mark.parametrize("name", [None, 3, ["KeyDoor"], {"os": "system"}, KeyDoor])
def test_a_name_that_is_no_text_is_refused(name):
    with pytest.raises(ValueError, match="expected a text"):
        check_name(name, named_by="the file", cure="say so")


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_a_registered_name_is_taken(name):
    check_name(name, named_by="the file", cure="say so")


def test_what_the_user_has_registered_is_taken():
    for name in ("StrangersOwn", "strangers:own"):
        with pytest.raises(ValueError, match="say so"):
            check_name(name, named_by="the file", cure="say so")
        register_llm_env(name, Countdown)
        check_name(name, named_by="the file", cure="say so")
    gymnasium.register("StrangersGym-v0", entry_point=lambda: Countdown())
    check_name("StrangersGym-v0", named_by="the file", cure="say so")


@pytest.mark.parametrize("settings", DANGEROUS_SETTINGS, ids=str)
def test_a_setting_that_may_run_something_is_refused(settings):
    with pytest.raises(ValueError, match=r"the file sets .*: say so"):
        check_settings(settings, named_by="the file", cure="say so")
    with pytest.raises(ValueError, match=r"the file sets .*: say so"):
        check_settings({"size": 3, "kwargs": [settings]}, named_by="the file", cure="say so")


@pytest.mark.parametrize("settings", HARMLESS_SETTINGS, ids=str)
def test_a_setting_that_can_only_choose_is_taken(settings):
    check_settings(settings, named_by="the file", cure="say so")


@given(st.dictionaries(st.sampled_from(["view", "split", "kwargs", "x"]), VALUES, max_size=3))
def test_settings_that_are_taken_hold_no_path_address_or_command(settings):
    def texts(value):
        if isinstance(value, dict | list):
            inner = value.values() if isinstance(value, dict) else value
            return [text for one in inner for text in texts(one)]
        return [value] if isinstance(value, str) else []

    try:
        check_settings(settings, named_by="the file", cure="say so")
    except ValueError:
        assert texts(settings)
    else:
        assert not any(set(text) & set("/\\:.$;|~\n") for text in texts(settings))


# Replay -------------------------------------------------------------------------------------------


def rollouts(path: Path, **told) -> str:
    return str(write_run(path, run={**RUN, **told}).rollout_file(1))


@pytest.mark.parametrize(
    "kind", ["os:makedirs", "mcp:mkdir {}", "trl:os:makedirs", "skyrl:os:mkdir"]
)
def test_replay_makes_no_environment_of_a_stranger(kind, mark, tmp_path):
    name = kind.format(mark)
    file = rollouts(tmp_path / "run", env=name, env_config={"name": str(mark)})
    done = run("replay", file, "--player", "random")
    assert done.exit_code == 2
    assert f"names the environment {name!r}" in done.stderr
    assert "name it yourself with --env, or say --trust-run" in done.stderr
    assert not mark.exists()


@pytest.mark.parametrize("settings", [{"data_dir": "/x"}, {"python_executable": "/x"}], ids=str)
def test_replay_gives_an_environment_no_setting_of_a_stranger(settings, tmp_path):
    file = rollouts(tmp_path / "run", env="ALFWorld", env_config=settings)
    for typed in ((), ("--env", "AppWorld")):
        done = run("replay", file, "--player", "random", *typed)
        assert done.exit_code == 2
        assert f"sets {next(iter(settings))}='/x' of the environment" in done.stderr
        assert "--env-config" in done.stderr


def test_the_users_word_is_enough(tmp_path):
    told = {"env": "tests.fakes:Countdown", "env_config": {"start": "x/y"}}
    file = rollouts(tmp_path / "run", **told)
    episode = load_episode(file)
    assert recorded_env(episode, file, trust=True) == (told["env"], told["env_config"])
    assert recorded_env(episode, file, "a:b", '{"c": "/d"}') == ("a:b", {"c": "/d"})
    with pytest.raises(ValueError, match="sets start='x/y'"):
        recorded_env(episode, file, "tests.fakes:Countdown")
    with pytest.raises(ValueError, match="names the environment"):
        recorded_env(episode, file, None, "{}")
    done = run("replay", file, "--player", "random", "--trust-run")
    # It was made, with a start that is no number.
    assert "x/y" in f"{done.stderr}{done.exception}"


def test_a_run_folder_of_ones_own_needs_no_word(tmp_path):
    for env, settings in (
        ("KeyDoor", {"size": 5, "view": "local"}),
        ("Sokoban", {"size": [6, 6], "num_boxes": 1}),
        ("ALFWorld", {"games": "shipped", "split": "train"}),
    ):
        file = rollouts(tmp_path / env, env=env, env_config=settings)
        assert recorded_env(load_episode(file), file) == (env, settings)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([], "expected a JSON object"),
        ({"env": 3}, "say --env and --env-config"),
        ({"env": "KeyDoor", "env_config": [1]}, "expected an object"),
        ({"env": "KeyDoor", "env_config": "x"}, "expected an object"),
        ({"env": "KeyDoor", "settings": [1]}, "the recorded observation is"),
    ],
    ids=str,
)
def test_a_run_file_of_another_form_is_refused_in_a_sentence(content, told, tmp_path):
    folder = write_run(tmp_path, iterations=1)
    write_json(folder.run, content)
    done = run("replay", str(folder.rollout_file(1)), "--player", "random", "--from", "1")
    assert done.exit_code == 2, json.dumps(content)
    assert told in done.stderr
