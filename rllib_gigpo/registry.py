"""Environments by name: `register_llm_env`, installed plug-ins, and gymnasium ids.

A name is looked up in this order: names registered in this process, names registered anywhere in
this Ray job (on a worker those of the driver), entry points of the group `rllib_gigpo.envs` (a
dict of catalogue entries, or one environment class), the bundled `envs` package of a source
checkout, schemes such as `gym:` (catalogue entries whose name ends in a colon; what follows goes to
the constructor as `target`), gymnasium's own registry, and `module:Class`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Any

import gymnasium as gym
from ray.tune.registry import ENV_CREATOR, _global_registry, register_env

from rllib_gigpo.agent.profile import AgentProfile, default_profile

ENTRY_POINT_GROUP = "rllib_gigpo.envs"


@dataclass(frozen=True)
class LLMEnvSpec:
    """How to make an environment, and the agent profile that goes with it.

    Attributes:
        name: The name users write.
        creator: From an env_config mapping to a new environment.
        profile: Makes the default agent profile.
        defaults: Constructor arguments that env_config overrides.
    """

    name: str
    creator: Callable[[Mapping[str, Any]], Any]
    profile: Callable[[], AgentProfile] = default_profile
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def make(self, env_config: Mapping[str, Any] | None = None) -> Any:
        """Make one environment (gymnasium.Env or RLlib MultiAgentEnv)."""
        return self.creator({**self.defaults, **(env_config or {})})


_registered: dict[str, LLMEnvSpec] = {}


def register_llm_env(
    name: str,
    creator: Callable[..., Any],
    profile: AgentProfile | Callable[[], AgentProfile] = default_profile,
) -> None:
    """Make an environment known by name, on this process and on every Ray worker.

    Args:
        name: What `config.environment(name)` says.
        creator: An environment class (its constructor takes env_config as keywords), or a callable
            from the env_config mapping to an environment.
        profile: The agent profile, or a callable that makes it.

    Raises:
        TypeError: `creator` is no callable, or `profile` is neither profile nor callable.
    """
    if not callable(creator):
        raise TypeError(
            f"register_llm_env({name!r}, ...) got a {type(creator).__name__}: pass an environment "
            "class, or a callable from env_config to an environment"
        )
    if not isinstance(profile, AgentProfile) and not callable(profile):
        raise TypeError(
            f"register_llm_env({name!r}, profile=...) got a {type(profile).__name__}: pass an "
            "AgentProfile, or a callable that makes one"
        )
    make_profile = profile if callable(profile) else lambda: profile
    if isinstance(creator, type):
        cls = creator
        creator = lambda env_config: cls(**env_config)  # noqa: E731
    _registered[name] = LLMEnvSpec(name, creator, make_profile)
    _announce(_registered[name])


def get_env_spec(name: str) -> LLMEnvSpec:
    """Find an environment by name and make it known to Ray's workers.

    Raises:
        ValueError: Nothing of that name; the message lists close names.
    """
    spec = (
        _registered.get(name)
        or _announced_spec(name)
        or _named_plugin(name)
        or _scheme_spec(name)
        or _gymnasium_spec(name)
        or _imported_spec(name)
    )
    if spec is None:
        known = sorted({*_registered, *_plugins()})
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"no environment is called {name!r}: {hint}known are {known} (what ends in a colon "
            "takes a target, such as gym:Taxi-v3), any gymnasium id of a text environment, "
            "module:Class, and what register_llm_env(name, creator) has added in this process"
        )
    _announce(spec)
    return spec


def is_registered(name: str) -> bool:
    """Whether a name is one of this process, of a plug-in or of gymnasium.

    Such a name imports nothing that is not installed or registered as an environment; `module:name`
    and schemes do, apart from `gym:` with an id that gymnasium knows.
    """
    known = name in _registered or _announced_spec(name) is not None
    is_plain = ":" not in name and (name in _plugins() or name in gym.registry)
    return known or is_plain or name.removeprefix("gym:") in gym.registry


def load_object(path: str) -> Any:
    """Import what `module:attribute` names.

    Raises:
        ValueError: The text has another form, or there is no such module or attribute.
    """
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ValueError(f"{path!r} names no object: expected module:attribute")
    try:
        loaded = _imported(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{path!r}: there is no module {error.name!r}; run from the folder that holds it, or "
            "put that folder on PYTHONPATH"
        ) from error
    if not hasattr(loaded, attribute):
        raise ValueError(f"{path!r}: module {module!r} has no {attribute!r}")
    return getattr(loaded, attribute)


def _imported(module: str) -> ModuleType:
    """Import a module, where need be from the working folder, as `python -m` does.

    A console script's path has that of the script instead.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        here = os.getcwd()
        if error.name != module.partition(".")[0] or here in sys.path:
            raise
        sys.path.append(here)
        return importlib.import_module(module)


