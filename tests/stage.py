"""A stage on which rollouts play against a scripted engine, with words as tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from envs.key_door import KeyDoor
from rllib_gigpo.agent import AgentProfile, ChatTemplate, NoMemory
from rllib_gigpo.encoding import PromptEncoder
from rllib_gigpo.engines.base import Request, Sampling
from rllib_gigpo.games import Game
from rllib_gigpo.rollout import play_groups
from rllib_gigpo.rollout_types import GroupTask, Rollout, RolloutSettings
from rllib_gigpo.stepping import Stepper, StepSettings
from tests.fakes import Countdown, ScriptedEngine, word_tokenizer

PROFILE = AgentProfile(ChatTemplate("{observation}"), memory=NoMemory())
TOKENIZER = word_tokenizer(
    Countdown.WORDS, *KeyDoor.words(), "[ Observation Action ] : ' , ;", "nonsense back \n"
)
DOWN = "<action> down </action>"


class Stage:
    """Everything that a rollout needs; plays, and keeps what was lent and asked.

    Args:
        reply: What the model says to a request.
        make: Makes an environment.
        turns: How many turns of the event loop a request takes.
    """

    def __init__(
        self,
        reply: Callable[[Request], str] | str = DOWN,
        make: Callable[[], Any] = Countdown,
        *,
        profile: AgentProfile = PROFILE,
        max_prompt_tokens: int = 200,
        on_long_prompt: str = "error",
        max_episode_steps: int | None = None,
        max_tokens: int = 10,
        turns: Callable[[Request], int] = lambda request: 1,
        policy_of: Callable[[Any], str] = lambda agent: "default_policy",
        seed: int = 0,
        lockstep: bool = False,
        steps: StepSettings | None = None,
    ):
        answer = (lambda request: reply) if isinstance(reply, str) else reply
        self.engine = ScriptedEngine(TOKENIZER, answer, turns=turns, weight_version=7)
        self.make = make
        self.profile = profile
        self.encoder = PromptEncoder(TOKENIZER, profile, max_prompt_tokens, on_long_prompt)
        self.settings = RolloutSettings(
            Sampling(max_tokens=max_tokens, stop=profile.stop),
            seed,
            lockstep,
            max_episode_steps,
            policy_of,
        )
        self.stepper = Stepper(steps or StepSettings())
        self.lent: list[Game] = []
        self.returned: list[Game] = []

    def acquire(self) -> Game:
        self.lent.append(Game(self.make(), "Test"))
        return self.lent[-1]

    def start(self, *tasks: GroupTask):
        return play_groups(
            tasks,
            engine=self.engine,
            profile=self.profile,
            encoder=self.encoder,
            acquire=self.acquire,
            release=self.returned.append,
            stepper=self.stepper,
            settings=self.settings,
        )

    def rollout(self, *tasks: GroupTask) -> Rollout:
        return asyncio.run(self.start(*tasks))

    def play(self, *tasks: GroupTask) -> list[Any]:
        return self.rollout(*tasks).episodes

    def prompts(self) -> list[str]:
        return [words(request.prompt_ids) for request in self.engine.requests]


def words(ids: np.ndarray) -> str:
    return TOKENIZER.decode(ids.tolist())


def task(group: int = 0, size: int = 1, start: int | None = None, **fields: Any) -> GroupTask:
    options = None if start is None else {"start": start}
    return GroupTask(group, fields.pop("env_seed", 10 + group), size, options=options, **fields)
