"""Draws one token per row from logits, by inverse transform of given uniform numbers.

Legend: R rows, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rllib_gigpo.engines.base import Sampling

# Most nuclei lie within so many tokens, and sorting a large vocabulary is slow.
_FIRST_CANDIDATES = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The n-th uniform number of each seed's stream: a pure function of seed and n.

    A counter-based generator (SplitMix64: Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators") whose streams start where the mixed seed says.

    Args:
        seeds: uint64 [R].
        counts: uint64 [R], numbers drawn before.

    Returns:
        float64 [R] in [0, 1).
    """
    bits = _mix(_mix(seeds) + (counts + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling settings of R rows; None where no row uses the setting.

    Attributes:
        temperature: float32 [R, 1]; None when every row's logits are divided by 1.
        greedy: bool [R, 1], rows that take the most likely token.
        restricted: int64 [Q], the rows with top-p or top-k.
        top_p: float64 [Q, 1], infinite for rows without top-p.
        top_k: int64 [Q, 1], V for rows without top-k.
    """

    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    restricted: torch.Tensor | None
    top_p: torch.Tensor
    top_k: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocab_size: int, device: torch.device) -> SamplingBatch:
        """Collect the settings of rows on a device."""

        def column(values: list, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        temperatures = [row.temperature or 1.0 for row in rows]
        greedy = [row.temperature == 0 for row in rows]
        chosen = [
            index
            for index, row in enumerate(rows)
            if row.temperature > 0 and (row.top_p < 1 or 0 < row.top_k < vocab_size)
        ]
        top_p = [rows[i].top_p if rows[i].top_p < 1 else float("inf") for i in chosen]
        top_k = [min(rows[i].top_k or vocab_size, vocab_size) for i in chosen]
        return cls(
            temperature=(
                column(temperatures, torch.float32) if set(temperatures) != {1.0} else None
            ),
            greedy=column(greedy, torch.bool) if any(greedy) else None,
            restricted=torch.tensor(chosen, device=device) if chosen else None,
            top_p=column(top_p, torch.float64),
            top_k=column(top_k, torch.int64),
        )


def sample(
    logits: torch.Tensor, batch: SamplingBatch, draws: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row: the first whose cumulative probability exceeds the draw.

    Args:
        logits: [R, V], any floating type.
        batch: Settings of the R rows.
        draws: float64 [R], uniform in [0, 1).

    Returns:
        Token ids int64 [R], and their log-probabilities float32 [R] under
        softmax(logits / temperature), before top-p and top-k; greedy rows at temperature 1.
    """
    scores = logits.float()
    if batch.temperature is not None:
        scores = scores / batch.temperature
    logps = scores.log_softmax(dim=-1)
    probabilities = logps.exp()
    if batch.restricted is not None:
        probabilities[batch.restricted] = restrict(
            probabilities[batch.restricted], batch.top_p, batch.top_k
        )
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    targets = draws[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    if batch.greedy is not None:
        tokens = torch.where(batch.greedy, scores.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], logps.gather(1, tokens)[:, 0]


def restrict(probabilities: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero all but the top-k tokens and, of their renormalised mass, the nucleus of top-p.

    The nucleus is the smallest set of most likely tokens whose mass reaches top_p. Of equally
    likely tokens at the edge, only as many stay as are needed.

    Args:
        probabilities: [R, V].
        top_p: float64 [R, 1]; infinite keeps all mass.
        top_k: int64 [R, 1]; V keeps all tokens.

    Returns:
        [R, V], not renormalised.
    """
    vocab_size = probabilities.shape[-1]
    count, complete = 0, False
    while not complete:
        count = min(max(16 * count, _FIRST_CANDIDATES), vocab_size)
        likely, order = probabilities.topk(count, dim=-1)
        ranks = torch.arange(count, device=likely.device)
        likely = likely.double() * (ranks < top_k)
        mass = torch.where(top_k < vocab_size, likely.sum(dim=-1, keepdim=True), 1.0)
        likely = likely * (likely.cumsum(dim=-1) - likely < top_p * mass)
        seen = (top_k <= count) | ((top_k == vocab_size) & (likely[:, -1:] == 0))
        complete = count == vocab_size or bool(seen.all())
    return torch.zeros_like(probabilities).scatter_(1, order, likely.to(probabilities.dtype))
