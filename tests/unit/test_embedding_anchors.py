"""Anchor groups by vectors, and keys of pictures and structured states."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo.embedding_anchors import embedding_anchors
from rllib_gigpo.grouping import AnchorRule, exact_anchors
from rllib_gigpo.state_keys import perceptual_key, structural_key

# Unit vectors at these angles, in degrees.
ANGLES = {"a": 0, "b": 20, "c": 40, "d": 90, "e": 180}


def encode(texts):
    """One vector per text, of a length that must not matter."""
    radians = np.radians([ANGLES[text] for text in texts])
    return 7.0 * np.stack([np.cos(radians), np.sin(radians)], axis=1)


def anchors(texts: str, group=None, threshold: float = 0.9, encoder=encode) -> list[int]:
    n = len(texts)
    groups = np.zeros(n, np.int64) if group is None else np.array(group)
    return embedding_anchors(
        list(texts), groups, np.zeros(n, np.int64), encoder=encoder, threshold=threshold
    ).tolist()


class TestEmbeddings:
    def test_texts_join_the_representative_that_they_are_like(self):
        # cos 20 = 0.940 joins a and b; c is 40 degrees from a, cos 40 = 0.766, and its own.
        assert anchors("abcde") == [0, 0, 1, 2, 3]

    def test_a_member_is_like_its_representative_not_like_other_members(self):
        # b would be a bridge from a to c, and is none.
        assert anchors("cba") == [1, 0, 0]

    def test_the_threshold_decides(self):
        assert anchors("abc", threshold=0.76) == [0, 0, 0]
        assert anchors("abc", threshold=0.95) == [0, 1, 2]
        assert anchors("aabb", threshold=1.0) == [0, 0, 1, 1]

    def test_groups_and_agents_do_not_meet(self):
        assert anchors("abab", group=[0, 0, 1, 1]) == [0, 0, 1, 1]
        found = embedding_anchors(
            ["a", "a"], np.zeros(2, np.int64), np.array([0, 1]), encoder=encode, threshold=0.9
        )
        assert found[0] != found[1]

    @given(st.permutations("aabbcddee"))
    def test_the_order_of_the_rows_does_not_matter(self, texts):
        found = anchors("".join(texts))
        number = dict(zip(texts, found, strict=True))
        assert number == {"a": 0, "b": 0, "c": 1, "d": 2, "e": 3}

    def test_the_encoder_is_asked_once_for_distinct_texts(self):
        calls = []

        def counting(texts):
            calls.append(list(texts))
            return encode(texts)

        anchors("abba", group=[0, 0, 1, 1], encoder=counting)
        assert calls == [["a", "b"]]

    def test_no_row_has_no_anchor(self):
        assert anchors("") == []

    @pytest.mark.parametrize(
        ("encoder", "message"),
        [
            (lambda texts: np.ones(len(texts)), r"shape \[2\] for 2 texts"),
            (lambda texts: np.ones((1, 3)), r"shape \[1, 3\] for 2 texts"),
            (lambda texts: np.zeros((2, 3)), "vector of length 0.0 for 'a'"),
            (lambda texts: np.full((2, 3), np.nan), "vector of length nan for 'a'"),
        ],
    )
    def test_an_encoder_that_does_not_encode_is_told_so(self, encoder, message):
        with pytest.raises(ValueError, match=message):
            anchors("ab", encoder=encoder)

    def test_wrong_arguments_raise(self):
        with pytest.raises(ValueError, match="threshold is 0"):
            anchors("ab", threshold=0.0)
        with pytest.raises(TypeError, match="an anchor is a int, expected str"):
            embedding_anchors([1], np.zeros(1, int), np.zeros(1, int), encoder=encode)

    def test_a_rule_of_anchors_uses_them(self):
        rule = AnchorRule("embedding", 0.9, encoder=encode)
        zeros = np.zeros(3, np.int64)
        assert rule(["a", "b", "c"], zeros, zeros).tolist() == [0, 0, 1]
        with pytest.raises(TypeError, match="needs an encoder"):
            AnchorRule("embedding")(["a"], zeros[:1], zeros[:1])


def picture(seed: int = 0) -> np.ndarray:
    """Blocks of 8 x 8 pixels in random greys, 64 x 72."""
    blocks = np.random.default_rng(seed).integers(0, 256, (8, 9))
    grey = np.kron(blocks, np.ones((8, 8), int)).astype(np.uint8)
    return np.stack([grey] * 3, axis=2)


class TestPerceptualKey:
    def test_bits_say_where_it_gets_brighter(self):
        # Cells 1 3 | 2 2 of one hash row each: brighter, and not: 10 in the first two of 8 bits.
        image = np.array([[1, 3], [2, 2]], np.uint8)
        assert perceptual_key(image[:1], size=1) == bytes([0b10000000])
        assert perceptual_key(image[1:], size=1) == bytes([0])

    def test_cells_are_means(self):
        # Halves of mean 2 and 3, though the pixel at the border gets darker.
        assert perceptual_key(np.array([[0, 4, 3, 3]], np.uint8), size=1) == bytes([128])

    def test_noise_does_not_count(self):
        noisy = picture().astype(int) + np.random.default_rng(1).integers(-1, 2, (64, 72, 3))
        noisy = np.clip(noisy, 0, 255).astype(np.uint8)
        assert perceptual_key(noisy) == perceptual_key(picture())

    def test_other_pictures_have_other_keys(self):
        assert len({perceptual_key(picture(seed)) for seed in range(50)}) == 50

    def test_grey_and_colour_are_alike(self):
        assert perceptual_key(picture()[..., 0]) == perceptual_key(picture())
        assert perceptual_key(picture()[..., :1]) == perceptual_key(picture())

    @pytest.mark.parametrize(
        ("shape", "message"),
        [((8,), "shape"), ((8, 9, 2), "shape"), ((7, 9), "7 x 9"), ((8, 8), "8 x 8")],
    )
    def test_what_is_no_picture_or_too_small_raises(self, shape, message):
        with pytest.raises(ValueError, match=message):
            perceptual_key(np.zeros(shape, np.uint8))


_STATES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=6,
)


class TestStructuralKey:
    def test_the_order_of_a_mapping_does_not_matter(self):
        one = {"room": "kitchen", "holding": ["mug", "egg"]}
        other = {"holding": ["mug", "egg"], "room": "kitchen"}
        assert structural_key(one) == structural_key(other)
        assert structural_key({1, 2}) == structural_key({2, 1})

    def test_the_order_of_a_sequence_does(self):
        assert structural_key(["mug", "egg"]) != structural_key(["egg", "mug"])

    def test_values_that_python_takes_for_equal_are_told_apart(self):
        assert len({structural_key(x) for x in (1, 1.0, True, "1", [1], {1})}) == 6

    def test_arrays_are_told_apart_by_shape_type_and_content(self):
        zeros = np.zeros(4)
        states = (zeros, zeros.reshape(2, 2), zeros.astype(int), np.ones(4))
        assert len({structural_key(state) for state in states}) == 4
        assert structural_key(np.int64(3)) == structural_key(3)

    def test_a_text_stays_as_it_is(self):
        assert structural_key("at 1 0") == "at 1 0"

    @given(_STATES, _STATES)
    def test_keys_are_equal_exactly_when_states_are(self, one, other):
        def typed(state):
            if isinstance(state, list):
                return [typed(part) for part in state]
            if isinstance(state, dict):
                return {key: typed(value) for key, value in state.items()}
            return (type(state), state)

        assert (structural_key(one) == structural_key(other)) == (typed(one) == typed(other))

    @given(_STATES)
    def test_keys_group_rows(self, state):
        assert exact_anchors([structural_key(state), structural_key(state)]).tolist() == [0, 0]

    def test_what_has_no_key_raises(self):
        with pytest.raises(TypeError, match="a part of the state is a object"):
            structural_key({"thing": object()})
