"""Preallocated key-value cache in slots, and the attention that reads and fills it.

One forward pass runs on one flat row of tokens, so neither prompts of different lengths nor
running and new requests are padded against each other in the linear layers:

    tokens [0, A)       the newest token of each running row, in slot order; only they need logits
                        (at least `MIN_ROWS`: padding rows read unused slots and write nothing)
    tokens [A, A + C)   the context: what a newly admitted prompt has before its last token

The attention is registered with transformers as `ATTENTION`; models look it up by name in their
config and pass the `Layout` through their keyword arguments. A call without a layout behaves like
"sdpa".

Legend: S slots, A running rows (row i lives in slot i), C context tokens, U prompts with context,
n longest context, L longest row (a multiple of `_GRAIN`), H query heads, K key-value heads,
D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rllib_gigpo.engines.base import EngineError

ATTENTION = "rllib_gigpo_slots"

# Kernels compute a row alike whatever else the batch holds once products have a few rows and
# attention runs over whole vectors; CUDA's memory-efficient kernel wants aligned masks besides.
MIN_ROWS = 4
_GRAIN = 16


def round_up(length: int) -> int:
    """Smallest multiple of the cache's grain that is at least `length`."""
    return -(-length // _GRAIN) * _GRAIN


class SlotCache:
    """Keys and values of all layers, [2 x layers, S, K, length, D], grown on demand.

    Args:
        config: The model's configuration.
        dtype: Type of keys and values.
        device: Where they live.
        max_slots: S never grows beyond it.
        max_length: Tokens of the longest row.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_slots: int,
        max_length: int,
    ):
        self._heads: int = config.num_key_value_heads
        self._head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self._planes: int = 2 * config.num_hidden_layers
        self.dtype, self.device = dtype, device
        self._max_slots = max(max_slots, MIN_ROWS)
        self._max_length = round_up(max_length)
        self.clear()

    def clear(self) -> None:
        """Free the memory."""
        self.slots = self.length = 0
        self._allocate(0, 0)

    def _allocate(self, slots: int, length: int) -> None:
        shape = (self._planes, slots, self._heads, length, self._head_dim)
        # Zeros, not empty: masked positions are multiplied by 0, which NaN would survive.
        self._store = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._layers = list(self._store)
        self._flat = [plane.view(-1, self._head_dim) for plane in self._store]
        self._head_starts = length * torch.arange(self._heads, device=self.device)
        self.slots, self.length = slots, length

    def reserve(self, slots: int, length: int) -> None:
        """Grow, at least doubling, until `slots` rows of `length` tokens fit; contents stay."""
        slots = max(slots, MIN_ROWS)
        if slots <= self.slots and length <= self.length:
            return
        old, old_slots, old_length = self._store, self.slots, self.length
        if slots > old_slots:
            slots = min(max(slots, 2 * old_slots), self._max_slots)
        if length > old_length:
            length = min(max(round_up(length), 2 * old_length), self._max_length)
        self._allocate(max(slots, old_slots), max(length, old_length))
        self._store[:, :old_slots, :, :old_length] = old

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions from slots to slots, all reads before all writes."""
        self._store[:, list(targets), :, :length] = self._store[:, list(sources), :, :length]

    def addresses(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where `write` stores the tokens at int64 [W] positions of int64 [W] slots, [W * K]."""
        starts = slots * (self._heads * self.length) + positions
        return (starts[:, None] + self._head_starts).flatten()

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, addresses: torch.Tensor
    ) -> None:
        """Store keys and values [W, K, D] at the `addresses` of W tokens."""
        self._flat[2 * layer].index_copy_(0, addresses, keys.reshape(-1, self._head_dim))
        self._flat[2 * layer + 1].index_copy_(0, addresses, values.reshape(-1, self._head_dim))

    def read(self, layer: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [rows, K, length, D] of the first slots' keys and values."""
        keys, values = self._layers[2 * layer], self._layers[2 * layer + 1]
        return keys[:rows, :, :length], values[:rows, :, :length]

    def gather(
        self, layer: int, slots: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies [U, K, length, D] of some slots' keys and values."""
        keys, values = self._layers[2 * layer], self._layers[2 * layer + 1]
        return keys[:, :, :length][slots], values[:, :, :length][slots]


@dataclass(frozen=True)
class Context:
    """Where the context tokens of the new prompts stand.

    Attributes:
        padded: int64 [U * n], flat token at each cell of the right-padded rectangle (padding cells
            name any token).
        cells: int64 [C], the rectangle's cell of each context token.
        shape: (U, n).
        slots: int64 [U], slots to read keys and values from where prompts continue a cached
            prefix; None when all start at position 0.
        mask: [U, 1, n, L], added to the scores; None when all start at position 0.
    """

    padded: torch.Tensor
    cells: torch.Tensor
    shape: tuple[int, int]
    slots: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """What the attention must know of one forward pass.

    Attributes:
        cache: The policy's cache.
        rows: A.
        length: L.
        mask: [A, 1, 1, L], added to the scores of the newest tokens.
        addresses: int64 [W * K], where the cache stores W >= A + C tokens.
        sources: int64 [W], the flat token stored at each; None means W = A in order.
        context: The new prompts, if any.
    """

    cache: SlotCache
    rows: int
    length: int
    mask: torch.Tensor
    addresses: torch.Tensor
    sources: torch.Tensor | None = None
    context: Context | None = None


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over the slots; the signature is that of transformers' attention functions.

    Args:
        module: The attention layer; its `layer_idx` names the layer.
        query: [1, H, A + C, D].
        key: [1, K, A + C, D].
        value: [1, K, A + C, D].
        attention_mask: Used only without a layout.
        scaling: Factor on the scores.
        layout: The pass; None falls back to "sdpa".
        **kwargs: What the model passes besides; extras that change the scores are refused.

    Returns:
        The attention's output, [1, A + C, H, D], and None for the weights.

    Raises:
        EngineError: The model uses a sliding window, logit soft-capping or sinks.
    """
    if layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise EngineError(
                f"the transformers engine has full attention only, and {type(module).__name__} "
                f"passes {name}={kwargs[name]!r}: serve this model with vLLM"
            )
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    if layout.sources is None:
        layout.cache.write(layer, keys, values, layout.addresses)
    else:
        layout.cache.write(layer, keys[layout.sources], values[layout.sources], layout.addresses)
    newest = _attend_newest(layer, queries[: layout.rows], keys.shape[1], layout, scaling)
    if layout.context is None:
        return newest.unsqueeze(0), None
    context = _attend_context(layer, queries, keys, values, layout, layout.context, scaling)
    return torch.cat((newest, context)).unsqueeze(0), None


def _attend_newest(
    layer: int, queries: torch.Tensor, kv_heads: int, layout: Layout, scaling: float | None
) -> torch.Tensor:
    """Newest tokens [A, H, D] over their slots; the H / K queries of a head share its keys."""
    rows, heads, dim = queries.shape
    keys, values = layout.cache.read(layer, rows, layout.length)
    output = scaled_dot_product_attention(
        queries.reshape(rows, kv_heads, heads // kv_heads, dim),
        keys,
        values,
        attn_mask=layout.mask,
        scale=scaling,
    )
    return output.reshape(rows, heads, dim)


def _attend_context(
    layer: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    context: Context,
    scaling: float | None,
) -> torch.Tensor:
    """Context tokens [C, H, D] over the tokens before them in their prompt."""

    def rectangle(states: torch.Tensor) -> torch.Tensor:
        return states[context.padded].view(*context.shape, *states.shape[1:]).transpose(1, 2)

    if context.slots is None:
        keys, values = rectangle(keys), rectangle(values)
    else:
        keys, values = layout.cache.gather(layer, context.slots, layout.length)
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = (s.repeat_interleave(groups, dim=1) for s in (keys, values))
    output = scaled_dot_product_attention(
        rectangle(queries),
        keys,
        values,
        attn_mask=context.mask,
        # Right padding comes after every real token, so causality hides it.
        is_causal=context.mask is None,
        scale=scaling,
    )
    return output.transpose(1, 2).flatten(0, 1)[context.cells]


AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
