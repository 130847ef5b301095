"""`gym:<id>`: a gymnasium environment told in words."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator

from envs.adapters.base import AdapterEnv, Turn, checked_horizon
from envs.adapters.gym_views import view_of
from envs.adapters.naming import named, spelled


class GymText(AdapterEnv):
    """Any gymnasium environment: its state as text, its actions as words.

    FrozenLake, Taxi, CliffWalking, Blackjack and MiniGrid have views of their own (see
    `envs.adapters.gym_views`). Of any other environment the observation is its "ansi" picture
    where it draws one, else the observation itself; actions are the numbers of a `Discrete`
    space, the texts of a `Text` space, or JSON for any other space.

    Rewards, termination and truncation are the environment's. `info["won"]` is told where the view
    knows what winning is, or by `won`.

    Args:
        target: Gymnasium's id; `module:id` imports the module that registers it first.
        horizon: Step limit; None: the registered one, or the environment's own `max_steps`.
        kwargs: Constructor arguments of the environment.
        actions: Names of the actions of a `Discrete` space, in order, in place of the view's.
        view: From (environment, observation) to text, in place of the built-in view: a function, or
            `"module:function"`.
        task: The task text, in place of the view's.
        won: When an episode counts as won: "terminated", or "rewarded" (terminated with a positive
            last reward); None: what the view says.

    Raises:
        ValueError: There is no such id, no step limit, or the names do not fit the actions.
    """

    def __init__(
        self,
        *,
        target: str = "FrozenLake-v1",
        horizon: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        view: str | Callable[[Any, Any], str] | None = None,
        task: str | None = None,
        won: str | None = None,
    ):
        if won not in (None, "terminated", "rewarded"):
            raise ValueError(f"won must be 'terminated', 'rewarded' or None, got {won!r}")
        self.target = target
        self.kwargs = kwargs
        self.actions = actions
        self.view = view
        self.task = task
        self.won = won
        self._inner = _make(target, dict(kwargs or {}), horizon)
        self._view = view_of(self._inner)
        self._describe = named(view, "view") or self._view.describe
        self._names = self._action_names()
        super().__init__(horizon=_limit(self._inner, target, horizon), examples=self._names)

    def _start(self, seed: int, options: Mapping[str, Any]) -> Turn:
        observation, _ = self._inner.reset(seed=seed, options=dict(options) or None)
        self._task = self.task
        if self._task is None:
            self._task = self._view.task(self._inner, observation)
        return self._turn(observation, 0.0, False, False)

    def _act(self, action: str) -> Turn:
        chosen = self._parse(action)
        if chosen is None:
            return Turn(self._seen, info={**self._facts(False), "is_action_valid": False})
        observation, reward, terminated, truncated, _ = self._inner.step(chosen)
        turn = self._turn(observation, float(reward), bool(terminated), bool(truncated))
        turn.info["is_action_valid"] = True  # pyright: ignore[reportIndexIssue]
        return turn

    def _release(self) -> None:
        self._inner.close()

    def _turn(self, observation: Any, reward: float, terminated: bool, truncated: bool) -> Turn:
        self._seen = self._describe(self._inner, observation)
        rule = self.won or self._view.won
        won = terminated and (rule == "terminated" or reward > 0)
        return Turn(self._seen, reward, terminated, truncated, self._facts(won))

    def _facts(self, won: bool) -> dict[str, Any]:
        facts: dict[str, Any] = {"task": self._task}
        if self._names:
            facts["admissible_actions"] = list(self._names)
        if self.won or self._view.won:
            facts["won"] = won
        return facts

    def _parse(self, action: str) -> Any:
        """Return the action of the environment's space, None where the text names none."""
        space = self._inner.action_space
        if isinstance(space, spaces.Discrete):
            name = spelled(" ".join(action.split()), self._names)
            return None if name is None else int(space.start) + self._names.index(name)
        if isinstance(space, spaces.Text):
            return action if space.contains(action) else None
        try:
            value = _cast(json.loads(action), space)
            # The check of spaces that are not cast may raise too, such as at too large a number.
            return value if space.contains(value) else None
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None

    def _action_names(self) -> tuple[str, ...]:
        space = self._inner.action_space
        if not isinstance(space, spaces.Discrete):
            if self.actions is not None:
                raise ValueError(
                    f"actions={self.actions!r} names the actions of a Discrete space, but that of "
                    f"{self.target!r} is {space}"
                )
            return ()
        numbers = range(int(space.start), int(space.start) + int(space.n))
        names = tuple(self.actions or self._view.actions or map(str, numbers))
        if len(names) != space.n:
            raise ValueError(f"{self.target!r} has {space.n} actions, not {len(names)}: {names}")
        return names


def _cast(value: Any, space: spaces.Space) -> Any:
    """Return what JSON has told in the types of a space, as its samples have them.

    Raises:
        ValueError: It is of another form, or a number that the space's type cannot hold.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            raise ValueError(f"expected an object with the keys {list(space.spaces)}")
        return {key: _cast(value[key], part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, list):
            raise ValueError("expected an array")
        return tuple(_cast(*both) for both in zip(value, space.spaces, strict=True))
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return _array(value, np.dtype(space.dtype))
    if isinstance(space, spaces.Discrete):
        return _array(value, np.dtype(space.dtype)).tolist()
    return value


def _array(value: Any, dtype: np.dtype) -> np.ndarray:
    told = np.asarray(value)
    if told.dtype.kind not in "biuf":
        raise ValueError("expected numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        array = told.astype(dtype)
    is_held = np.isfinite(array) if dtype.kind == "f" else array == told
    if not np.all(is_held):
        raise ValueError(f"{dtype} holds no such number")
    return array


def _make(target: str, kwargs: dict[str, Any], horizon: int | None) -> gymnasium.Env:
    module, _, name = target.rpartition(":")
    if module:
        _import(module, target)
    try:
        spec = gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise ValueError(
            f"gymnasium knows no environment {name!r} ({error}): write 'gym:module:id' to import "
            "the module that registers it"
        ) from error
    if horizon is not None:
        kwargs["max_episode_steps"] = checked_horizon(horizon)
    if _draws_ansi(spec):
        kwargs.setdefault("render_mode", "ansi")
    # Its checks are for the environment's author, and would be made at every step.
    return gymnasium.make(spec, disable_env_checker=True, **kwargs)


def _import(module: str, target: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ImportError(
            f"the environment {target!r} needs the module {module!r}, which is not installed"
        ) from error


def _draws_ansi(spec: Any) -> bool:
    entry = spec.entry_point
    cls = load_env_creator(entry) if isinstance(entry, str) else entry
    return "ansi" in (getattr(cls, "metadata", None) or {}).get("render_modes", ())


def _limit(env: gymnasium.Env, target: str, horizon: int | None) -> int:
    registered = env.spec.max_episode_steps if env.spec is not None else None
    limit = horizon or registered or getattr(env.unwrapped, "max_steps", None)
    if limit is None:
        raise ValueError(
            f"gymnasium registers {target!r} without a step limit: set one with "
            "env_config={'horizon': 100}"
        )
    return int(limit)
