"""Anchor grouping: exact, by key and by similarity, against a plain greedy loop."""

from difflib import SequenceMatcher

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import LCSseq

from rllib_gigpo.advantages import StepTable, gigpo
from rllib_gigpo.grouping import (
    SIZE_BINS,
    exact_anchors,
    group_size_histogram,
    key_anchors,
    similar_anchors,
)


def indel(text: str, representative: str) -> float:
    total = len(text) + len(representative)
    return 2 * LCSseq.similarity(text, representative) / total if total else 1.0


def difflib_ratio(text: str, representative: str) -> float:
    return SequenceMatcher(None, text, representative).ratio()


def greedy_clusters(texts, scopes, threshold, similarity) -> list[int]:
    """Row by row: join the first cluster of the scope whose representative is similar."""
    representatives: list[tuple] = []
    ids = []
    for text, scope in zip(texts, scopes, strict=True):
        for number, (other, representative) in enumerate(representatives):
            if other == scope and similarity(text, representative) >= threshold:
                ids.append(number)
                break
        else:
            ids.append(len(representatives))
            representatives.append((scope, text))
    return ids


def partition(ids) -> list[int]:
    """Ids renumbered by first appearance, so that equal partitions are equal lists."""
    first: dict[int, int] = {}
    return [first.setdefault(number, len(first)) for number in ids]


def one_scope(texts) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(len(texts), dtype=int), np.zeros(len(texts), dtype=int)


class TestExact:
    def test_ids_follow_first_appearance(self):
        assert exact_anchors(["b", "a", "b", "c", "a"]).tolist() == [0, 1, 0, 2, 1]

    def test_keys_of_every_kind(self):
        keys = ["1", b"1", 1, (1, "1"), (1, "1"), 1, b"1", "1"]
        assert exact_anchors(keys).tolist() == [0, 1, 2, 3, 3, 2, 1, 0]

    def test_one_character_apart_is_another_state(self):
        assert exact_anchors(["at 1 0 .", "at 1 0 . ", "at 1 0 ."]).tolist() == [0, 1, 0]

    def test_no_rows(self):
        ids = exact_anchors([])
        assert ids.shape == (0,)
        assert ids.dtype == np.int64

    @pytest.mark.parametrize("key", [1.5, ["a"], None, np.zeros(3)])
    def test_key_of_another_type_names_it_and_the_cure(self, key):
        with pytest.raises(TypeError, match=f"{type(key).__name__}, expected .* key_anchors"):
            exact_anchors(["a", key])

    def test_tuple_with_something_unhashable(self):
        with pytest.raises(TypeError, match="unhashable type: 'list'"):
            exact_anchors([("a", ["b"])])

    def test_equal_states_of_two_groups_are_two_anchor_groups(self):
        anchor = exact_anchors(["s", "s", "s", "s"])
        table = StepTable(
            group=np.array([0, 0, 1, 1]),
            episode=np.arange(4),
            agent=np.zeros(4, dtype=int),
            step=np.zeros(4, dtype=int),
            anchor=anchor,
            reward=np.array([2.0, 0.0, 10.0, 0.0]),
            valid=np.ones(4, dtype=bool),
        )
        # Means 1 and 5, not one mean of 3.
        result = gigpo(table, f_norm="none")
        assert result.step.tolist() == [1.0, -1.0, 5.0, -5.0]
        assert result.step_group_size.tolist() == [2, 2, 2, 2]


class TestKey:
    def test_groups_by_what_the_function_returns(self):
        observations = [{"room": 1, "t": 0}, {"room": 2, "t": 1}, {"room": 1, "t": 2}]
        assert key_anchors(observations, lambda seen: seen["room"]).tolist() == [0, 1, 0]

    def test_images_by_their_bytes(self):
        images = [np.zeros((2, 2)), np.ones((2, 2)), np.zeros((2, 2))]
        assert key_anchors(images, np.ndarray.tobytes).tolist() == [0, 1, 0]


