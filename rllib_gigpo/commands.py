"""What the commands share: which environment, and which agent plays it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.imports import import_places
from rllib_gigpo.registry import LLMEnvSpec, get_env_spec, load_object


def env_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[LLMEnvSpec, AgentProfile]:
    """Return the environment that the arguments name, with its settings, and the agent profile.

    The environment is built once: what is wrong with the arguments ends the program with one
    sentence instead of a traceback.
    """
    try:
        import_places(args.imports)
        spec, profile, _ = open_env(args.env, args.env_config, args.profile)
    except (ValueError, TypeError, FileNotFoundError, ImportError) as error:
        parser.error(str(error))
    return spec, profile


def open_env(
    name: str, env_config: str | Mapping[str, Any], profile: str | None
) -> tuple[LLMEnvSpec, AgentProfile, dict[str, Any]]:
    """Return an environment by name, with its settings, the agent profile, and the settings.

    Args:
        name: Of the environment; it is built once, so that what is wrong shows now.
        env_config: Its settings, as JSON where a text.
        profile: `module:name` of the agent profile, or None for the environment's own.

    Raises:
        ValueError: There is no such environment or profile, or the settings are no JSON object.
        TypeError: The environment does not take the settings.
    """
    spec = get_env_spec(name)
    is_text = isinstance(env_config, str)
    settings = json_object(env_config, "--env-config") if is_text else dict(env_config)
    spec = replace(spec, defaults={**spec.defaults, **settings})
    spec.make().close()
    return spec, spec.profile() if profile is None else load_profile(profile), settings


def load_profile(path: str) -> AgentProfile:
    """Import the agent profile that `module:name` names, or that a function of this name makes.

    Raises:
        ValueError: There is no such module or name.
        TypeError: It is something else.
    """
    found = load_object(path)
    profile = found() if callable(found) else found
    if not isinstance(profile, AgentProfile):
        raise TypeError(
            f"profile {path!r} is a {type(profile).__name__}: expected an AgentProfile or a "
            "function that makes one"
        )
    return profile


def json_object(text: str, option: str, what: str = "constructor arguments") -> dict[str, Any]:
    """Return the JSON object that an option was given.

    Raises:
        ValueError: It is something else; the option is named.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} {text!r} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{option} {text!r}: expected a JSON object of {what}")
    return found
