"""Prompt token ids within the limit: what is dropped, cut or refused, and in which order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo.agent import AgentProfile, ChatTemplate, LastSteps, PromptContext
from rllib_gigpo.encoding import PromptEncoder, PromptTooLongError
from tests.fakes import ByteTokenizer, word_tokenizer

WORDS = "now look at the red cup and then one two three four five six seven eight o1 o2 o3 o4 a1 a2"
PUNCTUATION = "[Observation 1 : ' o1 ' , Action a1 ] 2 3 4 5"
TOKENIZER = word_tokenizer(WORDS, PUNCTUATION)
PROFILE = AgentProfile(
    ChatTemplate(user="now {observation}", user_with_history="{history} now {observation}")
)


class Told:
    """A memory of words, one entry each."""

    def __init__(self, *entries: str):
        self.entries = entries

    def add(self, observation, action, info):
        self.entries = (*self.entries, action)

    def render(self, drop=0):
        shown = self.entries[drop:]
        return " ".join(shown), len(shown)


def encoder(limit: int, on_long_prompt: str = "error", tokenizer=TOKENIZER) -> PromptEncoder:
    return PromptEncoder(tokenizer, PROFILE, limit, on_long_prompt)


def words(ids: np.ndarray, tokenizer=TOKENIZER) -> str:
    return tokenizer.decode(ids.tolist())


def seen(observation: str) -> PromptContext:
    return PromptContext(task="", observation=observation)


def test_a_prompt_is_the_chat_template_around_the_message():
    ids = encoder(9).encode(seen("the red cup"), Told()).ids
    assert ids.dtype == np.int32
    assert words(ids) == "<user> now the red cup <assistant>"


def test_history_that_fits_is_shown_whole():
    # <user> one two three now cup <assistant>: 7 tokens, exactly the limit.
    ids = encoder(7).encode(seen("cup"), Told("one", "two", "three")).ids
    assert words(ids) == "<user> one two three now cup <assistant>"


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (6, "<user> two three now cup <assistant>"),
        (5, "<user> three now cup <assistant>"),
        # Without any history the other template speaks.
        (4, "<user> now cup <assistant>"),
    ],
)
@pytest.mark.parametrize("on_long_prompt", ["error", "end_episode", "shorten_observation"])
def test_the_oldest_history_goes_first_whatever_comes_after(limit, text, on_long_prompt):
    ids = encoder(limit, on_long_prompt).encode(seen("cup"), Told("one", "two", "three")).ids
    assert words(ids) == text


def test_the_steps_that_stay_keep_their_numbers():
    memory = LastSteps(2)
    for number in (1, 2, 3):
        memory.add(f"o{number}", f"a{min(number, 2)}", {})
    # One entry is [ Observation 3 : ' o3 ' , Action 3 : ' a2 ' ]: 15 tokens; with <user>, now,
    # cup and <assistant> 19, with two entries 34.
    text = words(encoder(33).encode(seen("cup"), memory).ids)
    assert text == "<user> [ Observation 3 : ' o3 ' , Action 3 : ' a2 ' ] now cup <assistant>"


@pytest.mark.parametrize("on_long_prompt", ["error", "end_episode"])
def test_a_prompt_too_long_without_history_is_refused_with_both_lengths(on_long_prompt):
    # <user> now one two three <assistant>: 6 tokens.
    with pytest.raises(PromptTooLongError, match=r"has 6 tokens.*max_prompt_tokens is 5") as error:
        encoder(5, on_long_prompt).encode(seen("one two three"), Told("four", "five"))
    for cure in ("raise llm(max_prompt_tokens=...)", "'shorten_observation'", "'end_episode'"):
        assert cure in str(error.value)


def test_a_shortened_observation_loses_its_end_and_the_history():
    ids = (
        encoder(6, "shorten_observation")
        .encode(seen("one two three four five six seven eight"), Told("cup", "red"))
        .ids
    )
    # <user>, now and <assistant> leave room for three words.
    assert words(ids) == "<user> now one two three <assistant>"


def test_shortening_cuts_no_more_than_it_must_where_a_token_is_a_byte():
    # "now " is 4 bytes; limit 20 leaves 16 for the observation.
    text = words(
        encoder(20, "shorten_observation", ByteTokenizer()).encode(seen("x" * 30), Told()).ids,
        ByteTokenizer(),
    )
    assert text == "now " + "x" * 16


def test_shortening_copes_with_characters_of_several_tokens():
    # Ten characters of four bytes make 44 tokens; 16 bytes of room hold four of them.
    tokenizer = ByteTokenizer()
    ids = encoder(20, "shorten_observation", tokenizer).encode(seen("🙂" * 10), Told()).ids
    assert words(ids, tokenizer) == "now 🙂🙂🙂🙂"


def test_a_template_that_fills_the_limit_leaves_an_empty_observation():
    ids = encoder(4, "shorten_observation", ByteTokenizer()).encode(seen("x" * 30), Told()).ids
    assert words(ids, ByteTokenizer()) == "now "


def test_a_template_over_the_limit_is_refused():
    with pytest.raises(PromptTooLongError, match=r"max_prompt_tokens=2 .*empty observation"):
        encoder(2, "shorten_observation").encode(seen("cup"), Told("one"))


def test_a_memory_that_cannot_drop_does_not_hang():
    class Stubborn(Told):
        def render(self, drop=0):
            return super().render(0)

    with pytest.raises(PromptTooLongError):
        encoder(6).encode(seen("cup"), Stubborn("one", "two", "three"))


@given(
    observation=st.text(alphabet="ab é中🙂\n", max_size=60),
    history=st.lists(st.text(alphabet="xy ", min_size=1, max_size=6), max_size=6),
    limit=st.integers(4, 60),
)
def test_the_limit_is_never_exceeded(observation, history, limit):
    tokenizer = ByteTokenizer()
    memory = Told(*history)
    ids = encoder(limit, "shorten_observation", tokenizer).encode(seen(observation), memory).ids
    assert len(ids) <= limit
    bare = len(f"now {observation}".encode())
    if bare > limit:
        kept = words(ids, tokenizer).removeprefix("now ")
        assert observation.startswith(kept)
        one_more = observation[: len(kept) + 1]
        assert len(f"now {one_more}".encode()) > limit
        with pytest.raises(PromptTooLongError):
            encoder(limit, "error", tokenizer).encode(seen(observation), memory)
    else:
        # Nothing of the observation is cut, and as much history is shown as fits.
        assert words(ids, tokenizer).endswith(f"now {observation}")
        sizes = [len(" ".join(history[drop:]).encode()) + 1 + bare for drop in range(len(history))]
        fitting = [size for size in sizes if size <= limit]
        assert len(ids) == (fitting[0] if fitting else bare)


@pytest.mark.parametrize("entries", [100, 1000, 10_000])
def test_the_work_of_a_prompt_does_not_grow_with_the_memory(entries):
    class Measuring(ByteTokenizer):
        characters = 0

        def apply_chat_template(self, messages, **kwargs):
            self.characters += sum(len(message["content"]) for message in messages)
            return super().apply_chat_template(messages, **kwargs)

    tokenizer = Measuring()
    memory = Told(*["seen"] * entries)
    ids = encoder(60, "error", tokenizer).encode(seen("cup"), memory).ids
    # "seen " ten times and "now cup" are 57 of the 60 bytes; one more would be 62.
    assert len(ids) == 57
    # 0, 1, 3, 7 and 15 entries are tried, then 11, 9 and 10, each with the 7 of "now cup".
    assert tokenizer.characters == 8 * 7 + 5 * (0 + 1 + 3 + 7 + 15 + 11 + 9 + 10)


# The cache ---------------------------------------------------------------------------------------


class Counting(ByteTokenizer):
    calls = 0

    def apply_chat_template(self, messages, **kwargs):
        self.calls += 1
        return super().apply_chat_template(messages, **kwargs)


def test_equal_prompts_are_tokenised_once():
    tokenizer = Counting()
    cached = encoder(50, tokenizer=tokenizer)
    first = cached.encode(seen("cup"), Told()).ids
    assert np.array_equal(cached.encode(seen("cup"), Told()).ids, first)
    assert tokenizer.calls == 1
    assert not np.array_equal(cached.encode(seen("pan"), Told()).ids, first)
    assert tokenizer.calls == 2


def test_the_cache_tells_roles_apart():
    roles = word_tokenizer("cup")
    cached = encoder(50, tokenizer=roles)
    user = cached.tokenize([{"role": "user", "content": "cup"}]).ids
    system = cached.tokenize([{"role": "system", "content": "cup"}]).ids
    assert words(user, roles) == "<user> cup <assistant>"
    assert words(system, roles) == "<system> cup <assistant>"


def test_the_cache_forgets_the_prompt_that_was_used_longest_ago(monkeypatch):
    monkeypatch.setattr("rllib_gigpo.encoding._CACHE_SIZE", 2)
    tokenizer = Counting()
    cached = encoder(50, tokenizer=tokenizer)
    for observation in ("a", "b", "a", "c"):  # "a" was used after "b", so "c" pushes "b" out
        cached.encode(seen(observation), Told())
    assert tokenizer.calls == 3
    cached.encode(seen("a"), Told())
    assert tokenizer.calls == 3
    cached.encode(seen("b"), Told())
    assert tokenizer.calls == 4


def test_a_cached_prompt_cannot_be_changed_by_who_got_it():
    cached = encoder(50)
    ids = cached.encode(seen("cup"), Told()).ids
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 7


def test_decoding_leaves_special_tokens_out():
    ids = np.array(TOKENIZER("<assistant> look at the cup <eos>")["input_ids"], dtype=np.int32)
    assert encoder(9).decode(ids) == "look at the cup"
