"""How known gymnasium environments are told in words.

A `View` names actions and describes states. States are told whole where the environment shows them
whole, and never with a step counter or the last action: both would keep equal states apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LAST_ACTION = re.compile(r"^ *\([A-Za-z ]+\) *$", re.MULTILINE)


class View(NamedTuple):
    """How an environment is told.

    Attributes:
        describe: From (environment, observation) to text.
        task: From (environment, observation) to the task text; empty where none is known.
        actions: Names of the actions of a Discrete space; empty means their numbers.
        won: When an episode is won: "terminated", "rewarded" or None; see `GymText`.
    """

    describe: Callable[[Any, Any], str]
    task: Callable[[Any, Any], str] = lambda env, observation: ""
    actions: tuple[str, ...] = ()
    won: str | None = None


def view_of(env: Any) -> View:
    """Return the view of an environment, by the name of its class or of a base of it."""
    for cls in type(env.unwrapped).__mro__:
        if cls.__name__ in VIEWS:
            return VIEWS[cls.__name__]
    return View(picture if env.render_mode == "ansi" else plain)


def plain(env: Any, observation: Any) -> str:
    """Return an observation as it is: a text, or JSON."""
    if isinstance(observation, str):
        return observation
    return json.dumps(_listed(observation), ensure_ascii=False)


def picture(env: Any, observation: Any) -> str:
    """Return the "ansi" picture without colours and without the line that tells the last action."""
    return _LAST_ACTION.sub("", _ANSI.sub("", env.render())).strip("\n")


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _listed(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_listed(part) for part in value]
    return value


# Toy text ----------------------------------------------------------------------------------------


def _frozen_lake(env: Any, observation: Any) -> str:
    letters = [[cell.decode() for cell in row] for row in env.unwrapped.desc]
    row, column = divmod(int(observation), len(letters[0]))
    letters[row][column] = f"[{letters[row][column]}]"
    return "\n".join(" ".join(line) for line in letters)


_CLIFF_WIDTH = 12


def _cliff(env: Any, observation: Any) -> str:
    lines = [["o"] * _CLIFF_WIDTH for _ in range(3)] + [["S", *["C"] * (_CLIFF_WIDTH - 2), "G"]]
    row, column = divmod(int(observation), _CLIFF_WIDTH)
    lines[row][column] = f"[{lines[row][column]}]"
    return "\n".join(" ".join(line) for line in lines)


_STANDS = ("red", "green", "yellow", "blue")


def _taxi(env: Any, observation: Any) -> str:
    row, column, passenger, destination = env.unwrapped.decode(int(observation))
    where = "in the taxi" if passenger == len(_STANDS) else f"at {_STANDS[passenger]}"
    stands = ", ".join(
        f"{name} at row {place[0]} column {place[1]}"
        for name, place in zip(_STANDS, env.unwrapped.locs, strict=True)
    )
    streets = "\n".join(b"".join(line).decode() for line in env.unwrapped.desc)
    return (
        f"{streets}\nStands: {stands}.\nThe taxi is at row {row} column {column}. "
        f"The passenger is {where}. The destination is {_STANDS[destination]}."
    )


def _blackjack(env: Any, observation: Any) -> str:
    total, dealer, usable = (int(part) for part in observation)
    ace = "a usable ace" if usable else "no usable ace"
    return f"Your cards sum to {total}, with {ace}. The dealer shows {dealer}."


# MiniGrid ----------------------------------------------------------------------------------------

_COMPASS = ("east", "south", "west", "north")
_DULL = frozenset({"unseen", "empty", "floor", "wall", "agent"})


def _minigrid(env: Any, observation: Any) -> str:
    """Tell what the agent's own view shows: states that look alike are told alike."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

    states = {number: name for name, number in STATE_TO_IDX.items()}
    cells = np.asarray(observation["image"])
    # The agent stands in the middle of the last row of its view and looks towards row 0.
    width, last = cells.shape[0], cells.shape[1] - 1
    middle = width // 2

    def kind_at(right: int, forward: int) -> str | None:
        x, y = middle + right, last - forward
        return IDX_TO_OBJECT[int(cells[x, y, 0])] if 0 <= x < width and 0 <= y <= last else None

    def name_at(right: int, forward: int) -> str:
        kind, color, state = (int(part) for part in cells[middle + right, last - forward])
        words = [IDX_TO_COLOR[color], IDX_TO_OBJECT[kind]]
        return " ".join([states[state], *words] if words[1] == "door" else words)

    def wall(right: int, forward: int) -> str | None:
        cell = (right, forward)
        while kind_at(*cell) not in (None, "wall"):
            cell = (cell[0] + right, cell[1] + forward)
        return _offset(*cell) if kind_at(*cell) == "wall" else None

    seen = [
        f"{name_at(right, forward)} {_offset(right, forward)}"
        for forward in range(last + 1)
        for right in range(-middle, width - middle)
        if (right, forward) != (0, 0) and kind_at(right, forward) not in _DULL
    ]
    walls = [found for side in ((0, 1), (-1, 0), (1, 0)) if (found := wall(*side))]
    carried = "nothing" if kind_at(0, 0) in _DULL else name_at(0, 0)
    return (
        f"You face {_COMPASS[int(observation['direction'])]}. "
        f"Walls: {', '.join(walls) or 'none straight ahead or beside you'}. "
        f"You see: {', '.join(seen) or 'nothing else'}. You carry: {carried}."
    )


def _offset(right: int, forward: int) -> str:
    parts = [f"{forward} ahead"] if forward else []
    if right:
        parts.append(f"{abs(right)} to the {'right' if right > 0 else 'left'}")
    return " and ".join(parts)


VIEWS: dict[str, View] = {
    "FrozenLakeEnv": View(
        _frozen_lake,
        lambda env, observation: (
            "Walk over the ice from S to the goal G without falling into a hole H; F is frozen "
            "and safe, [ ] is where you stand."
            + (" The ice is slippery." if env.spec.kwargs.get("is_slippery", True) else "")
        ),
        ("left", "down", "right", "up"),
        "rewarded",
    ),
    "CliffWalkingEnv": View(
        _cliff,
        lambda env, observation: (
            "Walk from S to the goal G in as few steps as you can; stepping on the cliff C puts "
            "you back to S. [ ] is where you stand."
        ),
        ("up", "right", "down", "left"),
        "terminated",
    ),
    "TaxiEnv": View(
        _taxi,
        lambda env, observation: (
            "Fetch the passenger at their stand and drop them off at their destination; "
            "'|' is a wall between streets, ':' is open."
        ),
        ("south", "north", "east", "west", "pick up", "drop off"),
        "rewarded",
    ),
    "BlackjackEnv": View(
        _blackjack,
        lambda env, observation: "Beat the dealer: come close to 21 and not over it.",
        ("stick", "hit"),
        "rewarded",
    ),
    "MiniGridEnv": View(
        _minigrid,
        lambda env, observation: str(observation["mission"]),
        ("turn left", "turn right", "go forward", "pick up", "drop", "toggle", "done"),
        "rewarded",
    ),
}