class TestSimilar:
    def test_by_hand(self):
        # Similarity is 2 M / T. "abcdefghij" and "abcdefghiX" share 9 of 10: 18 / 20 = 0.9,
        # at the threshold. "abcdefghXY" shares 8 with the first: 0.8, and founds a cluster.
        texts = ["abcdefghij", "abcdefghiX", "abcdefghXY"]
        assert similar_anchors(texts, *one_scope(texts), threshold=0.9).tolist() == [0, 0, 1]

    @pytest.mark.parametrize(
        ("text", "other", "similarity"), [("cc", "cbc", 0.8), ("b  ac", "a cac", 0.6)]
    )
    def test_a_similarity_at_the_threshold_is_enough(self, text, other, similarity):
        # "cc" inside "cbc": 2 x 2 / 5 = 0.8. " ac" in both: 2 x 3 / 10 = 0.6.
        pair = [text, other]
        assert similar_anchors(pair, *one_scope(pair), threshold=similarity).tolist() == [0, 0]
        above = similarity + 1e-6
        assert similar_anchors(pair, *one_scope(pair), threshold=above).tolist() == [0, 1]

    def test_the_oldest_similar_cluster_wins(self):
        # The third is like both representatives, which are not alike: it joins the older.
        texts = ["aaaaabbbbb", "aaaaaccccc", "aaaaabbccc"]
        ids = similar_anchors(texts, *one_scope(texts), threshold=0.7)
        assert ids.tolist() == [0, 1, 0]

    def test_another_order_may_give_other_clusters(self):
        ends_first = ["aaaaabbbbb", "aaaaaccccc", "aaaaabbccc"]
        middle_first = ["aaaaabbccc", "aaaaabbbbb", "aaaaaccccc"]
        assert similar_anchors(middle_first, *one_scope(middle_first), threshold=0.7).max() == 0
        assert similar_anchors(ends_first, *one_scope(ends_first), threshold=0.7).max() == 1

    def test_clusters_stay_inside_one_group_and_agent(self):
        texts = ["same text"] * 6
        group, agent = np.array([0, 0, 0, 1, 1, 0]), np.array([0, 0, 1, 0, 0, 1])
        ids = similar_anchors(texts, group, agent, threshold=0.9)
        assert partition(ids) == [0, 0, 1, 2, 2, 1]

    def test_empty_texts_are_alike(self):
        texts = ["", "a", ""]
        assert similar_anchors(texts, *one_scope(texts), threshold=0.5).tolist() == [0, 1, 0]

    @settings(deadline=None)
    @given(
        st.lists(st.text(alphabet="abc ", max_size=8), max_size=12),
        st.sampled_from([0.3, 0.6, 0.8, 0.9, 1.0]),
        st.data(),
    )
    def test_equals_the_greedy_loop(self, texts, threshold, data):
        label = st.lists(st.integers(0, 1), min_size=len(texts), max_size=len(texts))
        group, agent = data.draw(label), data.draw(label)
        scopes = list(zip(group, agent, strict=True))
        for measure, similarity in (("rapidfuzz", indel), ("difflib_reference", difflib_ratio)):
            ids = similar_anchors(
                texts,
                np.array(group, dtype=int),
                np.array(agent, dtype=int),
                threshold=threshold,
                measure=measure,
            )
            assert partition(ids) == greedy_clusters(texts, scopes, threshold, similarity)

    def test_threshold_one_is_exact(self):
        texts = ["a b", "a  b", "a b", "b a"]
        ids = similar_anchors(texts, *one_scope(texts), threshold=1.0)
        assert ids.tolist() == exact_anchors(texts).tolist()

    def test_difflib_reference_keeps_autojunk_on_long_texts(self):
        # One changed character in 300: 299 of 300 in common, 0.997. Above 200 characters difflib
        # leaves out characters that make up more than 1 % of the text, here all but one.
        text = "ab" * 150
        changed = "ba" * 100 + "Z" + "ba" * 49 + "b"
        pair = [text, changed]
        assert difflib_ratio(changed, text) < 0.9 < indel(changed, text)
        assert similar_anchors(pair, *one_scope(pair), threshold=0.9).tolist() == [0, 0]
        reference = similar_anchors(
            pair, *one_scope(pair), threshold=0.9, measure="difflib_reference"
        )
        assert reference.tolist() == [0, 1]

    @pytest.mark.parametrize("threshold", [0.0, -0.5, 1.01, float("nan")])
    def test_threshold_out_of_range(self, threshold):
        with pytest.raises(ValueError, match="expected a number above 0 and at most 1"):
            similar_anchors(["a"], *one_scope(["a"]), threshold=threshold)

    def test_unknown_measure(self):
        with pytest.raises(ValueError, match="measure is 'cosine', expected one of 'rapidfuzz'"):
            similar_anchors(["a"], *one_scope(["a"]), threshold=0.9, measure="cosine")

    def test_anchor_that_is_no_text(self):
        with pytest.raises(TypeError, match="an anchor is a int, expected str"):
            similar_anchors(["a", 3], *one_scope("ab"), threshold=0.9)


class TestHistogram:
    def test_every_bin_by_hand(self):
        # Groups of 1, 1, 2, 5, 6, 8, 9, 10, 49, 50 and 51 rows.
        sizes = np.concatenate([np.full(n, n) for n in (1, 1, 2, 5, 6, 8, 9, 10, 49, 50, 51)])
        histogram = group_size_histogram(sizes)
        assert SIZE_BINS == ("1", "2-5", "6-8", "9", "10-49", ">=50")
        assert histogram.groups.tolist() == [2, 2, 2, 1, 2, 2]
        assert histogram.steps.tolist() == [2, 7, 14, 9, 59, 101]

    def test_no_rows(self):
        assert group_size_histogram(np.zeros(0, dtype=int)).groups.tolist() == [0] * 6

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 4), min_size=1, max_size=200))
    def test_counts_every_row_and_group_once(self, anchors):
        sizes = np.bincount(anchors)[anchors]
        histogram = group_size_histogram(sizes)
        assert histogram.steps.sum() == len(anchors)
        assert histogram.groups.sum() == len(set(anchors))

    @pytest.mark.parametrize("sizes", [[2], [3, 3], [0]])
    def test_part_of_a_group_is_an_error(self, sizes):
        with pytest.raises(ValueError, match="expected a multiple of the size"):
            group_size_histogram(np.array(sizes))
