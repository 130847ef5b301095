"""The desk: stands where a tokenizer and an engine stand, and speaks text."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rllib_gigpo.agent.memory import Memory, look
from rllib_gigpo.agent.parsing import Action
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import Message, PromptContext
from rllib_gigpo.encoding import Encoded
from rllib_gigpo.engines.base import Completion, Request
from rllib_gigpo.games import Game


@dataclass(frozen=True)
class Asked:
    """What a player is asked.

    Attributes:
        agent: Agent id, as text.
        step: The agent's own step, from 0.
        turn: Step of the environment, from 0.
        messages: The prompt's chat messages.
        context: What they were made from.
        memory: The agent's memory, for players that may have to shorten the history.
        game: The environment, for players that may look into it.
    """

    agent: str
    step: int
    turn: int
    messages: list[Message]
    context: PromptContext
    memory: Memory
    game: Game


# From what is asked to the response, as the model would write it; a coroutine is awaited.
Player = Callable[[Asked], str | Awaitable[str]]


class KnownResponse(str):
    """A response whose action is known, because it was parsed when it was recorded.

    Attributes:
        action: The action text.
        is_valid: Whether its format was valid.
    """

    action: str
    is_valid: bool

    def __new__(cls, text: str, action: str, is_valid: bool) -> KnownResponse:
        """Make the text, with what is known of it."""
        made = super().__new__(cls, text)
        made.action, made.is_valid = action, is_valid
        return made


class Desk:
    """Passes prompts to a player and responses back; one episode sits at it.

    Args:
        profile: The agent's profile.
        player: Answers.
        game: The environment that is played.

    Attributes:
        on_long_prompt: As of a `PromptEncoder`.
        turn: Step of the environment; whoever steps it counts.
        asked: Everything that was asked, and what was answered.
    """

    on_long_prompt = "error"

    def __init__(self, profile: AgentProfile, player: Player, game: Game):
        self._profile = profile
        self._player = player
        self._game = game
        self._prompts: list[tuple[PromptContext, Memory, list[Message]]] = []
        self._responses: list[str] = []
        self.turn = 0
        self.asked: list[tuple[Asked, str]] = []

    @property
    def profile(self) -> AgentProfile:
        """The profile, with a parser that takes known actions as they are."""
        return replace(self._profile, parser=self._read)

    def _read(self, response: str) -> Action:
        action = self._profile.parser(response)
        if not isinstance(response, KnownResponse):
            return action
        return action._replace(text=response.action, is_valid=response.is_valid)

    def encode(self, context: PromptContext, memory: Memory) -> Encoded:
        """Keep a prompt; its "token ids" are its number."""
        look(memory, context.task, context.observation)
        history, shown = memory.render()
        context = replace(context, history=history, history_length=shown)
        self._prompts.append((context, memory, self._profile.prompt(context)))
        return Encoded(_ids(len(self._prompts) - 1))

    def decode(self, token_ids: np.ndarray) -> str:
        """Return the response of a number."""
        return self._responses[int(token_ids[0])]

    async def generate(self, request: Request) -> Completion:
        """Ask the player."""
        context, memory, messages = self._prompts[int(request.prompt_ids[0])]
        asked = Asked(
            agent=request.agent_id,
            step=context.step,
            turn=self.turn,
            messages=messages,
            context=context,
            memory=memory,
            game=self._game,
        )
        answer = self._player(asked)
        response = await answer if inspect.isawaitable(answer) else answer
        self.asked.append((asked, response))
        self._responses.append(response)
        return Completion(_ids(len(self._responses) - 1), np.zeros(1, np.float32), "stop", 0)


def _ids(number: int) -> np.ndarray:
    return np.array([number], dtype=np.int32)


class WatchedGame(Game):
    """A game that tells what happens in it.

    Args:
        env: The environment.
        name: Its name.
        watch: Called after the reset and after every step.
    """

    def __init__(self, env: Any, name: str, watch: Watch):
        super().__init__(env, name)
        self._watch = watch

    def reset(self, seed: int, options: Any = None) -> Any:
        """Reset, and tell it."""
        observations, infos = super().reset(seed, options)
        self._watch(0, {}, observations, {}, infos, self)
        self._turn = 0
        return observations, infos

    def step(self, actions: Any) -> Any:
        """Step, and tell it."""
        outcome = super().step(actions)
        self._turn += 1
        self._watch(
            self._turn, dict(actions), outcome.observations, outcome.rewards, outcome.infos, self
        )
        return outcome


# (turn, actions, observations, rewards, infos, game); turn 0 is the reset.
Watch = Callable[[int, dict[Any, str], Any, Any, Any, Game], None]
