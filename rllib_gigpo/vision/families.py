"""How families of image-text models place pictures among tokens and turn them into features.

A model is a vision tower, whose features stand in the place of tokens, and a language model. Both
engines and the learner ask the same family, so they agree on placing and positions.

Shapes: v tokens that a picture takes, K levels of features (1; more where deeper layers get
features of their own), D width of the language model, L tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

Layout = tuple[int, ...]
Tensors = dict[str, torch.Tensor]


class Family(Protocol):
    """What a family knows; `body` is a model without its output layer.

    Attributes:
        image_token_id: Token that the chat template writes for a picture.
        language_model: Name of the body's language model.
        processor_options: What the image processor is asked for besides pixels.
    """

    image_token_id: int
    language_model: str
    processor_options: Mapping[str, Any]

    def layout(self, processed: Any) -> Layout:
        """What the image processor's output for one picture says about its tokens."""
        ...

    def expansion(self, layout: Layout, tokenizer: Any) -> list[int]:
        """Token ids that replace the template's one; `image_token_id` where features stand."""
        ...

    def num_features(self, layout: Layout) -> int:
        """Number v of the tokens where features stand."""
        ...

    def features(self, body: Any, processed: Sequence[Tensors]) -> torch.Tensor:
        """Features [sum of v, K, D] of processed pictures, in order."""
        ...

    def positions(self, length: int, placed: Sequence[tuple[int, Layout]]) -> np.ndarray | None:
        """Rotary positions int64 [3, L] of a sequence, or None where they simply count.

        Args:
            length: L.
            placed: Where the first feature of each picture stands, and its layout.
        """
        ...


class QwenVL:
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any size, positions in three dimensions.

    The layout is the picture's grid (time, height, width) after patches have been merged.
    """

    model_types = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    language_model = "language_model"
    processor_options: Mapping[str, Any] = {}

    def __init__(self, config: Any):
        self.image_token_id: int = config.image_token_id
        self._merge: int = config.vision_config.spatial_merge_size

    def layout(self, processed: Any) -> Layout:
        """See `Family.layout`."""
        time, height, width = processed["image_grid_thw"][0].tolist()
        return time, height // self._merge, width // self._merge

    def expansion(self, layout: Layout, tokenizer: Any) -> list[int]:
        """See `Family.expansion`."""
        return [self.image_token_id] * self.num_features(layout)

    def num_features(self, layout: Layout) -> int:
        """See `Family.num_features`."""
        return math.prod(layout)

    def features(self, body: Any, processed: Sequence[Tensors]) -> torch.Tensor:
        """See `Family.features`; Qwen3-VL has deeper levels."""
        output = body.get_image_features(
            pixel_values=torch.cat([picture["pixel_values"] for picture in processed]),
            image_grid_thw=torch.cat([picture["image_grid_thw"] for picture in processed]),
            return_dict=True,
        )
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return torch.stack([torch.cat(tuple(level)) for level in levels], dim=1)

    def positions(self, length: int, placed: Sequence[tuple[int, Layout]]) -> np.ndarray | None:
        """See `Family.positions`; text counts on from a picture's largest coordinate."""
        positions = np.empty((3, length), dtype=np.int64)
        done = position = 0
        for start, (time, height, width) in placed:
            positions[:, done:start] = position + np.arange(start - done)
            position += start - done
            done = start + time * height * width
            grid = np.indices((time, height, width)).reshape(3, -1)
            positions[:, start:done] = position + grid
            position += max(height, width)
        positions[:, done:] = position + np.arange(length - done)
        return positions


class Idefics3:
    """Idefics3 and SmolVLM: tiles of one size and a view of the whole, ordinary positions.

    The layout is (rows, columns, tokens of a tile); 0 rows: the picture is one tile.
    """

    model_types = ("idefics3", "smolvlm")
    language_model = "text_model"
    processor_options: Mapping[str, Any] = {"return_row_col_info": True}

    def __init__(self, config: Any):
        self.image_token_id: int = config.image_token_id
        side = config.vision_config.image_size // config.vision_config.patch_size
        self._tile_tokens = side * side // config.scale_factor**2

    def layout(self, processed: Any) -> Layout:
        """See `Family.layout`."""
        (rows,), (columns,) = processed["rows"][0], processed["cols"][0]
        return int(rows), int(columns), self._tile_tokens

    def expansion(self, layout: Layout, tokenizer: Any) -> list[int]:
        """See `Family.expansion`; each tile is named by its row and column."""
        rows, columns, tokens = layout
        border, tile = "<fake_token_around_image>", "<image>" * tokens
        grid = "".join(
            "".join(f"{border}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1))
            + "\n"
            for row in range(1, rows + 1)
        )
        text = f"{grid}{chr(10) if rows else ''}{border}<global-img>{tile}{border}"
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def num_features(self, layout: Layout) -> int:
        """See `Family.num_features`."""
        rows, columns, tokens = layout
        return (rows * columns + 1) * tokens

    def features(self, body: Any, processed: Sequence[Tensors]) -> torch.Tensor:
        """See `Family.features`."""
        output = body.get_image_features(
            pixel_values=torch.cat([picture["pixel_values"] for picture in processed], dim=1),
            pixel_attention_mask=torch.cat(
                [picture["pixel_attention_mask"] for picture in processed], dim=1
            ),
            return_dict=True,
        )
        return output.pooler_output.flatten(0, 1)[:, None]

    def positions(self, length: int, placed: Sequence[tuple[int, Layout]]) -> np.ndarray | None:
        """See `Family.positions`."""
        return None


class Llava:
    """LLaVA 1.5: pictures of one size, ordinary positions. The layout is (tokens,)."""

    model_types = ("llava",)
    language_model = "language_model"
    processor_options: Mapping[str, Any] = {}

    def __init__(self, config: Any):
        self.image_token_id: int = config.image_token_id
        vision = config.vision_config
        has_class_token = vision.model_type == "clip_vision_model"
        is_cut = config.vision_feature_select_strategy == "default"
        patches = (vision.image_size // vision.patch_size) ** 2
        self._tokens = patches + has_class_token - is_cut
        self._selection = {
            "vision_feature_layer": config.vision_feature_layer,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
        }

    def layout(self, processed: Any) -> Layout:
        """See `Family.layout`."""
        return (self._tokens,)

    def expansion(self, layout: Layout, tokenizer: Any) -> list[int]:
        """See `Family.expansion`."""
        return [self.image_token_id] * layout[0]

    def num_features(self, layout: Layout) -> int:
        """See `Family.num_features`."""
        return layout[0]

    def features(self, body: Any, processed: Sequence[Tensors]) -> torch.Tensor:
        """See `Family.features`."""
        output = body.get_image_features(
            pixel_values=torch.cat([picture["pixel_values"] for picture in processed]),
            return_dict=True,
            **self._selection,
        )
        return torch.cat(tuple(output.pooler_output))[:, None]

    def positions(self, length: int, placed: Sequence[tuple[int, Layout]]) -> np.ndarray | None:
        """See `Family.positions`."""
        return None


FAMILIES: tuple[Any, ...] = (QwenVL, Idefics3, Llava)
MODEL_TYPES = tuple(sorted(name for family in FAMILIES for name in family.model_types))
