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
    found: Any = _ChunkedLogps.apply(hidden, *parts, output_layer, targets, scale, rows)
    logps, entropy = found
    return TokenLogps(logps, entropy if entropy_grad else entropy.detach())


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
    ) -> tuple[Tensor, Tensor]:
        logps = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logps)
        kept = None
        for part in _chunks(len(hidden), rows):
            log_probs = _log_softmax(output_layer, hidden[part], scale)
            logps[part] = log_probs.gather(-1, targets[part, None]).squeeze(-1)
            entropy[part] = -(log_probs.exp().mul_(log_probs)).sum(-1)
            kept = log_probs if len(hidden) <= rows else None
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, kept)
        ctx.output_layer, ctx.scale, ctx.rows = output_layer, scale, rows
        device = hidden.device.type
        ctx.types = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return logps, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, kept = ctx.saved_tensors
        into = [
            torch.zeros_like(part, dtype=torch.float32) if wanted else None
            for part, wanted in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        grad_hidden, grad_weight, grad_bias = into
        enabled, dtype = ctx.types
        with torch.autocast(hidden.device.type, dtype=dtype, enabled=enabled):
            for part in _chunks(len(hidden), ctx.rows):
                log_probs = kept
                if log_probs is None:
                    log_probs = _log_softmax(ctx.output_layer, hidden[part], ctx.scale)
                slope = _slope(log_probs, entropy[part], targets[part], *(g[part] for g in grads))
                slope *= ctx.scale
                if grad_hidden is not None:
                    grad_hidden[part] = slope @ weight
                if grad_weight is not None:
                    grad_weight += slope.t() @ hidden[part]
                if grad_bias is not None:
                    grad_bias += slope.sum(0)
        return (
            *(
                None if grad is None else grad.to(part.dtype)
                for grad, part in zip(into, (hidden, weight, bias), strict=True)
            ),
            *(None,) * 4,
        )


def _slope(
    log_probs: Tensor, entropy: Tensor, targets: Tensor, grad_logps: Tensor, grad_entropy: Tensor
) -> Tensor:
    """Return the gradient of the scaled logits, float32 like the log-probabilities [r, V]."""
    shared = log_probs + entropy[:, None]
    shared.mul_(grad_entropy[:, None]).add_(grad_logps[:, None]).mul_(log_probs.exp()).neg_()
    return shared.scatter_add_(-1, targets[:, None], grad_logps[:, None])


def _log_softmax(output_layer: torch.nn.Module, hidden: Tensor, scale: float) -> Tensor:
    logits = output_layer(hidden).float()
    return torch.log_softmax(logits if scale == 1.0 else logits * scale, dim=-1)


def _chunks(length: int, rows: int) -> Iterator[slice]:
    for start in range(0, length, rows):
        yield slice(start, min(start + rows, length))
