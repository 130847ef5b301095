"""Tools: descriptions from functions, actions as calls, and what does not fit a schema."""

import json
import random
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.adapters.tools import Call, fault, json_schema, parse_action, random_call, tool_of
from rllib_gigpo.agent import Action, PromptContext
from rllib_gigpo.agent.profiles.tools import profile


def book(title: str, copies: int = 1, way: Literal["lend", "buy"] = "lend", *, note: Any = None):
    """Get a book
    from the library.

    Args:
        title: Its title.
        copies (int): How many,
            at most three.

    Returns:
        args: Not an argument.
    """


def test_a_function_is_described_by_its_signature_and_docstring():
    assert tool_of(book) == {
        "name": "book",
        "description": "Get a book from the library.",
        "parameters": {
            "type": "object",
            "properties": {
                "title": {"type": "string", "description": "Its title."},
                "copies": {"type": "integer", "description": "How many,"},
                "way": {"enum": ["lend", "buy"]},
                "note": {},
            },
            "required": ["title"],
        },
    }


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, int], {"type": "object"}),
        (str | None, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        (bytes, {}),
    ],
)
def test_type_hints_as_json_schema(hint, schema):
    assert json_schema(hint) == schema


@pytest.mark.parametrize(
    ("action", "parsed"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', Call("f", {"a": 1})),
        ('{"name": "f"}', Call("f", {})),
        ("<answer> it is\n four </answer>", "it is\n four"),
        ("<answer></answer>", ""),
        ('{"name": "f", "arguments": [1]}', None),
        ('{"name": 1}', None),
        ('{"tool": "f"}', None),
        ("[1]", None),
        ("f()", None),
        ("so <answer>4</answer>", None),
        ("[" * 100_000, None),
        # What Python reads and writes, and JSON does not know.
        ('{"name": "f", "arguments": {"a": NaN}}', None),
        ('{"name": "f", "arguments": {"a": [-Infinity]}}', None),
        ('{"name": "f", "arguments": {"a": 1e999}}', None),
        # No server reads a lone surrogate; a pair is a character.
        ('{"name": "f", "arguments": {"a": "\\ud83d!"}}', Call("f", {"a": "\ufffd!"})),
        ('{"name": "f", "arguments": {"a": "\\ud83d\\ude00"}}', Call("f", {"a": "\U0001f600"})),
    ],
)
def test_an_action_is_a_call_or_an_answer(action, parsed):
    assert parse_action(action) == parsed


@pytest.mark.parametrize(
    ("name", "arguments", "wrong"),
    [
        ("book", {"title": "Emma"}, None),
        ("book", {"title": "Emma", "copies": 2, "way": "buy", "note": [1]}, None),
        ("look", {}, "There is no tool 'look'; use one of ['book']."),
        ("book", {"copies": 2}, "lacks the argument(s) ['title']"),
        ("book", {"title": 4}, "'title' of 'book' does not fit"),
        ("book", {"title": "Emma", "copies": True}, "'copies' of 'book' does not fit"),
        ("book", {"title": "Emma", "way": "steal"}, "'way' of 'book' does not fit"),
        ("book", {"title": "Emma", "year": 1815}, "has no argument 'year'"),
    ],
)
def test_calls_are_held_against_the_schema(name, arguments, wrong):
    found = fault(Call(name, arguments), [tool_of(book)])
    assert (found is None) if wrong is None else (wrong in str(found))


@given(st.integers(0, 10_000))
def test_random_calls_fit(seed):
    many = {
        "name": "many",
        "parameters": {
            "properties": {
                "n": {"type": "integer", "minimum": 3, "maximum": 4},
                "f": {"type": "number"},
                "b": {"type": "boolean"},
                "l": {"type": "array", "items": {"type": "string"}},
                "o": {"type": "object"},
                "u": {"anyOf": [{"type": "null"}, {"type": ["integer", "string"]}]},
                "e": {"enum": ["x", "y"]},
            },
            "required": ["n", "f", "b", "l", "o", "u", "e"],
        },
    }
    tools = [tool_of(book), many]
    call = parse_action(random_call(tools, random.Random(seed), ("Emma",)))
    assert isinstance(call, Call)
    assert fault(call, tools) is None
    if call.name == "book":
        assert call.arguments == {"title": "Emma"}


# Profile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "action"),
    [
        (
            '<think>hm</think><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
            Action('{"name": "f", "arguments": {}}', True),
        ),
        # The last call counts; one inside the thought is none.
        (
            '<think><tool_call>{"name": "a"}</tool_call></think>'
            '<tool_call>{"name": "b"}</tool_call><tool_call>{"name": "c"}</tool_call>',
            Action('{"name": "c"}', True),
        ),
        ("<answer> 4 </answer>", Action("<answer>4</answer>", True)),
        ("<tool_call>{name: f}</tool_call>", Action("{name: f}", False)),
        ("<tool_call>[1]</tool_call>", Action("[1]", False)),
        ("<think>hm</think> just text ", Action("just text", False)),
        ("<tool_call>open", Action("<tool_call>open", False)),
        ("", Action("", False)),
    ],
)
def test_the_profile_reads_calls_and_answers(response, action):
    assert profile().read(response) == action


def test_the_profile_reads_what_it_writes_and_stops_there():
    written = profile().respond.format(action='{"name": "f", "arguments": {}}')
    assert profile().read(written) == Action('{"name": "f", "arguments": {}}', True)
    assert written.endswith(profile().stop[0])


def test_the_prompt_lists_the_tools_as_json():
    tool = tool_of(book)
    context = PromptContext("Get Emma.", "A library.", info={"tools": [tool]})
    (message,) = profile().prompt(context)
    line = message["content"].split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(line) == {"type": "function", "function": tool}
    assert message["content"].startswith("Get Emma.\nYou see now: A library.\n")
    later = PromptContext("", "A shelf.", "[Observation {1}]", 1, info={"tools": [tool]})
    assert profile().prompt(later)[0]["content"].startswith("Your last 1 step(s)")
    assert "[Observation {1}]" in profile().prompt(later)[0]["content"]
