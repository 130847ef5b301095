"""One face for single- and multi-agent environments, as the rollouts see them.

A `Game` speaks in dicts keyed by agent id; a single-agent environment has the one agent
`SOLO_AGENT`. Its recorder fills the matching RLlib episode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_gigpo.answers import (
    ALL_AGENTS,
    check_flags,
    check_infos,
    check_observations,
    check_parts,
    check_rewards,
)

SOLO_AGENT = "agent"


class Outcome(NamedTuple):
    """What one environment step gave, per agent id.

    Attributes:
        observations: Texts or pictures of the agents that see something now.
        rewards: Rewards of the step.
        infos: Info dicts.
        acting: The observations of those that act next; an agent that has ended by itself, before
            its team, does not.
    """

    observations: dict[Any, str]
    rewards: dict[Any, float]
    infos: dict[Any, Mapping[str, Any]]
    acting: dict[Any, str]


class Game:
    """An environment that is being played.

    Args:
        env: A gymnasium environment with string actions whose observations are strings or
            pictures, or an RLlib MultiAgentEnv with the same per agent.
        name: For error messages.

    Attributes:
        terminated: Whether the environment has ended the episode.
        truncated: Whether it was cut off, by the environment or from outside.
        ended: Agents of a team that have ended by themselves and have not been asked since.

    Raises:
        TypeError: `env` is neither.
    """

    def __init__(self, env: gym.Env | MultiAgentEnv, name: str):
        if not isinstance(env, gym.Env | MultiAgentEnv):
            raise TypeError(
                f"environment {name!r} is a {type(env).__name__}: expected a gymnasium.Env or an "
                "RLlib MultiAgentEnv"
            )
        self.env: Any = env
        self.name = name
        self.is_team = isinstance(env, MultiAgentEnv)
        self.terminated = False
        self.truncated = False
        self.is_left = False
        self.ended: set[Any] = set()
        self._last_infos: dict[Any, Mapping[str, Any]] = {}

    @property
    def is_done(self) -> bool:
        """Whether the episode has ended."""
        return self.terminated or self.truncated

    def truncate(self) -> None:
        """End the episode from outside; one that has terminated stays terminated."""
        self.truncated = self.truncated or not self.terminated

    def reset(
        self, seed: int, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[Any, str], dict[Any, Mapping[str, Any]]]:
        """Start the episode of a seed.

        Raises:
            TypeError: Something that the environment answers is of the wrong type, see
                `rllib_gigpo.answers`.
            ValueError: A text has no UTF-8 form, or a score is not finite.
        """
        self.terminated = self.truncated = False
        self.ended = set()
        answer = self.env.reset(seed=seed, options=None if options is None else dict(options))
        check_parts(self.name, "reset", answer, "observation, info")
        observations, infos = answer
        if not self.is_team:
            observations, infos = {SOLO_AGENT: observations}, {SOLO_AGENT: infos}
        check_observations(self.name, observations, is_reset=True)
        check_infos(self.name, infos)
        self._last_infos = dict(infos)
        return observations, infos

    def step(self, actions: Mapping[Any, str]) -> Outcome:
        """Take one environment step.

        Raises:
            TypeError: Something that the environment answers is of the wrong type, see
                `rllib_gigpo.answers`.
            ValueError: A reward or score is not finite, an agent that acted has no reward, or a
                text has no UTF-8 form.
        """
        answer = self.env.step(dict(actions) if self.is_team else actions[SOLO_AGENT])
        parts = "observation, reward, terminated, truncated, info"
        check_parts(self.name, "step", answer, parts)
        observations, rewards, terminated, truncated, infos = answer
        if not self.is_team:
            observations, infos = {SOLO_AGENT: observations}, {SOLO_AGENT: infos}
            rewards = {SOLO_AGENT: rewards}
            terminated, truncated = {ALL_AGENTS: terminated}, {ALL_AGENTS: truncated}
        check_flags(self.name, "terminated", terminated)
        check_flags(self.name, "truncated", truncated)
        check_observations(self.name, observations)
        check_infos(self.name, infos)
        earned = check_rewards(self.name, rewards, actions)
        done, cut = ({a for a, flag in f.items() if flag} for f in (terminated, truncated))
        acting = {a: shown for a, shown in observations.items() if a not in done | cut}
        # Whoever is cut off together with the team has not ended by itself.
        alone = done if ALL_AGENTS in cut else done | cut
        self.ended = (self.ended | alone - {ALL_AGENTS}) - set(acting)
        self.terminated, self.truncated = bool(terminated[ALL_AGENTS]), bool(truncated[ALL_AGENTS])
        self._last_infos.update(infos)
        return Outcome(dict(observations), earned, dict(infos), acting)

    def verdict(self) -> dict[str, Any]:
        """Return what the episode came to, from the last info of each agent.

        `won`, `task_id`, `task_type` where known, and `numbers`: every other number of the info,
        such as `score` or `tool_calls`.
        """
        last: dict[str, Any] = {}
        for info in self._last_infos.values():
            last |= info
        facts = {key: last[key] for key in ("won", "task_id", "task_type") if key in last}
        numbers = {
            key: value
            for key, value in last.items()
            if isinstance(value, bool | int | float | np.number | np.bool_)
            and key not in ("won", "is_action_valid")
        }
        return {**facts, "numbers": numbers}

    def recorder(self, policy_of: Callable[[Any], str]) -> SoloRecorder | TeamRecorder:
        """Return a recorder for the episode that starts now."""
        return TeamRecorder(policy_of) if self.is_team else SoloRecorder()

    def spaces(self) -> tuple[Any, Any]:
        """Return the observation and action space of one agent."""
        if not self.is_team:
            return self.env.observation_space, self.env.action_space
        agent = next(iter(self.env.possible_agents))
        return self.env.observation_spaces[agent], self.env.action_spaces[agent]

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


class SoloRecorder:
    """Fills a SingleAgentEpisode."""

    def __init__(self):
        self.episode = SingleAgentEpisode()

    def start(self, observations: Mapping, infos: Mapping) -> None:
        """Record the reset."""
        self.episode.add_env_reset(observations[SOLO_AGENT], infos[SOLO_AGENT])

    def step(
        self,
        *,
        observations: Mapping[Any, np.ndarray],
        actions: Mapping[Any, np.ndarray],
        rewards: Mapping[Any, float],
        infos: Mapping[Any, Mapping],
        terminated: bool,
        truncated: bool,
        extras: Mapping[Any, Mapping],
    ) -> None:
        """Record one step."""
        self.episode.add_env_step(
            observations[SOLO_AGENT],
            actions[SOLO_AGENT],
            rewards[SOLO_AGENT],
            dict(infos[SOLO_AGENT]),
            terminated=terminated,
            truncated=truncated,
            extra_model_outputs=dict(extras[SOLO_AGENT]),
        )


class TeamRecorder:
    """Fills a MultiAgentEpisode.

    All that an agent earns counts in one of its steps: what it earns before its first one in that,
    what it earns between two of them in the earlier one, and what it earns after its last one, be
    it that it has ended by itself, in the last. RLlib would lose the first and the last.
    """

    def __init__(self, policy_of: Callable[[Any], str]):
        self.episode = MultiAgentEpisode(
            agent_to_module_mapping_fn=lambda agent_id, episode, **_: policy_of(agent_id)
        )
        self._shown: set[Any] = set()
        self._waiting: set[Any] = set()
        self._early: defaultdict[Any, float] = defaultdict(float)

    def start(self, observations: Mapping, infos: Mapping) -> None:
        """Record the reset."""
        self._shown = set(observations)
        self.episode.add_env_reset(observations=dict(observations), infos=dict(infos))

    def step(
        self,
        *,
        observations: Mapping[Any, np.ndarray],
        actions: Mapping[Any, np.ndarray],
        rewards: Mapping[Any, float],
        infos: Mapping[Any, Mapping],
        terminated: bool,
        truncated: bool,
        extras: Mapping[Any, Mapping],
    ) -> None:
        """Record one step of all agents that acted."""
        stepping = self._waiting | set(actions)
        # One that has ended by itself may still be shown something: nothing that it acts on.
        told = [a for a in observations if a in stepping or a not in self._shown]
        self.episode.add_env_step(
            observations={agent: observations[agent] for agent in told},
            actions=dict(actions),
            rewards=self._credited(rewards, actions, stepping),
            infos={agent: infos[agent] for agent in told},
            terminateds={"__all__": terminated},
            truncateds={"__all__": truncated},
            extra_model_outputs={agent: dict(extra) for agent, extra in extras.items()},
        )
        self._shown |= set(told)
        self._waiting = stepping - set(told)

    def _credited(
        self, rewards: Mapping[Any, float], actions: Mapping[Any, Any], stepping: set[Any]
    ) -> dict[Any, float]:
        """Return the rewards of steps that are going on; the others go where they belong."""
        for agent in rewards.keys() - stepping:
            single = self.episode.agent_episodes.get(agent)
            if single is not None and len(single) > 0:
                last = single.rewards[-1] + rewards[agent]
                single.set_rewards(new_data=last, at_indices=-1)
            else:
                self._early[agent] += rewards[agent]
        credited = {agent: rewards.get(agent, 0.0) for agent in stepping}
        for agent in actions:
            credited[agent] += self._early.pop(agent, 0.0)
        return credited
