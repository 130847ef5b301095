"""Environments that show pictures, and rollouts of one without a model."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import gymnasium
import numpy as np

from envs.spaces import TextSpace, image_space
from rllib_gigpo.agent import AgentProfile, ChatTemplate, LastSteps, TagParser
from rllib_gigpo.encoding import PromptEncoder
from rllib_gigpo.engines.base import Sampling
from rllib_gigpo.games import Game
from rllib_gigpo.rollout import play_groups
from rllib_gigpo.rollout_types import GroupTask, RolloutSettings
from rllib_gigpo.stepping import Stepper, StepSettings
from tests.fakes import ScriptedEngine


class Lamp(gymnasium.Env):
    """A lamp that grows brighter with every step; three steps, then it is over.

    Args:
        with_text: Show a text beside the picture.
        brightness: Of a step.
    """

    def __init__(self, with_text: bool = False, brightness: int = 60):
        self.with_text = with_text
        self.brightness = brightness
        self.action_space = TextSpace(["left"])
        self._buffer = np.zeros((16, 16, 3), dtype=np.uint8)

    def _seen(self):
        self._buffer[:] = self.brightness * self.light  # the same array at every step
        return {"text": "a red box", "image": self._buffer} if self.with_text else self._buffer

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.light = 0
        return self._seen(), {"task": "where is the box"}

    def step(self, action):
        self.light += 1
        return self._seen(), 1.0, self.light == 3, False, {"task": "where is the box"}


class Wall(gymnasium.Env):
    """A wall whose colour is the task; each step is paid by the length of the action, modulo 5.

    So answers of a random model are paid differently.

    Args:
        horizon: Number of steps.
    """

    def __init__(self, *, horizon: int = 2) -> None:
        self.horizon = horizon
        self.action_space = TextSpace()
        self.observation_space = image_space(40, 56)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps, self._colour = 0, self.np_random.integers(0, 256, 3).astype(np.uint8)
        return self._seen(), {"task": "where is the box"}

    def step(self, action: str):
        self._steps += 1
        return self._seen(), float(len(action) % 5), self._steps == self.horizon, False, {}

    def _seen(self) -> np.ndarray:
        wall = np.zeros((40, 56, 3), dtype=np.uint8)
        wall[:, 8 * self._steps :] = self._colour
        return wall


PROFILE = AgentProfile(
    prompt=ChatTemplate(user="now {observation}", user_with_history="{history} now {observation}"),
    memory=LastSteps(1),
    parser=TagParser(fallback_chars=0),
)
# Whatever is said is an action.
TALKATIVE = replace(PROFILE, parser=TagParser(fallback_chars=60))


def play(model, *, profile=PROFILE, groups=1, size=2, **env):
    """Let a scripted engine play; returns the episodes, and what the engine was asked.

    Args:
        model: Tokenizer and image side of an image-text model.
        profile: The agent.
        groups: Number of groups.
        size: Episodes of each.
        env: The lamp's own settings.
    """
    tokenizer, sight = model
    engine = ScriptedEngine(tokenizer, lambda request: "<action> left </action>")
    rollout = asyncio.run(
        play_groups(
            [GroupTask(group, env_seed=0, size=size) for group in range(groups)],
            engine=engine,  # pyright: ignore[reportArgumentType]
            profile=profile,
            encoder=PromptEncoder(tokenizer, profile, 200, sight=sight),
            acquire=lambda: Game(Lamp(**env), "lamp"),
            release=lambda game: None,
            stepper=Stepper(StepSettings()),
            settings=RolloutSettings(Sampling(max_tokens=8), seed=0),
        )
    )
    return rollout.episodes, engine.requests
