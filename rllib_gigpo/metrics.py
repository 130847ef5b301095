"""From episodes and rows to the scalars of one iteration.

Every episode counts once, however many steps it has. `episode_return_mean` is the environment's
return, before penalties.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.policy.sample_batch import MultiAgentBatch

from rllib_gigpo.advantages import dense_ids
from rllib_gigpo.grouping import SIZE_BINS, group_size_histogram
from rllib_gigpo.repetition import is_repeating
from rllib_gigpo.rows import agent_episodes, modules_of, step_is_valid

Episode = SingleAgentEpisode | MultiAgentEpisode


SOLO_MODULE = "default_policy"


def episode_return(episode: Episode) -> float:
    """Return the sum of the environment's rewards; over a team, the mean over its agents."""
    returns = [single.get_return() for _, single in agent_episodes(episode)]
    return float(np.mean(returns)) if returns else 0.0


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Summarise finished episodes.

    Returns:
        `episode_return_mean`, `episode_len_mean` (environment steps), `valid_action_rate`,
        `prompt_tokens_mean` and `response_tokens_mean` (per step), `response_cut_rate` (responses
        that hit the token limit), `repeated_response_rate` (responses that are loops),
        `truncated_rate` (episodes), `num_episodes`, `num_env_steps_sampled`; where the environment
        tells `won` of any episode, `success_rate` and `success_rate/<task type>`, to which the
        others count as not won; for every other number of its last info, such as `score`,
        `<name>_mean` and `<name>_mean/<task type>`; and `agent_episode_return_mean/<agent>` and
        `module_episode_return_mean/<module>`.
    """
    values: dict[str, list[float]] = defaultdict(list)
    tells_won = any("won" in episode.custom_data for episode in episodes)
    for episode in episodes:
        values["episode_return_mean"].append(episode_return(episode))
        values["episode_len_mean"].append(episode.env_steps())
        values["truncated_rate"].append(float(episode.is_truncated))
        facts = episode.custom_data
        if tells_won:
            won = float(facts.get("won", False))
            values["success_rate"].append(won)
            if "task_type" in facts:
                values[f"success_rate/{facts['task_type']}"].append(won)
        for name, value in facts["numbers"].items():
            values[f"{name}_mean"].append(float(value))
            if "task_type" in facts:
                values[f"{name}_mean/{facts['task_type']}"].append(float(value))
        for agent, single in agent_episodes(episode):
            own_return = float(single.get_return())
            values[f"agent_episode_return_mean/{agent}"].append(own_return)
            module = single.module_id or SOLO_MODULE
            values[f"module_episode_return_mean/{module}"].append(own_return)
            for step in range(len(single)):
                values["valid_action_rate"].append(step_is_valid(single, step))
                values["prompt_tokens_mean"].append(len(single.observations[step]))
                values["response_tokens_mean"].append(len(single.actions[step]))
                response = single.actions[step].tolist()
                values["repeated_response_rate"].append(is_repeating(response))
                reason = single.extra_model_outputs["finish_reason"][step]
                values["response_cut_rate"].append(reason == "length")
    means = {name: float(np.mean(found)) for name, found in values.items()}
    return {
        **means,
        "num_episodes": len(episodes),
        "num_env_steps_sampled": sum(episode.env_steps() for episode in episodes),
    }


def step_group_metrics(batch: MultiAgentBatch) -> dict[str, float]:
    """Describe the anchor groups of an iteration (the paper's Figure 5).

    Returns:
        `step_groups/group_share/<bin>` (of groups) and `step_groups/step_share/<bin>` (of steps)
        over the sizes 1, 2-5, 6-8, 9, 10-49, >=50, and `step_groups/count`.
    """
    sizes = []
    for _, rows in modules_of(batch):
        ids = dense_ids(rows["group"], rows["agent"], rows["anchor"])
        sizes.append(np.bincount(ids)[ids])
    histogram = group_size_histogram(np.concatenate(sizes))
    shares = {
        f"step_groups/{kind}_share/{name}": float(count / counts.sum())
        for kind, counts in (("group", histogram.groups), ("step", histogram.steps))
        for name, count in zip(SIZE_BINS, counts, strict=True)
    }
    return {**shares, "step_groups/count": float(histogram.groups.sum())}
