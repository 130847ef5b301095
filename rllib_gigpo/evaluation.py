"""Evaluation over a fixed panel: the same places in every run, each played k times.

An environment that lists its tasks (`task_ids()`) plays them in a fixed order, none at two places
before each has one; any other draws the task of a place from its reset seed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EVALUATION_RESULTS
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_gigpo.metrics import episode_metrics, episode_return
from rllib_gigpo.rollout_types import Episode, GroupTask
from rllib_gigpo.seeding import derive_seed

if TYPE_CHECKING:
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

    from rllib_gigpo.config import GiGPOConfig
    from rllib_gigpo.gigpo import GiGPO

_LOG = logging.getLogger(__name__)

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


def panel_order(env: Any) -> list[Any]:
    """Return the ids of an environment's tasks in the order in which panels play them.

    The order is a shuffle that depends on the ids alone: it is the same on every machine, however
    the environment sorts them. Empty is an environment that lists none, or two of one id: by that,
    one of them could never be played.
    """
    listed = env.get_wrapper_attr("task_ids") if env.has_wrapper_attr("task_ids") else None
    if not callable(listed):
        return []
    ids = list(cast("Sequence[Any]", listed()))
    if len(set(ids)) < len(ids):
        _LOG.warning(
            "%s.task_ids() lists %d ids, %d of them different: reset seeds choose the tasks of a "
            "panel, some of which may come more than once",
            type(env.unwrapped).__name__,
            len(ids),
            len(set(ids)),
        )
        return []
    return sorted(ids, key=_drawn)


def task_at(order: Sequence[Any], place: int) -> Any:
    """Return the id at a place of the panel, from 0; past the last task it begins again."""
    return order[place % len(order)]


def with_task_ids(tasks: Sequence[GroupTask], order: Sequence[Any]) -> list[GroupTask]:
    """Return tasks of which those of a panel name what they play, if the order holds any."""
    return [
        task
        if task.panel_place is None or not order
        else replace(task, options={"task_id": task_at(order, task.panel_place)})
        for task in tasks
    ]


def panel_tasks(config: GiGPOConfig) -> list[GroupTask]:
    """Return one group of k episodes per task; seeds that a user names choose the tasks."""
    is_drawn = config.evaluation_task_seeds is None
    return [
        GroupTask(
            group=number,
            env_seed=seed,
            size=config.evaluation_samples_per_task,
            stream="evaluation",
            panel_place=number if is_drawn else None,
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


def _drawn(task_id: Any) -> bytes:
    return hashlib.blake2b(f"{_PANEL_SEED}:{task_id}".encode("utf-8", "replace")).digest()


def _outcome(episode: Episode) -> dict:
    facts = episode.custom_data
    kept = ("env_seed", "task_id", "task_type", "member", "won")
    return {
        **{name: facts[name] for name in kept if name in facts},
        **facts["numbers"],
        "return": episode_return(episode),
        "steps": episode.env_steps(),
    }
