"""Plays groups of episodes against an engine.

Every episode is its own coroutine: prompt, generate, step, next prompt. Nothing waits for the
slowest episode of a batch, and a finished episode sends no further request.

    GroupTask -> play_groups -> RLlib episodes (one per member)

Carried per step in the RLlib episode: observation = prompt token ids (int32), action = response
token ids (int32), `extra_model_outputs` = log-probabilities, action text, whether the format was
valid, weight version, finish reason; `infos` = observation text, anchor and the environment's
verdicts on the action before. The last observation of an episode is empty: nothing is generated
there.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_gigpo.agent.memory import Memory
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import PromptContext
from rllib_gigpo.encoding import PromptEncoder, PromptTooLongError
from rllib_gigpo.engines.base import Completion, Engine, Request, Sampling
from rllib_gigpo.games import Game
from rllib_gigpo.seeding import derive_seed

Episode = SingleAgentEpisode | MultiAgentEpisode
T = TypeVar("T")

_NOTHING = np.zeros(0, dtype=np.int32)
_KEPT_INFO = ("won", "score", "is_action_valid", "task_id", "task_type")


@dataclass(frozen=True)
class GroupTask:
    """One task group: `size` episodes that start from the same initial state.

    Attributes:
        group: Number of the group inside its iteration.
        env_seed: Reset seed that all members share.
        size: Number of episodes N.
        iteration: Training iteration, or evaluation round.
        stream: Seed stream of the responses: "response" (training) or "evaluation".
        options: Passed to the environment's reset, such as a fixed `task_id`.
    """

    group: int
    env_seed: int
    size: int
    iteration: int = 0
    stream: str = "response"
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RolloutSettings:
    """What the rollouts need besides engine, agent and environments.

    Attributes:
        sampling: How responses are drawn.
        seed: The run's root seed.
        max_episode_steps: Agent steps after which an episode is truncated, or None for the
            environment's own limit alone.
        policy_of: From agent id to policy (RLlib module) id.
    """

    sampling: Sampling
    seed: int
    max_episode_steps: int | None = None
    policy_of: Callable[[Any], str] = lambda agent_id: "default_policy"


@dataclass
class _Seat:
    """One agent's side of a running episode."""

    index: int
    memory: Memory
    observation: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    task: str = ""
    steps: int = 0


async def play_groups(
    tasks: Sequence[GroupTask],
    *,
    engine: Engine,
    profile: AgentProfile,
    encoder: PromptEncoder,
    acquire: Callable[[], Game],
    release: Callable[[Game], None],
    settings: RolloutSettings,
) -> list[Episode]:
    """Play all members of all groups at once.

    Args:
        tasks: The groups.
        engine: Answers the requests.
        profile: The agent.
        encoder: Tokenises the agent's prompts.
        acquire: Lends an idle environment; one per running episode.
        release: Takes it back.
        settings: Sampling, seed, limits.

    Returns:
        The finished episodes, in order of (task, member).

    Raises:
        ValueError: Members of a group start from different states.
    """
    games: list[Game] = []
    plays = []
    try:
        for task in tasks:
            first = None
            for member in range(task.size):
                game = acquire()
                games.append(game)
                observations, infos = game.reset(task.env_seed, task.options)
                start = _start(observations, infos)
                if first is None:
                    first = start
                elif start != first:
                    raise ValueError(
                        f"members of group {task.group} start from different states although "
                        f"reset(seed={task.env_seed}) was the same: {first!r} and {start!r}; "
                        "GiGPO needs an environment whose reset depends on its seed alone"
                    )
                play = _Play(task, member, game, engine, profile, encoder, settings)
                plays.append((play, observations, infos))
        return await _all(play.run(observations, infos) for play, observations, infos in plays)
    finally:
        for game in games:
            release(game)


