"""Plays groups of episodes against an engine.

Every episode is its own coroutine (`rllib_gigpo.episode_player`). Nothing waits for the slowest
episode of a batch, and a finished episode sends no further request.

    GroupTask -> play_groups -> RLlib episodes (one per member)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.awaiting import await_all
from rllib_gigpo.encoding import PromptEncoder
from rllib_gigpo.engines.base import Engine
from rllib_gigpo.episode_player import EpisodePlayer, RolloutContext
from rllib_gigpo.games import Game
from rllib_gigpo.lockstep import FreeTurns, Lockstep
from rllib_gigpo.rollout_types import Episode, GroupTask, Rollout, RolloutSettings
from rllib_gigpo.starts import difference, start_of
from rllib_gigpo.stepping import EnvFailure, Stepper


async def play_groups(
    tasks: Sequence[GroupTask],
    *,
    engine: Engine,
    profile: AgentProfile,
    encoder: PromptEncoder,
    acquire: Callable[[], Game],
    release: Callable[[Game], None],
    stepper: Stepper,
    settings: RolloutSettings,
) -> Rollout:
    """Play all members of all groups at once.

    Args:
        tasks: The groups.
        engine: Answers the requests.
        profile: The agent.
        encoder: Tokenises the agent's prompts.
        acquire: Lends an idle environment; one per running episode.
        release: Takes it back, or takes one that was made too late; one that failed does not come
            back.
        stepper: Makes the environment calls.
        settings: Sampling, seed, limits.

    Raises:
        ValueError: Members of a group start from different states.
        EnvFailure: An environment failed and the rule is "raise".
    """
    members = [(task, member) for task in tasks for member in range(task.size)]
    turns = Lockstep(len(members)) if settings.lockstep else FreeTurns()
    context = RolloutContext(engine, profile, encoder, stepper, settings, turns)
    groups = _Groups(context, acquire, release)
    played = await await_all(
        groups.play(place, task, member) for place, (task, member) in enumerate(members)
    )
    dropped = {
        task.group
        for (task, _), outcome in zip(members, played, strict=True)
        if isinstance(outcome, EnvFailure)
    }
    return Rollout(
        episodes=[
            outcome
            for (task, _), outcome in zip(members, played, strict=True)
            if not isinstance(outcome, EnvFailure) and task.group not in dropped
        ],
        dropped=tuple(sorted(dropped)),
        replays=groups.replays,
        failures=tuple(groups.failures),
    )


class _Groups:
    """Plays the members of groups, again where an environment failed, and counts what failed."""

    def __init__(
        self,
        context: RolloutContext,
        acquire: Callable[[], Game],
        release: Callable[[Game], None],
    ):
        self.context = context
        self.acquire = acquire
        self.release = release
        self.replays = 0
        self.failures: list[str] = []
        self._starts: dict[int, Any] = {}

    async def play(self, place: int, task: GroupTask, member: int) -> Episode | EnvFailure:
        """Play one episode; replay it by rule."""
        rule = self.context.stepper.settings
        tries = 1 + (rule.max_replays if rule.on_failure == "replay" else 0)
        try:
            while True:
                try:
                    return await self._try(place, task, member)
                except EnvFailure as failure:
                    if rule.on_failure == "raise":
                        raise
                    self.failures.append(str(failure))
                    tries -= 1
                    if tries == 0:
                        return failure
                    self.replays += 1
        finally:
            self.context.turns.leave()

    async def _try(self, place: int, task: GroupTask, member: int) -> Episode:
        stepper = self.context.stepper
        limit = stepper.settings.episode_timeout_s
        deadline = math.inf if limit is None else time.monotonic() + limit
        game = await stepper.call(
            self.context.settings.env_name,
            "make",
            self.acquire,
            deadline - time.monotonic(),
            late=self._take_back,
        )
        try:
            observations, infos = await stepper.call(
                game.name,
                "reset",
                lambda: game.reset(task.env_seed, task.options),
                deadline - time.monotonic(),
                game=game,
            )
            self._check_start(game.name, task, observations, infos)
            episode = await EpisodePlayer(self.context, place, task, member, game, deadline).run(
                observations, infos
            )
        except EnvFailure:
            # Its state is unknown: never play it again. One with a call still inside is closed when
            # that comes back.
            if not game.is_left:
                await stepper.close(game)
            raise
        except BaseException:
            if not game.is_left:
                self.release(game)
            raise
        self.release(game)
        return episode

    def _take_back(self, game: Game | None) -> None:
        """Keep an environment that was made too late; nobody has played it."""
        if game is not None:
            self.release(game)

    def _check_start(
        self,
        name: str,
        task: GroupTask,
        observations: Mapping[Any, Any],
        infos: Mapping[Any, Mapping],
    ) -> None:
        start = start_of(observations, infos)
        first = self._starts.setdefault(task.group, start)
        if start != first:
            raise ValueError(
                f"members of group {task.group} start from different states although "
                f"reset(seed={task.env_seed}) of environment {name!r} was the same for them: "
                f"{difference(first, start)}; GiGPO needs an environment whose reset depends on "
                "its seed alone: draw from self.np_random only"
            )
