"""The critic's parts in pure torch: the value head and PPO's clipped value loss.

Shapes: N rows, T response tokens, D hidden size.
"""

from typing import Literal

import torch
from torch import Tensor

CriticKind = Literal["head", "model"]


class ValueHead(torch.nn.Module):
    """One number from a hidden state.

    It starts at 0, so that a new critic values every state alike and its first advantages are the
    plain returns.

    Args:
        hidden_size: Width of the body (D).
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.out = torch.nn.Linear(hidden_size, 1)
        torch.nn.init.zeros_(self.out.weight)
        torch.nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values [...] of hidden states [..., D], in fp32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.out(hidden.float()).squeeze(-1)


def value_loss(
    value: Tensor,
    old_value: Tensor,
    target: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
) -> Tensor:
    """Return the critic's loss, 0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2).

    Source: Schulman et al., arXiv 1707.06347, in the clipped form of OpenAI's baselines.

    Args:
        value: Values under the current critic [N, T].
        old_value: Values before the update [N, T].
        target: What the critic is to learn [N, T].
        mask: Where values count, bool [N, T].
        clip: How far a value may move, above 0; None: freely.

    Returns:
        Losses [N, T], 0 outside the mask.

    Raises:
        ValueError: `clip` is not above 0.
    """
    if clip is not None and clip <= 0:
        raise ValueError(f"the value clip is {clip}, expected a number above 0, or None.")
    value = value.masked_fill(~mask, 0.0)
    old_value, target = old_value.masked_fill(~mask, 0.0), target.masked_fill(~mask, 0.0)
    loss = (value - target).square()
    if clip is not None:
        held = old_value + (value - old_value).clamp(-clip, clip)
        loss = torch.maximum(loss, (held - target).square())
    return 0.5 * loss
