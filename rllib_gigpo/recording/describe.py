"""What `run.json` says of a run."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from rllib_gigpo.recording.folder import FORMAT
from rllib_gigpo.recording.plain import jsonable, without_secrets
from rllib_gigpo.recording.provenance import commits, data_of, machine, versions

if TYPE_CHECKING:
    from rllib_gigpo.config import GiGPOConfig

# How and where, not what: these differ between runs that are the same.
_NOT_COMPARED = frozenset(
    {"algo_class", "class", "record_command", "record_folder", "policies", "simple_optimizer"}
)


def describe_run(config: GiGPOConfig, run_id: str) -> dict[str, Any]:
    """Return the content of `run.json`, without secrets.

    Args:
        config: The settings.
        run_id: Stays the same when the run is resumed.
    """
    settings = _settings(config)
    # An environment brings its profile, which is then no choice of this run's.
    defaults = {**_settings(type(config)()), "profile": jsonable(config.env_spec.profile())}
    changed = {
        name: value
        for name, value in settings.items()
        if name not in _NOT_COMPARED and defaults.get(name) != value
    }
    env_config: dict[str, Any] = dict(config.env_config)
    return without_secrets(
        {
            "format": FORMAT,
            "run_id": run_id,
            "created": now(),
            "algorithm": getattr(config.algo_class, "__name__", str(config.algo_class)),
            "env": str(config.env),
            "env_config": jsonable(env_config),
            "model": config.llm_model,
            "profile": jsonable(config.profile),
            "seeds": {"root": config.root_seed},
            "omega": jsonable(config.omega),
            "changed": changed,
            "settings": settings,
            "versions": versions(),
            "commits": commits(),
            "machine": machine(),
            "data": data_of(str(config.env), env_config, config.llm_model),
            "command": config.record_command,
            "price_per_hour": config.price_per_hour,
            "trackers": {},
            "starts": [],
        }
    )


def start_of(config: GiGPOConfig, iteration: int) -> dict[str, Any]:
    """Return what `run.json` says of one start of the run, the first or a later one."""
    return without_secrets(
        {
            "time": now(),
            "after_iteration": iteration,
            "command": config.record_command,
            "versions": versions(),
            "commits": commits(),
        }
    )


def now() -> str:
    """Return the time, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _settings(config: GiGPOConfig) -> dict[str, Any]:
    found = jsonable(config.to_dict())
    return {name: value for name, value in sorted(found.items()) if not name.startswith("_")}
