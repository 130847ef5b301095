"""Log-probabilities of chosen tokens, without the logits of all positions at once.

A vocabulary of 150,000 words makes the logits of 10,000 response tokens 6 GB, and their softmax
and gradient as much again. Here they exist for a chunk of positions at a time, in the forward pass
and again in the backward one, which computes them anew. Where all positions fit into one chunk
they are kept instead.

Shapes: R positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**25


class TokenLogps(NamedTuple):
    """Log-probability of each chosen token and entropy of its distribution, float32 [R] each."""

    logps: Tensor
    entropy: Tensor


def token_logps(
    output_layer: torch.nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> TokenLogps:
    """Return log softmax(logits / temperature) at the targets, and its entropy.

    Args:
        output_layer: Linear layer from D to V; its weight gets a gradient if it wants one.
        hidden: What it reads [R, D].
        targets: Chosen tokens, int64 [R].
        temperature: Divides the logits; 0 counts as 1.
        entropy_grad: Whether the entropy carries a gradient.
        chunk_elements: Logits that may exist at a time; at least those of one position do.

    Returns:
        Log-probabilities and entropies, float32 [R] each.
    """
    rows = max(1, chunk_elements // int(output_layer.weight.shape[0]))  # pyright: ignore[reportIndexIssue, reportArgumentType]
    scale = 1.0 if temperature == 0 else 1.0 / temperature
    parts = (output_layer.weight, getattr(output_layer, "bias", None))
    settings = (output_layer, targets, scale, rows, entropy_grad)
    found: Any = _ChunkedLogps.apply(hidden, *parts, *settings)
    return TokenLogps(*found)


class _ChunkedLogps(torch.autograd.Function):
    """d logp / dz = onehot - p and dH / dz = -p (log p + H), of logits z times the scale."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        output_layer: torch.nn.Module,
        targets: Tensor,
        scale: float,
        rows: int,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        logps = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logps)
        kept = None
        for part in _chunks(len(hidden), rows):
            log_probs = _log_softmax(output_layer, hidden[part], scale)
            logps[part] = log_probs.gather(-1, targets[part, None]).squeeze(-1)
            entropy[part] = torch.linalg.vecdot(log_probs.exp(), log_probs).neg_()
            kept = log_probs if len(hidden) <= rows else None
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, kept)
        ctx.set_materialize_grads(False)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        ctx.output_layer, ctx.scale, ctx.rows = output_layer, scale, rows
        device = hidden.device.type
        ctx.types = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return logps, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, kept = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = grad_bias = None
        enabled, dtype = ctx.types
        with torch.autocast(hidden.device.type, dtype=dtype, enabled=enabled):
            for part in _chunks(len(hidden), ctx.rows):
                log_probs = kept
                if log_probs is None:
                    log_probs = _log_softmax(ctx.output_layer, hidden[part], ctx.scale)
                slope = _slope(
                    log_probs,
                    entropy[part],
                    targets[part],
                    *(None if grad is None else grad[part] for grad in grads),
                )
                slope *= ctx.scale
                if grad_hidden is not None:
                    grad_hidden[part] = slope.to(weight.dtype) @ weight
                if wants_weight:
                    product = slope.to(hidden.dtype).t() @ hidden[part]
                    grad_weight = _add(grad_weight, product)
                if wants_bias:
                    grad_bias = _add(grad_bias, slope.sum(0))
        return (
            grad_hidden,
            _finished(grad_weight, weight, wants_weight),
            _finished(grad_bias, bias, wants_bias),
            *(None,) * 5,
        )


def _slope(
    log_probs: Tensor,
    entropy: Tensor,
    targets: Tensor,
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of the scaled logits, float32 like the log-probabilities [r, V]."""
    slope = log_probs.exp()
    if grad_entropy is not None:
        factor = (log_probs + entropy[:, None]).mul_(grad_entropy[:, None])
        if grad_logps is not None:
            factor.add_(grad_logps[:, None])
        slope.mul_(factor).neg_()
    elif grad_logps is not None:
        slope.mul_(-grad_logps[:, None])
    if grad_logps is not None:
        slope.scatter_add_(-1, targets[:, None], grad_logps[:, None])
    return slope


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    """Add up in float32; the first part is taken as it is."""
    return part.float() if total is None else total.add_(part)


def _finished(total: Tensor | None, like: Tensor, wanted: bool) -> Tensor | None:
    if not wanted:
        return None
    return torch.zeros_like(like) if total is None else total.to(like.dtype)


def _log_softmax(output_layer: torch.nn.Module, hidden: Tensor, scale: float) -> Tensor:
    logits = output_layer(hidden).float()
    return torch.log_softmax(logits if scale == 1.0 else logits * scale, dim=-1)


def _chunks(length: int, rows: int) -> Iterator[slice]:
    for start in range(0, length, rows):
        yield slice(start, min(start + rows, length))
