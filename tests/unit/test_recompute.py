"""Activation checkpointing keeps less for the backward pass and changes no gradient."""

from __future__ import annotations

import pytest
import torch

from rllib_gigpo.recompute import allow_recompute
from tests.tiny_runs import (
    SHAPE,
    build_learner,
    gradient,
    module_of,
    parameters,
    random_rows,
    tiny_config,
    update,
)


def kept_elements(call) -> tuple[int, torch.Tensor]:
    """How many numbers the forward pass keeps beside the weights, and what it returns."""
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = call()
    return sum(kept.values()), out


@pytest.mark.parametrize("critic", [None, "head", "model"])
def test_the_step_is_the_same(critic):
    settings = {"critic": critic, "omega": 0.0, "estimator": "gae" if critic else "gigpo"}
    plain = build_learner(**settings)
    config = tiny_config(**settings).learners(activation_checkpointing=True)
    recomputing = build_learner(config)
    rows = random_rows(12)
    assert update(plain, rows)["gradient_norm"] == pytest.approx(
        update(recomputing, rows)["gradient_norm"], rel=1e-6
    )
    assert gradient(plain).norm() > 0
    torch.testing.assert_close(gradient(recomputing), gradient(plain), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(parameters(recomputing), parameters(plain))


def test_less_is_kept_and_nothing_without_gradient():
    from rllib_gigpo.sequences import pack

    kept = {}
    rows = random_rows(12)
    (batch,) = pack(rows["prompt_ids"], rows["response_ids"], 1000)
    for recomputes in (False, True):
        config = tiny_config().learners(activation_checkpointing=recomputes)
        module = module_of(
            build_learner(config.llm(model="tiny", options={**SHAPE, "num_layers": 4}))
        )
        kept[recomputes], scored = kept_elements(lambda module=module: module.score(batch))
        assert scored.logps.requires_grad
        assert not any(layer.training for layer in module.lm.modules()) or recomputes
        with torch.no_grad():
            module.score(batch)
        assert not any(part.training for part in module.lm.modules())
    # Of each layer its input alone, instead of a dozen tensors of that size and larger.
    assert kept[True] < 0.4 * kept[False]


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="Linear has no layer that can be computed again: leave"):
        allow_recompute(torch.nn.Linear(2, 2))
