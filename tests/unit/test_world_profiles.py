"""Prompts and parsers of Sokoban and Gym Cards."""

from __future__ import annotations

import json

import pytest

from envs.catalog import ENVIRONMENTS, make
from rllib_gigpo.agent.parsing import Action
from rllib_gigpo.agent.profiles import gym_cards, sokoban
from rllib_gigpo.agent.prompt import PromptContext

CARD_GAMES = sorted(gym_cards.PROFILES)


def shown(profile, observation, info, history="", length=0):
    context = PromptContext(
        task=info["task"],
        observation=observation,
        history=history,
        history_length=length,
        step=length,
        admissible_actions=tuple(info["admissible_actions"]),
        info=info,
    )
    (message,) = profile.prompt(context)
    return message["content"]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think> a </think><action> up </action>", ("up", True)),
        ("<think> a </think><action>Move LEFT</action>", ("left", True)),
        # up, down, left, right are looked for in this order
        ("<think> a </think><action>down, then up</action>", ("up", True)),
        ("<action>down</action>", ("down", False)),
        ("<think> a </think><action>still</action>", ("still", False)),
        ("<think> I go up", ("", False)),
        ("up", ("", False)),
        ("", ("", False)),
    ],
)
def test_sokoban_reads_a_direction(response, expected):
    assert sokoban.profile().read(response) == Action(*expected)


def test_sokoban_without_a_thought_for_small_models():
    assert sokoban.short_profile().read("<action> right </action>") == Action("right", True)
    assert sokoban.short_profile().read("right") == Action("", False)


def test_sokobans_prompt_shows_the_rules_the_past_and_the_room():
    profile = sokoban.profile()
    room, info = make("Sokoban").reset(seed=0)
    first = shown(profile, room, info)
    assert room in first
    assert "recent" not in first
    assert all(f"`{symbol}`" in first for symbol in "#_OX√PS")
    later = shown(profile, room, info, history="[Observation 1: ...]", length=1)
    assert "[Observation 1: ...]" in later
    assert "This is step 2." in later


@pytest.mark.parametrize(
    ("game", "response", "expected"),
    [
        ("NumberLine", '{"thoughts": "-", "action": "+"}', ("+", True)),
        ("NumberLine", '{"thoughts": "3 < 5", "ACTION" : "+"', ("+", True)),
        ("NumberLine", '{"action": "+ or -"}', ("", False)),
        ("NumberLine", '{"thoughts": "+"}', ("", False)),
        ("NumberLine", "+", ("", False)),
        ("EZPoints", '{"action": "10"}', ("10", True)),
        ("EZPoints", '{"action": "1"}', ("1", True)),
        ("EZPoints", '{"action": 10}', ("10", True)),
        # the 1 beside the 10 is another one
        ("EZPoints", '{"action": "10 1"}', ("", False)),
        ("EZPoints", '{"action": "-"}', ("", False)),
        ("EZPoints", '{"action": "10 10"}', ("10", True)),
        ("Points24", '{"action": "("}', ("(", True)),
        ("Points24", '{"action": "="}', ("=", True)),
        ("Blackjack", '{"action": "STAND"}', ("stand", True)),
        ("Blackjack", '{"action": "stand or hit"}', ("", False)),
        ("Blackjack", '{ " action " : " hit " }', ("hit", True)),
    ],
)
def test_cards_read_the_one_action_after_its_key(game, response, expected):
    assert gym_cards.PROFILES[game]().read(response) == Action(*expected)


@pytest.mark.parametrize("name", CARD_GAMES)
def test_the_answer_that_is_asked_for_is_json_and_is_read(name):
    profile = gym_cards.PROFILES[name]()
    for action in make(name).actions:
        response = profile.respond.format(action=action)
        assert json.loads(response)["action"] == action
        assert profile.read(response) == Action(action, True)
        short = gym_cards.short_profile()
        assert short.read(short.respond.format(action=action)) == Action(action, True)


@pytest.mark.parametrize("name", CARD_GAMES)
def test_the_cards_prompts_show_table_actions_and_keys(name):
    table, info = make(name).reset(seed=0)
    prompt = shown(gym_cards.PROFILES[name](), table, info)
    assert table in prompt
    assert all(f"'{action}'" in prompt for action in info["admissible_actions"])
    keys = ['"thoughts"', '"action"']
    if name == "NumberLine":
        keys += ['"current number"', '"target number"']
    assert all(key in prompt for key in keys)
    assert "{{" not in prompt
    assert "KEYS" not in prompt
    assert ('"current number"' in prompt) == (name == "NumberLine")


@pytest.mark.parametrize("name", ["Sokoban", *CARD_GAMES])
def test_profiles_know_the_actions_of_their_environments(name):
    entry = ENVIRONMENTS[name]
    assert entry.profile.startswith("rllib_gigpo.agent.profiles.")
    if name != "Sokoban":
        assert gym_cards.PROFILES[name]().parser.actions == make(name).actions
