"""Plays one episode: prompt, generate, step, next prompt.

Carried per step in the RLlib episode: observation = prompt token ids (int32), action = response
token ids (int32), `extra_model_outputs` = log-probabilities, action text, whether the format was
valid, weight version, finish reason; `infos` = observation text, anchor and the environment's
verdicts on the action before. The last observation of an episode is empty, because nothing is
generated there; only where a critic values truncated episodes is it their next prompt. Where the
prompt of an observation shows pictures, its info holds them as `images`.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rllib_gigpo.agent.memory import Memory
from rllib_gigpo.agent.parsing import Action
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import PromptContext
from rllib_gigpo.awaiting import await_all
from rllib_gigpo.encoding import Encoded, PromptEncoder, PromptTooLongError
from rllib_gigpo.engines.base import Completion, Engine, Request
from rllib_gigpo.games import Game, Outcome
from rllib_gigpo.lockstep import Turns
from rllib_gigpo.rollout_types import Episode, GroupTask, RolloutSettings, Voice
from rllib_gigpo.seeding import derive_seed
from rllib_gigpo.stepping import EnvFailure, Stepper
from rllib_gigpo.vision import Gallery, Picture

_NOTHING = Encoded(np.zeros(0, dtype=np.int32))
_ENDLESS_STEPS = 10_000
_KEPT_INFO = ("won", "score", "is_action_valid", "task_id", "task_type")


@dataclass(frozen=True)
class RolloutContext:
    """What the episodes of one rollout share.

    Attributes:
        engine: Answers the requests.
        profile: The agent of policies without a voice of their own.
        encoder: Tokenises that agent's prompts.
        stepper: Makes the environment calls.
        settings: Sampling, seed, limits.
        turns: When an episode may send its next requests.
        gallery: Keeps the pictures of observations.
    """

    engine: Engine
    profile: AgentProfile
    encoder: PromptEncoder
    stepper: Stepper
    settings: RolloutSettings
    turns: Turns
    gallery: Gallery = field(default_factory=Gallery)


@dataclass
class Seat:
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


class EpisodePlayer:
    """One running episode.

    Args:
        context: What it shares with the others.
        place: Its number among them, from 0.
        task: Its group.
        member: Its number in the group.
        game: Its environment, which has been reset.
        deadline: When it runs out of time, on the clock of `time.monotonic`.
    """

    def __init__(
        self,
        context: RolloutContext,
        place: int,
        task: GroupTask,
        member: int,
        game: Game,
        deadline: float,
    ):
        self.context = context
        self.place = place
        self.task = task
        self.member = member
        self.game = game
        self.deadline = deadline
        self.settings = context.settings
        self.seats: dict[Any, Seat] = {}
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
                rewards=outcome.rewards,
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
        outcome = await self.context.stepper.call(
            self.game.name,
            "step",
            lambda: self.game.step(actions),
            self.deadline - time.monotonic(),
            game=self.game,
        )
        if self.env_steps >= self._most_steps() and not self.game.is_done:
            self.context.stepper.counts["env_errors"] += 1
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
            seat.observation = self.context.gallery.keep(observation)
            seat.text, pictures = self.context.gallery.show(observation)
            seat.pictures |= pictures
            seat.info = infos.get(agent, {})
            seat.task = seat.info.get("task", seat.task)

    def _new_seat(self, agent: Any) -> Seat:
        policy = self.settings.policy_of(agent)
        common = Voice(self.context.profile, self.context.encoder, self.settings.sampling)
        voice = self.settings.voices.get(policy, common)
        return Seat(len(self.seats), policy, voice, copy.deepcopy(voice.profile.memory))

    def _prompts_or_truncate(self, observations: Mapping[Any, Any]) -> dict[Any, Encoded]:
        """Prompts of the agents that act now; none where the episode has ended, or ends here."""
        if self.game.is_done:
            return {}
        try:
            return {agent: self._prompt(self.seats[agent]) for agent in observations}
        except PromptTooLongError:
            if self.context.encoder.on_long_prompt != "end_episode":
                raise
            self.game.truncate()
            return {}

    def _last_prompts(self, agents: Iterable[Any]) -> dict[Any, Encoded]:
        """Prompts of the state after a truncation; none where they would be over the limit.

        An agent that had ended by itself has no such state.
        """
        prompts = {}
        if self.settings.keep_last_prompts and not self.game.terminated:
            for agent in [agent for agent in agents if agent not in self.game.ended]:
                with contextlib.suppress(PromptTooLongError):
                    prompts[agent] = self._prompt(self.seats[agent])
        return prompts

    def _prompt(self, seat: Seat) -> Encoded:
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
        engine = self.context.engine
        await self.context.turns.wait(self.place)
        if len(requests) == 1:
            # No task of its own: the next request is to reach the engine before its next step.
            completions = [await engine.generate(requests[0])]
        else:
            completions = await await_all(map(engine.generate, requests))
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
