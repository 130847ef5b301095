"""Agents: prompt templates, memories, action parsing, profiles."""

import copy
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo.agent import (
    Action,
    AgentProfile,
    ChatTemplate,
    LastSteps,
    NoMemory,
    PromptContext,
    TagParser,
)
from rllib_gigpo.agent.profile import default_profile
from rllib_gigpo.agent.profiles.webshop import short_profile as short_webshop_profile


def context(**fields) -> PromptContext:
    return PromptContext(**{"task": "find the mug", "observation": "you see a desk"} | fields)


# Prompt templates --------------------------------------------------------------------------------


def test_every_field_of_a_template_is_filled():
    template = ChatTemplate(
        user="{task}|{observation}|{history}|{history_length}|{step}|{admissible_actions}"
    )
    messages = template(
        context(
            history="earlier", history_length=2, step=6, admissible_actions=("go north", "look")
        )
    )
    # `step` counts the steps already taken; the prompt counts from 1, so 6 becomes 7.
    assert messages == [
        {
            "role": "user",
            "content": "find the mug|you see a desk|earlier|2|7|'go north'\n'look'",
        }
    ]


def test_the_history_text_is_used_only_where_there_is_history():
    template = ChatTemplate(user="now {observation}", user_with_history="{history}; {observation}")
    first = template(context())
    later = template(context(history="went north", history_length=1, step=1))
    assert [message["content"] for message in (*first, *later)] == [
        "now you see a desk",
        "went north; you see a desk",
    ]


def test_without_a_history_text_every_step_has_the_same_one():
    template = ChatTemplate(user="{observation}")
    assert template(context(history="went north", history_length=1)) == template(context())


def test_the_system_message_comes_first_and_is_filled_too():
    messages = ChatTemplate(user="{observation}", system="Your task: {task}.")(context())
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"] == "Your task: find the mug."


def test_hidden_actions_are_left_out_and_the_list_has_the_chosen_form():
    template = ChatTemplate(
        user="{admissible_actions}",
        hide_actions=("help", "look"),
        action_line="- {action}",
        action_separator=" / ",
    )
    actions = ("go north", "help", "take key", "look")
    messages = template(context(admissible_actions=actions))
    assert messages[0]["content"] == "- go north / - take key"


def test_braces_in_what_the_environment_says_are_plain_text():
    messages = ChatTemplate(user="{observation} {admissible_actions}")(
        context(observation="{task} {0}", admissible_actions=("open {box}",))
    )
    assert messages[0]["content"] == "{task} {0} 'open {box}'"


@pytest.mark.parametrize("part", ["user", "user_with_history", "system"])
@pytest.mark.parametrize(
    ("text", "named"),
    [("{observatoin}", "'observatoin'"), ("answer as {}", "''"), ("{0}", "'0'")],
)
def test_an_unknown_field_is_refused_when_the_template_is_made(part, text, named):
    texts = {"user": "{observation}", part: text}
    with pytest.raises(ValueError, match="unknown field") as error:
        ChatTemplate(**texts)
    assert named in str(error.value)
    assert "'observation'" in str(error.value)
    assert "{{" in str(error.value)


@pytest.mark.parametrize("text", ["a brace { alone", "a brace } alone"])
def test_an_unbalanced_brace_is_refused_with_the_cure(text):
    with pytest.raises(ValueError, match=re.escape("write {{ or }} for a literal brace")):
        ChatTemplate(user=text)


def test_an_action_line_without_its_field_is_refused():
    with pytest.raises(ValueError, match="action_line") as error:
        ChatTemplate(user="{admissible_actions}", action_line="{command}")
    assert "'{command}'" in str(error.value)
    assert "['action']" in str(error.value)


# Memories ----------------------------------------------------------------------------------------


def walked(k: int, steps: int) -> LastSteps:
    memory = LastSteps(k)
    for number in range(1, steps + 1):
        memory.add(f"room {number}", f"door {number}", {})
    return memory


def test_no_memory_shows_nothing():
    memory = NoMemory()
    memory.add("room", "door", {})
    assert memory.render() == ("", 0)
    assert memory.render(3) == ("", 0)


def test_the_window_keeps_the_numbers_of_the_whole_episode():
    # Five steps seen, the last two shown: they are numbers 4 and 5, not 1 and 2.
    assert walked(k=2, steps=5).render() == (
        "[Observation 4: 'room 4', Action 4: 'door 4']\n"
        "[Observation 5: 'room 5', Action 5: 'door 5']",
        2,
    )


