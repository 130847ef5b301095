"""The words that a from-scratch model must know to act in an environment."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.games import Game
from rllib_gigpo.scripted import NoLegalActionError, play_episode, random_legal
from rllib_gigpo.vision.pictures import strip_marks

_EPISODES = 24
_STEPS = 24


def collect_words(env: Any, profile: AgentProfile) -> tuple[str, ...]:
    """Return texts that hold every word the model may meet.

    The environment is played for a few episodes of random legal actions, or empty ones where it
    does not say what is legal; their prompts and responses are what the model meets. An environment
    that offers `words()` tells its own and is played once, for the words of the prompt and of the
    memory.

    Args:
        env: An environment; it is closed afterwards.
        profile: The agent profile.

    Returns:
        Texts for `ModelSpec.words`.
    """
    with closing(Game(env, type(env).__name__)) as game:
        texts = _texts(game, profile)
    # Prompts repeat each other: their pieces are few. A line break is a word of its own.
    pieces = {piece for text in texts for piece in text.replace("\n", " \n ").split(" ")}
    return tuple(sorted(pieces - {""}))


def _texts(game: Game, profile: AgentProfile) -> set[str]:
    texts = {*profile.vocabulary, *map(str, range(10))}
    own = getattr(game.env, "unwrapped", game.env)
    episodes = _EPISODES
    if hasattr(own, "words"):
        texts |= set(own.words())
        episodes = 1
    rng = random.Random(0)
    for seed in range(episodes):
        episode = play_episode(game, profile, _legal_or_empty, rng, seed=seed, max_steps=_STEPS)
        for step in episode.steps:
            texts |= {strip_marks(message["content"]) for message in profile.prompt(step.context)}
            texts.add(profile.respond.format(action=step.action))
    return texts


def _legal_or_empty(env: Any, observation: str, info: Mapping[str, Any], rng: random.Random) -> str:
    try:
        return random_legal(env, observation, info, rng)
    except NoLegalActionError:
        return ""
