"""The words of the tiny model: whatever an agent is shown or says in an environment is known."""

from __future__ import annotations

import random

import pytest

from envs.key_door import KeyDoor
from envs.key_door_team import KeyDoorTeam
from rllib_gigpo.agent import AgentProfile, ChatTemplate, LastSteps
from rllib_gigpo.agent.profile import default_profile
from rllib_gigpo.agent.profiles.key_door import profile as key_door_profile
from rllib_gigpo.games import Game
from rllib_gigpo.models.tiny import UNK, make_tokenizer, vocabulary
from rllib_gigpo.scripted import play_episode, random_legal
from rllib_gigpo.vocabulary import collect_words
from tests.fakes import Countdown


def unknown(env, profile: AgentProfile, made=None, seeds=range(900, 930)) -> set[str]:
    """What of the prompts and responses of fresh episodes the tiny model cannot spell."""
    tokenizer = make_tokenizer(vocabulary(collect_words(env, profile)), 4096)
    game = Game(made or type(env)(), "Test")
    found = set()
    for seed in seeds:
        episode = play_episode(game, profile, random_legal, random.Random(seed), seed=seed)
        for step in episode.steps:
            texts = [message["content"] for message in profile.prompt(step.context)]
            texts.append(profile.respond.format(action=step.action))
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            found |= {
                text
                for text, row in zip(texts, ids, strict=True)
                if tokenizer.convert_tokens_to_ids(UNK) in row
            }
    return found


@pytest.mark.parametrize("view", ["full", "local"])
@pytest.mark.parametrize("make_profile", [key_door_profile, default_profile])
def test_every_prompt_and_response_of_key_door_can_be_spelled(view, make_profile):
    env = KeyDoor(view=view)
    assert unknown(KeyDoor(view=view), make_profile(), env) == set()


def test_a_team_is_spelled_too():
    assert unknown(KeyDoorTeam(), default_profile()) == set()


def test_an_environment_that_tells_no_words_is_played():
    assert unknown(Countdown(), default_profile()) == set()


def test_an_environment_that_breaks_while_it_is_played_is_closed():
    class Breaks(Countdown):
        closed = 0

        def step(self, action):
            raise ZeroDivisionError

        def close(self):
            type(self).closed += 1

    with pytest.raises(ZeroDivisionError):
        collect_words(Breaks(), default_profile())
    assert Breaks.closed == 1


def test_what_only_the_prompt_says_is_known():
    profile = AgentProfile(
        ChatTemplate(
            user="first ; {task} ; {admissible_actions}",
            user_with_history="later : {history}",
            system="obey",
            action_line="* {action}",
            action_separator=" ~ ",
        ),
        memory=LastSteps(1),
        respond="ok <action>{action}</action>",
        vocabulary=("spare part",),
    )
    words = set(vocabulary(collect_words(KeyDoor(), profile)))
    assert {"first", ";", "later", ":", "obey", "*", "~", "ok", "spare", "part"} <= words
    assert {"Observation", "[", "'"} <= words  # of the memory
    assert "Pick" in words  # of the task


def test_key_doors_own_prompt_adds_nothing_to_its_words():
    words = vocabulary(collect_words(KeyDoor(), key_door_profile()))
    assert set(words) == set(vocabulary([*KeyDoor.words(), "<action> </action>"]))
    # An embedding row per word: they are few, and the same whatever the size and the view.
    assert words == vocabulary(collect_words(KeyDoor(size=7, view="local"), key_door_profile()))


def test_the_words_do_not_change_from_call_to_call():
    profile = default_profile()
    assert collect_words(Countdown(), profile) == collect_words(Countdown(), profile)


def test_an_environment_that_does_not_say_what_is_legal_gets_empty_actions():
    sent = []

    class Silent(Countdown):
        def __init__(self):
            super().__init__()
            self.action_space = self.observation_space

        def _info(self):
            return {"task": "guess"}

        def step(self, action):
            sent.append(action)
            return super().step("down")

    words = set(vocabulary(collect_words(Silent(), default_profile())))
    assert set(sent) == {""}
    assert {"left", "guess", "2", "1"} <= words


def test_an_environment_without_an_end_is_left():
    class Endless(Countdown):
        count = 0

        def step(self, action):
            Endless.count += 1
            observation, _, _, truncated, info = super().step("wait")
            return observation, 0.0, False, truncated, info

    collect_words(Endless(), default_profile())
    assert Endless.count == 24 * 24


def test_the_environment_is_closed():
    env = Countdown()
    collect_words(env, default_profile())
    assert env.closed
