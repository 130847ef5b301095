"""Anchor grouping and advantages of 6,400 rows against the loops of the authors' framework.

`python -m benchmarks.advantages`, about half a minute on one core. Both sides see the same rows and
their results are compared before any figure is printed. The loops are written anew here, after
what verl-agent does: one Python step per row, scores held as torch scalars, group statistics over
rows, and for similarity a stock `difflib.SequenceMatcher` per row and cluster.

Figures: `exact_ms`, milliseconds of exact grouping and all GiGPO advantages; `over_loop`, how many
times longer the loop takes; `similarity_s`, seconds of similarity grouping at 0.9; `over_difflib`,
how many times longer the difflib loop takes; `embedding_ms`, `image_ms`, `perceptual_ms` and
`structure_ms`, milliseconds of the other anchors (without the encoder), and `over_image_tuples`,
how many times longer the framework's tuples of pixels take.
"""

import random
from collections import defaultdict
from difflib import SequenceMatcher
from functools import partial

import numpy as np
import torch

from benchmarks import state_anchors
from benchmarks.report import best_seconds, report, timed
from rllib_gigpo.advantages import StepTable, gigpo
from rllib_gigpo.grouping import exact_anchors, similar_anchors

GROUPS, GROUP_SIZE, STEPS = 16, 8, 50
ROWS_PER_GROUP = GROUP_SIZE * STEPS
TEXT_LENGTH = 500
THRESHOLD = 0.9
OMEGA, GAMMA, PENALTY = 1.0, 0.95, 0.1
DIFFLIB_GROUPS = 1


def make_rows(rng: random.Random) -> tuple[StepTable, list[str]]:
    """Return 6,400 rows and their observations, 60 states per group, a fifth of the runs won."""
    episode = np.repeat(np.arange(GROUPS * GROUP_SIZE), STEPS)
    step = np.tile(np.arange(STEPS), GROUPS * GROUP_SIZE)
    won = np.array([rng.random() < 0.2 for _ in range(GROUPS * GROUP_SIZE)])
    table = StepTable(
        group=episode // GROUP_SIZE,
        episode=episode,
        agent=np.zeros_like(episode),
        step=step,
        anchor=np.zeros_like(episode),
        reward=10.0 * (won[episode] & (step == STEPS - 1)),
        valid=np.array([rng.random() < 0.95 for _ in episode]),
    )
    states = [[make_text(rng, 200) for _ in range(60)] for _ in range(GROUPS)]
    return table, [rng.choice(states[group]) for group in table.group]


def make_text(rng: random.Random, length: int) -> str:
    """Return words of random letters, cut to the length."""
    words = []
    while sum(map(len, words)) + len(words) <= length:
        words.append("".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(2, 9))))
    return " ".join(words)[:length]


def edit_text(rng: random.Random, text: str) -> str:
    """Return the text with one to five words replaced, of the same length."""
    words = text.split(" ")
    for place in rng.sample(range(len(words)), rng.randint(1, 5)):
        words[place] = make_text(rng, len(words[place]))
    return " ".join(words)


