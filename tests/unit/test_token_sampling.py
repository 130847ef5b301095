"""Tokens are drawn by inverse transform; expected numbers are worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_gigpo.engines.base import Sampling
from rllib_gigpo.engines.token_sampling import SamplingBatch, restrict, sample, uniforms

PROBABILITIES = [0.1, 0.4, 0.2, 0.3]
LOGITS = torch.tensor(PROBABILITIES).log()


def draw(*rows: tuple[Sampling, float], logits: torch.Tensor = LOGITS) -> tuple[list, list]:
    """Tokens and log-probabilities of rows of (sampling, draw) over the same logits."""
    batch = SamplingBatch.of([row for row, _ in rows], logits.shape[-1], torch.device("cpu"))
    draws = torch.tensor([value for _, value in rows], dtype=torch.float64)
    tokens, logps = sample(logits.expand(len(rows), -1), batch, draws)
    return tokens.tolist(), logps.tolist()


@pytest.mark.parametrize(
    ("value", "token"),
    # Cumulative: .1, .5, .7, 1.
    [(0.0, 0), (0.09, 0), (0.11, 1), (0.49, 1), (0.51, 2), (0.69, 2), (0.71, 3), (1 - 2**-53, 3)],
)
def test_the_first_token_whose_cumulative_probability_exceeds_the_draw(
    value: float, token: int
) -> None:
    tokens, logps = draw((Sampling(), value))
    assert tokens == [token]
    assert logps == pytest.approx([math.log(PROBABILITIES[token])], abs=1e-6)


def test_temperature_divides_the_logits_before_the_log_probability() -> None:
    # T = .5 squares the probabilities: .01, .16, .04, .09 over their sum .30.
    # Cumulative: .0333, .5667, .7, 1. Draw .5 gives token 1; log(.16 / .3) = -.6286.
    # T = 1 in the same batch: draw .5 + 1e-3 gives token 2; log(.2) = -1.6094.
    tokens, logps = draw((Sampling(temperature=0.5), 0.5), (Sampling(), 0.501))
    assert tokens == [1, 2]
    assert logps == pytest.approx([-0.6286, -1.6094], abs=1e-4)


def test_greedy_ignores_the_draw_and_reports_temperature_one() -> None:
    tokens, logps = draw((Sampling(temperature=0), 0.99), (Sampling(), 0.99))
    assert tokens == [1, 3]
    assert logps == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)


def test_top_k_keeps_the_likeliest_and_the_log_probability_of_all() -> None:
    # Kept: tokens 1 (.4) and 3 (.3), mass .7; draw u picks token 1 below u = .4 / .7 = .571.
    sampling = Sampling(top_k=2)
    tokens, logps = draw((sampling, 0.0), (sampling, 0.57), (sampling, 0.58), (sampling, 0.99))
    assert tokens == [1, 1, 3, 3]
    assert logps == pytest.approx([math.log(0.4)] * 2 + [math.log(0.3)] * 2, abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    # Likeliest first: .4, .7, .9, 1. top_p .65 keeps {1, 3}; .75 keeps {1, 3, 2}; .1 keeps {1}.
    for top_p, kept in ((0.65, {1, 3}), (0.75, {1, 2, 3}), (0.1, {1})):
        rows = [(Sampling(top_p=top_p), value) for value in np.linspace(0, 0.999, 50)]
        assert set(draw(*rows)[0]) == kept


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    # top_k 3 leaves .4, .3, .2 of .9: shares .444, .778, 1. top_p .7 keeps two tokens; without
    # renormalising, .4 + .3 reaches .7 too, so .75 tells them apart: shares say two, masses three.
    rows = [(Sampling(top_p=0.75, top_k=3), value) for value in np.linspace(0, 0.999, 50)]
    assert set(draw(*rows)[0]) == {1, 3}


def test_restrictions_touch_only_their_own_rows() -> None:
    rows = [(Sampling(), 0.05), (Sampling(top_k=1), 0.05), (Sampling(temperature=0, top_k=2), 0.05)]
    assert draw(*rows)[0] == [0, 1, 1]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_p=st.floats(0.05, 1.0),
    top_k=st.integers(1, 700),
    scale=st.floats(0.1, 5.0),
)
def test_restrict_agrees_with_a_full_sort(
    seed: int, top_p: float, top_k: int, scale: float
) -> None:
    """Vocabulary 600: wide nuclei reach beyond the first candidates."""
    vocab_size = 600
    logits = scale * torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(seed))
    probabilities = logits.softmax(dim=-1)
    limits = torch.tensor([[top_k], [vocab_size]]).clamp(max=vocab_size)
    masses = torch.tensor([[top_p], [top_p]], dtype=torch.float64)
    kept = restrict(probabilities, masses, limits)
    for row, limit in enumerate(limits[:, 0].tolist()):
        likely, order = probabilities[row].double().sort(descending=True)
        likely = likely[:limit]
        share = likely / (likely.sum() if limit < vocab_size else 1.0)
        count = int((share.cumsum(0) - share < top_p).sum())
        assert kept[row].count_nonzero() == pytest.approx(count, abs=1)  # a tie with the edge
        inside = order[: count - 1]
        assert torch.equal(kept[row, inside], probabilities[row, inside])


def test_uniforms_are_splitmix64() -> None:
    # Mixing maps 0 to 0, so seed 0 starts at 0, whose published first output is
    # 0xE220A8397B1DCDAF; the upper 53 bits make the number.
    first = uniforms(np.array([0], dtype=np.uint64), np.array([0], dtype=np.uint64))
    assert first[0] == (0xE220A8397B1DCDAF >> 11) * 2.0**-53


def test_uniforms_depend_on_seed_and_count_alone() -> None:
    seeds = np.arange(1000, dtype=np.uint64)
    table = np.array([uniforms(seeds, np.full(1000, n, dtype=np.uint64)) for n in range(20)])
    lone = uniforms(np.array([77], dtype=np.uint64), np.array([13], dtype=np.uint64))
    assert lone[0] == table[13, 77]
    assert len(np.unique(table)) == table.size
    assert table.min() >= 0
    assert table.max() < 1
    # 20,000 uniforms: mean .5 +- 5 * sqrt(1 / 12 / 20,000) = .0102; neighbouring seeds and counts
    # correlate within 5 / sqrt(19,000) = .036.
    assert table.mean() == pytest.approx(0.5, abs=0.0102)
    assert abs(np.corrcoef(table[:, 1:].ravel(), table[:, :-1].ravel())[0, 1]) < 0.036
    assert abs(np.corrcoef(table[1:].ravel(), table[:-1].ravel())[0, 1]) < 0.036
