"""RLlib's callbacks on the side of the EnvRunners.

Episodes are played many at once and beside each other, so those that want to look at one while it
is played have no moment to be called at; an episode that has ended holds all its steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.utils import force_list

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

_NEVER = ("on_episode_created", "on_episode_start", "on_episode_step")


class RunnerCallbacks:
    """Calls what `config.callbacks(...)` has set, on one EnvRunner.

    Args:
        config: The settings.
        runner: The EnvRunner; callbacks log on its `metrics`.
    """

    def __init__(self, config: GiGPOConfig, runner: Any):
        self._config = config
        self._runner = runner
        self._objects = [make() for make in force_list(config.callbacks_class)]

    def __call__(self, name: str, **facts: Any) -> None:
        """Call all callbacks of a name."""
        make_callback(
            name,
            callbacks_objects=self._objects,
            callbacks_functions=getattr(self._config, f"callbacks_{name}"),
            kwargs={
                "env_runner": self._runner,
                "metrics_logger": self._runner.metrics,
                **facts,
            },
        )


def check_callbacks(config: GiGPOConfig) -> None:
    """Refuse callbacks that nothing would call.

    Raises:
        ValueError: One of them is set.
    """
    for name in _NEVER:
        is_overridden = any(
            getattr(cls, name) is not getattr(RLlibCallback, name)
            for cls in force_list(config.callbacks_class)
        )
        if is_overridden or getattr(config, f"callbacks_{name}") is not None:
            raise ValueError(
                f"callbacks({name}=...) is never called, because episodes are played many at once: "
                "use on_episode_end, whose episode holds every step"
            )