def make_similar_texts(rng: random.Random) -> list[str]:
    """Return 400 texts for each group, a third of them distinct, edits of 40 pages each."""
    texts = []
    for _ in range(GROUPS):
        pages = [make_text(rng, TEXT_LENGTH) for _ in range(40)]
        distinct = pages + [
            edit_text(rng, rng.choice(pages)) for _ in range(ROWS_PER_GROUP // 3 - len(pages))
        ]
        rows = distinct + rng.choices(distinct, k=ROWS_PER_GROUP - len(distinct))
        texts += rng.sample(rows, len(rows))
    return texts


def fresh_copies(texts: list[str]) -> list[str]:
    """Return equal strings without a cached hash, as rows have that come from another process."""
    return [text.encode().decode() for text in texts]


def vectorised(table: StepTable, observations: list[str]) -> np.ndarray:
    """Group exactly and compute the advantages as a learner does, with the loop's settings."""
    return gigpo(
        table._replace(anchor=exact_anchors(observations)),
        omega=OMEGA,
        gamma=GAMMA,
        f_norm="std",
        group_mean_over="steps",
        invalid_action_penalty=PENALTY,
        penalty_scope="step",
    ).total


def row_loop(table: StepTable, observations: list[str], *, search: bool) -> torch.Tensor:
    """Compute the same advantages one row at a time over torch scalars.

    With `search` every row looks its trajectory up in the whole batch by a string label, as
    verl-agent does when it hands the discounted returns back to the rows.
    """
    label = np.array([f"trajectory-{episode:027d}" for episode in table.episode], dtype=object)
    returns_of = {}
    for name in np.unique(label):
        returns, running = [], 0.0
        for row in reversed(np.where(label == name)[0]):
            running = float(table.reward[row]) + GAMMA * running
            returns.append(running)
        returns_of[name] = returns[::-1]
    totals = np.bincount(table.episode, weights=table.reward).tolist()
    episode_score, step_return = torch.zeros(len(label)), torch.zeros(len(label))
    for row, name in enumerate(label):
        place = np.where(np.where(label == name)[0] == row)[0][0] if search else table.step[row]
        cost = 0.0 if table.valid[row] else PENALTY
        episode_score[row] = totals[table.episode[row]] - cost
        step_return[row] = returns_of[name][place] - cost
    anchors = list(zip(table.group.tolist(), observations, strict=True))
    episode_level = normalise_loop(table.group.tolist(), episode_score)
    return episode_level + OMEGA * normalise_loop(anchors, step_return)


def normalise_loop(labels: list, scores: torch.Tensor) -> torch.Tensor:
    """Subtract the group mean and divide by the group's standard deviation, row by row."""
    groups = defaultdict(list)
    for row, label in enumerate(labels):
        groups[label].append(scores[row])
    mean, std = {}, {}
    for label, members in groups.items():
        mean[label] = torch.mean(torch.tensor(members))
        std[label] = torch.std(torch.tensor(members)) if len(members) > 1 else torch.tensor(1.0)
    result = scores.clone()
    for row, label in enumerate(labels):
        result[row] = (result[row] - mean[label]) / (std[label] + 1e-6)
    return result


def difflib_loop(texts: list[str]) -> list[int]:
    """Cluster the rows of one group: every row against every representative until one is alike."""
    representatives: list[str] = []
    ids = []
    for text in texts:
        for number, representative in enumerate(representatives):
            if SequenceMatcher(None, text, representative).ratio() >= THRESHOLD:
                ids.append(number)
                break
        else:
            ids.append(len(representatives))
            representatives.append(text)
    return ids


def measure_exact() -> tuple[float, float, float, float]:
    """Return seconds of the vectorised code and of the loop with and without its search.

    The fourth number is the largest difference between their advantages.

    Raises:
        ValueError: The two do not compute the same advantages.
    """
    table, observations = make_rows(random.Random(0))
    reference = row_loop(table, observations, search=False).numpy()
    apart = float(np.abs(vectorised(table, observations) - reference).max())
    if apart > 1e-4:
        raise ValueError(f"the advantages of the two ways differ by {apart:.2g}, expected < 1e-4.")

    def best(way, repeats: int) -> float:
        return best_seconds(
            lambda texts: way(table, texts), repeats, lambda: fresh_copies(observations)
        )

    return (
        best(vectorised, 50),
        best(partial(row_loop, search=True), 3),
        best(partial(row_loop, search=False), 3),
        apart,
    )


def measure_similarity() -> tuple[float, float, tuple[int, int]]:
    """Return seconds of rapidfuzz and, scaled, of the difflib loop, and what each found in it."""
    texts = make_similar_texts(random.Random(0))
    group = np.repeat(np.arange(GROUPS), ROWS_PER_GROUP)
    agent = np.zeros_like(group)
    seconds = best_seconds(
        lambda fresh: similar_anchors(fresh, group, agent, threshold=THRESHOLD),
        5,
        lambda: fresh_copies(texts),
    )
    part = DIFFLIB_GROUPS * ROWS_PER_GROUP
    reference, loop = timed(
        lambda: [
            difflib_loop(texts[start : start + ROWS_PER_GROUP])
            for start in range(0, part, ROWS_PER_GROUP)
        ]
    )
    ids = similar_anchors(texts[:part], group[:part], agent[:part], threshold=THRESHOLD)
    clusters = len(set(ids)), sum(len(set(numbers)) for numbers in reference)
    return seconds, loop * GROUPS / DIFFLIB_GROUPS, clusters


def main() -> None:
    """Measure, compare and report."""
    torch.set_num_threads(1)
    exact, loop, lean_loop, apart = measure_exact()
    similarity, difflib, (ours, theirs) = measure_similarity()
    states = state_anchors.measure()
    figures = {
        "exact_ms": round(exact * 1e3, 3),
        "over_loop": round(loop / exact, 1),
        "similarity_s": round(similarity, 4),
        "over_difflib": round(difflib / similarity, 1),
        "embedding_ms": round(states.embedding * 1e3, 2),
        "image_ms": round(states.image_bytes * 1e3, 2),
        "perceptual_ms": round(states.image_perceptual * 1e3, 2),
        "structure_ms": round(states.structure * 1e3, 2),
        "over_image_tuples": round(states.image_tuples / states.image_bytes, 1),
    }
    report(
        f"{GROUPS * ROWS_PER_GROUP:,} rows ({GROUPS} groups x {GROUP_SIZE} episodes x {STEPS})",
        ("job", "way", "CPU seconds", "times longer", "result"),
        [
            ("exact grouping + advantages", "this package", exact, 1.0, ""),
            (
                "",
                "per-row loop over torch scalars",
                loop,
                loop / exact,
                f"differs by at most {apart:.1g}",
            ),
            ("", "the loop, rows not searched", lean_loop, lean_loop / exact, ""),
            (
                f"similarity {THRESHOLD}, {TEXT_LENGTH} characters",
                "this package",
                similarity,
                1.0,
                f"{ours} clusters in {DIFFLIB_GROUPS} of {GROUPS} groups",
            ),
            (
                "",
                f"difflib loop ({DIFFLIB_GROUPS} of {GROUPS} groups measured, scaled)",
                difflib,
                difflib / similarity,
                f"{theirs} clusters there (autojunk)",
            ),
            *_state_rows(states),
        ],
        figures,
    )


def _state_rows(costs: state_anchors.Costs) -> list[tuple[str, str, float, float, str]]:
    pixels, size = state_anchors.PIXELS, state_anchors.VECTOR_SIZE
    image = costs.image_bytes
    return [
        (
            f"embeddings, {size} numbers",
            "this package, without the encoder",
            costs.embedding,
            1.0,
            "the framework has none",
        ),
        (f"images, {pixels} x {pixels}", "this package, equal pixels", image, 1.0, ""),
        (
            "",
            "this package, perceptual key",
            costs.image_perceptual,
            costs.image_perceptual / image,
            "",
        ),
        (
            "",
            f"tuples of pixels ({state_anchors.TUPLED_IMAGES} images measured, scaled)",
            costs.image_tuples,
            costs.image_tuples / image,
            "same groups",
        ),
        ("structured states", "this package", costs.structure, 1.0, ""),
        (
            "",
            "tuples of sorted items",
            costs.structure_tuples,
            costs.structure_tuples / costs.structure,
            "same groups",
        ),
    ]


if __name__ == "__main__":
    main()
