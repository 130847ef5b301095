"""ArithmeticTeam: a solver answers a generated sum, a verifier judges the answer."""

from __future__ import annotations

import random
from typing import Any

from gymnasium.error import ResetNeeded
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from envs.spaces import TextSpace
from envs.turns import TeamStep, move_of

SOLVER, VERIFIER = "solver", "verifier"
_VERDICTS = ["right", "wrong"]


class ArithmeticTeam(MultiAgentEnv):
    """`solver` and `verifier` take turns, the solver first.

    The solver sees a sum, such as `solve 3 + 5 = ? .`, and says a number. The verifier sees the sum
    with that number, `check 3 + 5 = 9 ? .`, and says `right` or `wrong`. After `right` the episode
    ends; after `wrong` the solver tries again and sees its last answer, `solve 3 + 5 = ? not 9 .`,
    until it has had `tries` tries.

    Rewards: the verifier gets 1 for every verdict that is true, else 0; the solver gets 1 at the
    end if its last answer is right, else 0. `info["won"]`: the last answer is right and the
    verifier said so. What is no number, or no verdict, is invalid: the verifier then sees `none`
    for the number, and an invalid verdict counts as an untrue `wrong`.

    `info["admissible_actions"]` lists what the agent may say; `info["task_id"]` names the sum;
    `info["is_action_valid"]` is about the agent's own last action. The observation is the anchor.

    Args:
        largest: Largest summand; both are drawn from 0 to it.
        tries: Answers that the solver may give, at least 1.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(self, *, largest: int = 4, tries: int = 2):
        super().__init__()
        if largest < 1 or tries < 1:
            raise ValueError(
                f"largest and tries must be at least 1, got largest={largest} and tries={tries}"
            )
        self._largest = largest
        self._tries = tries
        self._numbers = [str(number) for number in range(2 * largest + 1)]
        self.agents = [SOLVER, VERIFIER]
        self.possible_agents = list(self.agents)
        space = TextSpace()
        self.observation_spaces = dict.fromkeys(self.agents, space)
        self.action_spaces = {SOLVER: TextSpace(self._numbers), VERIFIER: TextSpace(_VERDICTS)}
        self._draws = random.Random()
        self._turn: str | None = None

    @property
    def horizon(self) -> int:
        """Step limit over both agents' moves."""
        return 2 * self._tries

    def words(self) -> list[str]:
        """Return every word of the observations and actions."""
        return ["solve", "check", "+", "=", "?", ".", "not", "none", *_VERDICTS, *self._numbers]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """Ask a sum, a function of the seed."""
        if seed is not None:
            self._draws = random.Random(seed)
        self._first, self._second = (self._draws.randint(0, self._largest) for _ in range(2))
        self._turn = SOLVER
        self._answer: str | None = None
        self._left = self._tries
        self._was_valid: dict[str, bool] = {}
        return {SOLVER: self._question()}, {SOLVER: self._info(SOLVER, won=False)}

    def step(self, action_dict: dict[str, str]) -> TeamStep:
        """Take what the agent whose turn it is says.

        Raises:
            ResetNeeded: No episode is running.
            ValueError: Another agent acted, or more than one.
        """
        mover, action = move_of(self._turn, action_dict)
        said = action.strip()
        if mover == SOLVER:
            self._was_valid[SOLVER] = said.isascii() and said.isdecimal()
            # Not int(): Python reads no number of more than 4,300 digits.
            number = said.lstrip("0") or "0"
            self._answer = number if self._was_valid[SOLVER] else "none"
            self._left -= 1
            self._turn = VERIFIER
            return self._told([VERIFIER], {SOLVER: 0.0}, is_over=False, won=False)
        self._was_valid[VERIFIER] = said in _VERDICTS
        is_right = self._answer == str(self._first + self._second)
        is_true = self._was_valid[VERIFIER] and (said == "right") == is_right
        is_over = said == "right" or self._left == 0
        rewards = {VERIFIER: float(is_true)}
        if not is_over:
            self._turn = SOLVER
            return self._told([SOLVER], rewards, is_over=False, won=False)
        self._turn = None
        rewards[SOLVER] = float(is_right)
        won = is_right and said == "right"
        return self._told([SOLVER, VERIFIER], rewards, is_over=True, won=won)

    def expert_action(self) -> str:
        """Return the sum, or the truth about the answer.

        Raises:
            ResetNeeded: No episode is running.
        """
        if self._turn is None:
            raise ResetNeeded("no episode is running; call reset() first")
        total = str(self._first + self._second)
        return total if self._turn == SOLVER else _VERDICTS[self._answer != total]

    def _told(
        self, agents: list[str], rewards: dict[str, float], *, is_over: bool, won: bool
    ) -> TeamStep:
        over = dict.fromkeys([*agents, "__all__"], is_over)
        return (
            {agent: self._seen(agent) for agent in agents},
            rewards,
            over,
            dict.fromkeys(over, False),
            {agent: self._info(agent, won=won) for agent in agents},
        )

    def _seen(self, agent: str) -> str:
        return self._question() if agent == SOLVER else self._claim()

    def _question(self) -> str:
        before = "" if self._answer is None else f"not {self._answer} "
        return f"solve {self._first} + {self._second} = ? {before}."

    def _claim(self) -> str:
        return f"check {self._first} + {self._second} = {self._answer} ? ."

    def _info(self, agent: str, *, won: bool) -> dict[str, Any]:
        own = {"is_action_valid": self._was_valid[agent]} if agent in self._was_valid else {}
        return {
            "task_id": f"{self._first}+{self._second}",
            "won": won,
            "admissible_actions": list(self._numbers if agent == SOLVER else _VERDICTS),
            **own,
        }
