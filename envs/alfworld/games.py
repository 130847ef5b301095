"""Which games there are, real ones in a folder and shipped ones, and what each holds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from envs.alfworld.shipped_games import build_shipped_game, shipped_splits

# Name used here -> first part of the game folder's name in ALFRED.
TASK_TYPES = {
    "pick_and_place": "pick_and_place_simple",
    "look_at_obj_in_light": "look_at_obj_in_light",
    "pick_clean_then_place": "pick_clean_then_place_in_recep",
    "pick_heat_then_place": "pick_heat_then_place_in_recep",
    "pick_cool_then_place": "pick_cool_then_place_in_recep",
    "pick_two_obj": "pick_two_obj_and_place",
}
_SHORT_NAMES = {folder: short for short, folder in TASK_TYPES.items()}
_GAME_FILE = "game.tw-pddl"
# The flag ends the file, or stands before a walkthrough; both fit into the last kilobytes.
_TAIL_BYTES = 8192
_SOLVABLE = re.compile(rb'"solvable"\s*:\s*(true|false)')


class Game(NamedTuple):
    """One game.

    Attributes:
        task_id: Path of the game file below its `json_2.1.*` folder, with forward slashes.
        task_type: A key of `TASK_TYPES`.
        path: The game file on this machine; None for a shipped game.
    """

    task_id: str
    task_type: str
    path: str | None


def list_games(
    games: str, split: str, task_types: Sequence[str] | None, data_dir: str | os.PathLike | None
) -> tuple[Game, ...]:
    """Return the games of a split, sorted by task id.

    Args:
        games: `"real"` (files below `data_dir`) or `"shipped"`.
        split: A folder below `json_2.1.*`, or a shipped split.
        task_types: Keys of `TASK_TYPES` to keep; None keeps all six.
        data_dir: The folder that holds `json_2.1.*`, or such a folder itself; None reads the
            environment variable ALFWORLD_DATA.

    Raises:
        ValueError: An argument names nothing known, or no game is left.
        FileNotFoundError: There is no data.
    """
    wanted = tuple(TASK_TYPES) if task_types is None else tuple(task_types)
    if not wanted or not set(wanted) <= set(TASK_TYPES):
        raise ValueError(
            f"task_types must name some of {', '.join(TASK_TYPES)}; got {list(wanted)}"
        )
    if games not in ("real", "shipped"):
        raise ValueError(f'games must be "real" or "shipped", got {games!r}')
    return _kept(_data_root(data_dir) if games == "real" else None, split, wanted)


@lru_cache(maxsize=64)
def _kept(root: Path | None, split: str, wanted: tuple[str, ...]) -> tuple[Game, ...]:
    found = _shipped_games(split) if root is None else _real_games(root, split)
    kept = tuple(game for game in found if game.task_type in wanted)
    if not kept:
        raise ValueError(
            f"split {split!r} has {len(found)} games, none of type {', '.join(wanted)};"
            " choose other task_types"
        )
    return kept


def load_game(game: Game) -> dict[str, str]:
    """Return a game's data: at least `pddl_domain`, `grammar` and `pddl_problem`."""
    if game.path is None:
        return build_shipped_game(game.task_id)
    return json.loads(Path(game.path).read_text())


def _shipped_games(split: str) -> tuple[Game, ...]:
    splits = shipped_splits()
    if split not in splits:
        raise ValueError(f"no shipped split is named {split!r}; use one of {', '.join(splits)}")
    return tuple(Game(task_id, _task_type(task_id) or "", None) for task_id in splits[split])


def _data_root(data_dir: str | os.PathLike | None) -> Path:
    named = data_dir if data_dir is not None else os.environ.get("ALFWORLD_DATA")
    what = f"data_dir={str(data_dir)!r}" if data_dir is not None else f"ALFWORLD_DATA={named!r}"
    if named is None:
        what = "the environment variable ALFWORLD_DATA is not set and data_dir is None"
    elif re.match(r"json_2\.1\.", Path(named).name) or any(Path(named).glob("json_2.1.*")):
        return Path(named)
    raise FileNotFoundError(
        f"no ALFWorld games: {what}, expected a folder that holds json_2.1.*; fetch the games with"
        " `alfworld-download --data-dir FOLDER` and set ALFWORLD_DATA to that folder, or use"
        ' games="shipped", which needs no data'
    )


def _real_games(root: Path, split: str) -> tuple[Game, ...]:
    is_version = root.name.startswith("json_2.1.")
    versions = [root] if is_version else sorted(root.glob("json_2.1.*"), key=_version, reverse=True)
    for version in versions:
        paths = sorted(
            path.relative_to(version).as_posix() for path in (version / split).rglob(_GAME_FILE)
        )
        typed = [(task_id, _task_type(task_id), version / task_id) for task_id in paths]
        found = tuple(
            Game(task_id, task_type, str(path))
            for task_id, task_type, path in typed
            if task_type is not None and _is_solvable(path)
        )
        if found:
            return found
    folders = sorted({path.name for v in versions for path in v.glob("*") if path.is_dir()})
    raise ValueError(
        f"split {split!r} holds no {_GAME_FILE} below {', '.join(str(v) for v in versions)};"
        f" the folders there are {', '.join(folders) or 'none'}"
    )


def _version(folder: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", folder.name))


def _task_type(task_id: str) -> str | None:
    # Games with movable receptacles or sliced objects are outside ALFWorld's six task types.
    if "movable" in task_id or "Sliced" in task_id:
        return None
    kinds = (_SHORT_NAMES.get(part.split("-")[0]) for part in task_id.split("/"))
    return next((kind for kind in kinds if kind is not None), None)


def _is_solvable(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        flags = _SOLVABLE.findall(file.read())
        if not flags:
            file.seek(0)
            flags = _SOLVABLE.findall(file.read())
    return bool(flags) and flags[-1] == b"true"
