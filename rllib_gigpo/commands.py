"""What the command-line tools share: which environment, and which agent plays it."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.registry import LLMEnvSpec, get_env_spec, load_object


def add_env_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the environment's name, its arguments and its agent profile."""
    parser.add_argument("env", help="name of an environment, gymnasium id, or module:Class")
    parser.add_argument(
        "--env-config", default="{}", metavar="JSON", help="constructor arguments, %(default)s"
    )
    parser.add_argument(
        "--profile",
        default=None,
        metavar="MODULE:NAME",
        help="agent profile, or a function that makes it; by default the environment's own",
    )


def env_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[LLMEnvSpec, AgentProfile]:
    """Return the environment that the arguments name, with its settings, and the agent profile.

    The environment is built once: what is wrong with the arguments ends the program with one
    sentence instead of a traceback.
    """
    try:
        spec = get_env_spec(args.env)
        spec = replace(spec, defaults={**spec.defaults, **_json_object(args.env_config)})
        spec.make().close()
        return spec, spec.profile() if args.profile is None else load_profile(args.profile)
    except (ValueError, TypeError, FileNotFoundError, ImportError) as error:
        parser.error(str(error))


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


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--env-config {text!r} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"--env-config {text!r}: expected a JSON object of constructor arguments")
    return found
