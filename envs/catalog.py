"""The list of bundled environments, and what each needs to be built, prompted and tested.

To add an environment, write its module, give `ENVIRONMENTS` one entry, and write its profile. The
entry is all it takes: `rllib_gigpo` finds it through the entry-point group `rllib_gigpo.envs`,
gymnasium registers it as `rllib_gigpo/<Name>-v0`, and the contract test plays it. Classes are
named as strings, so reading the catalogue imports no simulator.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium


class EnvEntry(NamedTuple):
    """One bundled environment.

    Attributes:
        env: `"module:Class"` of the environment; the class takes keyword arguments only.
        profile: `"module:attribute"` of the agent profile (prompt, memory, action parsing) that
            plays it.
        kwargs: Constructor arguments that make this entry out of the class.
        multi_agent: Whether the class is an RLlib `MultiAgentEnv`.
        extra: The pip extra that installs its simulator, None if nothing more is needed.
        contract_kwargs: Further constructor arguments under which the contract test plays it,
            chosen so that no download is needed.
    """

    env: str
    profile: str
    kwargs: Mapping[str, Any] = {}
    multi_agent: bool = False
    extra: str | None = None
    contract_kwargs: Mapping[str, Any] = {}


_KEY_DOOR_PROFILE = "rllib_gigpo.agent.profiles.key_door:profile"
_CARD_PROFILES = "rllib_gigpo.agent.profiles.gym_cards"

ENVIRONMENTS: dict[str, EnvEntry] = {
    "KeyDoor": EnvEntry("envs.key_door:KeyDoor", _KEY_DOOR_PROFILE),
    "KeyDoorLocal": EnvEntry("envs.key_door:KeyDoor", _KEY_DOOR_PROFILE, {"view": "local"}),
    "KeyDoorTeam": EnvEntry("envs.key_door_team:KeyDoorTeam", _KEY_DOOR_PROFILE, multi_agent=True),
    "ArithmeticTeam": EnvEntry(
        "envs.arithmetic_team:ArithmeticTeam", _KEY_DOOR_PROFILE, multi_agent=True
    ),
    "Sokoban": EnvEntry("envs.sokoban:Sokoban", "rllib_gigpo.agent.profiles.sokoban:profile"),
    "NumberLine": EnvEntry("envs.gym_cards:NumberLine", f"{_CARD_PROFILES}:number_line"),
    "EZPoints": EnvEntry("envs.gym_cards:EZPoints", f"{_CARD_PROFILES}:ez_points"),
    "Points24": EnvEntry("envs.gym_cards:Points24", f"{_CARD_PROFILES}:points24"),
    "Blackjack": EnvEntry("envs.gym_cards:Blackjack", f"{_CARD_PROFILES}:blackjack"),
    "ALFWorld": EnvEntry(
        "envs.alfworld:ALFWorld",
        "rllib_gigpo.agent.profiles.alfworld:profile",
        contract_kwargs={"games": "shipped"},
    ),
    "WebShop": EnvEntry(
        "envs.webshop:WebShop", "rllib_gigpo.agent.profiles.webshop:profile", extra="webshop"
    ),
    "AppWorld": EnvEntry(
        "envs.appworld:AppWorld",
        "rllib_gigpo.agent.profiles.appworld:profile",
        contract_kwargs={"world": "shipped"},
    ),
    "Search": EnvEntry(
        "envs.search:Search", "rllib_gigpo.agent.profiles.search:profile", extra="search"
    ),
    "SearchTeam": EnvEntry(
        "envs.search_team:SearchTeam",
        "rllib_gigpo.agent.profiles.search:team",
        multi_agent=True,
        extra="search",
    ),
}

_DEFAULT_PROFILE = "rllib_gigpo.agent.profile:default_profile"
_TOOLS_PROFILE = "rllib_gigpo.agent.profiles.tools:profile"
_CONVERSATION_PROFILE = "rllib_gigpo.agent.profiles.conversation:profile"

# Kinds of other projects' environments. What follows "scheme:" in a name becomes the constructor
# argument `target`.
SCHEMES: dict[str, EnvEntry] = {
    "gym:": EnvEntry("envs.adapters.gym_text:GymText", _DEFAULT_PROFILE),
    "textworld:": EnvEntry(
        "envs.adapters.textworld:TextWorldGame", _DEFAULT_PROFILE, extra="textworld"
    ),
    "trl:": EnvEntry("envs.adapters.trl:TRLEnv", _TOOLS_PROFILE),
    "openenv:": EnvEntry("envs.adapters.openenv:OpenEnv", _TOOLS_PROFILE, extra="openenv"),
    "skyrl:": EnvEntry("envs.adapters.skyrl:SkyRLEnv", _CONVERSATION_PROFILE, extra="skyrl"),
    "mcp:": EnvEntry("envs.adapters.mcp:MCPEnv", _TOOLS_PROFILE),
}


def make(name: str, **kwargs: Any) -> gymnasium.Env:
    """Build a bundled environment by name.

    Args:
        name: A key of `ENVIRONMENTS`.
        **kwargs: Constructor arguments; they override those of the entry.

    Raises:
        ValueError: No environment has this name.
    """
    if name not in ENVIRONMENTS:
        raise ValueError(f"no environment is named {name!r}; use one of {sorted(ENVIRONMENTS)}")
    entry = ENVIRONMENTS[name]
    module, _, attribute = entry.env.partition(":")
    return getattr(importlib.import_module(module), attribute)(**{**entry.kwargs, **kwargs})
