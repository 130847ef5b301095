"""What goes into the rollouts and what comes out: tasks, settings, episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.encoding import PromptEncoder
from rllib_gigpo.engines.base import Sampling

Episode = SingleAgentEpisode | MultiAgentEpisode


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
        panel_place: Place in an evaluation panel: whoever has the environment turns it into the
            `task_id` of that place, see `rllib_gigpo.evaluation.panel_order`. None: no such place.
    """

    group: int
    env_seed: int
    size: int
    iteration: int = 0
    stream: str = "response"
    options: Mapping[str, Any] | None = None
    panel_place: int | None = None


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
