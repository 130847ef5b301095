"""What a model is called and how the tiny one is shaped: plain, hashable, picklable data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

TINY = "tiny"
TINY_VISION = "tiny-vision"
SMOLLM2 = "smollm2-135m"

FROM_SCRATCH = (TINY, TINY_VISION)

Option = int | float | bool


@dataclass(frozen=True)
class TinyShape:
    """Shape of the tiny from-scratch language model.

    Attributes:
        hidden_size: Width of the residual stream; `num_heads` must divide it. vLLM serves only
            heads of 32, 64, 80, 96, 112 or 128 dimensions, so keep `hidden_size / num_heads` there.
        intermediate_size: Width of the MLP.
        num_layers: Transformer blocks.
        num_heads: Attention heads, as many for keys and values as for queries.
        tie: Whether the output layer shares the embedding matrix.
        initializer_range: Standard deviation of the initial matrices. A model this small learns a
            response format badly from the 0.02 that is usual for large ones.
        max_position_embeddings: Longest prompt plus response in tokens.
    """

    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 2
    tie: bool = True
    initializer_range: float = 0.1
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "tie":
                valid, expected = isinstance(value, bool), "True or False"
            elif field.name == "initializer_range":
                number = isinstance(value, int | float) and not isinstance(value, bool)
                valid, expected = number and 0 < value < float("inf"), "a number above 0"
            else:
                integer = isinstance(value, int) and not isinstance(value, bool)
                valid, expected = integer and value > 0, "an integer above 0"
            if not valid:
                raise ValueError(f"tiny model option {field.name}={value!r} must be {expected}")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"tiny model option hidden_size={self.hidden_size} must be a multiple of "
                f"2 * num_heads = {2 * self.num_heads}, because rotary embeddings need heads of an "
                "even size"
            )


@dataclass(frozen=True)
class TinyVisionShape(TinyShape):
    """Shape of the tiny from-scratch image-text model.

    Attributes:
        initializer_range: As above; wider than for text, so that pictures show from the start.
        vision_size: Width of the vision tower.
        vision_layers: Its blocks.
        image_side: Pictures are shrunk to at most this many pixels squared. A token stands for
            16 x 16 of them.
    """

    initializer_range: float = 0.2
    vision_size: int = 32
    vision_layers: int = 1
    image_side: int = 80


Shape = TypeVar("Shape", bound=TinyShape)


@dataclass(frozen=True)
class ModelSpec:
    """A language model by name.

    Attributes:
        name: `"tiny"` or `"tiny-vision"` (built from scratch), `"smollm2-135m"` (packaged weights),
            a Hugging Face id, or a local folder with `config.json` and safetensors.
        words: Only for the tiny ones: sample texts (prompts, observations, actions) whose words
            form the vocabulary.
        seed: Only for the tiny ones: decides the initial weights.
        options: Only for the tiny ones: fields of `TinyShape` (`TinyVisionShape`) that differ from
            their defaults, as a mapping or as pairs; kept as sorted pairs.

    Raises:
        ValueError: A setting of the wrong kind, an unknown option, or a setting of the tiny model
            given to another one.
    """

    name: str
    words: tuple[str, ...] = ()
    seed: int = 0
    options: Mapping[str, Option] | tuple[tuple[str, Option], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(
                f"model name {self.name!r} must be {TINY!r}, {SMOLLM2!r}, a Hugging Face id, or a "
                "folder"
            )
        if isinstance(self.words, str) or not all(isinstance(text, str) for text in self.words):
            raise ValueError(f"words={self.words!r} must be a tuple of texts")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise ValueError(f"model seed {self.seed!r} must be an integer of at least 0")
        object.__setattr__(self, "words", tuple(self.words))
        try:
            options = sorted(dict(self.options).items())
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"model options={self.options!r} must be a dict, such as {{'hidden_size': 64}}"
            ) from error
        object.__setattr__(self, "options", tuple(options))
        if self.name == TINY:
            _ = self.tiny_shape
        elif self.name == TINY_VISION:
            _ = self.tiny_vision_shape
        elif self.words or self.seed or self.options:
            raise ValueError(
                f"words, seed and options shape the model {TINY!r}; leave them out for "
                f"{self.name!r}, which brings its own vocabulary and weights"
            )

    @property
    def tiny_shape(self) -> TinyShape:
        """The tiny model's shape: the defaults with `options` over them."""
        return self._shape(TinyShape)

    @property
    def tiny_vision_shape(self) -> TinyVisionShape:
        """The same of the tiny image-text model."""
        return self._shape(TinyVisionShape)

    @property
    def is_from_scratch(self) -> bool:
        """Whether the model is built from the environment's words."""
        return self.name in FROM_SCRATCH

    def _shape(self, kind: type[Shape]) -> Shape:
        options = dict(self.options)
        known = [field.name for field in fields(kind)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(
                f"unknown tiny model options {', '.join(map(repr, unknown))}: choose from "
                f"{', '.join(known)}"
            )
        return kind(**options)  # pyright: ignore[reportArgumentType]
