"""Sums over learners (torch.distributed: gloo on CPU, NCCL on GPUs)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

_BUCKET_ELEMENTS = 2**25


def sum_over_learners(values: Sequence[float]) -> list[float]:
    """Return the sums of a few numbers over all learners."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Replace each gradient by its sum over all learners.

    Args:
        parameters: The same parameters in the same order on every learner, each with a gradient;
            that of a learner without a row in this step is 0.
    """
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
