"""`trl:<module:factory>`: environment classes as TRL's `environment_factory` takes them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.adapters.naming import Rows, named
from envs.adapters.tool_env import Result, ToolEnv
from envs.adapters.tools import Call, tool_of

_NOT_TOOLS = frozenset({"reset", "get_reward"})


class TRLEnv(ToolEnv):
    """A TRL environment: public methods are tools, `get_reward()` scores the episode.

    As in TRL 1.16, a factory takes no arguments, or a mapping from names to factories is chosen
    from by the row's `environment`; `reset(**row)` may return a text; the policy sees the exception
    of a tool. Otherwise than there, an episode ends with `<answer>text</answer>` and not with any
    text that calls no tool, so that a broken call costs a step and not the episode.

    The observation is the last result, and at first what `reset` returned, else the task. `reset`
    also gets `seed` where its signature takes one: whatever it draws must come from that or from
    its row, or the members of a group start from different states.

    Isolation: none. The environment's methods run in this process, with whatever arguments the
    policy writes; a tool that runs code or commands has to bring a sandbox of its own.

    Args:
        target: `module:factory`.
        rows: Task rows; see `ToolEnv`. All fields go to `reset`.
        reward: From (environment, row, answer or None) to the final reward, in place of the
            environment's `get_reward()`: a function, or `"module:function"`.
        anchor: From the environment to the text of its state, by which GiGPO compares steps, in
            place of the observation: a function, or `"module:function"`.
        horizon: See `ToolEnv`.
        won_reward: See `ToolEnv`.
        texts: See `ToolEnv`.

    Raises:
        ValueError: Nothing of that name, no reward, or a row that chooses no environment.
    """

    def __init__(
        self,
        *,
        target: str = "",
        rows: Rows = ({},),
        reward: str | Callable[[Any, Mapping[str, Any], str | None], float] | None = None,
        anchor: str | Callable[[Any], str] | None = None,
        horizon: int = 16,
        won_reward: float | None = None,
        texts: Sequence[str] = ("yes", "no"),
    ):
        super().__init__(rows=rows, horizon=horizon, won_reward=won_reward, texts=texts)
        self.target = target
        self.reward = reward
        self.anchor = anchor
        self._factory = named(target, "trl:")
        self._score = named(reward, "reward")
        self._state_of = named(anchor, "anchor")
        self._world: Any = None

    def _open(self, row: dict[str, Any], seed: int) -> str:
        self._row = row
        self._world = self._chosen_factory(row)()
        if self._score is None and not callable(getattr(self._world, "get_reward", None)):
            raise ValueError(
                f"{self.target!r} has no get_reward(): give env_config "
                "{'reward': 'module:function'}, a function of (environment, row, answer)"
            )
        names = [name for name, _ in inspect.getmembers(type(self._world), inspect.isfunction)]
        self._methods = {
            name: getattr(self._world, name)
            for name in names
            if not name.startswith("_") and name not in _NOT_TOOLS
        }
        self._tools = [tool_of(method) for method in self._methods.values()]
        given = {**row, "seed": seed} if _takes_seed(self._world.reset) else row
        return str(_settled(self._world.reset(**given)) or self._facts["task"])

    def _call(self, call: Call) -> Result:
        try:
            return Result(str(_settled(self._methods[call.name](**call.arguments))))
        except Exception as error:  # TRL's rule: the policy sees what its call did wrong
            return Result(f"{type(error).__name__}: {error}", is_error=True)

    def _reward(self, answer: str | None) -> float:
        if self._score is not None:
            return float(_settled(self._score(self._world, self._row, answer)))
        return float(_settled(self._world.get_reward()))

    def _told_now(self, reward: float) -> dict[str, Any]:
        facts = super()._told_now(reward)
        if self._state_of is not None:
            facts["anchor"] = self._state_of(self._world)
        return facts

    def _chosen_factory(self, row: Mapping[str, Any]) -> Callable[[], Any]:
        if not isinstance(self._factory, Mapping):
            return self._factory
        chosen = row.get("environment")
        if chosen not in self._factory:
            raise ValueError(
                f"a row has environment={chosen!r}: {self.target!r} holds {sorted(self._factory)}"
            )
        return self._factory[chosen]


def _takes_seed(function: Callable[..., Any]) -> bool:
    return "seed" in inspect.signature(function).parameters


def _settled(value: Any) -> Any:
    """Return a value, awaited where it has to be; in a thread, since a loop may run in this one."""
    if not inspect.isawaitable(value):
        return value
    outcome: list[Any] = []
    failure: list[BaseException] = []

    async def wait() -> Any:
        return await value

    def run() -> None:
        try:
            outcome.append(asyncio.run(wait()))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="trl-env-call")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
