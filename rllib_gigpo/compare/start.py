"""What every run of a comparison starts from."""

from __future__ import annotations

from pathlib import Path

from rllib_gigpo.config import GiGPOConfig
from rllib_gigpo.models import materialize
from rllib_gigpo.record import record
from rllib_gigpo.sft import WarmStart, warm_start

_EPISODES = 400


def starting_model(config: GiGPOConfig, folder: Path, seed: int, episodes: int = _EPISODES) -> str:
    """Return the model that all runs of a seed start from.

    A tiny model knows no response format, so it learns that from random legal actions, by a
    supervised warm start, and nothing else. Any other model is taken as it is.

    Args:
        config: The run's settings.
        folder: Where warm-started models are kept; one that is there is used again.
        seed: Of the warm start.
        episodes: Random episodes of the warm start.
    """
    if config.llm_model != "tiny":
        return config.llm_model
    target = folder / f"start-{seed}"
    if (target / "done").exists():
        return str(target)
    examples = record(
        lambda: config.env_spec.make(config.env_config),
        config.agent_profile,
        episodes=episodes,
        seed=seed * 10_000,
    )
    warm_start(
        materialize(config.model_spec),
        examples,
        target,
        settings=WarmStart(seed=seed),
        max_prompt_tokens=config.max_prompt_tokens,
    )
    (target / "done").touch()
    return str(target)
