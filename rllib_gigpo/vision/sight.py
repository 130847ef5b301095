"""From pictures to what a language model reads in the place of their tokens.

Pictures stay uint8 until here. Every distinct one is processed once while it is in use, and goes
through the vision tower once per forward pass however many rows show it.

Shapes: U sequences, L longest sequence, n features, K levels of features, D hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import transformers

from rllib_gigpo.vision.families import FAMILIES, Family, Layout, Tensors
from rllib_gigpo.vision.pictures import Gallery, Picture, PlacedPicture

_CACHE_BYTES = 256 << 20
_BLANK = Gallery().hang(np.zeros((32, 32, 3), dtype=np.uint8))
_INFORMATION = ("rows", "cols")  # what image processors return besides tensors


class Sight:
    """The image side of one model.

    Args:
        family: Knows the model's layout of pictures.
        processor: The model's image processor of transformers.

    Attributes:
        always_looks: Whether `inputs` lets the vision tower look at a blank picture, to no effect,
            where rows show none. A sharded model needs it: its learners gather weights together,
            and one that passes the tower by would leave the others waiting.
    """

    def __init__(self, family: Family, processor: Any):
        self.family = family
        self.processor = processor
        self.always_looks = False
        self._processed: OrderedDict[bytes, Tensors] = OrderedDict()
        self._bytes = 0
        self._layout_of_size = lru_cache(maxsize=4096)(self._layout_of_blank)

    # Tokens ----------------------------------------------------------------------------------

    def layout(self, picture: Picture) -> Layout:
        """How the model lays the picture out; its size alone decides."""
        height, width, _ = picture.pixels.shape
        return self._layout_of_size(height, width)

    def _layout_of_blank(self, height: int, width: int) -> Layout:
        return self.family.layout(self._run(np.zeros((height, width, 3), dtype=np.uint8)))

    def place(
        self, ids: Sequence[int], pictures: Sequence[Picture], tokenizer: Any
    ) -> tuple[np.ndarray, tuple[PlacedPicture, ...]]:
        """Make room for pictures in a prompt.

        Args:
            ids: The prompt's tokens with one placeholder per picture.
            pictures: The pictures in order.
            tokenizer: The model's tokenizer.

        Returns:
            Token ids int32 [P], and where each picture stands in them.

        Raises:
            ValueError: Placeholders and pictures differ in number.
        """
        holder = self.family.image_token_id
        count = sum(token == holder for token in ids)
        if count != len(pictures):
            raise ValueError(
                f"a prompt has {len(pictures)} pictures and {count} placeholders for them "
                f"(token {holder}, {tokenizer.decode([holder])!r}): the chat template must write "
                "one for each picture, and no text of the environment may spell it"
            )
        waiting = iter(pictures)
        placed, expanded = [], []
        for token in ids:
            if token != holder:
                expanded.append(token)
                continue
            picture = next(waiting)
            inserted = self.family.expansion(self.layout(picture), tokenizer)
            is_seen = np.array(inserted) == holder
            placed.append(PlacedPicture(picture, _runs(is_seen, len(expanded))))
            expanded += inserted
        return np.array(expanded, dtype=np.int32), tuple(placed)

    # Pixels ----------------------------------------------------------------------------------

    def process(self, picture: Picture) -> Tensors:
        """Return the processor's tensors of a picture, float32 and on the CPU."""
        found = self._processed.get(picture.key)
        if found is not None:
            self._processed.move_to_end(picture.key)
            return found
        output = self._run(picture.pixels)
        tensors = {name: value for name, value in output.items() if name not in _INFORMATION}
        self._processed[picture.key] = tensors
        self._bytes += _size(tensors)
        while self._bytes > _CACHE_BYTES and len(self._processed) > 1:
            _, dropped = self._processed.popitem(last=False)
            self._bytes -= _size(dropped)
        return tensors

    def _run(self, pixels: np.ndarray) -> Any:
        return self.processor(
            images=[np.array(pixels)],
            input_data_format="channels_last",
            return_tensors="pt",
            **self.family.processor_options,
        )

    # Model -----------------------------------------------------------------------------------

    def features(self, body: Any, pictures: Iterable[Picture]) -> torch.Tensor:
        """Let a model's vision tower look at pictures.

        Args:
            body: The model without its output layer.
            pictures: Distinct pictures, at least one.

        Returns:
            Features [n, K, D] of all pictures in order.
        """
        device = body.device
        processed = [
            {name: tensor.to(device) for name, tensor in self.process(picture).items()}
            for picture in pictures
        ]
        return self.family.features(body, processed)

    def inputs(
        self, body: Any, input_ids: torch.Tensor, images: Sequence[Sequence[PlacedPicture]]
    ) -> dict[str, Any]:
        """Return what the body's language model takes instead of token ids.

        Args:
            body: The model without its output layer.
            input_ids: int64 [U, L], right-padded.
            images: Pictures of each sequence, at least one in all unless `always_looks`.
        """
        distinct = {shown.picture.key: shown.picture for row in images for shown in row}
        addresses = dict(zip(distinct, self.addresses(distinct.values()), strict=True))
        addressed = input_ids.cpu().numpy().copy()
        for row, shown in enumerate(images):
            write_addresses(addressed[row], shown, addresses)
        features = self.features(body, distinct.values() or [_BLANK])
        inputs = embed(body, torch.from_numpy(addressed).to(body.device), features)
        if not distinct:
            inputs["inputs_embeds"] = inputs["inputs_embeds"] + 0.0 * features.sum()
        positions = [self.positions(input_ids.shape[1], shown) for shown in images]
        rotary = [found for found in positions if found is not None]
        if rotary:
            inputs["position_ids"] = torch.from_numpy(np.stack(rotary, axis=1)).to(body.device)
        return inputs

    def addresses(self, pictures: Iterable[Picture], first: int = 0) -> list[int]:
        """Return the number of each picture's first feature, where features lie end to end."""
        counts = [self.num_features(picture) for picture in pictures]
        return list(accumulate(counts, initial=first))[:-1]

    def num_features(self, picture: Picture) -> int:
        """Number of tokens in whose place the picture stands."""
        return self.family.num_features(self.layout(picture))

    def positions(self, length: int, images: Sequence[PlacedPicture]) -> np.ndarray | None:
        """Rotary positions int64 [3, L] of a sequence; None where they simply count."""
        placed = [(shown.runs[0][0], self.layout(shown.picture)) for shown in images]
        return self.family.positions(length, placed)

    def language_model(self, body: Any) -> Any:
        """The part of a body that reads tokens."""
        return getattr(body, self.family.language_model)


