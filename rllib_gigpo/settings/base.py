"""What all groups of settings share: how arguments are taken over, and that typos are refused."""

from __future__ import annotations

import difflib
from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.utils.annotations import override

# RLlib's marker of an argument that was left out; typed so that signatures can name real types.
UNSET: Any = NotProvided

# What RLlib itself sets on a config after construction.
_RLLIB_LATE_SETTINGS = frozenset(
    {"worker_index", "simple_optimizer", "rl_module_spec", "in_evaluation", "env_task_fn"}
)


class SettingsBase(AlgorithmConfig):
    """An RLlib config that knows its settings."""

    def _take(self, values: dict[str, Any]) -> Self:
        for name, value in values.items():
            if name not in ("self", "kwargs", "__class__") and value is not UNSET:
                setattr(self, name, value)
        return self

    @override(AlgorithmConfig)
    def __setattr__(self, key: str, value: Any) -> None:
        """Refuse names that are no setting, so that a typo cannot pass for one."""
        is_known = key.startswith("_") or hasattr(self, key) or key in _RLLIB_LATE_SETTINGS
        if not is_known and not getattr(self, "_settings_are_open", True):
            settings = [name for name in vars(self) if not name.startswith("_")]
            close = difflib.get_close_matches(key, settings, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see GiGPOConfig for what there is"
            raise ValueError(f"{type(self).__name__} has no setting {key!r}: {hint}")
        super().__setattr__(key, value)
