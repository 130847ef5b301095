"""What all adapters share: episodes with a horizon, from a seed, that pickle by being replayed."""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from envs.spaces import TextSpace

_SEEDS = 2**31
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Turn:
    """What the adapted environment answered.

    Attributes:
        observation: What the agent sees now.
        reward: Reward of the step.
        terminated: Whether the episode has come to its end.
        truncated: Whether the adapted environment has cut it.
        info: The keys of the contract that are known (`task`, `is_action_valid`, `won`, ...), and
            numbers to report.
    """

    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


def checked_horizon(horizon: int) -> int:
    """Return the step limit.

    Raises:
        ValueError: It is below 1.
    """
    if horizon < 1:
        raise ValueError(f"horizon must be at least 1 step, got {horizon}")
    return horizon


def without_surrogates(text: str) -> str:
    r"""Return a text with U+FFFD in place of lone surrogates, which no tokenizer reads.

    A policy spells them in ASCII, as JSON's and Python's "\ud83d", and tools give them back.
    """
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


class AdapterEnv(gymnasium.Env[str, str]):
    """Base of the adapters: subclasses write `_start`, `_act` and, to free things, `_release`.

    Every constructor argument is kept as an attribute of its name. A pickled copy is made of these,
    the episode's seed and the actions so far: it starts its own server or game and plays the
    actions again. That is exact where the adapted environment depends on its seed alone.

    Args:
        horizon: Steps until the episode is truncated, at least 1.
        examples: Actions that the action space draws, where they cannot be listed.

    Raises:
        ValueError: The horizon is below 1.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it without ClassVar

    def __init__(self, *, horizon: int = 30, examples: Sequence[str] = ()):
        self.horizon = checked_horizon(horizon)
        self.examples = tuple(examples)
        self.observation_space = TextSpace()
        self.action_space = TextSpace(self.examples)
        self._episode: tuple[int, dict[str, Any]] | None = None
        self._actions: list[str] = []
        self._is_over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        return self._begin(int(self.np_random.integers(_SEEDS)), dict(options or {}))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one action.

        Raises:
            RuntimeError: No episode is running.
        """
        if self._is_over:
            raise RuntimeError("no episode is running; call reset() before step()")
        turn = self._act(action)
        self._actions.append(action)
        is_cut = turn.truncated or len(self._actions) >= self.horizon
        truncated = is_cut and not turn.terminated
        self._is_over = turn.terminated or truncated
        seen, info = self._told(turn)
        return seen, float(turn.reward), turn.terminated, truncated, info

    def close(self) -> None:
        """Free what the episode holds; a later `reset` starts anew."""
        self._is_over = True
        self._release()

    @property
    def is_last_step(self) -> bool:
        """Whether the action that is being taken is the last that the horizon allows."""
        return len(self._actions) + 1 >= self.horizon

    @abstractmethod
    def _start(self, seed: int, options: Mapping[str, Any]) -> Turn:
        """Start the episode of a seed in [0, 2**31)."""

    @abstractmethod
    def _act(self, action: str) -> Turn:
        """Answer an action; one that is not possible changes nothing and is flagged."""

    def _release(self) -> None:
        """Free processes and sockets."""

    def _begin(self, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._episode = (seed, options)
        self._actions = []
        turn = self._start(seed, options)
        self._is_over = turn.terminated
        return self._told(turn)

    def _told(self, turn: Turn) -> tuple[str, dict[str, Any]]:
        """Return the observation and the info of a turn."""
        info = {
            key: without_surrogates(value) if isinstance(value, str) else value
            for key, value in turn.info.items()
        }
        if self._is_over and "admissible_actions" in info:
            info["admissible_actions"] = []
        return without_surrogates(turn.observation), info

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return _replayed, (type(self), arguments, self._np_random, self._episode, self._actions)


def _replayed(
    cls: type[AdapterEnv],
    arguments: dict[str, Any],
    np_random: Any,
    episode: tuple[int, dict[str, Any]] | None,
    actions: list[str],
) -> AdapterEnv:
    env = cls(**arguments)
    env._np_random = np_random
    if episode is not None:
        env._begin(*episode)
        for action in actions:
            env.step(action)
    return env
