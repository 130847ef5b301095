"""Pictures in texts, prompts, memories and files."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from gymnasium.spaces import Dict
from hypothesis import given
from hypothesis import strategies as st

from envs.spaces import TextSpace, image_space
from rllib_gigpo.agent import AgentProfile, ChatTemplate, LastSteps, PromptContext
from rllib_gigpo.encoding import PromptEncoder, PromptTooLongError, encode_chat
from rllib_gigpo.models import load_tokenizer
from rllib_gigpo.observations import is_observation, state_key
from rllib_gigpo.record import Example, load_examples, save_examples
from rllib_gigpo.vision import Gallery, Picture, split_marks
from rllib_gigpo.vision.pictures import strip_marks, units
from rllib_gigpo.vision.sight import load_sight
from tests.fakes import ByteTokenizer
from tests.vision_models import build_folder, picture, prompt_of

PROFILE = AgentProfile(
    ChatTemplate(user="now {observation}", user_with_history="before {history} now {observation}")
)


def pixels(value: int = 0) -> np.ndarray:
    return np.full((2, 3, 3), value, dtype=np.uint8)


# Observations and marks --------------------------------------------------------------------------


def test_text_beside_a_picture_is_an_observation():
    assert is_observation({"text": "a room", "image": pixels()})
    for other in (
        {"text": "a room"},
        {"text": 1, "image": pixels()},
        {"text": "a room", "image": pixels().astype(float)},
        {"text": "a room", "image": pixels(), "sound": ""},
        None,
    ):
        assert not is_observation(other)
    space = Dict({"text": TextSpace(), "image": image_space(2, 3)})
    assert is_observation(space.sample())


def test_text_and_picture_are_one_state_only_together():
    state = {"text": "a room", "image": pixels()}
    assert state_key(state) == state_key({"image": pixels().copy(), "text": "a room"})
    assert state_key(state) != state_key({"text": "a hall", "image": pixels()})
    assert state_key(state) != state_key({"text": "a room", "image": pixels(1)})


def test_a_gallery_keeps_equal_pictures_once_and_copies_them():
    gallery, seen = Gallery(), pixels()
    first = gallery.hang(seen)
    assert gallery.hang(pixels()) is first
    assert gallery.keep(pixels()) is first.pixels
    assert gallery.keep({"text": "", "image": pixels()})["image"] is first.pixels
    # An environment may draw the next picture into the same array.
    seen[:] = 9
    assert first.pixels.max() == 0
    with pytest.raises(ValueError, match="read-only"):
        first.pixels[0, 0, 0] = 1


def test_how_observations_are_shown():
    gallery = Gallery()
    mark = gallery.hang(pixels()).mark
    assert gallery.show("a text") == ("a text", {})
    assert gallery.show(pixels())[0] == mark
    text, shown = gallery.show({"text": "a room", "image": pixels()})
    assert text == f"{mark}\na room"
    assert [p.mark for p in shown.values()] == [mark]


def test_marks_of_unknown_pictures_stay_text():
    known, forged = Gallery().hang(pixels()), Gallery().hang(pixels(1))
    text = f"a{known.mark}{known.mark}b{forged.mark}"
    assert split_marks(text, {known.name: known}) == ["a", known, known, f"b{forged.mark}"]
    assert strip_marks(text) == "ab"


@given(st.lists(st.one_of(st.text(max_size=8), st.integers(0, 2)), max_size=8))
def test_splitting_and_joining_give_the_text_back(parts):
    held = [Gallery().hang(pixels(value)) for value in range(3)]
    text = "".join(part if isinstance(part, str) else held[part].mark for part in parts)
    found = split_marks(text, {p.name: p for p in held})
    assert "".join(part if isinstance(part, str) else part.mark for part in found) == text
    assert [p for p in found if isinstance(p, Picture)] == [
        held[part] for part in parts if isinstance(part, int)
    ]
    assert "".join(units(text)) == text
    marks = [unit for unit in units(text) if len(unit) > 1]
    assert marks == [held[part].mark for part in parts if isinstance(part, int)]


# Prompts -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = str(build_folder(tmp_path_factory.mktemp("qwen"), "qwen2_vl"))
    return load_tokenizer(folder), load_sight(folder)


def context(*observations) -> tuple[PromptContext, LastSteps]:
    """The context of the last observation, and a memory of those before."""
    gallery, memory, pictures = Gallery(), LastSteps(5), {}
    text = ""
    for number, observation in enumerate(observations):
        text, shown = gallery.show(observation)
        pictures |= shown
        if number < len(observations) - 1:
            memory.add(text, "left", {})
    return PromptContext(task="", observation=text, pictures=pictures), memory


def test_a_picture_stands_where_the_template_places_it(qwen):
    tokenizer, sight = qwen
    # 40 x 56 pixels become 32 x 64: 2 x 4 tokens of 16 x 16 pixels, between start and end marker.
    encoded = prompt_of(tokenizer, sight, "where is the ", picture(0), "box ?")
    (placed,) = encoded.images
    tokens = tokenizer.convert_ids_to_tokens(encoded.ids.tolist())
    ((start, length),) = placed.runs
    assert length == 8
    assert set(tokens[start : start + length]) == {"<|image_pad|>"}
    assert tokens[start - 1] == "<|vision_start|>"
    assert tokens[start + length : start + length + 3] == ["<|vision_end|>", "box", "?"]
    assert np.array_equal(placed.picture.pixels, picture(0).pixels)


def test_histories_hold_pictures_as_far_as_the_limit_allows(qwen):
    tokenizer, sight = qwen
    shown = [picture(number).pixels for number in range(4)]
    prompt, memory = context(*shown)

    def pictures(limit: int) -> list[bytes]:
        encoded = PromptEncoder(tokenizer, PROFILE, limit, sight=sight).encode(prompt, memory)
        assert len(encoded.ids) <= limit
        return [placed.picture.key for placed in encoded.images]

    whole = PromptEncoder(tokenizer, PROFILE, 1000, sight=sight).encode(prompt, memory)
    keys = [state_key(array) for array in shown]
    assert pictures(len(whole.ids)) == keys
    # One token less, and the oldest step goes with its picture.
    assert pictures(len(whole.ids) - 1) == keys[1:]
    # Alone, the current picture takes 8 tokens and 2 markers, beside <user>, "now" and <assistant>.
    assert pictures(8 + 2 + 3) == keys[3:]
    with pytest.raises(PromptTooLongError, match="13 tokens without any history"):
        pictures(12)


def test_shortening_drops_a_picture_as_a_whole(qwen):
    tokenizer, sight = qwen
    encoder = PromptEncoder(tokenizer, PROFILE, 12, "shorten_observation", sight)
    encoded = encoder.encode(*context({"text": "left right", "image": picture(0).pixels}))
    assert encoded.images == ()
    assert len(encoded.ids) <= 12
    encoder = PromptEncoder(tokenizer, PROFILE, 14, "shorten_observation", sight)
    encoded = encoder.encode(*context({"text": "left right up", "image": picture(0).pixels}))
    assert len(encoded.images) == 1
    assert len(encoded.ids) == 14


def test_a_cached_prompt_shows_the_pictures_of_who_asks(qwen):
    encoder = PromptEncoder(qwen[0], PROFILE, 100, sight=qwen[1])
    first = encoder.encode(*context(picture(0).pixels))
    prompt, memory = context(picture(0).pixels)
    again = encoder.encode(prompt, memory)
    assert again.ids is first.ids
    assert again.images[0].picture is next(iter(prompt.pictures.values()))
    assert again.images[0].runs == first.images[0].runs


def test_other_pictures_make_other_prompts(qwen):
    encoder = PromptEncoder(qwen[0], PROFILE, 100, sight=qwen[1])
    first = encoder.encode(*context(picture(0).pixels))
    other = encoder.encode(*context(picture(1).pixels))
    assert np.array_equal(first.ids, other.ids)
    assert first.images[0].picture.key != other.images[0].picture.key


def test_a_text_model_refuses_pictures_and_says_what_sees():
    shown = picture(0)
    messages = [{"role": "user", "content": shown.mark}]
    with pytest.raises(ValueError, match=r"1 picture.*qwen2_5_vl.*view='text'"):
        encode_chat(ByteTokenizer(), messages, {shown.name: shown})  # pyright: ignore[reportArgumentType]


def test_text_that_spells_a_placeholder_is_refused(qwen):
    with pytest.raises(ValueError, match=r"1 pictures and 2 placeholders.*image_pad"):
        prompt_of(*qwen, "now <|image_pad|> ", picture(0))


def test_a_raw_picture_is_no_text_for_a_template():
    with pytest.raises(TypeError, match=r"is a ndarray, expected text"):
        PROFILE.prompt(PromptContext(task="", observation=pixels()))  # pyright: ignore[reportArgumentType]


# Files -------------------------------------------------------------------------------------------


def test_examples_keep_each_picture_once_per_file(tmp_path):
    first, second = picture(0), picture(1)

    def example(*shown: Picture) -> Example:
        content = "".join(p.mark for p in shown)
        return Example(
            [{"role": "user", "content": content}], "left", False, {p.name: p for p in shown}
        )

    path = tmp_path / "examples.jsonl"
    examples = [example(first), example(second, first), example(first)]
    save_examples(examples, path)
    # Two pictures are written, though they are shown four times.
    assert path.read_text().count("iVBORw0KGgo") == 2
    loaded = load_examples(path)
    for before, after in zip(examples, loaded, strict=True):
        assert (after.messages, after.response, after.ends_turn) == (
            before.messages,
            "left",
            False,
        )
        assert set(after.pictures) == set(before.pictures)
        for name, shown in before.pictures.items():
            assert np.array_equal(after.pictures[name].pixels, shown.pixels)


def test_pickles_keep_equal_pictures_one_object():
    shown = picture(0)
    one, many = len(pickle.dumps([shown])), len(pickle.dumps([shown] * 100))
    assert many < one + shown.pixels.nbytes
    loaded = pickle.loads(pickle.dumps([shown] * 2))
    assert loaded[0] is loaded[1]
