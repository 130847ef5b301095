"""Chunked log-probabilities are those of the whole logits, which never exist."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rllib_gigpo.chunked import token_logps


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def layer(vocabulary: int, width: int, *, bias: bool = True, seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(width, vocabulary, bias=bias)


def plain(output_layer: Any, hidden: torch.Tensor, targets: torch.Tensor, temperature: float):
    """What it should be: one softmax over all logits, differentiated by autograd."""
    logps = torch.log_softmax(output_layer(hidden).float() / temperature, dim=-1)
    entropy = -(logps.exp() * logps).sum(-1)
    return logps.gather(-1, targets[:, None]).squeeze(-1), entropy


def gradients(output_layer: Any, hidden: torch.Tensor, loss: torch.Tensor) -> list[torch.Tensor]:
    inputs = [hidden, *output_layer.parameters()]
    return list(torch.autograd.grad(loss, inputs))


def test_one_position_by_hand():
    # Logits (0, ln 3): probabilities 1/4 and 3/4, entropy -(1/4 ln 1/4 + 3/4 ln 3/4).
    output_layer = layer(2, 1, bias=False)
    with torch.no_grad():
        output_layer.weight.copy_(torch.tensor([[0.0], [math.log(3)]]))
    hidden = torch.ones(1, 1, requires_grad=True)
    found = token_logps(output_layer, hidden, torch.tensor([1]))
    assert found.logps.item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert found.entropy.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))
    # d logp / dz = onehot - p = (-1/4, 1/4), and hidden is 1.
    (slope,) = torch.autograd.grad(found.logps.sum(), output_layer.weight)
    torch.testing.assert_close(slope, torch.tensor([[-0.25], [0.25]]))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 9),
    chunk=st.integers(1, 60),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_chunk_gives_the_values_and_gradients_of_the_whole(
    rows, chunk, temperature, bias, seed
):
    output_layer = layer(7, 4, bias=bias, seed=seed)
    hidden = torch.randn(rows, 4, requires_grad=True)
    targets = torch.randint(0, 7, (rows,))
    weights = torch.randn(2, rows)
    logps, entropy = token_logps(
        output_layer,
        hidden,
        targets,
        temperature=temperature,
        entropy_grad=True,
        chunk_elements=chunk,
    )
    expected = plain(output_layer, hidden, targets, temperature)
    torch.testing.assert_close((logps, entropy), expected, rtol=1e-5, atol=1e-6)
    loss = (weights[0] * logps).sum() + (weights[1] * entropy).sum()
    whole = (weights[0] * expected[0]).sum() + (weights[1] * expected[1]).sum()
    torch.testing.assert_close(
        gradients(output_layer, hidden, loss),
        gradients(output_layer, hidden, whole),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("chunk_elements", [1000, 100_000])
def test_bfloat16_by_autocast_and_in_the_weights(chunk_elements, autocast):
    output_layer = layer(1000, 16)
    hidden = torch.randn(20, 16, requires_grad=True)
    if not autocast:
        output_layer = output_layer.bfloat16()
        hidden = hidden.detach().bfloat16().requires_grad_()
    targets = torch.randint(0, 1000, (20,))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = token_logps(output_layer, hidden, targets, chunk_elements=chunk_elements)
        expected = plain(output_layer, hidden, targets, 1.0)[0]
    assert found.logps.dtype == torch.float32
    torch.testing.assert_close(found.logps, expected, rtol=0, atol=0.02)
    for ours, theirs in zip(
        gradients(output_layer, hidden, found.logps.sum()),
        gradients(output_layer, hidden, expected.sum()),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype == hidden.dtype
        assert float((ours - theirs).norm() / theirs.norm()) < 0.02


def test_the_logits_of_all_positions_never_exist():
    output_layer = layer(5000, 8)
    hidden = torch.randn(100, 8, requires_grad=True)
    targets = torch.randint(0, 5000, (100,))
    largest = {}
    for name, chunk_elements in {"chunked": 50_000, "whole": 500_000}.items():
        with LargestTensor() as seen:
            found = token_logps(
                output_layer, hidden, targets, entropy_grad=True, chunk_elements=chunk_elements
            )
            (found.logps.sum() + found.entropy.sum()).backward()
        largest[name] = seen.elements
    # 10 positions of 5,000 words at a time, against 100 positions.
    assert largest == {"chunked": 50_000, "whole": 500_000}


def test_a_frozen_output_layer_gets_no_gradient():
    output_layer = layer(50, 4).requires_grad_(False)
    hidden = torch.randn(6, 4, requires_grad=True)
    token_logps(output_layer, hidden, torch.arange(6), chunk_elements=100).logps.sum().backward()
    assert output_layer.weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0
