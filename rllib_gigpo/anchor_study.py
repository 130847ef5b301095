"""What GiGPO would make of an environment: how often states repeat, and how many steps get credit.

Groups of episodes are played without a model, and their steps go through the same grouping and the
same estimator as in training.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rllib_gigpo.advantages import StepTable, gigpo
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.games import Game
from rllib_gigpo.grouping import SIZE_BINS, AnchorRule, group_size_histogram
from rllib_gigpo.scripted import Policy, ScriptedEpisode, play_episode


class AnchorStudy(NamedTuple):
    """What a policy's groups look like.

    Attributes:
        episodes: Number of episodes.
        success: Share of them that were won, or None where the environment does not tell.
        return_mean: Mean return of an agent in an episode.
        length_mean: Mean length in environment steps.
        length_max: Longest.
        invalid_share: Share of steps whose action was invalid.
        repeat_share: Share of steps whose anchor state occurs at least twice in their group.
        step_shares: Share of steps by size of their anchor group, in the bins `SIZE_BINS`.
        step_advantage_share: Share of steps whose step advantage (Eq. 7) is not zero.
        episode_advantage_share: Share of steps whose episode advantage (Eq. 3) is not zero.
    """

    episodes: int
    success: float | None
    return_mean: float
    length_mean: float
    length_max: int
    invalid_share: float
    repeat_share: float
    step_shares: tuple[float, ...]
    step_advantage_share: float
    episode_advantage_share: float


def play_groups(
    env: Any,
    profile: AgentProfile,
    policy: Policy,
    *,
    groups: int,
    group_size: int,
    seed: int = 0,
) -> list[list[ScriptedEpisode]]:
    """Play groups of episodes that start from the same state; group g resets with `seed + g`."""
    game = Game(env, type(env).__name__)
    rng = random.Random(seed)
    return [
        [play_episode(game, profile, policy, rng, seed=seed + group) for _ in range(group_size)]
        for group in range(groups)
    ]


def study(
    groups: Sequence[Sequence[ScriptedEpisode]], rule: AnchorRule, gamma: float = 0.95
) -> AnchorStudy:
    """Group the steps and compute their advantages.

    Args:
        groups: Episodes by group, as `play_groups` returns them.
        rule: Which steps count as taken from the same state.
        gamma: Discount of the step returns (Eq. 5).

    Raises:
        TypeError: The rule cannot compare the anchors.
    """
    table = _step_table(groups, rule)
    advantages = gigpo(table, gamma=gamma)
    histogram = group_size_histogram(advantages.step_group_size)
    episodes = [episode for group in groups for episode in group]
    won = [episode.verdict["won"] for episode in episodes if "won" in episode.verdict]
    returns = np.bincount(table.episode * (table.agent.max() + 1) + table.agent, table.reward)
    played = np.bincount(table.episode * (table.agent.max() + 1) + table.agent) > 0
    lengths = [episode.length for episode in episodes]
    return AnchorStudy(
        episodes=len(episodes),
        success=float(np.mean(won)) if won else None,
        return_mean=float(returns[played].mean()),
        length_mean=float(np.mean(lengths)),
        length_max=max(lengths),
        invalid_share=1.0 - float(table.valid.mean()),
        repeat_share=float(np.mean(advantages.step_group_size > 1)),
        step_shares=tuple((histogram.steps / histogram.steps.sum()).tolist()),
        step_advantage_share=float(np.mean(advantages.step != 0)),
        episode_advantage_share=float(np.mean(advantages.episode != 0)),
    )


def verdict(found: AnchorStudy) -> str:
    """Say in one sentence whether step advantages have something to work with."""
    shares = (
        f"{found.repeat_share:.0%} of the steps meet a state again and "
        f"{found.step_advantage_share:.0%} get a step advantage"
    )
    if found.repeat_share < 0.05:
        return (
            f"GiGPO would be GRPO here: {shares}. Give a coarser anchor: info['anchor'], "
            "AgentProfile(anchor=...) or anchor='similarity'."
        )
    if found.step_advantage_share < 0.05:
        return (
            f"No credit to give yet: {shares}, because the returns at a state hardly differ. Warm "
            "start on recordings of an expert, or choose easier tasks first."
        )
    return f"GiGPO will help here: {shares} of their own, beside the episode's."


def histogram_header() -> list[str]:
    """Return the column names of `AnchorStudy.step_shares`."""
    return [f"size {name}" for name in SIZE_BINS]


def _step_table(groups: Sequence[Sequence[ScriptedEpisode]], rule: AnchorRule) -> StepTable:
    codes: dict[Any, int] = {}
    rows, anchors, number = [], [], 0
    for group, episodes in enumerate(groups):
        for episode in episodes:
            for step in episode.steps:
                agent = codes.setdefault(step.agent, len(codes))
                rows.append((group, number, agent, step.context.step, step.reward, step.is_valid))
                anchors.append(step.anchor)
            number += 1
    group_ids, episode_ids, agents, steps, rewards, valid = map(np.array, zip(*rows, strict=True))
    return StepTable(
        group=group_ids,
        episode=episode_ids,
        agent=agents,
        step=steps,
        anchor=rule(anchors, group_ids, agents),
        reward=rewards,
        valid=valid,
    )