def _announce(spec: LLMEnvSpec) -> None:
    """Carry the spec, profile included, to every process of the Ray job."""
    register_env(spec.name, spec.make)


def _announced_spec(name: str) -> LLMEnvSpec | None:
    if not _global_registry.contains(ENV_CREATOR, name):
        return None
    creator = _global_registry.get(ENV_CREATOR, name)
    owner = getattr(creator, "__self__", None)
    return owner if isinstance(owner, LLMEnvSpec) else LLMEnvSpec(name, creator)


@cache
def _plugins() -> dict[str, LLMEnvSpec]:
    found = {}
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for entry_point in entry_points:
        with _shadow_explained():
            loaded = entry_point.load()
        if isinstance(loaded, Mapping):
            found |= {name: _from_catalog(name, entry) for name, entry in loaded.items()}
        else:
            found[entry_point.name] = LLMEnvSpec(
                entry_point.name, lambda env_config, cls=loaded: cls(**env_config)
            )
    if not any(entry_point.name == "bundled" for entry_point in entry_points):
        found |= {name: _from_catalog(name, e) for name, e in _source_catalog().items()}
    return found


def _source_catalog() -> Mapping[str, Any]:
    """Return the bundled catalogue of a checkout that is not installed (`ray job submit`)."""
    try:
        with _shadow_explained():
            catalog = importlib.import_module("envs.catalog")
        return {**catalog.ENVIRONMENTS, **catalog.SCHEMES}
    except ModuleNotFoundError as error:
        if error.name != "envs":
            raise
        return {}


@contextmanager
def _shadow_explained() -> Iterator[None]:
    """Say so where `envs` is found but is another package than the one of this project."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "envs.catalog":
            raise
        envs = sys.modules["envs"]
        place = getattr(envs, "__file__", None) or next(iter(getattr(envs, "__path__", ())), "?")
        raise ImportError(
            f"another package called 'envs' ({place}) hides the one of rllib_gigpo: "
            "put the folder of rllib_gigpo first on PYTHONPATH, or pip install -e . in it"
        ) from error


def _from_catalog(name: str, entry: Any) -> LLMEnvSpec:
    def create(env_config: Mapping[str, Any]) -> Any:
        return load_object(entry.env)(**env_config)

    def profile() -> AgentProfile:
        return load_object(entry.profile)()

    return LLMEnvSpec(name, create, profile, dict(entry.kwargs))


def _named_plugin(name: str) -> LLMEnvSpec | None:
    return None if name.endswith(":") else _plugins().get(name)


def _scheme_spec(name: str) -> LLMEnvSpec | None:
    scheme, colon, target = name.partition(":")
    spec = _plugins().get(f"{scheme}:") if colon else None
    if spec is None:
        return None
    if not target:
        raise ValueError(f"environment {name!r} names nothing after the colon, as gym:Taxi-v3 does")
    return replace(spec, name=name, defaults={**spec.defaults, "target": target})


def _gymnasium_spec(name: str) -> LLMEnvSpec | None:
    if name not in gym.registry:
        return None
    # The registration itself travels: other processes may not have imported what registers the id.
    registration = gym.registry[name]
    return LLMEnvSpec(name, lambda env_config: gym.make(registration, **env_config))


def _imported_spec(name: str) -> LLMEnvSpec | None:
    if ":" not in name:
        return None
    load_object(name)
    return LLMEnvSpec(name, lambda env_config: load_object(name)(**env_config))
