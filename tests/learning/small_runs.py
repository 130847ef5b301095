"""Runs short enough for CI: a tiny model on KeyDoor 3 x 3, warm-started once for all presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.models import materialize
from rllib_gigpo.record import record
from rllib_gigpo.scripted import half_expert
from rllib_gigpo.sft import WarmStart, warm_start

EPISODES = 96
ENV_CONFIG = {"size": 3, "horizon": 10}


def small_config(preset: str, model: Path | str = "tiny", **training: Any) -> GiGPOConfig:
    """A preset with what the tiny model needs to learn fast."""
    config = GiGPOConfig.preset(preset)
    group_size = 1 if config.group_size == 1 else 8
    settings = {
        "num_groups": EPISODES // group_size,
        "group_size": group_size,
        "lr": 4e-4,
        "critic_lr": 7e-4,
        "adam_betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "kl_coeff": 0.0,
        "num_minibatches": 6,
        "invalid_action_penalty": 0.0,
        "old_logp": "engine",
    }
    return (
        config.environment("KeyDoor", env_config=ENV_CONFIG)
        .llm(model=str(model), max_prompt_tokens=64, max_response_tokens=8, eval_temperature=1.0)
        .training(**{**settings, **training})
        .evaluation(evaluation_duration=128)
    )


def small_model(folder: Path) -> Path:
    """A model that has seen a player who tosses a coin between an expert and chance."""
    config = small_config("gigpo")
    examples = record(
        lambda: config.env_spec.make(config.env_config),
        config.agent_profile,
        policy=half_expert,
        episodes=300,
    )
    return warm_start(
        materialize(config.model_spec), examples, folder, settings=WarmStart(steps=60)
    )


def learn(
    config: GiGPOConfig, iterations: int, enough: float = 0.95
) -> tuple[float, float, list[dict]]:
    """Train until the training episodes are won often enough, or the iterations are over.

    Args:
        config: What to train.
        iterations: Iterations at most.
        enough: Share of won training episodes.

    Returns:
        Success on 128 held-out tasks before and after, and the results of the iterations.
    """
    algorithm = config.build_algo()
    before = float(algorithm.evaluate()["env_runners"]["success_rate"])
    results = []
    while len(results) < iterations:
        results.append(algorithm.train())
        if results[-1]["env_runners"]["success_rate"] >= enough:
            break
    after = float(algorithm.evaluate()["env_runners"]["success_rate"])
    algorithm.stop()
    return before, after, results
