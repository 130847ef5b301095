"""What a model, a file or a server may hand over: anything at all, and never a crash."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from envs.catalog import ENVIRONMENTS, SCHEMES, make
from envs.search.actions import parse_tool_call
from envs.search.passages import JsonlCorpus
from envs.search.questions import load_questions
from envs.search.rows import Question, question_from_row
from envs.webshop import files
from envs.webshop.files import iterate_json
from rllib_gigpo.agent import (
    AgentProfile,
    ChatTemplate,
    Joined,
    LastSteps,
    NoMemory,
    TagParser,
)
from rllib_gigpo.agent.profile import default_profile
from rllib_gigpo.agent.prompt import PromptContext
from rllib_gigpo.encoding import PromptEncoder, PromptTooLongError
from rllib_gigpo.evaluate.panel import read_episodes
from rllib_gigpo.playing.replay import load_episode
from rllib_gigpo.record import load_examples
from rllib_gigpo.recording.folder import RunFolder, read_json, read_lines, write_bytes
from rllib_gigpo.registry import load_object
from rllib_gigpo.report.build import report_html
from tests.fakes import ByteTokenizer, word_tokenizer
from tests.recorded import RUN, metrics_line, recorded_rows
from tests.strange_values import DEEP, VALUES

FAST = settings(suppress_health_check=list(HealthCheck), max_examples=30)

# Pieces that formats are made of, so that random texts come close to real ones.
TAGS = ["action", "think", "search", "answer", "code", "tool_call", "information"]
PIECES = [
    *(f"<{tag}>" for tag in TAGS),
    *(f"</{tag}>" for tag in TAGS),
    *[
        "```",
        "search[",
        "click[",
        "]",
        '{"name":',
        '"arguments":{',
        "}",
        '"action":',
        "{task}",
        "{",
        "%s",
        "<|im_end|>",
        "<",
        ">",
    ],
    *("10", "east", "你好", "🙂", "\\", "'", '"', "\x00", "\x1b[2J", "\u202e", "\ud800", "\n", " "),
]
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(st.characters(), max_size=60),  # surrogates, too
    st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=14).map("".join),
)
HUGE = "<action> a " * 20_000


# Parsers ------------------------------------------------------------------------------------------


def profiles() -> dict[str, AgentProfile]:
    entries = {**ENVIRONMENTS, **SCHEMES}
    return {name: load_object(entry.profile)() for name, entry in entries.items()}


PROFILES = profiles()


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_every_parser_reads_any_response(profile):
    @FAST
    @given(TEXTS)
    @example("")
    @example(HUGE)
    @example("<think>" * 20_000)
    @example("{" * 20_000)
    @example('<action>{"action": ' * 5_000)
    @example(DEEP.decode())
    def check(response):
        action = profile.read(response)
        assert isinstance(action.text, str)
        assert action.is_valid in (True, False)
        assert profile.read(response) == action

    check()


@FAST
@given(TEXTS)
@example("<search>" * 20_000)
def test_tool_calls_of_search_are_read_from_any_text(text):
    call = parse_tool_call(text)
    assert call is None or isinstance(call.text, str)


@FAST
@given(TEXTS, st.booleans(), st.booleans(), st.integers(0, 40))
def test_the_tag_parser_gives_back_what_stands_in_the_tags(text, think, cjk, fallback):
    parser = TagParser(
        require_think=think, reject_cjk=cjk, lowercase=False, fallback_chars=fallback
    )
    action = parser(text)
    assert len(action.text) <= max(len(text), fallback)
    if "</action>" not in text:
        assert not action.is_valid
        assert len(action.text) <= fallback
    wrapped = parser(f"<think>x</think><action>{text}</action>")
    if "action>" not in text:
        assert wrapped.text == " ".join(text.split())


# Prompts ------------------------------------------------------------------------------------------


@FAST
@given(
    task=TEXTS,
    observation=TEXTS,
    past=st.lists(st.tuples(TEXTS, TEXTS), max_size=5),
    actions=st.lists(TEXTS, max_size=4),
    limit=st.integers(1, 120),
    rule=st.sampled_from(["error", "end_episode", "shorten_observation"]),
)
def test_a_prompt_never_exceeds_its_limit(task, observation, past, actions, limit, rule):
    memory = Joined(NoMemory(), LastSteps(3))
    for seen, done in past:
        memory.add(seen, done, {})
    context = PromptContext(task, observation, step=len(past), admissible_actions=tuple(actions))
    encoder = PromptEncoder(
        word_tokenizer("your current observation is"), default_profile(), limit, rule
    )
    try:
        ids = encoder.encode(context, memory).ids
    except PromptTooLongError:
        return
    assert 0 < len(ids) <= limit
    assert ids.max() < len(encoder.tokenizer)


@FAST
@given(task=st.text(max_size=30), observation=st.text(max_size=30))
def test_texts_stand_in_the_prompt_as_they_are(task, observation):
    """Braces, percent signs and tags of an observation are no part of the template."""
    profile = AgentProfile(ChatTemplate("{task}|{observation}"), memory=NoMemory())
    encoder = PromptEncoder(ByteTokenizer(), profile, 4096)
    ids = encoder.encode(PromptContext(task, observation), NoMemory()).ids
    assert bytes(ids.tolist()) == f"{task}|{observation}".encode()


@FAST
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=8), st.integers(0, 12), st.integers(1, 5))
def test_dropping_entries_empties_a_memory(steps, drop, k):
    memory = Joined(LastSteps(k), LastSteps(1))
    for observation, action in steps:
        memory.add(observation, action, {})
    text, entries = memory.render()
    shorter, left = memory.render(drop)
    assert left == max(0, entries - drop)
    assert len(shorter) <= len(text)
    assert memory.render(entries) == ("", 0)


# Environments -------------------------------------------------------------------------------------

WORLDS = [
    name
    for name, entry in ENVIRONMENTS.items()
    if not entry.multi_agent and name not in ("KeyDoorLocal", "EZPoints", "Points24")
]


@pytest.fixture(scope="module")
def worlds():
    made = {name: make(name, **ENVIRONMENTS[name].contract_kwargs) for name in WORLDS}
    yield made
    for env in made.values():
        env.close()


@pytest.mark.parametrize("name", WORLDS)
def test_an_environment_answers_any_action(name, worlds):
    env = worlds[name]

    @settings(FAST, max_examples=25)
    @given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(0, 2**31 - 1))
    @example(["search[" + "x" * 100_000], 1)
    @example(["click[" * 2_000], 1)
    @example(["<search>" + "why " * 20_000 + "</search>"], 1)
    @example(["<code>" + "(" * 5_000 + "</code>"], 1)
    @example(["(" * 5_000], 1)
    def check(actions, seed):
        env.reset(seed=seed)
        for action in actions:
            observation, reward, terminated, truncated, info = env.step(action)
            assert env.observation_space.contains(observation) or not isinstance(observation, str)
            assert np.isfinite(reward)
            assert isinstance(info, dict)
            if terminated or truncated:
                break

    check()


# Files --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_of(content: bytes, name: str = "x.jsonl") -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        yield path


LINES = st.lists(
    st.binary(max_size=30) | VALUES.map(lambda value: json.dumps(value).encode()), max_size=5
).map(lambda lines: b"\n".join(lines) + b"\n")

BYTES = pytest.mark.parametrize(
    "read",
    [
        read_json,
        read_lines,
        read_episodes,
        lambda path: load_questions((str(path),), "all"),
        lambda path: list(JsonlCorpus(path)),
        load_episode,
        load_examples,
        lambda path: list(iterate_json(path.rename(path.with_suffix(".json")))),
    ],
    ids=["json", "lines", "episodes", "questions", "corpus", "episode", "examples", "elements"],
)


@BYTES
def test_a_reader_of_files_says_what_is_wrong(read):
    @FAST
    @given(LINES)
    @example(DEEP + b"\n")
    @example(b'{"a": ' + b"9" * 10_000 + b"}\n")
    @example(b"\xff\xfe{}\n")
    @example(b"\xef\xbb\xbf{}\n")
    @example(b"\x80\x04\x95\n")
    @example(b"null\n[]\n")
    def check(content):
        with file_of(content) as path, contextlib.suppress(ValueError):
            read(path)

    check()


_EXAMPLE = {"messages": [{"role": "user", "content": "hi"}], "response": "ho", "ends_turn": True}


@FAST
@given(
    st.dictionaries(st.sampled_from(["messages", "response", "ends_turn", "pictures"]), VALUES)
    | st.fixed_dictionaries({"messages": st.lists(st.dictionaries(TEXTS, VALUES), max_size=2)})
)
@example({"pictures": [1]})
@example({"pictures": {"a": "aGk="}})
@example({"pictures": {"a": 3}})
def test_an_example_of_any_json_is_read_or_its_line_is_named(changes):
    line = json.dumps({**_EXAMPLE, **changes}).encode()
    with file_of(json.dumps(_EXAMPLE).encode() + b"\n" + line + b"\n") as path:
        told = ""
        try:
            assert len(load_examples(path)) == 2
        except ValueError as error:
            told = str(error)
        assert not told or f"{path}, line 2: " in told


@pytest.mark.parametrize(
    "element", ['["' + "x" * 10_000, "[" + "1," * 10_000, '{"a": "\\x' + "y" * 10_000]
)
def test_one_bad_byte_in_a_large_file_is_refused_before_the_file_is_read(element, monkeypatch):
    """An element without an end is all that follows, which may be gigabytes."""
    monkeypatch.setattr(files, "_CHUNK", 64)
    monkeypatch.setattr(files, "_LONGEST", 256)
    stream = io.StringIO("[[1], " + element + " ,[2]]")
    reader = files._Reader(stream, Path("x.json"))
    assert reader.symbol() == "["
    reader.skip()
    assert reader.value() == [1]
    with pytest.raises(ValueError, match=r"x\.json is cut off or is no valid JSON near"):
        reader.value()
    assert stream.tell() < 1_000


@FAST
@given(VALUES.filter(lambda value: isinstance(value, dict)))
@example({"question": "q", "answer": {"a": []}})
@example({"question": "q", "golden_answers": ["a"], "context": 3})
@example({"question": "q", "golden_answers": ["a"], "context": [["t", 3]], "metadata": []})
@example({"question": ["q"], "reward_model": {"ground_truth": {"target": 5}}})
@example({"question": "\ud800", "answer": "a"})
def test_a_row_of_questions_is_read_or_refused(row):
    with contextlib.suppress(ValueError):
        assert isinstance(question_from_row(row, "own"), Question)


_FIELDS = sorted(recorded_rows().rows[0])


@FAST
@given(
    run=VALUES,
    metrics=st.lists(st.dictionaries(st.sampled_from(sorted(metrics_line(1))), VALUES), max_size=2),
    row=st.dictionaries(st.sampled_from(_FIELDS), VALUES, max_size=4),
)
@example(run={**RUN, "starts": 3, "seeds": [1], "versions": "x"}, metrics=[], row={})
@example(run=RUN, metrics=[{"iteration": 1, "timers": {"rollout": "x"}}], row={})
@example(run=RUN, metrics=[{"iteration": 1, "seconds": "long", "env_runners": []}], row={})
@example(run=RUN, metrics=[], row={"picture": ["a"], "prompt_pictures": 3})
@example(run={**RUN, "price_per_hour": "much"}, metrics=[metrics_line(1)], row={})
def test_a_report_of_any_json_is_a_page_or_a_sentence(run, metrics, row):
    with TemporaryDirectory() as name:
        folder = RunFolder(name)
        write_bytes(folder.run, json.dumps(run).encode())
        lines = "".join(json.dumps(line) + "\n" for line in metrics)
        write_bytes(folder.metrics, lines.encode())
        rows = [{**one, **row} for one in recorded_rows().rows]
        lines = "".join(json.dumps(line) + "\n" for line in rows)
        write_bytes(folder.rollout_file(1), lines.encode())
        with contextlib.suppress(ValueError):
            assert report_html(folder).startswith("<!doctype html>")
        with contextlib.suppress(ValueError):
            load_episode(folder.rollout_file(1))
