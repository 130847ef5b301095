"""Plays environments without a language model, with the prompts that a model would get.

A policy is a function from (environment, observation, info, random generator) to an action text.
What it plays serves warm starts (`rllib_gigpo.record`) and the environment checker.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rllib_gigpo.agent.memory import look
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import PromptContext
from rllib_gigpo.games import Game
from rllib_gigpo.grouping import AnchorKey
from rllib_gigpo.vision import Gallery, Picture

Policy = Callable[[Any, str, Mapping[str, Any], random.Random], str]


@dataclass
class Step:
    """One step of one agent.

    Attributes:
        agent: Agent id.
        context: What its prompt shows.
        anchor: Anchor state that it acted on.
        action: Action text.
        reward: Reward of the step, and any that came before the agent's next one; in its first
            step also what came before.
        is_valid: The environment's verdict; True where it gives none.
    """

    agent: Any
    context: PromptContext
    anchor: AnchorKey
    action: str
    reward: float = 0.0
    is_valid: bool = True


class ScriptedEpisode(NamedTuple):
    """An episode to its end.

    Attributes:
        steps: The steps of all agents in the order in which they were taken.
        length: Environment steps.
        truncated: Whether a limit ended it.
        verdict: `won`, `task_id`, `task_type` where known, and `numbers`; see `Game.verdict`.
    """

    steps: list[Step]
    length: int
    truncated: bool
    verdict: dict[str, Any]


class NoLegalActionError(ValueError):
    """The environment does not say what it accepts."""


def random_legal(env: Any, observation: str, info: Mapping[str, Any], rng: random.Random) -> str:
    """Draw an action that the environment accepts.

    An environment whose actions cannot be listed draws its own (`random_action(rng)`); otherwise
    one of `info["admissible_actions"]` is drawn, or of the examples of the action space.

    Raises:
        NoLegalActionError: The environment offers none of the three.
    """
    own = getattr(env, "unwrapped", env)
    if hasattr(own, "random_action"):
        return own.random_action(rng)
    examples = getattr(getattr(own, "action_space", None), "examples", ())
    offered = info.get("admissible_actions") or examples
    if not offered:
        raise NoLegalActionError(
            f"{type(own).__name__} offers no action to draw: give it info['admissible_actions'], a "
            "method random_action(rng), or an action space with examples"
        )
    return rng.choice(list(offered))


def expert(env: Any, observation: str, info: Mapping[str, Any], rng: random.Random) -> str:
    """Ask the environment's own expert.

    Raises:
        ValueError: The environment has none.
    """
    own = getattr(env, "unwrapped", env)
    if not hasattr(own, "expert_action"):
        raise ValueError(
            f"{type(own).__name__} has no expert_action(): use the random policy instead"
        )
    return own.expert_action()


def half_expert(env: Any, observation: str, info: Mapping[str, Any], rng: random.Random) -> str:
    """Toss a coin between the expert and a random legal action: a policy half-way in training."""
    chosen = expert if rng.random() < 0.5 else random_legal
    return chosen(env, observation, info, rng)


def play_episode(
    game: Game,
    profile: AgentProfile,
    policy: Policy,
    rng: random.Random,
    *,
    seed: int,
    options: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
    gallery: Gallery | None = None,
) -> ScriptedEpisode:
    """Play one episode.

    Args:
        game: The environment.
        profile: The agent whose prompts and anchors are kept.
        policy: Picks the action texts.
        rng: For the policy.
        seed: Reset seed.
        options: Reset options, such as a fixed task id.
        max_steps: Environment steps after which it is left, or None to play to the end.
        gallery: Keeps the pictures that are seen, where several episodes are to share them.
    """
    observations, infos = game.reset(seed, options)
    gallery = Gallery() if gallery is None else gallery
    texts: dict[Any, str] = {}
    pictures: dict[Any, dict[str, Picture]] = {}
    steps: list[Step] = []
    memories: dict[Any, Any] = {}
    latest: dict[Any, Step] = {}
    taken: dict[Any, int] = {}
    early: dict[Any, float] = {}
    length = 0
    while not game.is_done and (max_steps is None or length < max_steps):
        actions = {}
        for agent, observation in observations.items():
            info = infos.get(agent, {})
            memory = memories.setdefault(agent, copy.deepcopy(profile.memory))
            before = latest[agent].context.task if agent in latest else ""
            texts[agent], shown_now = gallery.show(observation)
            seen = pictures[agent] = {**pictures.get(agent, {}), **shown_now}
            look(memory, info.get("task", before), texts[agent])
            history, shown = memory.render()
            context = PromptContext(
                task=info.get("task", before),
                observation=texts[agent],
                history=history,
                history_length=shown,
                step=taken.get(agent, 0),
                admissible_actions=tuple(info.get("admissible_actions", ())),
                info=info,
                pictures=seen,
            )
            actions[agent] = policy(game.env, observation, info, rng)
            anchor = profile.anchor_of(observation, info)
            earned = early.pop(agent, 0.0)
            latest[agent] = Step(agent, context, anchor, actions[agent], earned)
            steps.append(latest[agent])
            taken[agent] = taken.get(agent, 0) + 1
        outcome = game.step(actions)
        length += 1
        for agent, action in actions.items():
            memories[agent].add(texts[agent], action, outcome.infos.get(agent, {}))
        # What an agent is told now is about its own last action, even where others came between.
        for agent, info in outcome.infos.items():
            if agent in latest and "is_action_valid" in info:
                latest[agent].is_valid = bool(info["is_action_valid"])
        for agent, reward in outcome.rewards.items():
            if agent in latest:
                latest[agent].reward += reward
            else:
                early[agent] = early.get(agent, 0.0) + reward
        observations, infos = outcome.acting, outcome.infos
    return ScriptedEpisode(steps, length, game.truncated, game.verdict())
