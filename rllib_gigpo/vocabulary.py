"""The words that a from-scratch model must know to act in an environment."""

from __future__ import annotations

import random
from typing import Any

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.games import Game
from rllib_gigpo.scripted import NoLegalActionError, random_legal

_EPISODES = 24
_STEPS = 24


def collect_words(env: Any, profile: AgentProfile) -> tuple[str, ...]:
    """Return texts that hold every word the model may meet.

    An environment that offers `words()` tells its own; any other is played for a few episodes of
    random legal actions, or empty ones where it does not say what is legal.

    Args:
        env: An environment; it is closed afterwards.
        profile: The agent profile, for its prompt and vocabulary.

    Returns:
        Texts for `ModelSpec.words`.
    """
    game = Game(env, type(env).__name__)
    texts = {*profile.vocabulary, profile.respond.format(action="")}
    own = getattr(env, "unwrapped", env)
    if hasattr(own, "words"):
        texts |= set(own.words())
    else:
        texts |= _played(game)
    texts |= _prompt_words(profile)
    game.close()
    return tuple(sorted(texts))


def _prompt_words(profile: AgentProfile) -> set[str]:
    from rllib_gigpo.agent.prompt import PromptContext

    empty = PromptContext(task="", observation="")
    later = PromptContext(task="", observation="", history=" ", history_length=1, step=1)
    messages = [*profile.prompt(empty), *profile.prompt(later)]
    return {message["content"] for message in messages} | {str(number) for number in range(10)}


def _played(game: Game) -> set[str]:
    rng = random.Random(0)
    texts: set[str] = set()
    for seed in range(_EPISODES):
        observations, infos = game.reset(seed)
        for _ in range(_STEPS):
            actions = {}
            for agent, observation in observations.items():
                info = infos.get(agent, {})
                offered = list(info.get("admissible_actions", ()))
                texts |= {observation, str(info.get("task", "")), *offered}
                try:
                    actions[agent] = random_legal(game.env, observation, info, rng)
                except NoLegalActionError:
                    actions[agent] = ""
                texts.add(actions[agent])
            outcome = game.step(actions)
            texts |= set(outcome.observations.values())
            observations, infos = outcome.acting, outcome.infos
            if game.is_done:
                break
    return texts
