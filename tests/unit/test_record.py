"""Recordings: what is kept, the file format, and the command line."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from rllib_gigpo.agent import AgentProfile, ChatTemplate, LastSteps, NoMemory
from rllib_gigpo.record import Example, load_examples, main, record, save_examples
from rllib_gigpo.vision.files import png_of_picture
from rllib_gigpo.vision.pictures import Gallery
from tests.fakes import Countdown

PROFILE = AgentProfile(
    ChatTemplate("see {observation}", user_with_history="{history} see {observation}"),
    memory=LastSteps(1),
    respond="<action> {action} </action>",
)


def png(pixels: bytes | None = None) -> bytes:
    """A PNG file of one pixel; with other bytes in place of its compressed pixels."""
    file = base64.b64decode(png_of_picture(Gallery().hang(np.zeros((1, 1, 3), np.uint8))))
    start = file.index(b"IDAT") + 4
    return file if pixels is None else file[:start] + pixels + file[start + len(pixels) :]


CUT_PNG, BROKEN_PNG = (base64.b64encode(file).decode() for file in (png()[:-24], png(b"????")))


def down(env, observation, info, rng):
    return "down"


def user(text):
    return [{"role": "user", "content": text}]


class TestRecord:
    def test_every_step_becomes_a_prompt_and_a_response(self):
        assert record(lambda: Countdown(2), PROFILE, policy=down, episodes=1) == [
            Example(user("see left 2"), "<action> down </action>", ends_turn=False),
            Example(
                user("[Observation 1: 'left 2', Action 1: 'down'] see left 1"),
                "<action> down </action>",
                ends_turn=False,
            ),
        ]

    def test_without_a_stop_string_the_turn_ends(self):
        profile = AgentProfile(ChatTemplate("{observation}"), memory=NoMemory(), stop=())
        examples = record(lambda: Countdown(1), profile, policy=down, episodes=1)
        assert [example.ends_turn for example in examples] == [True]

    def test_episodes_reset_with_seeds_in_order_and_with_their_options(self):
        env = Countdown()
        options = [{"start": 1}, {"start": 3}]
        examples = record(lambda: env, PROFILE, policy=down, episodes=2, seed=40, options=options)
        assert env.seeds == [40, 41]
        assert [e.messages[0]["content"] for e in examples if "Obs" not in str(e.messages)] == [
            "see left 1",
            "see left 3",
        ]
        assert env.closed

    def test_an_environment_whose_episode_fails_is_closed(self):
        env = Countdown()

        def lost(*situation):
            raise OSError("the policy is lost")

        with pytest.raises(OSError, match="the policy is lost"):
            record(lambda: env, PROFILE, policy=lost, episodes=2)
        assert env.closed

    def test_only_kept_episodes_are_recorded(self):
        env = Countdown()
        options = [{"start": 1}, {"start": 2}]
        examples = record(
            lambda: env,
            PROFILE,
            policy=down,
            episodes=2,
            options=options,
            keep=lambda episode: episode.length == 2,
        )
        assert len(examples) == 2

    def test_the_same_seed_records_the_same(self):
        def played(seed):
            return record(lambda: Countdown(5), PROFILE, episodes=4, seed=seed)

        assert played(3) == played(3)
        assert played(3) != played(4)


class TestFiles:
    def test_what_is_saved_is_loaded(self, tmp_path):
        examples = [Example(user("Öffne\n{x}"), "</action> 🦄", ends_turn=False), Example([], "")]
        save_examples(examples, tmp_path / "e.jsonl")
        assert load_examples(tmp_path / "e.jsonl") == examples

    def test_the_end_of_the_turn_may_be_left_out(self, tmp_path):
        row = {"messages": user("hi"), "response": "ho"}
        (tmp_path / "e.jsonl").write_text(json.dumps(row) + "\n")
        assert load_examples(tmp_path / "e.jsonl") == [Example(user("hi"), "ho", ends_turn=True)]

    @pytest.mark.parametrize(
        "line",
        [
            "",
            "{",
            "3",
            "[]",
            '{"messages": []}',
            '{"messages": 3, "response": "x"}',
            '{"messages": "hi", "response": "x"}',
            '{"messages": [], "response": null}',
            '{"messages": ["hi"], "response": "x"}',
            '{"messages": [{"role": "user"}], "response": "x"}',
            '{"messages": [{"role": "user", "content": ["hi"]}], "response": "x"}',
            '{"messages": [], "response": "", "pictures": [1]}',
            '{"messages": [], "response": "", "pictures": null}',
            '{"messages": [], "response": "", "pictures": {"a": 1}}',
            '{"messages": [], "response": "", "pictures": {"a": "no base64!"}}',
            '{"messages": [], "response": "", "pictures": {"a": "bm8gUE5H"}}',
            '{"messages": [], "response": "", "pictures": {"a": "' + CUT_PNG + '"}}',
            '{"messages": [], "response": "", "pictures": {"a": "' + BROKEN_PNG + '"}}',
            "[" * 100_000,
            '{"messages": [], "response": "", "x": ' + "9" * 10_000 + "}",
            b"\xff\xfe",
        ],
        ids=lambda line: repr(line)[:60],
    )
    def test_a_broken_line_is_named(self, tmp_path, line):
        path = tmp_path / "e.jsonl"
        line = line if isinstance(line, bytes) else line.encode()
        path.write_bytes(b'{"messages": [], "response": ""}\n' + line + b"\n")
        with pytest.raises(ValueError, match=r"line 2: expected an object with 'messages'") as told:
            load_examples(path)
        assert str(path) in str(told.value)


class TestCommand:
    def test_an_expert_is_recorded(self, tmp_path, capsys):
        path = tmp_path / "new" / "expert.jsonl"
        main(["KeyDoor", "--episodes", "5", "--output", str(path)])
        told = capsys.readouterr().out
        examples = load_examples(path)
        assert f"5 episodes, 100.0% won; {len(examples)} steps" in told
        # The profile of KeyDoor: the observation is the prompt.
        assert examples[0].messages[0]["content"].startswith("at ")
        assert examples[0].response.startswith("<action> go ")

    def test_env_config_profile_and_winners_only(self, tmp_path):
        path = tmp_path / "random.jsonl"
        common = ["--policy", "random", "--episodes", "20", "--output", str(path)]
        config = ["--env-config", '{"horizon": 3}']
        main(["KeyDoor", *common, *config])
        everything = load_examples(path)
        profile = ["--profile", "rllib_gigpo.agent.profile:default_profile"]
        main(["KeyDoor", *common, *config, *profile, "--only-won"])
        won = load_examples(path)
        assert len(everything) <= 60
        assert len(won) < len(everything)
        assert all("admissible actions" in example.messages[0]["content"] for example in won)

    def test_a_policy_of_ones_own(self, tmp_path):
        path = tmp_path / "own.jsonl"
        own = ["--policy", "tests.unit.test_record:down", "--episodes", "1"]
        main(["tests.fakes:Countdown", *own, "--output", str(path)])
        assert {e.response for e in load_examples(path)} == {
            "<think> </think><action>down</action>"
        }

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["KeyDor"], "no environment is called 'KeyDor': did you mean 'KeyDoor'?"),
            (["KeyDoor", "--env-config", "{"], "--env-config '{' is not JSON"),
            (["KeyDoor", "--env-config", "3"], "expected a JSON object"),
            (["KeyDoor", "--env-config", '{"size": 99}'], "size must be 2 to 10 cells, got 99"),
            (["KeyDoor", "--profile", "json:dumps:x"], "module 'json' has no 'dumps:x'"),
            (["KeyDoor", "--profile", "rllib_gigpo:__version__"], "is a str: expected an Agent"),
            (["nowhere:Env"], "there is no module 'nowhere'"),
            (["tests.fakes:Missing"], "module 'tests.fakes' has no 'Missing'"),
        ],
    )
    def test_wrong_arguments_are_told_in_one_sentence(self, capsys, arguments, message):
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, "--output", "x.jsonl"])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
