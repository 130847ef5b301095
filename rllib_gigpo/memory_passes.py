"""What a pass keeps for the backward pass, counted on tensors that have shapes and no memory.

Nothing is guessed by a formula: the model runs, and what autograd would keep is added up. So the
number holds for any architecture, with or without autocast and activation checkpointing. Rows are
taken to differ in length, so that attention reads a mask; where all are equally long it keeps a
little less. Pictures are taken to be all different.

Shapes: U rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten

from rllib_gigpo.recompute import allow_recompute, recompute_layers, repeated_layers
from rllib_gigpo.vision import Gallery, PlacedPicture
from rllib_gigpo.vision.sight import Sight, freeze_vision


@dataclass(frozen=True)
class Passes:
    """What passes of one micro-batch need, in bytes.

    Attributes:
        kept: Activations that are kept for the backward pass.
        scored: Activations of the layer at work in a pass without gradients.
        pictures: Pixels of the pictures, processed; once as they are kept, once put together.
    """

    kept: int
    scored: int
    pictures: int


class _Weightless(FakeTensorMode):
    """Lets tensors have no memory, or only those that meet one without.

    Attributes:
        keeps_real: Whether an operation on real tensors alone gives a real one. Vision towers read
            the values of indices, which are computed from the sizes of pictures.
    """

    keeps_real = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation for real where nothing in it is fake, and that is wanted."""
        kwargs = kwargs or {}
        flat, _ = tree_flatten((args, kwargs))
        if self.keeps_real and not any(isinstance(value, FakeTensor) for value in flat):
            return func(*args, **kwargs)
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            # The number of places in a mask must be known.
            args = (args[0], _places(args[1]), *args[2:])
        return super().__torch_dispatch__(func, types, args, kwargs)


def _places(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
            found.append(index)
        else:
            found += index.nonzero(as_tuple=True)
    return found


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch.

    Attributes:
        number: U.
        tokens: L.
        sight: The model's image side, where they show pictures.
        sizes: Height and width of each picture of a row.
    """

    number: int
    tokens: int
    sight: Sight | None = None
    sizes: tuple[tuple[int, int], ...] = ()

    def images(self) -> list[tuple[PlacedPicture, ...]]:
        """Return the pictures of each row, all different and at its start.

        Raises:
            ValueError: They take more tokens than a row has.
        """
        if self.sight is None:
            return [()] * self.number
        gallery, draws = Gallery(), np.random.default_rng(0)
        rows = []
        for _ in range(self.number):
            shown, start = [], 0
            for height, width in self.sizes:
                pixels = draws.integers(1, 256, (height, width, 3), dtype=np.uint8)
                picture = gallery.hang(pixels)
                length = self.sight.num_features(picture)
                shown.append(PlacedPicture(picture, ((start, length),)))
                start += length
            if start >= self.tokens:
                raise ValueError(
                    f"{len(self.sizes)} pictures take {start} tokens and a row has {self.tokens}: "
                    "raise max_prompt_tokens, or show fewer or smaller pictures"
                )
            rows.append(tuple(shown))
        return rows


def passes(
    make: Callable[[], Any],
    rows: Rows,
    *,
    bf16: bool = False,
    recompute: bool = False,
    freeze: bool = False,
) -> Passes:
    """Count what the passes of a micro-batch keep.

    Every row with pictures adds the same. So two are counted at most: a tower that reads pictures
    window by window takes minutes for dozens of them, even without memory.

    Args:
        make: Builds the model, with an output layer.
        rows: The micro-batch.
        bf16: Whether matrix products run under bf16 autocast.
        recompute: Whether the insides of layers are computed again.
        freeze: Whether the vision tower gets no gradient.

    Raises:
        ValueError: The pictures take more tokens than a row has.
    """
    count = partial(_passes, make, bf16=bf16, recompute=recompute, freeze=freeze)
    if rows.sight is None or rows.number <= 2:
        return count(rows)
    one, two = (count(replace(rows, number=number)) for number in (1, 2))
    further = rows.number - 1
    return Passes(*(a + further * (b - a) for a, b in zip(astuple(one), astuple(two), strict=True)))


def _passes(
    make: Callable[[], Any], rows: Rows, *, bf16: bool, recompute: bool, freeze: bool
) -> Passes:
    images, mode = rows.images(), _Weightless(allow_non_fake_inputs=True)
    with mode:
        model = make().eval()
    if freeze:
        freeze_vision(model)
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def kept() -> int:
        counted = _Kept(own)
        with (
            mode,
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
            torch.autograd.graph.saved_tensors_hooks(counted.keep, lambda tensor: tensor),
        ):
            _run(model.base_model, mode, rows, images)
        return sum(counted.sizes.values())

    whole = kept()
    layers = []
    for stack in _stacks(model):
        with _without_last(stack):
            layers.append(whole - kept())
    if recompute:
        allow_recompute(model)
        recompute_layers(model)
        whole = kept()
    distinct = {shown.picture.key: shown.picture for row in images for shown in row}
    pixels = sum(
        tensor.numel() * tensor.element_size()
        for picture in distinct.values()
        for tensor in (rows.sight.process(picture).values() if rows.sight else ())
    )
    return Passes(kept=whole, scored=max(layers), pictures=2 * pixels)


class _Kept:
    """Adds up storages that autograd keeps beside a model's own."""

    def __init__(self, own: set[int]):
        self.sizes: dict[int, int] = {}
        self._own = own
        self._alive: list[torch.Tensor] = []  # so that none is taken for one that came before it

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self.sizes[storage._cdata] = storage.nbytes()
            self._alive.append(tensor)
        return tensor


def _run(
    body: Any, mode: _Weightless, rows: Rows, images: Sequence[tuple[PlacedPicture, ...]]
) -> None:
    shape = rows.number, rows.tokens
    reader, inputs = body, {"input_ids": torch.zeros(shape, dtype=torch.long)}
    if rows.sight is not None:
        mode.keeps_real = True
        try:
            ids = torch.zeros(shape, dtype=torch.long)
            inputs = rows.sight.inputs(body, ids, images)
        finally:
            mode.keeps_real = False
        reader = rows.sight.language_model(body)
    is_token = torch.ones(shape, dtype=torch.long)
    reader(**inputs, attention_mask=is_token, use_cache=False)


def _stacks(model: Any) -> list[torch.nn.ModuleList]:
    """Return the lists of layers that a model is made of: the language model's, the tower's."""
    layers = set(map(id, repeated_layers(model)))
    return [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and any(id(part) in layers for part in module)
    ]


@contextmanager
def _without_last(stack: torch.nn.ModuleList) -> Iterator[None]:
    last = stack.pop(-1)
    try:
        yield
    finally:
        stack.append(last)
