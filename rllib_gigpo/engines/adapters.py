"""LoRA adapters: what an engine accepts, and merging one into a plain model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rllib_gigpo.engines.base import EngineError
from rllib_gigpo.engines.packing import Checksums, checksum

_NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<half>[AB])\.weight")
_OTHER_RULES = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")


class MergedAdapter:
    """The adapter that a model computes with: W + (alpha / rank) B A in place of W.

    The product is computed in fp32 and rounded to the model's type once. W is kept on the CPU, so
    that the next adapter starts from it.

    Args:
        model: A plain model; its matrices are changed.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._base: dict[str, torch.Tensor] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._scale = 1.0

    def __bool__(self) -> bool:
        """Whether there is an adapter."""
        return bool(self._tensors)

    def replace(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        """Take the adapter out that is there, and merge another one.

        Args:
            tensors: The adapter's parameters under their names in a peft adapter file.
            config: The content of peft's adapter_config.json.

        Raises:
            EngineError: The tensors are no adapter of this model; nothing has changed then.
        """
        shapes = {name: tuple(value.shape) for name, value in self._model.named_parameters()}
        scale = check_adapter(tensors, config, shapes)
        self._restore()
        self._tensors = {name: value.detach().float().clone() for name, value in tensors.items()}
        self._scale = scale
        with torch.no_grad():
            for layer in self._layers():
                weight = self._weight(layer)
                self._base[layer] = weight.detach().cpu().clone()
                weight.copy_(self._merged(layer))

    def forget(self) -> None:
        """Give the adapter up because the model has got other weights."""
        self._base, self._tensors = {}, {}

    def checksums(self) -> Checksums:
        """Checksums of the adapter's tensors, but for those of matrices that hold other values."""
        return {
            name: checksum(self._tensors[name])
            for layer in self._layers()
            if torch.equal(self._weight(layer), self._merged(layer))
            for name in _names(layer)
        }

    def _restore(self) -> None:
        with torch.no_grad():
            for layer, base in self._base.items():
                self._weight(layer).copy_(base)
        self.forget()

    def _layers(self) -> Iterator[str]:
        for name in self._tensors:
            matched = _NAME.fullmatch(name)
            assert matched is not None
            if matched["half"] == "A":
                yield matched["layer"]

    def _weight(self, layer: str) -> torch.Tensor:
        return self._model.get_submodule(layer).weight  # pyright: ignore[reportReturnType]

    def _merged(self, layer: str) -> torch.Tensor:
        weight = self._weight(layer)
        down, up = (self._tensors[name].to(weight.device) for name in _names(layer))
        base = self._base[layer].to(weight.device)
        return (base.float() + self._scale * (up @ down)).to(weight.dtype)


def _names(layer: str) -> tuple[str, str]:
    start = f"base_model.model.{layer}.lora_"
    return f"{start}A.weight", f"{start}B.weight"


def check_adapter(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> float:
    """Check that an adapter is one of a model.

    Args:
        tensors: The adapter's parameters under their names in a peft adapter file.
        config: The content of peft's adapter_config.json.
        shapes: Shapes of the model's parameters by name.

    Returns:
        alpha / rank, by which B A is multiplied.

    Raises:
        EngineError: It is not.
    """
    missing = [name for name in ("r", "lora_alpha") if name not in config]
    special = [name for name in _OTHER_RULES if config.get(name)]
    if missing or special:
        raise EngineError(
            f"the adapter's configuration {'lacks' if missing else 'sets'} "
            f"{', '.join(missing or special)}: engines serve plain LoRA adapters, "
            "W + (lora_alpha / r) B A, only"
        )
    if not tensors:
        raise EngineError("the adapter holds no tensor: send A and B of every adapted matrix")
    for name, tensor in tensors.items():
        matched = _NAME.fullmatch(name)
        matrix = shapes.get(f"{matched['layer']}.weight", ()) if matched else ()
        if matched is None or len(matrix) != 2:
            raise EngineError(
                f"the adapter's tensor {name!r} belongs to no linear layer of the model: expected "
                "peft's names, base_model.model.<layer>.lora_A.weight and .lora_B.weight"
            )
        lost = [other for other in _names(matched["layer"]) if other not in tensors]
        if lost:
            raise EngineError(f"the adapter lacks {lost[0]!r}, the other half of {name!r}")
        rows, columns = matrix
        expected = (config["r"], columns) if matched["half"] == "A" else (rows, config["r"])
        if tuple(tensor.shape) != expected:
            raise EngineError(
                f"the adapter's tensor {name!r} has shape {tuple(tensor.shape)}, expected "
                f"{expected}"
            )
    return config["lora_alpha"] / config["r"]
