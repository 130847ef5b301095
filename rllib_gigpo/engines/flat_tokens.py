"""Lays the tokens of one forward pass out in a flat row; kv_cache.py says in which order.

Legend: A running rows, C context tokens, U prompts with context, n longest context, L longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rllib_gigpo.engines.kv_cache import MIN_ROWS, Context, Layout, SlotCache, round_up


@dataclass
class Prompt:
    """A prompt about to be computed.

    Attributes:
        token_ids: int32 [P]; in the place of pictures, addresses below 0 of their features.
        shared: Leading tokens whose keys and values slot `source` holds; at most P - 1.
        source: That slot.
        slots: Slots of all the rows that start with this prompt.
        rotary: Rotary positions int64 [3, P], or None where they count like the slots'.
    """

    token_ids: np.ndarray
    shared: int = 0
    source: int = 0
    slots: list[int] = field(default_factory=list)
    rotary: np.ndarray | None = None

    @property
    def context(self) -> np.ndarray:
        """Tokens to compute before the last one, which is its row's newest token."""
        return self.token_ids[self.shared : -1]


class FlatTokens:
    """The flat row and its layout; `rows` is A, padding rows included.

    Args:
        newest: int64, newest token of each running row, in slot order.
        positions: int64, its position in the row.
        cache: The policy's cache.
        rotary: int64 [3, rows], rotary positions of the newest tokens; None where they are the
            positions in the row.
    """

    def __init__(
        self,
        newest: np.ndarray,
        positions: np.ndarray,
        cache: SlotCache,
        rotary: np.ndarray | None = None,
    ):
        self._cache = cache
        padding = np.zeros(max(0, MIN_ROWS - len(newest)), dtype=np.int64)
        self.rows = len(newest) + len(padding)
        self._ids = [np.concatenate((newest, padding))]
        self._positions = [np.concatenate((positions, padding))]
        self._rotary = None
        if rotary is not None:
            self._rotary = [np.concatenate((rotary, np.tile(padding, (3, 1))), axis=1)]
        self._slots = [np.arange(len(newest))]
        self._written = [positions]
        self._sources = [np.arange(len(newest))]
        self._length = round_up(int(positions.max()) + 1)
        self._context: Context | None = None

    def add_context(self, prompts: Sequence[Prompt]) -> None:
        """Append the contexts of prompts (none empty); each goes to all slots that share it."""
        lengths = np.array([len(prompt.context) for prompt in prompts])
        starts = self.rows + np.cumsum(lengths) - lengths
        for prompt, start, length in zip(prompts, starts, lengths, strict=True):
            steps = np.arange(length)
            self._ids.append(prompt.context)
            self._positions.append(prompt.shared + steps)
            if self._rotary is not None and prompt.rotary is not None:
                self._rotary.append(prompt.rotary[:, prompt.shared : -1])
            self._slots.append(np.repeat(prompt.slots, length))
            self._written.extend([prompt.shared + steps] * len(prompt.slots))
            self._sources.extend([start + steps] * len(prompt.slots))
        columns = np.arange(round_up(int(lengths.max())))
        padded = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
        slots = mask = None
        if any(prompt.shared for prompt in prompts):
            slots = self._tensor([np.array([prompt.slots[0] for prompt in prompts])])
            shared = np.array([prompt.shared for prompt in prompts])
            mask = self._score_mask(shared[:, None] + columns)[:, None]
        self._context = Context(
            padded=self._tensor([padded.ravel()]),
            cells=self._tensor([np.flatnonzero(columns < lengths[:, None])]),
            shape=(len(prompts), len(columns)),
            slots=slots,
            mask=mask,
        )

    @property
    def has_context(self) -> bool:
        """Whether prompts are computed; addresses of pictures stand nowhere else."""
        return self._context is not None

    def ids(self) -> torch.Tensor:
        """Token ids, int64 [1, A + C]."""
        return self._tensor(self._ids)[None]

    def positions(self) -> torch.Tensor:
        """Rotary positions, int64 [1, A + C], or [3, 1, A + C] where they have three dimensions."""
        if self._rotary is None:
            return self._tensor(self._positions)[None]
        joined = np.concatenate(self._rotary, axis=1, dtype=np.int64)
        return torch.from_numpy(joined).to(self._cache.device)[:, None]

    def layout(self) -> Layout:
        """What the attention must know."""
        in_order = self._context is None and len(self._sources[0]) == self.rows
        return Layout(
            cache=self._cache,
            rows=self.rows,
            length=self._length,
            mask=self._score_mask(self._positions[0])[:, None, None],
            addresses=self._cache.addresses(self._tensor(self._slots), self._tensor(self._written)),
            sources=None if in_order else self._tensor(self._sources),
            context=self._context,
        )

    def _tensor(self, parts: Sequence[np.ndarray]) -> torch.Tensor:
        """Parts end to end as int64 on the cache's device."""
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, dtype=np.int64)
        return torch.from_numpy(joined).to(self._cache.device)

    def _score_mask(self, last: np.ndarray) -> torch.Tensor:
        """[..., L]: 0 at positions up to `last` [...], minus infinity after them."""
        device = self._cache.device
        hidden = torch.arange(self._length, device=device) > self._tensor([last])[..., None]
        mask = torch.zeros(hidden.shape, dtype=self._cache.dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf"))
