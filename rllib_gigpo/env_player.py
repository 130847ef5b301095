"""Plays single- and multi-agent environments alike, for the checks of the contract.

Each reset and step becomes a `Turn` of dictionaries by agent id. Nothing here needs Ray, so a check
can replay an environment in another process within a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle

from rllib_gigpo.observations import state_key
from rllib_gigpo.scripted import Policy

Make = Callable[[], Any]
Actions = dict[str, str]

SEEDS = (0, 1, 2)
INFO_TYPES: dict[str, tuple[type, ...]] = {
    "task": (str,),
    "task_id": (str,),
    "task_type": (str,),
    "anchor": (str, bytes, int, tuple),
    "admissible_actions": (list,),
    "is_action_valid": (bool,),
    "won": (bool,),
    "score": (float,),
    "event": (str, type(None)),
    "tools": (list,),
}


class Turn(NamedTuple):
    """What one reset or step returned, by agent id."""

    observations: dict[str, Any]
    rewards: dict[str, float]
    is_terminated: bool
    is_truncated: bool
    infos: dict[str, dict[str, Any]]
    ended: tuple[str, ...] = ()

    @property
    def acting(self) -> dict[str, Any]:
        """The observations of the agents that act next: not of those that ended before the team."""
        return {a: seen for a, seen in self.observations.items() if a not in self.ended}

    @property
    def is_last(self) -> bool:
        """Whether the episode has ended."""
        return self.is_terminated or self.is_truncated

    def comparable(self) -> Turn:
        """Return the turn with digests in place of pictures, which `==` does not compare."""
        keys = {agent: state_key(seen) for agent, seen in self.observations.items()}
        return self._replace(observations=keys)


class Player:
    """Plays one environment.

    Args:
        env: A gymnasium environment, or one with `possible_agents` (RLlib's MultiAgentEnv).
    """

    def __init__(self, env: Any):
        self.env = env
        self.is_multi_agent = hasattr(env, "possible_agents")
        self.agents = list(env.possible_agents) if self.is_multi_agent else ["agent"]

    def reset(self, seed: int | None = None) -> Turn:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed)
        if self.is_multi_agent:
            return Turn(observation, {}, False, False, info)
        return Turn({"agent": observation}, {}, False, False, {"agent": info})

    def step(self, actions: Actions) -> Turn:
        """Take one step of the environment."""
        if self.is_multi_agent:
            observations, rewards, terminateds, truncateds, infos = self.env.step(actions)
            over = terminateds["__all__"], truncateds["__all__"]
            ended = tuple(a for a in self.agents if terminateds.get(a) or truncateds.get(a))
            return Turn(observations, rewards, *over, infos, ended)
        observation, reward, terminated, truncated, info = self.env.step(actions["agent"])
        return Turn(
            {"agent": observation}, {"agent": reward}, terminated, truncated, {"agent": info}
        )

    def play(self, first: Turn, choose: Callable[[Turn], Actions], max_steps: int) -> list[Turn]:
        """Step until the episode ends or `max_steps` are done; return all turns."""
        turns = [first]
        while not turns[-1].is_last and len(turns) <= max_steps:
            turns.append(self.step(choose(turns[-1])))
        return turns

    def chooser(self, policy: Policy, seed: int) -> Callable[[Turn], Actions]:
        """Return a function from a turn to the policy's actions, its draws fixed by the seed."""
        rng = random.Random(seed)
        return lambda turn: {
            agent: policy(self.env, observation, turn.infos.get(agent, {}), rng)
            for agent, observation in turn.acting.items()
        }

    def episode(self, seed: int, policy: Policy, max_steps: int = 15) -> list[Turn]:
        """Play the start of an episode, a function of the seed alone."""
        return self.play(self.reset(seed), self.chooser(policy, seed), max_steps)


def fingerprint(player: Player, policy: Policy) -> str:
    """Hash everything that the policy's episodes of all `SEEDS` return."""
    dumps = [dump(player.episode(seed, policy)) for seed in SEEDS]
    return hashlib.sha256("\n".join(dumps).encode()).hexdigest()


def fingerprint_elsewhere(make: Make, policy: Policy) -> str:
    """Return the fingerprint of an environment that another process makes and plays.

    Raises:
        RuntimeError: That process failed; its last lines are told.
    """
    # By value: importing this package there would import Ray and PyTorch as well.
    package = sys.modules[__name__.partition(".")[0]]
    cloudpickle.register_pickle_by_value(package)
    work = cloudpickle.dumps((make, policy, Player, fingerprint))
    cloudpickle.unregister_pickle_by_value(package)
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, cloudpickle; make, policy, Player, fingerprint = "
            "cloudpickle.load(sys.stdin.buffer); print(fingerprint(Player(make()), policy))",
        ],
        input=work,
        capture_output=True,
        # Another hash seed than this process has: order of sets must not matter.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1234"},
        check=False,
    )
    if result.returncode != 0:
        last = result.stderr.decode().strip()[-2000:]
        raise RuntimeError(f"another process cannot play the environment: {last}")
    return result.stdout.decode().split()[-1]


def dump(turns: list[Turn]) -> str:
    """Return the turns as JSON, with the keys of the infos that the contract names."""
    known = [
        turn.comparable()._replace(
            infos={
                agent: {key: value for key, value in info.items() if key in INFO_TYPES}
                for agent, info in turn.infos.items()
            }
        )
        for turn in turns
    ]
    return json.dumps(known, sort_keys=True, default=bytes.hex)
