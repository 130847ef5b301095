"""Costs of anchors that are no plain text, beside what the authors' framework does with them.

That framework turns an image into the tuple of all its numbers, a dict into a tuple of its sorted
items, and has nothing that compares meanings. `python -m benchmarks.advantages` prints these costs.
"""

import random
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import best_seconds, timed
from rllib_gigpo.embedding_anchors import embedding_anchors
from rllib_gigpo.grouping import exact_anchors
from rllib_gigpo.observations import state_key
from rllib_gigpo.state_keys import perceptual_key, structural_key

GROUPS, ROWS_PER_GROUP = 16, 400
STATES_PER_GROUP = 60
PIXELS = 96
VECTOR_SIZE = 384
TUPLED_IMAGES = 200


class Costs(NamedTuple):
    """CPU seconds for 6,400 rows; the framework's way with images is measured on a part."""

    embedding: float
    image_bytes: float
    image_perceptual: float
    image_tuples: float
    structure: float
    structure_tuples: float


def to_tuples(state: Any) -> Any:
    """Turn a state into nested tuples, as the authors' framework does."""
    if isinstance(state, np.ndarray):
        return tuple(state.flatten())
    if isinstance(state, dict):
        return tuple(sorted((key, to_tuples(value)) for key, value in state.items()))
    if isinstance(state, list):
        return tuple(to_tuples(part) for part in state)
    return state


def make_images(rng: np.random.Generator) -> list[np.ndarray]:
    """Return a picture for each row; 60 pictures of 6 x 6 coloured tiles per group."""
    tile = PIXELS // 6
    images = []
    for _ in range(GROUPS):
        tiles = rng.integers(0, 256, (STATES_PER_GROUP, 6, 6, 3), dtype=np.uint8)
        pictures = tiles.repeat(tile, axis=1).repeat(tile, axis=2)
        images += [pictures[n] for n in rng.integers(0, STATES_PER_GROUP, ROWS_PER_GROUP)]
    return images


def make_structures(rng: random.Random) -> list[dict[str, Any]]:
    """Return a state for each row: a room, what is held, and what lies where."""
    rooms, things = [f"room {n}" for n in range(10)], [f"thing {n}" for n in range(20)]
    return [
        {
            "room": rng.choice(rooms),
            "holding": rng.choice([None, *things]),
            "seen": rng.sample(things, 5),
            "open": {place: rng.random() < 0.5 for place in rng.sample(rooms, 4)},
        }
        for _ in range(GROUPS * ROWS_PER_GROUP)
    ]


def make_vectors(rng: np.random.Generator) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return a text for each row and the vector of each text: 60 per group around 20 meanings."""
    vectors, texts = {}, []
    for group in range(GROUPS):
        meanings = rng.standard_normal((20, VECTOR_SIZE))
        names = [f"{group} {state}" for state in range(STATES_PER_GROUP)]
        for number, name in enumerate(names):
            vectors[name] = meanings[number % 20] + 0.2 * rng.standard_normal(VECTOR_SIZE)
        texts += [names[n] for n in rng.integers(0, STATES_PER_GROUP, ROWS_PER_GROUP)]
    return texts, vectors


def measure() -> Costs:
    """Measure all of them.

    Raises:
        ValueError: A way of ours groups rows unlike the one it is compared with.
    """
    generator = np.random.default_rng(0)
    images, structures = make_images(generator), make_structures(random.Random(0))
    texts, vectors = make_vectors(generator)
    group = np.repeat(np.arange(GROUPS), ROWS_PER_GROUP)

    def by_meaning(given: list[str]) -> np.ndarray:
        return embedding_anchors(
            given,
            group,
            np.zeros_like(group),
            encoder=lambda asked: np.stack([vectors[text] for text in asked]),
            threshold=0.9,
        )

    part = images[:TUPLED_IMAGES]
    tupled, image_tuples = timed(lambda: exact_anchors([to_tuples(image) for image in part]))
    structured, structure_tuples = timed(lambda: exact_anchors(list(map(to_tuples, structures))))
    for name, ours, theirs in (
        ("images", exact_anchors(list(map(state_key, part))), tupled),
        ("structures", exact_anchors(list(map(structural_key, structures))), structured),
    ):
        if not np.array_equal(ours, theirs):
            raise ValueError(f"the two ways group {name} differently.")
    clusters = len(set(by_meaning(texts).tolist()))
    if clusters != 20 * GROUPS:
        raise ValueError(f"embeddings gave {clusters} clusters, expected {20 * GROUPS} meanings.")
    return Costs(
        embedding=best_seconds(by_meaning, 3, lambda: texts),
        image_bytes=best_seconds(
            lambda x: exact_anchors(list(map(state_key, x))), 3, lambda: images
        ),
        image_perceptual=best_seconds(
            lambda x: exact_anchors(list(map(perceptual_key, x))), 1, lambda: images
        ),
        image_tuples=image_tuples * len(images) / TUPLED_IMAGES,
        structure=best_seconds(
            lambda x: exact_anchors(list(map(structural_key, x))), 3, lambda: structures
        ),
        structure_tuples=structure_tuples,
    )
