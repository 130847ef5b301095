"""Plays groups of episodes against an engine.

Every episode is its own coroutine: prompt, generate, step, next prompt. Nothing waits for the
slowest episode of a batch, and a finished episode sends no further request.

    GroupTask -> play_groups -> RLlib episodes (one per member)

Carried per step in the RLlib episode: observation = prompt token ids (int32), action = response
token ids (int32), `extra_model_outputs` = log-probabilities, action text, whether the format was
valid, weight version, finish reason; `infos` = observation text, anchor and the environment's
verdicts on the action before. The last observation of an episode is empty, because nothing is
generated there; only where a critic values truncated episodes is it their next prompt. Where the
prompt of an observation shows pictures, its info holds them as `images`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_gigpo.agent.memory import Memory
from rllib_gigpo.agent.parsing import Action
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import PromptContext
from rllib_gigpo.encoding import Encoded, PromptEncoder, PromptTooLongError
from rllib_gigpo.engines.base import Completion, Engine, Request, Sampling
from rllib_gigpo.games import Game, Outcome
from rllib_gigpo.lockstep import FreeTurns, Lockstep, Turns
from rllib_gigpo.seeding import derive_seed
from rllib_gigpo.starts import difference, start_of
from rllib_gigpo.stepping import EnvFailure, Stepper
from rllib_gigpo.vision import Gallery, Picture

Episode = SingleAgentEpisode | MultiAgentEpisode
T = TypeVar("T")

_NOTHING = Encoded(np.zeros(0, dtype=np.int32))
_ENDLESS_STEPS = 10_000
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


class Voice(NamedTuple):
    """How a policy is spoken to and speaks.

    Attributes:
        profile: Its agent.
        encoder: Tokenises that agent's prompts for that policy's model.
        sampling: How responses are drawn.
    """

    profile: AgentProfile
    encoder: PromptEncoder
    sampling: Sampling


@dataclass(frozen=True)
class RolloutSettings:
    """What the rollouts need besides engine, agent and environments.

    Attributes:
        sampling: How responses are drawn.
        seed: The run's root seed.
        lockstep: Whether all episodes take their turns together (the reference mode).
        max_episode_steps: Agent steps after which an episode is truncated, or None for the
            environment's own limit alone.
        policy_of: From agent id to policy (RLlib module) id.
        keep_last_prompts: Whether a truncated episode ends with the prompt that would have come
            next, for a critic.
        voices: By policy id, of those that differ from the others.
        env_name: What the environment is called, for messages.
    """

    sampling: Sampling
    seed: int
    lockstep: bool = False
    max_episode_steps: int | None = None
    policy_of: Callable[[Any], str] = lambda agent_id: "default_policy"
    keep_last_prompts: bool = False
    voices: Mapping[str, Voice] = field(default_factory=dict)
    env_name: str = "environment"


@dataclass
class _Seat:
    """One agent's side of a running episode."""

    index: int
    policy: str
    voice: Voice
    memory: Memory
    observation: Any = ""
    text: str = ""
    pictures: dict[str, Picture] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    task: str = ""
    steps: int = 0

    def read(self, completion: Completion) -> Action:
        """Return what the agent does by its response."""
        return self.voice.profile.read(self.voice.encoder.decode(completion.token_ids))


