"""Plays one episode with a player, by the rollouts' own rules."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.engines.base import Sampling
from rllib_gigpo.games import Game
from rllib_gigpo.metrics import episode_return
from rllib_gigpo.playing.desk import Asked, Desk, Player, Watch, WatchedGame
from rllib_gigpo.rollout import play_groups
from rllib_gigpo.rollout_types import Episode, GroupTask, RolloutSettings
from rllib_gigpo.stepping import EnvFailure, Stepper, StepSettings


class Played(NamedTuple):
    """An episode that was played.

    Attributes:
        episode: RLlib's episode; its "token ids" are numbers of prompts and responses.
        asked: What was asked and answered, in order.
        total: The return.
        verdict: `won`, `task_id`, ... where the environment tells.
    """

    episode: Episode
    asked: list[tuple[Asked, str]]
    total: float
    verdict: dict[str, Any]


def play(
    env: Any,
    profile: AgentProfile,
    player: Player,
    *,
    name: str = "the environment",
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
    watch: Watch | None = None,
) -> Played:
    """Play one episode to its end.

    Args:
        env: The environment; it is closed only where it fails.
        profile: The agent, whose prompts the player sees and whose parser reads its responses.
        player: From what is asked to a response.
        name: The environment's name, for messages.
        seed: Reset seed.
        options: Reset options, such as a fixed task id.
        max_steps: Steps of an agent after which the episode is truncated.
        watch: Called after the reset and every step.

    Raises:
        Exception: Whatever the player or `watch` raises.
        EnvFailure: The environment failed.
    """
    desk: Desk

    def see(turn: int, actions: Any, observations: Any, rewards: Any, infos: Any, g: Game) -> None:
        desk.turn = turn
        if watch is not None:
            watch(turn, actions, observations, rewards, infos, g)

    game = WatchedGame(env, name, see)
    desk = Desk(profile, player, game)
    playing = play_groups(
        [GroupTask(group=0, env_seed=seed, size=1, options=options)],
        engine=desk,  # pyright: ignore[reportArgumentType] - it only generates
        profile=desk.profile,
        encoder=desk,  # pyright: ignore[reportArgumentType] - it encodes and decodes
        acquire=lambda: game,
        release=lambda game: None,
        stepper=Stepper(StepSettings()),
        settings=RolloutSettings(Sampling(), seed=seed, max_episode_steps=max_steps),
    )
    try:
        (episode,) = asyncio.run(playing).episodes
    except EnvFailure as failure:
        # What `watch` raises inside a step looks like a failure of the environment.
        if isinstance(failure.__cause__, WatchError):
            raise failure.__cause__ from None
        raise
    return Played(episode, desk.asked, episode_return(episode), game.verdict())


class WatchError(Exception):
    """Raised by a `watch` to end the episode."""
