"""What an environment may answer: the checks of every reset and step that is played.

`check_env` asks for the exact types of the contract before anything is trained; here NumPy's
counterparts pass too, and what would otherwise break far from its cause, or be trained on as
something else than it is, is refused with one sentence. The rollouts count a refusal as a failure
of the environment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

import numpy as np

from rllib_gigpo.observations import EXPECTED, is_observation, is_text_and_picture

# RLlib's key of the flags that end an episode for the whole team.
ALL_AGENTS = "__all__"

_FLAG = bool | np.bool_
_NUMBER = bool | int | float | np.bool_ | np.number
# Of the keys of an info that mean something: what their values may be.
_INFO_KINDS: dict[str, tuple[Any, str]] = {
    "task": (str, "a string"),
    "task_id": (str | int | np.integer, "a string or an integer"),
    "task_type": (str, "a string"),
    "admissible_actions": (list | tuple, "a list of strings"),
    "is_action_valid": (_FLAG, "a bool"),
    "won": (_FLAG, "a bool"),
    "score": (_NUMBER, "a finite number"),
    "event": (str | None, "a string or None"),
    "note": (str, "a string"),
    "tools": (list | tuple, "a list of dictionaries"),
}


def check_parts(name: str, what: str, answer: Any, parts: str) -> None:
    """Check that a reset or step returned as many things as it should.

    Args:
        name: The environment.
        what: "reset" or "step".
        answer: What it returned.
        parts: What it should have returned, such as "observation, info".

    Raises:
        TypeError: It returned something else.
    """
    count = parts.count(",") + 1
    if not isinstance(answer, tuple | list) or len(answer) != count:
        size = f" of {len(answer)}" if isinstance(answer, tuple | list) else ""
        raise TypeError(
            f"{what} of environment {name!r} returned a {type(answer).__name__}{size}: expected "
            f"({parts})"
        )


def check_observations(name: str, observations: Any, *, is_reset: bool = False) -> None:
    """Check what the agents see.

    Raises:
        TypeError: It is neither text nor picture, or not by agent.
        ValueError: A text has no UTF-8 form, so that no tokenizer reads it, or a reset shows
            nothing to anybody.
    """
    _check_by_agent(name, "observations", observations)
    if is_reset and not observations:
        raise ValueError(
            f"reset of environment {name!r} shows nothing to any agent: expected an observation "
            "for at least one of them"
        )
    for agent, observation in observations.items():
        if not is_observation(observation):
            raise TypeError(
                f"environment {name!r} observed a {type(observation).__name__} for {agent!r}: "
                f"expected {EXPECTED}; name a gymnasium id as 'gym:<id>', or wrap the environment "
                "to render its state"
            )
        text = observation.get("text", "") if isinstance(observation, Mapping) else observation
        if isinstance(text, str):
            _check_text(name, "the observation", text)


def check_infos(name: str, infos: Any) -> None:
    """Check the infos, as far as anything reads them.

    Raises:
        TypeError: An info is no dictionary, or a value of a key that means something is of another
            type; for an anchor, one that states cannot be compared by.
        ValueError: A score is not finite, or a text has no UTF-8 form.
    """
    _check_by_agent(name, "infos", infos)
    for info in infos.values():
        if not isinstance(info, Mapping):
            raise TypeError(
                f"environment {name!r} gave {_shown(info)} as its info: expected a dictionary"
            )
        for key, (kinds, expected) in _INFO_KINDS.items():
            if key in info and not isinstance(info[key], kinds):
                raise TypeError(
                    f"environment {name!r} gave info[{key!r}]={_shown(info[key])}: expected "
                    f"{expected}"
                )
        if not _is_anchor(info.get("anchor", "")):
            raise TypeError(
                f"environment {name!r} gave info['anchor']={_shown(info['anchor'])}: expected a "
                "string, bytes, an int, a tuple of them, or a picture; "
                "rllib_gigpo.state_keys.structural_key makes such a tuple of any nested state"
            )
        if "tools" in info:
            _check_tools(name, info["tools"])
        if not math.isfinite(info.get("score", 0.0)):
            raise ValueError(
                f"environment {name!r} gave info['score']={info['score']}: expected a finite number"
            )
        _check_texts(name, info)


def _is_anchor(anchor: Any) -> bool:
    try:
        hash(anchor)  # a tuple may hold what has none
    except TypeError:
        return isinstance(anchor, np.ndarray) or is_text_and_picture(anchor)
    return isinstance(anchor, str | bytes | int | tuple)


def _check_tools(name: str, tools: Iterable[Any]) -> None:
    try:
        text = json.dumps(tools, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = None
    if text is None or not all(isinstance(tool, dict) for tool in tools):
        raise TypeError(
            f"environment {name!r} gave info['tools']={_shown(tools)}: expected a list of "
            "dictionaries that JSON can hold"
        )
    _check_text(name, "info['tools']", text)


def _check_texts(name: str, info: Mapping[str, Any]) -> None:
    for action in info.get("admissible_actions", ()):
        if not isinstance(action, str):
            raise TypeError(
                f"environment {name!r} gave info['admissible_actions'] with {_shown(action)} in "
                "it: expected strings"
            )
        _check_text(name, "an admissible action", action)
    for key in ("anchor", *_INFO_KINDS):
        if isinstance(info.get(key), str):
            _check_text(name, f"info[{key!r}]", info[key])


def check_rewards(name: str, rewards: Any, acted: Iterable[Any]) -> dict[Any, float]:
    """Return the rewards as floats.

    Args:
        name: The environment.
        rewards: What it gave, by agent.
        acted: The agents whose actions it was given.

    Raises:
        TypeError: A reward is no number.
        ValueError: A reward is not finite, or an agent that acted has none.
    """
    _check_by_agent(name, "rewards", rewards)
    for agent in acted:
        if agent not in rewards:
            raise ValueError(
                f"environment {name!r} gave no reward to {agent!r}, which acted: expected a number "
                "for every agent that did, 0.0 where it earned nothing"
            )
    earned = {}
    for agent, reward in rewards.items():
        if not isinstance(reward, SupportsFloat):
            raise TypeError(
                f"environment {name!r} gave reward {_shown(reward)} to {agent!r}: expected a "
                "finite number"
            )
        earned[agent] = float(reward)
        if not math.isfinite(earned[agent]):
            raise ValueError(
                f"environment {name!r} gave reward {earned[agent]} to {agent!r}: rewards must be "
                "finite numbers"
            )
    return earned


def check_flags(name: str, what: str, flags: Any) -> None:
    """Check that the flags which end an episode are flags: any text would count as true.

    Args:
        name: The environment.
        what: "terminated" or "truncated".
        flags: Its flags, by agent, and that of all agents under `ALL_AGENTS`.

    Raises:
        TypeError: One is not.
        ValueError: There is none of all agents.
    """
    _check_by_agent(name, what, flags)
    if ALL_AGENTS not in flags:
        raise ValueError(
            f"environment {name!r} gave {what}={_shown(flags)}: expected a flag for {ALL_AGENTS!r}"
        )
    for flag in flags.values():
        is_number = isinstance(flag, int | np.integer) and flag in (0, 1)
        if not isinstance(flag, _FLAG) and not is_number:
            raise TypeError(
                f"environment {name!r} gave {what}={_shown(flag)}: expected True or False"
            )


def _check_by_agent(name: str, what: str, found: Any) -> None:
    if not isinstance(found, Mapping):
        raise TypeError(
            f"environment {name!r} gave {_shown(found)} as its {what}: expected a dictionary by "
            "agent id"
        )


def _check_text(name: str, what: str, text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"environment {name!r}: {what} holds {text[error.start]!r} at character "
            f"{error.start}, a lone surrogate, which no tokenizer reads; decode what it was made "
            "of with errors='replace'"
        ) from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
