"""TextSpace: the space of all strings."""

import json
import pickle

import gymnasium
import pytest
from gymnasium.vector import AsyncVectorEnv
from gymnasium.vector.utils import batch_space
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.utils.serialization import gym_space_from_dict, gym_space_to_dict

from envs.key_door import KeyDoor
from envs.spaces import TextSpace


@given(st.text())
def test_contains_every_string(text):
    assert text in TextSpace()
    assert text in TextSpace(["go north"])


@pytest.mark.parametrize("value", [None, 3, b"go north", ["go north"], ("go", "north")])
def test_contains_nothing_but_strings(value):
    assert value not in TextSpace()


def test_samples_are_the_examples():
    space = TextSpace(["go north", "go south"], seed=0)
    assert {space.sample() for _ in range(50)} == {"go north", "go south"}


def test_samples_without_examples_are_short_printable_text():
    space = TextSpace(seed=0)
    samples = [space.sample() for _ in range(200)]
    assert {len(sample) for sample in samples} == set(range(1, 33))
    assert all(character.isprintable() or character.isspace() for character in "".join(samples))


@pytest.mark.parametrize("examples", [(), ("a", "b", "c", "d")])
def test_the_seed_decides_the_samples(examples):
    draws = []
    for seed in (5, 5, 6):
        space = TextSpace(examples)
        space.seed(seed)
        draws.append([space.sample() for _ in range(20)])
    assert draws[0] == draws[1] != draws[2]
    assert draws[0] == [TextSpace(examples, seed=5).sample(), *draws[0][1:]]


def test_pickling_keeps_equality_and_the_next_samples():
    space = TextSpace(["a", "b", "c"], seed=1)
    space.sample()
    copy = pickle.loads(pickle.dumps(space))
    assert copy == space
    assert [copy.sample() for _ in range(20)] == [space.sample() for _ in range(20)]


def test_equality_is_about_the_examples():
    assert TextSpace() == TextSpace(seed=3)
    assert TextSpace(["a"]) == TextSpace(("a",))
    assert TextSpace(["a"]) != TextSpace(["b"])
    assert TextSpace() != gymnasium.spaces.Text(9)


def test_json_round_trip():
    samples = ["Öffne die Tür!\n", ""]
    stored = json.dumps(TextSpace().to_jsonable(samples))
    assert TextSpace().from_jsonable(json.loads(stored)) == samples


def test_rllib_can_write_it_into_a_checkpoint():
    restored = gym_space_from_dict(gym_space_to_dict(TextSpace(["go north"])))
    assert isinstance(restored, gymnasium.spaces.Text)


def test_a_batch_of_texts_is_a_tuple_of_spaces():
    assert batch_space(TextSpace(), 2) == gymnasium.spaces.Tuple([TextSpace(), TextSpace()])


def test_shared_memory_is_refused_before_workers_start():
    with pytest.raises(ValueError, match="shared_memory=False"):
        AsyncVectorEnv([KeyDoor])


@pytest.mark.parametrize("examples", ["go north", ["go north", 3]])
def test_examples_must_be_a_sequence_of_strings(examples):
    with pytest.raises(TypeError, match="sequence of strings"):
        TextSpace(examples)


def test_masks_are_refused():
    with pytest.raises(ValueError, match="admissible_actions"):
        TextSpace().sample(mask=(1, None))