def _start(observations: Mapping[Any, str], infos: Mapping[Any, Mapping]) -> dict[Any, tuple]:
    """Return what tells initial states apart; observations alone may show a part of the state."""
    told = {agent: infos.get(agent, {}) for agent in observations}
    return {
        agent: (observation, told[agent].get("task"), told[agent].get("task_id"))
        for agent, observation in observations.items()
    }


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; the first error ends the others, so that nothing goes on playing behind it."""
    running = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class _Play:
    """One running episode."""

    def __init__(
        self,
        task: GroupTask,
        member: int,
        game: Game,
        engine: Engine,
        profile: AgentProfile,
        encoder: PromptEncoder,
        settings: RolloutSettings,
    ):
        self.task = task
        self.member = member
        self.game = game
        self.engine = engine
        self.profile = profile
        self.encoder = encoder
        self.settings = settings
        self.seats: dict[Any, _Seat] = {}

    async def run(self, observations: dict[Any, str], infos: dict[Any, Mapping]) -> Episode:
        """Play to the end."""
        recorder = self.game.recorder(self.settings.policy_of)
        self._see(observations, infos)
        prompts = self._prompts_or_truncate(observations)
        recorder.start(
            {agent: prompts.get(agent, _NOTHING) for agent in observations},
            {agent: self._record(agent) for agent in observations},
        )
        # Only differs from the recorder's own default where there is no first step.
        recorder.episode.is_truncated = self.game.truncated
        while not self.game.is_done:
            completions = await self._generate(prompts)
            actions = {
                agent: self.profile.read(self.encoder.decode(completion.token_ids))
                for agent, completion in completions.items()
            }
            outcome = self.game.step({agent: action.text for agent, action in actions.items()})
            extras = {}
            for agent, action in actions.items():
                seat = self.seats[agent]
                info = outcome.infos.get(agent, {})
                seat.memory.add(seat.observation, action.text, info)
                seat.steps += 1
                completion = completions[agent]
                extras[agent] = {
                    "action_logp": completion.logps,
                    "action_text": action.text,
                    "format_is_valid": action.is_valid,
                    "weight_version": completion.weight_version,
                    "finish_reason": completion.finish_reason,
                }
            self._see(outcome.observations, outcome.infos)
            if self._out_of_steps():
                self.game.truncate()
            prompts = self._prompts_or_truncate(outcome.acting)
            seen = list(outcome.observations)
            if self.game.is_done:
                # RLlib wants a last observation of every agent that has acted.
                unseen = {a: s.observation for a, s in self.seats.items() if a not in seen}
                self._see(unseen, outcome.infos)
                seen += unseen
            recorder.step(
                observations={agent: prompts.get(agent, _NOTHING) for agent in seen},
                actions={agent: completions[agent].token_ids for agent in actions},
                rewards={**dict.fromkeys(actions, 0.0), **outcome.rewards},
                infos={agent: self._record(agent) for agent in seen},
                terminated=self.game.terminated,
                truncated=self.game.truncated,
                extras=extras,
            )
        episode = recorder.episode
        episode.custom_data.update(
            group=self.task.group,
            member=self.member,
            iteration=self.task.iteration,
            env_seed=self.task.env_seed,
            task=next(iter(self.seats.values())).task,
            **self.game.verdict(),
        )
        return episode

    def _out_of_steps(self) -> bool:
        limit = self.settings.max_episode_steps
        return limit is not None and max(seat.steps for seat in self.seats.values()) >= limit

    def _see(self, observations: Mapping[Any, str], infos: Mapping[Any, Mapping]) -> None:
        for agent, observation in observations.items():
            seat = self.seats.get(agent)
            if seat is None:
                seat = _Seat(len(self.seats), copy.deepcopy(self.profile.memory))
                self.seats[agent] = seat
            seat.observation = observation
            seat.info = infos.get(agent, {})
            seat.task = seat.info.get("task", seat.task)

    def _prompts_or_truncate(self, observations: Mapping[Any, str]) -> dict[Any, np.ndarray]:
        """Prompt ids of the agents that act now; none where the episode has ended, or ends here."""
        if self.game.is_done:
            return {}
        try:
            return {agent: self._prompt(self.seats[agent]) for agent in observations}
        except PromptTooLongError:
            if self.encoder.on_long_prompt != "end_episode":
                raise
            self.game.truncate()
            return {}

    def _prompt(self, seat: _Seat) -> np.ndarray:
        context = PromptContext(
            task=seat.task,
            observation=seat.observation,
            step=seat.steps,
            admissible_actions=tuple(seat.info.get("admissible_actions", ())),
            info=seat.info,
        )
        return self.encoder.encode(context, seat.memory)

    def _record(self, agent: Any) -> dict[str, Any]:
        seat = self.seats[agent]
        kept = {key: seat.info[key] for key in _KEPT_INFO if key in seat.info}
        if self.profile.validity == "parser":
            kept.pop("is_action_valid", None)
        anchor = self.profile.anchor_of(seat.observation, seat.info)
        return {"observation": seat.observation, "anchor": anchor, **kept}

    async def _generate(self, prompts: Mapping[Any, np.ndarray]) -> dict[Any, Completion]:
        requests = [self._request(agent, ids) for agent, ids in prompts.items()]
        if len(requests) == 1:
            # No task of its own: the next request is to reach the engine before its next step.
            completions = [await self.engine.generate(requests[0])]
        else:
            completions = await _all(map(self.engine.generate, requests))
        return dict(zip(prompts, completions, strict=True))

    def _request(self, agent: Any, prompt_ids: np.ndarray) -> Request:
        seat = self.seats[agent]
        place = (self.task.iteration, self.task.group, self.member, seat.index, seat.steps)
        return Request(
            prompt_ids=prompt_ids,
            sampling=self.settings.sampling,
            seed=derive_seed(self.settings.seed, self.task.stream, *place),
            request_id=":".join((self.task.stream, *map(str, place))),
            policy_id=self.settings.policy_of(agent),
            agent_id=str(agent),
            group_id=self.task.group,
        )
