"""Anchor-state grouping: give every row the id of its anchor state (GiGPO Eq. 6).

Rows of one (group, agent) pair with equal ids form an anchor group. Ways to compare states:

*   `exact_anchors`: equal keys, one hash map. Independent of the row order.
*   `key_anchors`: equal keys that a user's function computes from the observations (in training,
    `AgentProfile.anchor` is that function).
*   `similar_anchors`: texts close to a cluster's representative. Clusters are greedy, so the result
    depends on the row order: give rows in a fixed order (by episode, then step).
*   `embedding_anchors` (in `rllib_gigpo.embedding_anchors`): texts whose vectors point alike;
    independent of the row order.

Images and structured states become keys first, see `rllib_gigpo.state_keys`.

Shapes: N rows.
"""

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from itertools import compress
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from rllib_gigpo.advantages.parts import IntArray, check_choice, dense_ids

AnchorKey = str | bytes | int | tuple
AnchorKind = Literal["exact", "similarity", "embedding"]
Measure = Literal["rapidfuzz", "difflib_reference"]
Observation = TypeVar("Observation")

SIZE_BINS = ("1", "2-5", "6-8", "9", "10-49", ">=50")
_BIN_STARTS = (1, 2, 6, 9, 10, 50)
_CUTOFF_SLACK = 1e-3
_SCORE_ROUNDING = 1e-9


class AnchorRule(NamedTuple):
    """Which steps of a group count as taken from the same state.

    Attributes:
        kind: "exact": equal anchors. "similarity": texts that are alike. "embedding": texts whose
            vectors point alike.
        threshold: Smallest similarity inside a cluster, where similarity counts.
        measure: How similarity of texts is measured, see `similar_anchors`.
        encoder: From texts to vectors, where vectors count.
    """

    kind: AnchorKind = "exact"
    threshold: float = 0.9
    measure: Measure = "rapidfuzz"
    encoder: Callable[[Sequence[str]], np.ndarray] | None = None

    def __call__(self, anchors: Sequence[Any], group: IntArray, agent: IntArray) -> IntArray:
        """Return the anchor ids [N] of rows.

        Args:
            anchors: Anchors of the rows, length N: keys, or texts where similarity counts.
            group: Task groups [N].
            agent: Agent ids [N].

        Raises:
            TypeError: An anchor is of a type that the rule cannot compare.
        """
        if self.kind == "exact":
            return exact_anchors(anchors)
        if self.kind == "embedding":
            from rllib_gigpo.embedding_anchors import embedding_anchors

            if self.encoder is None:
                raise TypeError("AnchorRule(kind='embedding') needs an encoder, got None.")
            return embedding_anchors(
                anchors, group, agent, encoder=self.encoder, threshold=self.threshold
            )
        return similar_anchors(
            anchors, group, agent, threshold=self.threshold, measure=self.measure
        )


class SizeHistogram(NamedTuple):
    """How anchor groups spread over sizes, one count per bin of `SIZE_BINS` (paper's Figure 5).

    Attributes:
        groups: Anchor groups of the size [6].
        steps: Rows in groups of the size [6].
    """

    groups: IntArray
    steps: IntArray


def exact_anchors(keys: Sequence[AnchorKey]) -> IntArray:
    """Give equal keys equal ids, numbered by first appearance.

    Args:
        keys: Anchor keys of the rows, length N. Whole text counts; nothing is normalised.

    Returns:
        Anchor ids [N]. The same key has the same id in every group; estimators separate them.

    Raises:
        TypeError: A key is not a str, bytes, int or tuple, or a tuple holds something unhashable.
    """
    for kind in set(map(type, keys)):
        if not issubclass(kind, str | bytes | int | tuple):
            raise TypeError(
                f"an anchor key is a {kind.__name__}, expected str, bytes, int or tuple: turn the "
                "state into one of them with key_anchors (array.tobytes() for an image)."
            )
    try:
        distinct = dict.fromkeys(keys)
    except TypeError as error:
        raise TypeError(
            f"an anchor key holds an {error}, expected a tuple of str, bytes, int or tuple."
        ) from error
    ids = dict(zip(distinct, range(len(distinct)), strict=True))
    return np.fromiter(map(ids.__getitem__, keys), dtype=np.int64, count=len(keys))


def key_anchors(
    observations: Sequence[Observation], key: Callable[[Observation], AnchorKey]
) -> IntArray:
    """Group rows by a user's key of the observation, for instance its room or its rounded position.

    Args:
        observations: Observations of the rows, length N.
        key: Function from an observation to a str, bytes, int or tuple.

    Returns:
        Anchor ids [N], as in `exact_anchors`.

    Raises:
        TypeError: `key` returned another type.
    """
    return exact_anchors([key(observation) for observation in observations])


