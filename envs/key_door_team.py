"""KeyDoorTeam: two agents move one body through KeyDoor in turns."""

from __future__ import annotations

from typing import Any

from ray.rllib.env.multi_agent_env import MultiAgentEnv

from envs.key_door import KeyDoor, View
from envs.turns import TeamStep, move_of

_AGENTS = ["agent_0", "agent_1"]


class KeyDoorTeam(MultiAgentEnv):
    """KeyDoor whose moves are made by `agent_0` and `agent_1` in turns, `agent_0` first.

    Every dictionary names only the agent to move next, until the end of the episode, when both
    agents get the last observation and both the same reward: the one that did not make the last
    move earns it for its move before. What an agent's info says about an action
    (`is_action_valid`) is about that agent's own last action. Observations, actions, rules and
    the other info keys are KeyDoor's.

    Args:
        size: Width and height of the grid in cells, 2 to 10.
        horizon: Step limit over both agents' moves, at least 2, so that each agent has a turn.
        view: What the observation tells, "full" or "local".

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(self, *, size: int = 4, horizon: int = 20, view: View = "full"):
        super().__init__()
        if horizon < 2:
            raise ValueError(f"horizon must be at least 2, one move for each agent, got {horizon}")
        self._game = KeyDoor(size=size, horizon=horizon, view=view)
        self.agents = list(_AGENTS)
        self.possible_agents = list(_AGENTS)
        self.observation_spaces = dict.fromkeys(_AGENTS, self._game.observation_space)
        self.action_spaces = dict.fromkeys(_AGENTS, self._game.action_space)
        self._turn = 0

    @classmethod
    def words(cls) -> list[str]:
        """Return every word of the observations and actions: KeyDoor's."""
        return KeyDoor.words()

    @property
    def horizon(self) -> int:
        """Step limit over both agents' moves."""
        return self._game.horizon

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """Start an episode; seed and options as in `KeyDoor.reset`."""
        observation, info = self._game.reset(seed=seed, options=options)
        self._turn = 0
        self._was_valid: dict[str, bool] = {}
        return {_AGENTS[0]: observation}, {_AGENTS[0]: info}

    def step(self, action_dict: dict[str, str]) -> TeamStep:
        """Play the move of the agent whose turn it is.

        Raises:
            ValueError: Another agent acted, or more than one.
            RuntimeError: No episode is running.
        """
        mover, action = move_of(_AGENTS[self._turn], action_dict)
        other = _AGENTS[1 - self._turn]
        observation, reward, won, truncated, info = self._game.step(action)
        self._was_valid[mover] = info.pop("is_action_valid")
        self._turn = 1 - self._turn

        is_over = won or truncated
        told = _AGENTS if is_over else [other]
        return (
            dict.fromkeys(told, observation),
            dict.fromkeys(_AGENTS if is_over else [mover], reward),
            {**dict.fromkeys(told, won), "__all__": won},
            {**dict.fromkeys(told, truncated), "__all__": truncated},
            {agent: self._info_of(agent, info) for agent in told},
        )

    def expert_action(self) -> str:
        """Return the move of a shortest path for the agent whose turn it is."""
        return self._game.expert_action()

    def _info_of(self, agent: str, info: dict[str, Any]) -> dict[str, Any]:
        own = {"is_action_valid": self._was_valid[agent]} if agent in self._was_valid else {}
        return {**info, "admissible_actions": list(info["admissible_actions"]), **own}
