"""Pictures as observations: recognised, compared, grouped, and refused by text prompts."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.spaces import Box
from ray.rllib.utils.serialization import gym_space_from_dict, gym_space_to_dict

from envs.spaces import image_space
from rllib_gigpo.agent.profile import AgentProfile, default_profile
from rllib_gigpo.agent.prompt import PromptContext
from rllib_gigpo.grouping import AnchorRule, exact_anchors
from rllib_gigpo.observations import is_picture, state_key


def picture(value=0, height=2, width=3):
    return np.full((height, width, 3), value, dtype=np.uint8)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (picture(), True),
        (picture().astype(np.float32), False),
        (picture()[..., :1], False),
        (picture()[0], False),
        (picture().tolist(), False),
        ("a text", False),
    ],
)
def test_a_picture_is_bytes_by_height_width_and_colour(value, expected):
    assert is_picture(value) is expected


def test_pictures_are_equal_when_every_pixel_is():
    other = picture()
    other[1, 2, 0] = 1
    assert state_key(picture()) == state_key(picture().copy())
    assert state_key(picture()) != state_key(other)
    # The same 18 bytes in another shape are another picture; a view is what it shows.
    assert state_key(picture(height=2, width=3)) != state_key(picture(height=3, width=2))
    assert state_key(picture(height=4)[::2]) == state_key(picture(height=2))


def test_anything_else_stands_for_itself():
    assert state_key("a text") == "a text"
    assert state_key(("room", 3)) == ("room", 3)


def test_pictures_are_anchor_states():
    profile = default_profile()
    anchors = [profile.anchor_of(picture(value), {}) for value in (0, 1, 0)]
    assert exact_anchors(anchors).tolist() == [0, 1, 0]
    assert profile.anchor_of(picture(), {"anchor": "kitchen"}) == "kitchen"
    by_shape = AgentProfile(prompt=profile.prompt, anchor=lambda seen, info: seen.shape)
    assert by_shape.anchor_of(picture(), {}) == (2, 3, 3)


def test_similarity_of_pictures_is_refused():
    anchors = [default_profile().anchor_of(picture(value), {}) for value in (0, 1)]
    with pytest.raises(TypeError, match="an anchor is a bytes, expected str"):
        AnchorRule("similarity")(anchors, np.array([0, 0]), np.array([0, 0]))


def test_a_text_prompt_refuses_a_picture():
    with pytest.raises(TypeError, match="the observation is a ndarray"):
        default_profile().prompt(PromptContext(task="", observation=picture()))


def test_the_space_of_pictures():
    space = image_space(4, 6)
    assert space.contains(picture(height=4, width=6))
    assert not space.contains(picture(height=6, width=4))
    assert is_picture(space.sample())
    assert gym_space_from_dict(gym_space_to_dict(space)) == space
    assert isinstance(space, Box)
