"""Search's action language and its exact-match reward, by hand."""

import pytest

from envs.search.actions import ToolCall, parse_tool_call
from envs.search.scoring import exact_match, normalize_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Beatles", "beatles"),
        ("  a   b\tc\n", "b c"),  # "a" is an article
        ("A.N. Other!", "other"),  # points go first: "an other", then the article
        ("Theatre and thean", "theatre and thean"),  # articles are whole words
        ("U.S.", "us"),
        ("twenty-one", "twentyone"),  # punctuation is removed, not replaced by a blank
        ("April 30, 1789", "april 30 1789"),
        ("Poznań", "poznań"),  # letters outside ASCII stay
        ("«Alû»", "«alû»"),  # and so does punctuation outside ASCII
        ("the", ""),
        ("", ""),
    ],
)
def test_normalization(text, expected):
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "golden", "expected"),
    [
        ("the finnish markka", ["Finnish markka"], True),
        ("G. Stanley Hall.", ["Stanley Hall", "G. Stanley Hall"], True),
        ("Hall", ["G. Stanley Hall"], False),  # a part is no match
        ("1999", ["1998", "2000"], False),
        ("anything", [], False),
    ],
)
def test_exact_match(prediction, golden, expected):
    assert exact_match(prediction, golden) is expected


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("<search>river Aelth</search>", ToolCall("search", "river Aelth")),
        ("<answer> 1999 </answer>", ToolCall("answer", "1999")),
        ("<SEARCH>Mount Kolm</Search>", ToolCall("search", "Mount Kolm")),
        ("<think>I look it up.</think> <search>q</search> done", ToolCall("search", "q")),
        ("<search>two\nlines</search>", ToolCall("search", "two\nlines")),
        ("<answer>a < b and <b>bold</b></answer>", ToolCall("answer", "a < b and <b>bold</b>")),
    ],
)
def test_one_block_is_a_call(action, expected):
    assert parse_tool_call(action) == expected


@pytest.mark.parametrize(
    "action",
    [
        "",
        "Paris",
        "<search>q",
        "q</search>",
        "</search>q<search>",  # wrong order
        "<search>q</answer>",  # mismatched
        "<search>q</search><search>r</search>",
        "<search>q</search><answer>a</answer>",
        "<answer><search>q</search></answer>",
        "<search>q</search></answer>",  # a stray tag
        "<search>  </search>",
        "<answer></answer>",
        "< search >q</ search >",
    ],
)
def test_anything_else_is_none(action):
    assert parse_tool_call(action) is None
