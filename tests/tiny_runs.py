"""Configurations and learners small enough for tests that take a second."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import SampleBatch

from envs.spaces import TextSpace
from rllib_gigpo import GiGPOConfig
from rllib_gigpo.learner import GiGPOTorchLearner
from rllib_gigpo.module import CausalLMModule
from rllib_gigpo.rows import object_array

SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 1}
VOCABULARY = 34  # of the tiny model on KeyDoor


def tiny_config(**training: Any) -> GiGPOConfig:
    """KeyDoor on a 4x4 grid with the smallest model; SGD, no KL, no clipping of the gradient."""
    settings = {
        "num_groups": 2,
        "group_size": 2,
        "lr": 0.1,
        "optimizer_name": "sgd",
        "grad_clip": None,
        "kl_coeff": 0.0,
        "minibatch_size": None,
        "invalid_action_penalty": 0.0,
    }
    return (
        GiGPOConfig()
        .environment("KeyDoor", env_config={"horizon": 6})
        .llm(model="tiny", options=SHAPE, max_prompt_tokens=64, max_response_tokens=6)
        .training(**{**settings, **training})
    )


def build_learner(config: GiGPOConfig | None = None, **training: Any) -> GiGPOTorchLearner:
    """A learner in this process, without Ray; `gradient` tells what its last step took."""
    learner = bare_learner(config, **training)
    if DEFAULT_MODULE_ID in learner.module:
        _keep_gradients(learner)
    return learner


def bare_learner(config: GiGPOConfig | None = None, **training: Any) -> GiGPOTorchLearner:
    """The same without a copy of its gradients."""
    config = (config or tiny_config()).copy(copy_frozen=False).training(**training)
    config.validate()
    learner = config.build_learner(
        spaces=dict.fromkeys(config.module_ids, (TextSpace(), TextSpace()))
    )
    assert isinstance(learner, GiGPOTorchLearner)
    return learner


_GRADIENTS: WeakKeyDictionary[GiGPOTorchLearner, dict[str, torch.Tensor]] = WeakKeyDictionary()


def _keep_gradients(learner: GiGPOTorchLearner) -> None:
    """Keep what the optimizer is given: an update leaves no gradient behind."""

    def keep(*_: Any) -> None:
        named = module_of(learner).lm.named_parameters()
        _GRADIENTS[learner] = {n: p.grad.clone() for n, p in named if p.grad is not None}

    learner.get_optimizer(DEFAULT_MODULE_ID).register_step_pre_hook(keep)


def module_of(learner: GiGPOTorchLearner) -> CausalLMModule:
    module = learner.module[DEFAULT_MODULE_ID]
    assert isinstance(module, CausalLMModule)
    return module


def update(learner: GiGPOTorchLearner, batch: SampleBatch, iteration: int = 0) -> dict[str, float]:
    """One update; what it reports of the policy."""
    results = learner.update(
        batch=batch.copy().as_multi_agent(),
        timesteps={"num_env_steps_sampled_lifetime": 0},
        iteration=iteration,
    )
    return {
        name: float(stats.peek())
        for name, stats in results[DEFAULT_MODULE_ID].items()
        if "throughput" not in name
    }


def parameters(learner: GiGPOTorchLearner) -> dict[str, torch.Tensor]:
    """A copy of the trained parameters."""
    return {n: p.detach().clone() for n, p in module_of(learner).lm.named_parameters()}


def gradients(learner: GiGPOTorchLearner) -> dict[str, torch.Tensor]:
    """The gradient of the last optimizer step, by parameter."""
    return _GRADIENTS[learner]


def gradient(learner: GiGPOTorchLearner) -> torch.Tensor:
    """The gradient of the last optimizer step in one vector."""
    return torch.cat([part.reshape(-1) for part in gradients(learner).values()])


def random_rows(
    num_rows: int = 12, *, seed: int = 0, group_size: int = 3, steps: int = 2, zeros: int = 0
) -> SampleBatch:
    """Rows with prompts of 1 to 9 and responses of 1 to 5 random tokens.

    Args:
        num_rows: A multiple of `steps`.
        seed: Of tokens and rewards.
        group_size: Episodes per group.
        steps: Rows per episode.
        zeros: The last so many rows are one group each, which makes their advantage 0.
    """
    rng = np.random.default_rng(seed)
    episode = np.arange(num_rows) // steps
    group = episode // group_size
    group[num_rows - zeros :] = 1000 + episode[num_rows - zeros :]

    def tokens(low: int, high: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, rng.integers(low, high)).astype(np.int32)

    responses = [tokens(1, 6) for _ in range(num_rows)]
    return SampleBatch(
        {
            "group": group,
            "episode": episode,
            "step": np.arange(num_rows) % steps,
            "anchor": np.arange(num_rows) % steps,
            "reward": rng.standard_normal(num_rows),
            "prompt_ids": object_array([tokens(1, 10) for _ in range(num_rows)]),
            "response_ids": object_array(responses),
            "response_logps": object_array(
                [np.full(len(r), -3.5, dtype=np.float32) for r in responses]
            ),
        }
    )


def one_step_rows(returns: list[float], response_lengths: list[int] | None = None) -> SampleBatch:
    """A group whose episodes have one step each, all from different anchor states."""
    n = len(returns)
    lengths = response_lengths or [2] * n
    return SampleBatch(
        {
            "group": np.zeros(n, dtype=np.int64),
            "episode": np.arange(n),
            "step": np.zeros(n, dtype=np.int64),
            "anchor": np.arange(n),
            "reward": np.array(returns, dtype=np.float64),
            "prompt_ids": object_array([np.arange(3 + i, dtype=np.int32) for i in range(n)]),
            "response_ids": object_array(
                [np.arange(5, 5 + length, dtype=np.int32) for length in lengths]
            ),
            "response_logps": object_array(
                [np.full(length, -3.5, dtype=np.float32) for length in lengths]
            ),
        }
    )
