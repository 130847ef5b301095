"""`skyrl:<id or module:Class>`: environments of skyrl-gym."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

from envs.adapters.base import AdapterEnv, Turn
from envs.adapters.naming import Rows, chosen_row, load_rows, named, prompt_text


class SkyRLEnv(AdapterEnv):
    """A text environment with skyrl-gym's `init(prompt)` and `step(action)`.

    A row is one of SkyRL's data set: `prompt` (chat messages) goes to `init`, the other fields are
    the constructor's `extras`. The action is the policy's whole response, which the environment
    reads itself. The task is the text of the prompt; the observation is the text of the messages
    that the last step returned, and at first "" where `init` returned the prompt as it was. What
    the environment appends to the conversation is thus what GiGPO compares, and what memory keeps.

    `info` holds `task`, `task_id`, the numbers of the environment's `metadata` and `get_metrics()`,
    and `won` where `won_reward` is set. Whether a response was valid is not told: skyrl-gym does
    not say.

    Isolation: none. The environment runs in this process; one that executes what the policy wrote
    (SQL, Python) has to bring a sandbox of its own.

    Args:
        target: An id of skyrl-gym's registry, or `module:Class`.
        rows: Task rows: a sequence of mappings, or a file of JSON lines. The seed chooses one.
        kwargs: Constructor arguments, such as `{"env_config": {...}}`.
        horizon: Most actions of an episode; the environment ends it earlier by itself.
        won_reward: Reward of the last step from which an episode counts as won.
        examples: Responses that random play draws.

    Raises:
        ImportError: An id was given, and skyrl-gym is not installed.
        ValueError: Nothing of that name.
    """

    def __init__(
        self,
        *,
        target: str = "",
        rows: Rows = ({},),
        kwargs: Mapping[str, Any] | None = None,
        horizon: int = 16,
        won_reward: float | None = None,
        examples: Sequence[str] = ("yes", "no"),
    ):
        super().__init__(horizon=horizon, examples=examples)
        self.target = target
        self.rows = rows
        self.kwargs = kwargs
        self.won_reward = won_reward
        self._loaded_rows = load_rows(rows)
        self._create = named(target, "skyrl:") if ":" in target else _registered(target)
        self._world: Any = None

    def task_ids(self) -> list[str]:
        """Return the numbers of the rows; any goes to `reset` as the option `task_id`."""
        return [str(number) for number in range(len(self._loaded_rows))]

    def random_action(self, rng: random.Random) -> str:
        """Draw one of the examples."""
        return rng.choice(self.examples)

    def _start(self, seed: int, options: Mapping[str, Any]) -> Turn:
        number, row = chosen_row(self._loaded_rows, seed, options)
        self._release()
        row = copy.deepcopy(row)
        prompt = row.pop("prompt", [])
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        self._world = self._create(**dict(self.kwargs or {}), extras=row)
        opening, _ = self._world.init(copy.deepcopy(messages))
        added = opening[len(messages) :] if opening[: len(messages)] == messages else opening
        self._facts = {"task": prompt_text(messages), "task_id": str(number)}
        return Turn(prompt_text(added), info=self._told_now({}, 0.0))

    def _act(self, action: str) -> Turn:
        answer = self._world.step(action)
        reward, done = float(answer["reward"]), bool(answer["done"])
        facts = self._told_now(answer.get("metadata") or {}, reward if done else 0.0)
        if done or self.is_last_step:
            facts = {**_numbers(self._world.get_metrics()), **facts}
        return Turn(prompt_text(answer["observations"]), reward, done, info=facts)

    def _release(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    def _told_now(self, metadata: Mapping[str, Any], reward: float) -> dict[str, Any]:
        facts = {**_numbers(metadata), **self._facts}
        if self.won_reward is not None:
            facts["won"] = reward >= self.won_reward
        return facts


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _registered(target: str) -> Any:
    if not target:
        raise ValueError(
            "skyrl: needs a name, such as skyrl:gsm8k_multi_turn or skyrl:module:Class"
        )
    try:
        import skyrl_gym
    except ImportError as error:
        raise ImportError(
            f"skyrl:{target} needs skyrl-gym ({error}); install it with "
            "`pip install -e '.[skyrl]'` in rllib-gigpo's folder, or name a class as "
            "skyrl:module:Class"
        ) from error
    if target not in skyrl_gym.registry:
        raise ValueError(f"skyrl-gym has no {target!r}: it has {sorted(skyrl_gym.registry)}")
    return lambda **arguments: skyrl_gym.make(target, **arguments)
