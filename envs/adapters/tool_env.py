"""Episodes of tool calls with one reward at the end, as `trl:` and `mcp:` have them."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from envs.adapters.base import AdapterEnv, Turn
from envs.adapters.naming import Rows, chosen_row, load_rows, prompt_text
from envs.adapters.tools import Call, Tool, fault, parse_action, random_call

NO_CALL = (
    'That was neither a tool call, {"name": ..., "arguments": {...}}, nor an <answer>text</answer>.'
)


class Result(NamedTuple):
    """What a tool call brought.

    Attributes:
        text: What the policy sees.
        is_error: Whether the tool reported an error; the call counts as invalid then.
    """

    text: str
    is_error: bool = False


class ToolEnv(AdapterEnv):
    """Base of environments whose actions are tool calls.

    An action is the JSON text of one call, or `<answer>text</answer>`, which ends the episode.
    Anything else, a call that the tool's schema does not allow, and a call that fails are flagged;
    the observation tells why. The reward comes with the last step, an answer or the horizon's.

    `info` holds `task`, `task_id`, `tools`, and `won` where `won_reward` is set.

    Isolation: none of its own; each kind of environment says where its tools run.

    Args:
        rows: Task rows: a sequence of mappings, or a file of JSON lines. The seed chooses one. Its
            `prompt` (a text, or chat messages) is the task.
        horizon: Most actions of an episode.
        won_reward: Final reward from which an episode counts as won; None leaves it untold.
        texts: What `random_action` draws text arguments from.
    """

    def __init__(self, *, rows: Rows, horizon: int, won_reward: float | None, texts: Sequence[str]):
        super().__init__(horizon=horizon)
        self.rows = rows
        self.won_reward = won_reward
        self.texts = texts
        self._loaded_rows = load_rows(rows)
        self._tools: list[Tool] = []

    def task_ids(self) -> list[str]:
        """Return the numbers of the rows; any goes to `reset` as the option `task_id`."""
        return [str(number) for number in range(len(self._loaded_rows))]

    def random_action(self, rng: random.Random) -> str:
        """Draw a call that fits the schema of a tool."""
        return random_call(self._tools, rng, self.texts)

    @abstractmethod
    def _open(self, row: dict[str, Any], seed: int) -> str:
        """Start the episode of a row, set `self._tools`, return what there is to see."""

    @abstractmethod
    def _call(self, call: Call) -> Result:
        """Carry out a call that the schema allows."""

    @abstractmethod
    def _reward(self, answer: str | None) -> float:
        """Return the reward of the finished episode; None means that no answer was given."""

    def _start(self, seed: int, options: Mapping[str, Any]) -> Turn:
        number, row = chosen_row(self._loaded_rows, seed, options)
        self._facts = {"task": prompt_text(row.get("prompt")), "task_id": str(number)}
        self._seen = self._open(row, seed)
        return Turn(self._seen, info=self._told_now(0.0))

    def _act(self, action: str) -> Turn:
        parsed = parse_action(action)
        if isinstance(parsed, str):
            return self._last(self._seen, parsed, is_valid=True)
        result = self._try(parsed)
        if not result.is_error:
            self._seen = result.text
        if self.is_last_step:
            return self._last(result.text, None, is_valid=not result.is_error)
        facts = {**self._told_now(0.0), "is_action_valid": not result.is_error}
        return Turn(result.text, info=facts)

    def _try(self, call: Call | None) -> Result:
        if call is None:
            return Result(NO_CALL, is_error=True)
        wrong = fault(call, self._tools)
        return Result(wrong, is_error=True) if wrong else self._call(call)

    def _last(self, observation: str, answer: str | None, *, is_valid: bool) -> Turn:
        reward = float(self._reward(answer))
        facts = {**self._told_now(reward), "is_action_valid": is_valid}
        return Turn(observation, reward, terminated=answer is not None, info=facts)

    def _told_now(self, reward: float) -> dict[str, Any]:
        facts: dict[str, Any] = {**self._facts, "tools": self._tools}
        if self.won_reward is not None:
            facts["won"] = reward >= self.won_reward
        return facts
