"""Who may play: a person, a scripted policy, a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.playing.desk import Asked
from rllib_gigpo.scripted import Policy
from rllib_gigpo.seeding import derive_seed

QUIT = "/quit"
ACTIONS = "/actions"


class Quit(Exception):  # noqa: N818 - what the person wants, not an error
    """The person has had enough."""


class Person:
    """Someone at a terminal.

    A line is the action; one that starts with "<" is the whole response, as a model writes it.
    "/actions" shows what is possible, where the environment lists it, and "/quit" ends the game.

    Args:
        profile: Writes the response around an action.
        show: Shows what is asked.
        ask: Asks for a line, by default `input`.
        tell: Shows a line.
    """

    def __init__(
        self,
        profile: AgentProfile,
        show: Callable[[Asked], None],
        ask: Callable[[str], str] = input,
        tell: Callable[[str], None] = print,
    ):
        self._profile = profile
        self._show = show
        self._ask = ask
        self._tell = tell

    def __call__(self, asked: Asked) -> str:
        """Show the prompt and read the answer.

        Raises:
            Quit: The line is "/quit", or the input has ended.
        """
        self._show(asked)
        while True:
            try:
                line = self._ask("action> ").strip()
            except EOFError as error:
                raise Quit from error
            if line == QUIT:
                raise Quit
            if line == ACTIONS:
                listed = asked.context.info.get("admissible_actions")
                self._tell("\n".join(listed) if listed else "this environment lists no actions")
            elif line:
                return line if line.startswith("<") else self._profile.respond.format(action=line)


class ScriptedPlayer:
    """A policy without a language model, such as `rllib_gigpo.scripted.expert`.

    Args:
        policy: From (environment, observation, info, random generator) to an action text.
        profile: Writes the response around the action.
        seed: Of the random generator.
    """

    def __init__(self, policy: Policy, profile: AgentProfile, seed: int = 0):
        self._policy = policy
        self._profile = profile
        self._rng = random.Random(seed)

    def __call__(self, asked: Asked) -> str:
        """Return the response for the policy's action."""
        context = asked.context
        action = self._policy(asked.game.env, context.observation, context.info, self._rng)
        return self._profile.respond.format(action=action)


class ModelPlayer:
    """A language model in this process.

    Args:
        model: As in `GiGPOConfig.llm(model=...)`; for a checkpoint, what
            `rllib_gigpo.trained.playable` gives.
        env: Name of the environment, whose words the tiny model knows.
        env_config: Its settings.
        profile: The agent.
        temperature: Of the responses; 0 is greedy.
        seed: Decides the draws, together with agent and step.
        **limits: Other arguments of `GiGPOConfig.llm`, such as `max_prompt_tokens`.
    """

    def __init__(
        self,
        model: str,
        env: str,
        env_config: dict[str, Any],
        profile: AgentProfile,
        *,
        temperature: float = 0.4,
        seed: int = 0,
        **limits: Any,
    ):
        from rllib_gigpo.config import GiGPOConfig
        from rllib_gigpo.encoding import PromptEncoder
        from rllib_gigpo.engines import build_engine
        from rllib_gigpo.engines.base import Sampling
        from rllib_gigpo.models import (
            load_generation_config,
            load_tokenizer,
            materialize,
            stop_token_ids,
        )
        from rllib_gigpo.vision.sight import load_sight

        config = (
            GiGPOConfig()
            .environment(env, env_config=env_config)
            .agent(profile=profile)
            .llm(model=model, eval_temperature=temperature, **limits)
        )
        config.validate()
        path = materialize(config.model_spec)
        tokenizer = load_tokenizer(path)
        self._encoder = PromptEncoder(
            tokenizer, profile, config.max_prompt_tokens, config.on_long_prompt, load_sight(path)
        )
        self._engine = build_engine(config)
        self._policy_id = config.module_ids[0]
        self._seed = seed
        self._sampling = Sampling(
            temperature=temperature,
            max_tokens=config.max_response_tokens,
            stop=profile.stop,
            stop_token_ids=stop_token_ids(tokenizer, load_generation_config(path)),
        )

    async def __call__(self, asked: Asked) -> str:
        """Return the model's response."""
        from rllib_gigpo.engines.base import Request

        prompt = self._encoder.encode(asked.context, asked.memory)
        request = Request(
            prompt_ids=prompt.ids,
            images=prompt.images,
            sampling=self._sampling,
            seed=derive_seed(self._seed, "response", asked.turn, asked.step),
            request_id=f"{asked.agent}:{asked.step}",
            policy_id=self._policy_id,
            agent_id=asked.agent,
        )
        completion = await self._engine.generate(request)
        return self._encoder.decode(completion.token_ids)