@dataclass(frozen=True)
class Rollout:
    """What was played.

    Attributes:
        episodes: Finished episodes in order of (task, member), whole groups only.
        dropped: Numbers of the groups of which an episode failed for good.
        replays: Episodes that were played again.
        failures: Messages of the failures.
    """

    episodes: list[Episode]
    dropped: tuple[int, ...] = ()
    replays: int = 0
    failures: tuple[str, ...] = ()


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
        release: Takes it back; one that failed does not come back.
        stepper: Makes the environment calls.
        settings: Sampling, seed, limits.

    Raises:
        ValueError: Members of a group start from different states.
        EnvFailure: An environment failed and the rule is "raise".
    """
    rounds = _Round(engine, profile, encoder, acquire, release, stepper, settings)
    members = [(task, member) for task in tasks for member in range(task.size)]
    if settings.lockstep:
        rounds.turns = Lockstep(len(members))
    played = await _all(
        rounds.member(place, task, member) for place, (task, member) in enumerate(members)
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
        replays=rounds.replays,
        failures=tuple(rounds.failures),
    )


class _Round:
    """What the episodes of one `play_groups` share."""

    def __init__(
        self,
        engine: Engine,
        profile: AgentProfile,
        encoder: PromptEncoder,
        acquire: Callable[[], Game],
        release: Callable[[Game], None],
        stepper: Stepper,
        settings: RolloutSettings,
    ):
        self.engine = engine
        self.profile = profile
        self.encoder = encoder
        self.acquire = acquire
        self.release = release
        self.stepper = stepper
        self.settings = settings
        self.gallery = Gallery()
        self.turns: Turns = FreeTurns()
        self.replays = 0
        self.failures: list[str] = []
        self._starts: dict[int, Any] = {}

    async def member(self, place: int, task: GroupTask, member: int) -> Episode | EnvFailure:
        """Play one episode; replay it by rule."""
        rule = self.stepper.settings
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
            self.turns.leave()

    async def _try(self, place: int, task: GroupTask, member: int) -> Episode:
        limit = self.stepper.settings.episode_timeout_s
        deadline = math.inf if limit is None else time.monotonic() + limit
        game = await self.stepper.call(
            self.settings.env_name, "make", self.acquire, deadline - time.monotonic()
        )
        try:
            observations, infos = await self.stepper.call(
                game.name,
                "reset",
                lambda: game.reset(task.env_seed, task.options),
                deadline - time.monotonic(),
            )
            self._check_start(game.name, task, observations, infos)
            episode = await _Play(self, place, task, member, game, deadline).run(
                observations, infos
            )
        except EnvFailure as failure:
            # Its state is unknown, and a hung call may still be inside: never play it again.
            if failure.kind == "error":
                await self.stepper.close(game)
            raise
        except BaseException:
            # A cancelled episode may have left a call running in its thread.
            if self.stepper.settings.threads == 0:
                self.release(game)
            raise
        self.release(game)
        return episode

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
        round_: _Round,
        place: int,
        task: GroupTask,
        member: int,
        game: Game,
        deadline: float,
    ):
        self.round = round_
        self.place = place
        self.task = task
        self.member = member
        self.game = game
        self.deadline = deadline
        self.settings = round_.settings
        self.seats: dict[Any, _Seat] = {}
        self.env_steps = 0

    async def run(self, observations: dict[Any, Any], infos: dict[Any, Mapping]) -> Episode:
        """Play to the end."""
        recorder = self.game.recorder(self.settings.policy_of)
        self._see(observations, infos)
        prompts = self._prompts_or_truncate(observations)
        recorder.start(
            {agent: prompts.get(agent, _NOTHING).ids for agent in observations},
            {agent: self._record(agent, prompts) for agent in observations},
        )
        # Only differs from the recorder's own default where there is no first step.
        recorder.episode.is_truncated = self.game.truncated
        while not self.game.is_done:
            completions = await self._generate(prompts)
            actions = {
                agent: self.seats[agent].read(completion)
                for agent, completion in completions.items()
            }
            outcome = await self._step({agent: action.text for agent, action in actions.items()})
            extras = {}
            for agent, action in actions.items():
                seat = self.seats[agent]
                info = outcome.infos.get(agent, {})
                seat.memory.add(seat.text, action.text, action.noted(info))
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
                prompts = self._last_prompts(seen)
            recorder.step(
                observations={agent: prompts.get(agent, _NOTHING).ids for agent in seen},
                actions={agent: completions[agent].token_ids for agent in actions},
                rewards={**dict.fromkeys(actions, 0.0), **outcome.rewards},
                infos={agent: self._record(agent, prompts) for agent in seen},
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

    async def _step(self, actions: dict[Any, str]) -> Outcome:
        self.env_steps += 1
        outcome = await self.round.stepper.call(
            self.game.name,
            "step",
            lambda: self.game.step(actions),
            self.deadline - time.monotonic(),
        )
        if self.env_steps >= self._most_steps() and not self.game.is_done:
            self.round.stepper.counts["env_errors"] += 1
            raise EnvFailure(
                "error",
                f"an episode of environment {self.game.name!r} has not ended after "
                f"{self.env_steps} steps: set agent(max_episode_steps=...), or give the "
                "environment a horizon",
            )
        return outcome

    def _most_steps(self) -> int:
        """Steps after which an episode is taken for one that never ends.

        Even where agents have a limit, an environment may go on without asking any of them.
        """
        return _ENDLESS_STEPS + (self.settings.max_episode_steps or 0) * len(self.seats)

    def _out_of_steps(self) -> bool:
        limit = self.settings.max_episode_steps
        return limit is not None and max(seat.steps for seat in self.seats.values()) >= limit

    def _see(self, observations: Mapping[Any, Any], infos: Mapping[Any, Mapping]) -> None:
        for agent, observation in observations.items():
            seat = self.seats.get(agent)
            if seat is None:
                seat = self.seats[agent] = self._new_seat(agent)
            seat.observation = self.round.gallery.keep(observation)
            seat.text, pictures = self.round.gallery.show(observation)
            seat.pictures |= pictures
            seat.info = infos.get(agent, {})
            seat.task = seat.info.get("task", seat.task)

    def _new_seat(self, agent: Any) -> _Seat:
        policy = self.settings.policy_of(agent)
        common = Voice(self.round.profile, self.round.encoder, self.settings.sampling)
        voice = self.settings.voices.get(policy, common)
        return _Seat(len(self.seats), policy, voice, copy.deepcopy(voice.profile.memory))

    def _prompts_or_truncate(self, observations: Mapping[Any, Any]) -> dict[Any, Encoded]:
        """Prompts of the agents that act now; none where the episode has ended, or ends here."""
        if self.game.is_done:
            return {}
        try:
            return {agent: self._prompt(self.seats[agent]) for agent in observations}
        except PromptTooLongError:
            if self.round.encoder.on_long_prompt != "end_episode":
                raise
            self.game.truncate()
            return {}

    def _last_prompts(self, agents: Iterable[Any]) -> dict[Any, Encoded]:
        """Prompts of the state after a truncation; none where they would be over the limit."""
        prompts = {}
        if self.settings.keep_last_prompts and not self.game.terminated:
            for agent in agents:
                with contextlib.suppress(PromptTooLongError):
                    prompts[agent] = self._prompt(self.seats[agent])
        return prompts

    def _prompt(self, seat: _Seat) -> Encoded:
        context = PromptContext(
            task=seat.task,
            observation=seat.text,
            step=seat.steps,
            admissible_actions=tuple(seat.info.get("admissible_actions", ())),
            info=seat.info,
            pictures=seat.pictures,
        )
        return seat.voice.encoder.encode(context, seat.memory)

    def _record(self, agent: Any, prompts: Mapping[Any, Encoded]) -> dict[str, Any]:
        seat = self.seats[agent]
        kept = {key: seat.info[key] for key in _KEPT_INFO if key in seat.info}
        if seat.voice.profile.validity == "parser":
            kept.pop("is_action_valid", None)
        anchor = seat.voice.profile.anchor_of(seat.observation, seat.info)
        images = prompts.get(agent, _NOTHING).images
        if images:
            kept["images"] = images
        return {"observation": seat.observation, "anchor": anchor, **kept}

    async def _generate(self, prompts: Mapping[Any, Encoded]) -> dict[Any, Completion]:
        requests = [self._request(agent, prompt) for agent, prompt in prompts.items()]
        engine = self.round.engine
        await self.round.turns.wait(self.place)
        if len(requests) == 1:
            # No task of its own: the next request is to reach the engine before its next step.
            completions = [await engine.generate(requests[0])]
        else:
            completions = await _all(map(engine.generate, requests))
        return dict(zip(prompts, completions, strict=True))

    def _request(self, agent: Any, prompt: Encoded) -> Request:
        seat = self.seats[agent]
        place = (self.task.iteration, self.task.group, self.member, seat.index, seat.steps)
        return Request(
            prompt_ids=prompt.ids,
            images=prompt.images,
            sampling=seat.voice.sampling,
            seed=derive_seed(self.settings.seed, self.task.stream, *place),
            request_id=":".join((self.task.stream, *map(str, place))),
            policy_id=seat.policy,
            agent_id=str(agent),
            group_id=self.task.group,
        )
