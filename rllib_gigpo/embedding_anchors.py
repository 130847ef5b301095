"""Anchor groups of texts that mean the same: vectors of a sentence encoder that point alike.

Shapes: N rows, U distinct texts of a (group, agent) pair, D vector size.
"""

from collections.abc import Callable, Sequence

import numpy as np

from rllib_gigpo.advantages.parts import FloatArray, IntArray, dense_ids

_ROUNDING = 1e-6


def embedding_anchors(
    texts: Sequence[str],
    group: IntArray,
    agent: IntArray,
    *,
    encoder: Callable[[Sequence[str]], np.ndarray],
    threshold: float = 0.9,
) -> IntArray:
    """Group texts inside each (group, agent) pair whose vectors have a cosine near 1.

    The distinct texts of a pair are gone through in alphabetical order: a text joins the oldest
    cluster whose representative it is like, else it founds one and represents it. So every member
    is like its representative, and the result is a function of the set of texts: the order of the
    rows does not matter, and how often a text occurs neither. (A text that is new to a pair can
    still change its clusters.)

    Args:
        texts: Anchor texts of the rows, length N.
        group: Task groups [N].
        agent: Agent ids [N].
        encoder: From texts to vectors [n, D], in this process, such as
            `SentenceTransformer(...).encode`. Called once, with every distinct text once.
        threshold: Smallest cosine inside a cluster, above 0 and at most 1.

    Returns:
        Anchor ids [N], one per cluster, different in every (group, agent) pair.

    Raises:
        ValueError: `threshold` is out of range, or the encoder does not give one finite vector
            other than 0 per text.
        TypeError: An anchor is not a str.
    """
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"threshold is {threshold}, expected a number above 0 and at most 1.")
    for kind in set(map(type, texts)):
        if not issubclass(kind, str):
            raise TypeError(
                f"an anchor is a {kind.__name__}, expected str: encoders read texts; group other "
                "states by equal keys (anchor='exact')."
            )
    distinct = sorted(set(texts))
    places = {text: place for place, text in enumerate(distinct)}
    place_of = np.fromiter((places[text] for text in texts), dtype=np.int64, count=len(texts))
    vectors = _unit_vectors(encoder, distinct)
    scope = dense_ids(group, agent)
    anchors = np.empty(len(texts), dtype=np.int64)
    clusters = 0
    for pair in range(int(scope.max(initial=-1)) + 1):
        rows = np.flatnonzero(scope == pair)
        members, own = np.unique(place_of[rows], return_inverse=True)
        labels = _leader_clusters(vectors[members], threshold)
        anchors[rows] = clusters + labels[own]
        clusters += int(labels.max()) + 1
    return anchors


def _unit_vectors(
    encoder: Callable[[Sequence[str]], np.ndarray], texts: Sequence[str]
) -> FloatArray:
    """Return the texts' vectors, scaled to length 1 [U, D]."""
    if not texts:
        return np.zeros((0, 1))
    vectors = np.asarray(encoder(texts), dtype=np.float64)
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise ValueError(
            f"the anchor encoder gave an array of shape {list(vectors.shape)} for {len(texts)} "
            "texts, expected one vector per text, [texts, size]."
        )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    for place in np.flatnonzero(~np.isfinite(lengths[:, 0]) | (lengths[:, 0] == 0.0)):
        raise ValueError(
            f"the anchor encoder gave a vector of length {lengths[place, 0]} for "
            f"{texts[place]!r}, expected a finite one above 0."
        )
    return vectors / lengths


def _leader_clusters(vectors: FloatArray, threshold: float) -> IntArray:
    """Return the cluster of each vector [U]: the oldest leader that it is like, else a new one."""
    labels = np.full(len(vectors), -1, dtype=np.int64)
    clusters = 0
    while (waiting := np.flatnonzero(labels < 0)).size:
        cosines = vectors[waiting] @ vectors[waiting[0]]
        alike = cosines >= threshold - _ROUNDING
        alike[0] = True
        labels[waiting[alike]] = clusters
        clusters += 1
    return labels
