"""What fits a policy's model, and how vLLM's workers take it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rllib_gigpo.engines.base import EngineError
from rllib_gigpo.engines.packing import Checksums, checksum

Shapes = Mapping[str, tuple[int, ...]]

_SHOWN = 3


def parameter_shapes(model: str) -> tuple[Shapes, frozenset[str]]:
    """Names and shapes of a model's parameters as transformers knows them.

    Args:
        model: Model folder or Hugging Face id.

    Returns:
        Shapes by name, and the names of further state that a tied or buffered model may also send.
    """
    from transformers import AutoConfig

    from rllib_gigpo.models.loading import model_class

    with torch.device("meta"):
        skeleton = model_class(model).from_config(
            AutoConfig.from_pretrained(model, trust_remote_code=False)
        )
    shapes = {name: tuple(value.shape) for name, value in skeleton.named_parameters()}
    return shapes, frozenset(skeleton.state_dict().keys() - shapes.keys())


def fitting(
    tensors: Mapping[str, torch.Tensor], shapes: Shapes, optional: frozenset[str]
) -> dict[str, torch.Tensor]:
    """The tensors to load, once they are known to be exactly the model's.

    Raises:
        EngineError: Missing or unknown names, or wrong shapes.
    """
    missing = sorted(shapes.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - shapes.keys() - optional)
    wrong = [
        f"{name} {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = [
        f"{len(found)} {what} ({', '.join(found[:_SHOWN])}{', ...' if len(found) > _SHOWN else ''})"
        for what, found in (("missing", missing), ("unknown", unknown), ("of wrong shape", wrong))
        if found
    ]
    if problems:
        raise EngineError(
            f"weights do not fit the model: {'; '.join(problems)}; send every parameter under its "
            "Hugging Face name"
        )
    return {name: tensors[name] for name in shapes}


def load_into_worker(worker: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace a vLLM worker's weights; runs inside the worker.

    Args:
        worker: vLLM's worker.
        tensors: All parameters under their Hugging Face names.
    """
    begin_update(worker)
    try:
        worker.reload_weights(weights_iterator=iter(tensors.items()))
    finally:
        end_update(worker)


class _Received(NamedTuple):
    """One tensor that a worker's model was given."""

    checksum: int
    shape: torch.Size
    dtype: torch.dtype


def begin_update(worker: Any) -> None:
    """From here to `end_update`, note what the worker's model is given; runs inside the worker."""
    model = worker.model_runner.get_model()
    load, received = model.load_weights, {}

    def load_and_note(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return load(_noted(weights, received))

    worker.rllib_gigpo_received = received
    model.load_weights = load_and_note


def _noted(
    weights: Iterable[tuple[str, torch.Tensor]], received: dict[str, _Received]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        received[name] = _Received(checksum(tensor), tensor.shape, tensor.dtype)
        yield name, tensor


def end_update(worker: Any) -> None:
    """Put all new weights into effect; runs inside the worker."""
    from vllm.platforms import current_platform

    model = worker.model_runner.get_model()
    vars(model).pop("load_weights", None)
    if current_platform.is_cpu():
        _repack_heads(model)


def _repack_heads(model: torch.nn.Module) -> None:
    # vLLM's CPU kernels multiply with a packed copy of each matrix. Reloading renews the copies of
    # layers that receive weights; an output head tied to the embeddings receives none itself and
    # would go on with its old copy.
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def weight_checksums(worker: Any) -> Checksums:
    """Checksums of a worker's weights by the names they came under; runs inside the worker.

    Parameters that the worker keeps as they came are read back. Fused, sharded or repacked ones
    count as they were received.
    """
    model = worker.model_runner.get_model()
    held = {name.replace(".base_layer.", "."): value for name, value in model.named_parameters()}
    received: dict[str, _Received] = getattr(worker, "rllib_gigpo_received", {})
    return {name: _read_back(held.get(name), sent) for name, sent in received.items()}


def _read_back(held: torch.Tensor | None, sent: _Received) -> int:
    if held is None or held.dtype != sent.dtype or held.ndim != len(sent.shape):
        return sent.checksum
    # vLLM fills embeddings up to a round number of rows.
    if held.shape[1:] != sent.shape[1:] or held.shape[:1] < sent.shape[:1]:
        return sent.checksum
    return checksum(held[: sent.shape[0]])


def adapter_checksums(
    worker: Any, number: int, tensors: Mapping[str, torch.Tensor], scale: float
) -> Checksums:
    """Checksums of those adapter tensors that a worker holds; runs inside the worker.

    Args:
        worker: vLLM's worker.
        number: The adapter's number.
        tensors: The adapter as it was sent.
        scale: alpha / rank, by which vLLM multiplies B once it has read it.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    if number not in manager.list_adapters():
        return {}
    names = _names_in_worker(worker, tensors)
    found: Checksums = {}
    for layer, down, up in _adapter_layers(manager.get_adapter(number), manager.packed_modules):
        for half, held, factor in (("A", down, 1.0), ("B", up, scale)):
            name = names.get(f"{layer}.lora_{half}.weight", "")
            sent = tensors.get(name)
            if sent is not None and torch.equal(held, sent.to(held.device, held.dtype) * factor):
                found[name] = checksum(sent)
    return found


def _names_in_worker(worker: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """From the names that a worker's model has for adapter tensors to those they came under."""
    mapper = getattr(worker.model_runner.get_model(), "hf_to_vllm_mapper", None)
    plain = {name.removeprefix("base_model.model."): name for name in tensors}
    if mapper is None:
        return plain
    # The full mapper would name q, k and v alike after the layer they are fused into.
    mapper = mapper.get_rename_mapper()
    return {mapper.map_name(inner) or inner: name for inner, name in plain.items()}


def _adapter_layers(
    adapter: Any, packed: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Layer name, A and B of an adapter in vLLM's memory, where q, k and v are one layer."""
    for name, layer in adapter.loras.items():
        if not isinstance(layer.lora_a, list):
            yield name, layer.lora_a, layer.lora_b
            continue
        for part, down, up in zip(packed[name], layer.lora_a, layer.lora_b, strict=True):
            if down is not None and up is not None:
                yield part, down, up
