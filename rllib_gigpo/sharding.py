"""Models whose weights, gradients and optimizer state are spread over the learners (FSDP2).

Every forward and backward pass of a sharded model gathers its weights layer by layer from all
learners, and so does whatever reads them whole. All learners must therefore make the same passes
and reads in the same order: one that stays behind makes all others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from rllib_gigpo.recompute import repeated_layers

T = TypeVar("T")


def shard(
    model: torch.nn.Module,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    offload_to_cpu: bool = False,
) -> None:
    """Spread a model over all learners, layer by layer.

    Gradients are summed over the learners, not averaged: losses divide by the totals of the whole
    optimizer step.

    Args:
        model: A Hugging Face model, or the body of one; changed where it stands.
        device: Where this learner computes.
        dtype: Type in which weights are gathered; those that are kept stay as they are.
        offload_to_cpu: Keep weights, gradients and optimizer state in the host's memory.
    """
    if device.type == "cuda":
        # Each learner sees one GPU; a mesh over an idle CUDA would look for one per learner.
        torch.cuda.set_device(device)
        torch.cuda.init()
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "reshard_after_forward": True,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy() if offload_to_cpu else OffloadPolicy(),
    }
    for part in (*repeated_layers(model), model):
        part = fully_shard(part, **options)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    called: Any = model
    called.with_weights = _with_weights.__get__(model)
    register_fsdp_forward_method(model, "with_weights")


def _with_weights(self: Any, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return function(self, *args, **kwargs)


def run(model: Any, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return function(model, ...), with the weights of a sharded model at hand."""
    if hasattr(model, "with_weights"):
        return model.with_weights(function, *args, **kwargs)
    return function(model, *args, **kwargs)


def forget_passes(model: Any) -> None:
    """Let a sharded model that is never trained forget its passes; all learners must ask.

    FSDP notes every pass until the next backward one, for a frozen model without an end. This one
    goes backward through nothing.
    """
    with torch.enable_grad():
        run(model, lambda _: torch.zeros((), requires_grad=True)).backward()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this learner holds a part of the tensor only."""
    return isinstance(tensor, DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the parts of all learners; all of them must ask."""
    if not isinstance(tensor, DTensor):
        return tensor
    on_device: Any = tensor.to(tensor.device_mesh.device_type)
    return on_device.full_tensor()


def keeps(tensor: torch.Tensor) -> bool:
    """Whether this learner keeps a tensor once it is whole: of sharded ones the first alone does.

    A node with many learners would otherwise hold as many copies.
    """
    return not is_sharded(tensor) or dist.get_rank() == 0


def gathered(tensors: Mapping[Any, Any], of: Callable[[torch.Tensor], T]) -> dict[Any, T]:
    """Return `of` each whole tensor that this learner keeps; all learners must ask."""
    found = {}
    for name, tensor in tensors.items():
        complete = whole(tensor)
        if keeps(tensor):
            found[name] = of(complete)
    return found


def part_like(held: torch.Tensor, complete: torch.Tensor) -> torch.Tensor:
    """Return this learner's part of a whole tensor, as it holds the other one."""
    if not isinstance(held, DTensor):
        return complete
    return distribute_tensor(
        complete.to(held.device_mesh.device_type),
        held.device_mesh,
        held.placements,
        src_data_rank=None,
    )