def write_addresses(
    ids: np.ndarray, images: Iterable[PlacedPicture], addresses: Mapping[bytes, int]
) -> None:
    """Replace the tokens of pictures by -1 - the number of the feature that stands there.

    Args:
        ids: Token ids [L]; changed.
        images: Pictures among them.
        addresses: Number of the first feature of each picture, by its key.
    """
    for shown in images:
        number = addresses[shown.picture.key]
        for start, length in shown.runs:
            ids[start : start + length] = -1 - np.arange(number, number + length)
            number += length


def embed(body: Any, addressed: torch.Tensor, features: torch.Tensor) -> dict[str, Any]:
    """Put token embeddings and features together.

    Args:
        body: The model without its output layer.
        addressed: int64 [U, L], token ids, or -1 - the number of a feature.
        features: [n, K, D].

    Returns:
        `inputs_embeds` [U, L, D], and where K > 1 what the deeper layers get.
    """
    is_feature = addressed < 0
    embeds = body.get_input_embeddings()(addressed.clamp(min=0))
    chosen = features[-1 - addressed[is_feature]].to(embeds.dtype)
    inputs: dict[str, Any] = {
        "inputs_embeds": embeds.masked_scatter(is_feature[..., None], chosen[:, 0])
    }
    if chosen.shape[1] > 1 and len(chosen):
        inputs["visual_pos_masks"] = is_feature
        inputs["deepstack_visual_embeds"] = list(chosen[:, 1:].unbind(1))
    return inputs


def freeze_vision(model: Any) -> None:
    """Freeze an image-text model but for its language model and its output layer."""
    for name in vision_modules(model):
        model.get_submodule(name).requires_grad_(False)


def vision_modules(model: Any) -> list[str]:
    """Names of the parts that `freeze_vision` freezes; none for a text model."""
    body = model.base_model
    for family in FAMILIES:
        if model.config.model_type in family.model_types:
            prefix = model.base_model_prefix
            return [
                f"{prefix}.{name}"
                for name, _ in body.named_children()
                if name != family.language_model
            ]
    return []


def load_sight(path: str) -> Sight | None:
    """Load the image side of a model folder or id; None for a text model.

    The image processor is transformers' Pillow variant, which needs no torchvision.

    Raises:
        ValueError: An image-text model without the settings of its image processor.
    """
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    for family in FAMILIES:
        if config.model_type in family.model_types:
            return Sight(family(config), _load_processor(path))
    return None


def _load_processor(path: str) -> Any:
    try:
        return transformers.AutoImageProcessor.from_pretrained(
            path, trust_remote_code=False, backend="pil"
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the image-text model {path!r} has no image processor that works without torchvision "
            f"(preprocessor_config.json): {str(error).strip().splitlines()[0]}"
        ) from error


def _runs(is_seen: np.ndarray, offset: int) -> tuple[tuple[int, int], ...]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], is_seen.astype(np.int8), [0]))))
    return tuple(
        (int(start) + offset, int(end - start))
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    )


def _size(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
