"""Sums over learners (torch.distributed: gloo on CPU, NCCL on GPUs)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rllib_gigpo.sequences import MicroBatch, empty_batch
from rllib_gigpo.sharding import is_sharded

_BUCKET_ELEMENTS = 2**25


def sum_over_learners(values: Sequence[float]) -> list[float]:
    """Return the sums of a few numbers over all learners."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def in_step(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """Add empty micro-batches, until every learner has as many as the one with the most.

    Where the passes of a model are made by all learners together, none may have fewer.
    """
    counts = [0.0] * dist.get_world_size()
    counts[dist.get_rank()] = len(micro_batches)
    most = int(max(sum_over_learners(counts)))
    return [*micro_batches, *(empty_batch() for _ in range(most - len(micro_batches)))]


def sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Replace each gradient by its sum over all learners; those of sharded parameters are sums.

    Args:
        parameters: The same parameters in the same order on every learner, each with a gradient;
            that of a learner without a row in this step is 0.
    """
    parameters = [parameter for parameter in parameters if not is_sharded(parameter)]
    bucket: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        assert parameter.grad is not None
        bucket.append(parameter.grad)
        size += parameter.grad.numel()
        if size >= _BUCKET_ELEMENTS:
            _sum_bucket(bucket)
            bucket, size = [], 0
    if bucket:
        _sum_bucket(bucket)


def _sum_bucket(gradients: list[torch.Tensor]) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def clip_gradients(parameters: list[torch.nn.Parameter], limit: float) -> float:
    """Scale gradients to a norm of at most `limit`, over the parts of all learners.

    Returns:
        The norm before.
    """
    if not any(map(is_sharded, parameters)):
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))
    squares = {True: 0.0, False: 0.0}
    gradients = [_local(parameter.grad) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        squares[is_sharded(parameter)] += float(gradient.double().square().sum())
    square = sum_over_learners([squares[True]])[0] + squares[False]
    # As in the norm of whole gradients, whose squares are added up in float32.
    norm = square**0.5 if square <= torch.finfo(torch.float32).max else math.inf
    if limit < norm < math.inf:
        for gradient in gradients:
            gradient.mul_(limit / (norm + 1e-6))
    return norm


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
