"""Evaluation over a fixed panel: the same tasks in every run, each exactly k times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EVALUATION_RESULTS
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_gigpo.metrics import episode_metrics, episode_return
from rllib_gigpo.rollout_types import Episode, GroupTask
from rllib_gigpo.seeding import derive_seed

if TYPE_CHECKING:
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

    from rllib_gigpo.config import GiGPOConfig
    from rllib_gigpo.gigpo import GiGPO

# The panel does not depend on the run's seed, so that runs can be compared.
_PANEL_SEED = 505


def panel_seeds(config: GiGPOConfig) -> list[int]:
    """Return the reset seeds of the panel's tasks.

    Seeds drawn here are never those of a training task.
    """
    if config.evaluation_task_seeds is not None:
        return list(config.evaluation_task_seeds)
    return [
        derive_seed(_PANEL_SEED, "evaluation", task) for task in range(config.evaluation_duration)
    ]


def panel_tasks(config: GiGPOConfig) -> list[GroupTask]:
    """Return one group of k episodes per task."""
    return [
        GroupTask(
            group=number,
            env_seed=seed,
            size=config.evaluation_samples_per_task,
            stream="evaluation",
        )
        for number, seed in enumerate(panel_seeds(config))
    ]


def evaluate_panel(
    algorithm: GiGPO, group: EnvRunnerGroup | None
) -> tuple[dict[str, float], int, int]:
    """Play the panel; RLlib's custom evaluation function of GiGPO.

    The ids of the tasks and their outcomes are kept in `algorithm.last_evaluation`, which
    `GiGPO.evaluate` adds to its result as `episodes`.

    Args:
        algorithm: The algorithm.
        group: Its evaluation EnvRunners, or None where the training ones play.

    Returns:
        Metrics, environment steps, agent steps.
    """
    runners = group if group is not None else algorithm.env_runner_group
    config: Any = algorithm.evaluation_config if group is not None else algorithm.config
    collected = algorithm.play(runners, panel_tasks(config))
    results = {**episode_metrics(collected.episodes), **collected.counts()}
    logger = MetricsLogger(root=False)
    logger.log_dict(results, window=1)
    algorithm.metrics.aggregate(
        [logger.reduce(), *collected.metrics], key=(EVALUATION_RESULTS, ENV_RUNNER_RESULTS)
    )
    algorithm.last_evaluation = [_outcome(episode) for episode in collected.episodes]
    steps = int(results["num_env_steps_sampled"])
    return results, steps, steps


def _outcome(episode: Episode) -> dict:
    facts = episode.custom_data
    kept = ("env_seed", "task_id", "task_type", "member", "won")
    return {
        **{name: facts[name] for name in kept if name in facts},
        **facts["numbers"],
        "return": episode_return(episode),
        "steps": episode.env_steps(),
    }