def test_a_window_that_is_not_full_shows_what_there_is():
    assert LastSteps(3).render() == ("", 0)
    assert walked(k=3, steps=1).render() == ("[Observation 1: 'room 1', Action 1: 'door 1']", 1)


def test_dropping_leaves_out_the_oldest_and_keeps_the_numbers():
    memory = walked(k=3, steps=5)
    assert memory.render(2) == ("[Observation 5: 'room 5', Action 5: 'door 5']", 1)
    assert memory.render(3) == ("", 0)
    assert memory.render(9) == ("", 0)
    assert memory.render()[1] == 3  # rendering with a drop forgets nothing


def test_copies_of_a_memory_are_independent():
    prototype = LastSteps(2)
    episode = copy.deepcopy(prototype)
    episode.add("room", "door", {})
    assert episode.render()[1] == 1
    assert prototype.render()[1] == 0


@pytest.mark.parametrize("k", [0, -1])
def test_a_window_of_no_steps_is_refused(k):
    with pytest.raises(ValueError, match=rf"LastSteps\(k={k}\).*NoMemory"):
        LastSteps(k)


@given(k=st.integers(1, 6), steps=st.integers(0, 9), drop=st.integers(0, 9))
def test_the_window_shows_the_last_steps_in_order(k, steps, drop):
    text, shown = walked(k, steps).render(drop)
    numbers = list(range(1, steps + 1))[-k:][drop:]
    assert shown == len(numbers)
    assert [int(n) for n in re.findall(r"Observation (\d+)", text)] == numbers
    assert [int(n) for n in re.findall(r"'door (\d+)'", text)] == numbers


# Parsing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("<action>go north</action>", "go north"),
        ("<think>hm</think>  <action>\n Go   NORTH \n</action> done", "go north"),
        # The last complete block counts, also when another one was begun after it.
        ("<action>look</action> no, <action>go north</action>", "go north"),
        ("<action>go north</action> or <action>look", "go north"),
        ("<action>look <action>go north</action>", "go north"),
        ("</action><action>go north</action>", "go north"),
    ],
)
def test_the_last_complete_block_is_the_action(response, text):
    assert TagParser()(response) == Action(text, True)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("go north", "go north"),
        ("<action>go north", "<action>go north"),
        ("go north</action>", "go north</action>"),
        ("</action>go<action>", "</action>go<action>"),
        ("<Action>go north</Action>", "<action>go north</action>"),
        ("", ""),
    ],
)
def test_without_a_complete_block_the_end_of_the_response_is_sent_as_invalid(response, text):
    assert TagParser()(response) == Action(text, False)


@pytest.mark.parametrize(
    ("fallback_chars", "text"), [(5, "north"), (1, "h"), (0, ""), (99, "please go north")]
)
def test_fallback_chars_counts_from_the_end(fallback_chars, text):
    assert TagParser(fallback_chars=fallback_chars)("please go north") == Action(text, False)


def test_an_empty_action_is_invalid():
    assert TagParser()("<action>  \n </action>") == Action("", False)


@pytest.mark.parametrize(
    ("response", "valid"),
    [
        ("<think>hm</think><action>look</action>", True),
        ("<think></think><action>look</action>", True),
        ("<action>look</action>", False),
        ("<think>hm <action>look</action>", False),
        ("hm</think><action>look</action>", False),
        ("</think><think><action>look</action>", False),
        # A thought after the action is no thought before it.
        ("<action>look</action><think>hm</think>", False),
    ],
)
def test_a_required_thought_stands_before_the_action(response, valid):
    assert TagParser(require_think=True)(response) == Action("look", valid)
    assert TagParser()(response) == Action("look", True)


@pytest.mark.parametrize(
    ("character", "valid"),
    # U+4E00 and U+9FFF are the ends of the range; kana, hangul and accents are not in it.
    [("一", False), ("鿿", False), ("中", False), ("あ", True), ("한", True), ("é", True)],
)
def test_ideographs_make_a_response_invalid_where_they_are_rejected(character, valid):
    response = f"<think>{character}</think><action>look</action>"
    assert TagParser(reject_cjk=True)(response) == Action("look", valid)
    assert TagParser()(response) == Action("look", True)


def test_the_tag_and_the_case_are_settings():
    parser = TagParser(tag="search", lowercase=False)
    assert parser("<search>Who wrote Emma?</search>") == Action("Who wrote Emma?", True)
    assert parser("<action>look</action>").is_valid is False


TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(["<action>", "</action>", "<think>", "</think>", "go", " ", "\n", "中"]),
    ),
    max_size=12,
).map("".join)


@given(
    response=TEXTS,
    require_think=st.booleans(),
    reject_cjk=st.booleans(),
    lowercase=st.booleans(),
    fallback_chars=st.integers(0, 40),
)
def test_no_response_breaks_the_parser(
    response, require_think, reject_cjk, lowercase, fallback_chars
):
    parser = TagParser(
        require_think=require_think,
        reject_cjk=reject_cjk,
        lowercase=lowercase,
        fallback_chars=fallback_chars,
    )
    action = parser(response)
    assert isinstance(action.is_valid, bool)
    assert action.text == " ".join(action.text.split())
    if action.is_valid:
        before, found, _ = response.rpartition("</action>")
        assert found
        assert action.text
        inside = " ".join(before.rpartition("<action>")[2].split())
        assert action.text == (inside.lower() if lowercase else inside)
        assert not require_think or "</think>" in before
        assert not reject_cjk or "中" not in response
    elif "</action>" not in response and not lowercase:
        assert len(action.text) <= fallback_chars


# Profiles ----------------------------------------------------------------------------------------


def test_the_default_profile_shows_task_history_observation_and_actions():
    profile = default_profile()
    first = profile.prompt(context(admissible_actions=("go north",)))
    assert len(first) == 1
    for expected in ("find the mug", "you see a desk", "'go north'", "<think>", "<action>"):
        assert expected in first[0]["content"]
    assert "recent step" not in first[0]["content"]

    memory = copy.deepcopy(profile.memory)
    for number in (1, 2, 3):
        memory.add(f"room {number}", f"door {number}", {})
    history, shown = memory.render()
    later = profile.prompt(context(history=history, history_length=shown, step=3))
    content = later[0]["content"]
    assert "find the mug" in content
    assert "You have taken 2 recent step(s)" in content
    assert "Action 2: 'door 2'" in content
    assert "door 1" not in content
    assert "now at step 4" in content


def test_the_default_profile_reads_what_it_asks_for():
    profile = default_profile()
    written = profile.respond.format(action="go north")
    assert profile.read(written) == Action("go north", True)
    assert written.endswith(profile.stop[0])
    assert profile.read("<action>go north</action>") == Action("go north", False)


def test_the_default_profile_leaves_actions_as_they_are_spelled():
    profile = default_profile()
    shown = profile.prompt(context(admissible_actions=("Go North",)))[0]["content"]
    assert "'Go North'" in shown
    assert profile.read("<think>so</think><action>Go North</action>") == Action("Go North", True)


def test_the_anchor_is_the_observation_the_environments_word_or_the_users():
    profile = AgentProfile(ChatTemplate("{observation}"))
    assert profile.anchor_of("room 1", {}) == "room 1"
    assert profile.anchor_of("room 1", {"anchor": "start"}) == "start"
    own = AgentProfile(
        ChatTemplate("{observation}"), anchor=lambda seen, info: f"{seen}:{info['floor']}"
    )
    assert own.anchor_of("room 1", {"anchor": "start", "floor": 2}) == "room 1:2"


@pytest.mark.parametrize(
    ("setting", "cure"),
    [
        ({"validity": "env"}, "'parser_and_environment'"),
        ({"respond": "<action></action>"}, "{action}"),
        ({"respond": '{"act": "{action}"}'}, "{{"),
        ({"respond": "{thought} {action}"}, "'action'"),
    ],
)
def test_a_faulty_profile_is_refused_with_the_cure(setting, cure):
    (name, value), *_ = setting.items()
    with pytest.raises(ValueError, match=f"AgentProfile\\({name}=") as error:
        AgentProfile(ChatTemplate("{observation}"), **setting)
    assert repr(value) in str(error.value)
    assert cure in str(error.value)


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("search [ red mug ]", "search[red mug]"),
        ("click[b0 [x] y]", "click[b0 [x] y]"),
        ("click [ b0 [ x ] ]", "click[b0 [ x ]]"),
        ("click [ < prev ]", "click[< prev]"),
        ("look around", "look around"),
    ],
)
def test_webshops_short_profile_closes_the_brackets_of_word_level_tokenizers(written, sent):
    action = short_webshop_profile().read(f"<action> {written} </action>")
    assert action == Action(sent, True)
    assert short_webshop_profile().read(written).is_valid is False
