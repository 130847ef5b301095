"""What a transformers engine knows of pictures: which it has seen, and their features.

Every distinct picture gets a range of addresses. A prompt holds the addresses in the place of the
picture's tokens, so prompts share what they see exactly where it is the same.

Legend: A running rows, C context tokens, P prompt length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rllib_gigpo.engines.base import Request
from rllib_gigpo.engines.flat_tokens import FlatTokens
from rllib_gigpo.vision.pictures import Picture, PlacedPicture
from rllib_gigpo.vision.sight import Sight, embed, write_addresses

_FEATURE_BYTES = 1 << 30
# Addresses lie below the mark of an empty cell, which is -1.
_FIRST = 1


@dataclass(frozen=True)
class Seen:
    """A prompt with its pictures.

    Attributes:
        addressed: int32 [P], token ids, and addresses below -1 in the place of pictures.
        rotary: Rotary positions int64 [3, P], or None where they count.
    """

    addressed: np.ndarray
    rotary: np.ndarray | None


class View:
    """The pictures of one policy's requests.

    Args:
        sight: The model's image side.
        model: The model.
    """

    def __init__(self, sight: Sight, model: PreTrainedModel):
        self._sight = sight
        self._model = model
        self._body: Any = model.base_model
        self._addresses: dict[bytes, int] = {}
        self._next = _FIRST
        self._features: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._bytes = 0
        self.has_rotary = sight.positions(1, ()) is not None

    def look(self, request: Request) -> Seen:
        """Give the pictures of a request their addresses."""
        for placed in request.images:
            key = placed.picture.key
            if key not in self._addresses:
                self._addresses[key] = self._next
                self._next += self._sight.num_features(placed.picture)
        addressed = np.array(request.prompt_ids, dtype=np.int32)
        write_addresses(addressed, request.images, self._addresses)
        return Seen(addressed, self._sight.positions(len(addressed), request.images))

    def forget(self) -> None:
        """Look at pictures anew: the vision tower has other weights, and no prompt is left.

        Addresses go too. There is one for every distinct picture of a run, and they are int32.
        """
        self._addresses.clear()
        self._next = _FIRST
        self._features.clear()
        self._bytes = 0

    def logits(
        self, flat: FlatTokens, mask: torch.Tensor, images: Iterable[Sequence[PlacedPicture]]
    ) -> torch.Tensor:
        """Return logits [A, V] of the newest tokens.

        Args:
            flat: The tokens of the pass, with addresses.
            mask: A ready attention mask.
            images: Pictures of all running rows.
        """
        inputs: dict[str, Any] = {"input_ids": flat.ids()}
        if flat.has_context:
            inputs = self._inputs(inputs["input_ids"], images)
        hidden = self._sight.language_model(self._body)(
            **inputs,
            position_ids=flat.positions(),
            attention_mask=mask,
            use_cache=False,
            layout=flat.layout(),
        ).last_hidden_state
        output_layer: Any = self._model.get_output_embeddings()
        return output_layer(hidden[0, : flat.rows])

    def _inputs(
        self, ids: torch.Tensor, images: Iterable[Sequence[PlacedPicture]]
    ) -> dict[str, Any]:
        addresses = -1 - ids[ids < 0].cpu().numpy()
        if len(addresses) == 0:
            return {"input_ids": ids}
        shown = {placed.picture.key: placed.picture for row in images for placed in row}
        present = self._present(addresses, shown)
        features = self._look_at(present)
        # From addresses to places in the features, which hold the pictures in order of address.
        starts = np.array([self._addresses[picture.key] for picture in present])
        counts = np.array([len(part) for part in features])
        owner = np.searchsorted(starts, addresses, side="right") - 1
        places = (np.cumsum(counts) - counts)[owner] + addresses - starts[owner]
        ids = ids.masked_scatter(ids < 0, torch.from_numpy(-1 - places).to(ids))
        return embed(self._body, ids, torch.cat(features))

    def _present(self, addresses: np.ndarray, pictures: dict[bytes, Picture]) -> list[Picture]:
        """Pictures that the addresses lie in, in order of address."""
        ordered = sorted(pictures.values(), key=lambda picture: self._addresses[picture.key])
        starts = [self._addresses[picture.key] for picture in ordered]
        owners = np.unique(np.searchsorted(starts, addresses, side="right") - 1)
        return [ordered[owner] for owner in owners]

    def _look_at(self, pictures: list[Picture]) -> list[torch.Tensor]:
        """Features of each picture; those looked at before come out of the cache."""
        new = [picture for picture in pictures if picture.key not in self._features]
        if new:
            sizes = [self._sight.num_features(picture) for picture in new]
            found = self._sight.features(self._body, new).split(sizes)
            for picture, part in zip(new, found, strict=True):
                self._features[picture.key] = part
                self._bytes += part.numel() * part.element_size()
        features = [self._features[picture.key] for picture in pictures]
        for picture in pictures:
            self._features.move_to_end(picture.key)
        while self._bytes > _FEATURE_BYTES and len(self._features) > len(pictures):
            _, dropped = self._features.popitem(last=False)
            self._bytes -= dropped.numel() * dropped.element_size()
        return features