def similar_anchors(
    texts: Sequence[str],
    group: IntArray,
    agent: IntArray,
    *,
    threshold: float,
    measure: Measure = "rapidfuzz",
) -> IntArray:
    """Group similar texts inside each (group, agent) pair.

    A text joins the oldest cluster whose representative has a similarity of at least `threshold`,
    else it founds a cluster and represents it. Another row order may give other clusters. Equal
    texts are compared once, which leaves the clusters as they are.

    The two measures are not the same. "rapidfuzz" is the normalised Indel similarity 2 M / T, with
    M the length of the longest common subsequence and T the summed length of the texts.
    "difflib_reference" is Python's `SequenceMatcher(None, text, representative).ratio()` with its
    default autojunk, as in the authors' framework: it finds fewer matches, above 200 characters
    ignores frequent characters and then calls many texts different that differ in a few words. Use
    it to reproduce published runs only.

    Args:
        texts: Anchor texts of the rows, length N.
        group: Task groups [N].
        agent: Agent ids [N].
        threshold: Smallest similarity inside a cluster, above 0 and at most 1.
        measure: How similarity is measured.

    Returns:
        Anchor ids [N], one per cluster, different in every (group, agent) pair.

    Raises:
        ValueError: `threshold` or `measure` is not one of the above.
        TypeError: An anchor is not a str.
    """
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"threshold is {threshold}, expected a number above 0 and at most 1.")
    check_choice("measure", measure, ("rapidfuzz", "difflib_reference"))
    for kind in set(map(type, texts)):
        if not issubclass(kind, str):
            raise TypeError(
                f"an anchor is a {kind.__name__}, expected str: similarity compares texts; group "
                "other states by exact_anchors or key_anchors (anchor='exact')."
            )
    find_similar = _indel_matches if measure == "rapidfuzz" else _difflib_matches
    scopes = dense_ids(group, agent).tolist()
    cluster_of: dict[int, dict[str, int]] = {scope: {} for scope in set(scopes)}
    for scope, text in zip(scopes, texts, strict=True):
        cluster_of[scope][text] = -1
    clusters = 0
    for members in cluster_of.values():
        waiting = list(members)
        while waiting:
            # Going through clusters by age, the oldest unplaced text founds the next one, and
            # every unplaced text that is like it joins: none of them is like an older one.
            founder, *others = waiting
            alike = find_similar(founder, others, threshold)
            members[founder] = clusters
            members.update(dict.fromkeys(compress(others, alike), clusters))
            waiting = [text for text in others if members[text] < 0]
            clusters += 1
    anchors = [cluster_of[scope][text] for scope, text in zip(scopes, texts, strict=True)]
    return np.array(anchors, dtype=np.int64)


def group_size_histogram(sizes: IntArray) -> SizeHistogram:
    """Count anchor groups and rows by group size, in the bins of the paper's Figure 5.

    Args:
        sizes: Size of each row's anchor group [N] (`Advantages.step_group_size`).

    Returns:
        Counts per bin of `SIZE_BINS`.

    Raises:
        ValueError: The sizes do not come from whole groups.
    """
    size, rows = np.unique(sizes, return_counts=True)
    for broken in np.flatnonzero((size < 1) | (rows % np.maximum(size, 1) != 0)):
        raise ValueError(
            f"{rows[broken]} rows have group size {size[broken]}, expected a multiple of the size: "
            "pass the sizes of all rows of a batch, not of a part."
        )
    bins = np.searchsorted(_BIN_STARTS, size, side="right") - 1
    steps = np.zeros(len(SIZE_BINS), dtype=np.int64)
    groups = np.zeros(len(SIZE_BINS), dtype=np.int64)
    np.add.at(steps, bins, rows)
    np.add.at(groups, bins, rows // size)
    return SizeHistogram(groups=groups, steps=steps)


def _indel_matches(representative: str, texts: list[str], threshold: float) -> list[bool]:
    # rapidfuzz is imported here so that exact grouping needs NumPy alone.
    from rapidfuzz.distance.Indel import normalized_similarity
    from rapidfuzz.process import cdist

    # The cutoff saves time but rounds coarsely, so scores near the threshold are compared here.
    scores = cdist(
        [representative],
        texts,
        scorer=normalized_similarity,
        score_cutoff=max(0.0, threshold - _CUTOFF_SLACK),
        dtype=np.float64,
    )
    return (scores[0] >= threshold - _SCORE_ROUNDING).tolist()


def _difflib_matches(representative: str, texts: list[str], threshold: float) -> list[bool]:
    matcher = SequenceMatcher(None, "", representative)
    matches = []
    for text in texts:
        matcher.set_seq1(text)
        # Both quick ratios are upper bounds of ratio() and cheaper.
        matches.append(
            matcher.real_quick_ratio() >= threshold
            and matcher.quick_ratio() >= threshold
            and matcher.ratio() >= threshold
        )
    return matches
