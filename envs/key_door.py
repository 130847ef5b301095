"""KeyDoor: fetch a key, then reach a door, in a small grid told in a few words.

The embedded default: a sparse terminal reward, many states met again by other episodes of the
same group, and a vocabulary small enough for a language model with 0.1M parameters.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import gymnasium

from envs.spaces import TextSpace

View = Literal["full", "local"]

_TASK = "Pick up the key, then go to the door."
# Columns are counted from the west, rows from the north.
_MOVES = {
    "go north": (0, -1),
    "go south": (0, 1),
    "go east": (1, 0),
    "go west": (-1, 0),
}
_LARGEST_SIZE = 10


class KeyDoor(gymnasium.Env[str, str]):
    """A grid with a key and a door on distinct random cells.

    Walking onto the key takes it. Reaching the door with the key gives reward 1 and ends the
    episode; every other step gives 0. A move into the border wall is legal and stays in place. An
    action that is not one of the four moves does nothing, counts as a step, and sets
    `info["is_action_valid"]` to False. Episodes are truncated after `horizon` steps.

    Observations:
        `view="full"`: the agent's column and row, and the directions of key and door; "hold"
        stands for the key once taken, "here" for the door underfoot:
        `at 1 0 . key south west . door south .`, then `at 0 2 . key hold . door south .`
        `view="local"`: the four neighbouring cells and whether the key is held. Different
        states look alike, so one observation no longer tells which action is best:
        `north wall . south empty . east key . west empty . key away .`

    Info: `task`, `task_id` (equal for equal layouts), `admissible_actions` (empty once the
    episode has ended), `won`, and after a step `is_action_valid`.

    Args:
        size: Width and height of the grid in cells, 2 to 10.
        horizon: Step limit, at least 1.
        view: What the observation tells, "full" or "local".

    Raises:
        ValueError: An argument is out of its range.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it without ClassVar
    actions: tuple[str, ...] = tuple(_MOVES)

    def __init__(self, *, size: int = 4, horizon: int = 20, view: View = "full"):
        if not 2 <= size <= _LARGEST_SIZE:
            raise ValueError(f"size must be 2 to {_LARGEST_SIZE} cells, got {size}")
        if horizon < 1:
            raise ValueError(f"horizon must be at least 1 step, got {horizon}")
        if view not in get_args(View):
            raise ValueError(f"view must be one of {get_args(View)}, got {view!r}")
        self.size = size
        self.horizon = horizon
        self.view = view
        cells = size * size
        self.num_layouts = cells * (cells - 1) * (cells - 2)
        self.observation_space = TextSpace()
        self.action_space = TextSpace(self.actions)
        self._is_over = True

    @classmethod
    def words(cls) -> list[str]:
        """Return every word of the observations (any size, either view) and of the actions."""
        numbers = [str(number) for number in range(_LARGEST_SIZE)]
        directions = ["north", "south", "east", "west"]
        things = ["key", "door", "wall", "empty"]
        return ["at", *numbers, ".", *things, *directions, "here", "hold", "away", "go"]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode; `options={"layout": n}` chooses a layout in [0, `num_layouts`).

        Raises:
            ValueError: The layout does not exist.
        """
        super().reset(seed=seed)
        layout = (options or {}).get("layout")
        if layout is None:
            layout = int(self.np_random.integers(self.num_layouts))
        if not 0 <= layout < self.num_layouts:
            raise ValueError(
                f"layout must be in [0, {self.num_layouts}) for size {self.size}, got {layout}"
            )
        self._task_id = f"{self.size}x{self.size}-{layout}"
        self._agent, self._key, self._door = _three_cells(layout, self.size)
        self._has_key = False
        self._won = False
        self._steps = 0
        self._is_over = False
        return self._observation(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one move.

        Raises:
            RuntimeError: No episode is running.
        """
        if self._is_over:
            raise RuntimeError("no episode is running; call reset() before step()")
        is_valid = action in _MOVES
        if is_valid:
            self._agent = self._neighbour(action) or self._agent
            self._has_key = self._has_key or self._agent == self._key
            self._won = self._has_key and self._agent == self._door
        self._steps += 1
        truncated = not self._won and self._steps >= self.horizon
        self._is_over = self._won or truncated
        info = self._info()
        info["is_action_valid"] = is_valid
        return self._observation(), float(self._won), self._won, truncated, info

    def expert_action(self) -> str:
        """Return the first move of a shortest path to the key, or to the door once it is held.

        Raises:
            RuntimeError: No episode is running.
        """
        if self._is_over:
            raise RuntimeError("no episode is running; call reset() before expert_action()")
        goal = self._door if self._has_key else self._key
        return f"go {self._directions(goal)[0]}"

    def _neighbour(self, action: str) -> tuple[int, int] | None:
        """The cell that a move leads to, None for the wall."""
        dx, dy = _MOVES[action]
        x, y = self._agent[0] + dx, self._agent[1] + dy
        return (x, y) if 0 <= x < self.size and 0 <= y < self.size else None

    def _directions(self, cell: tuple[int, int]) -> list[str]:
        dx, dy = cell[0] - self._agent[0], cell[1] - self._agent[1]
        north_south = ["north"] if dy < 0 else ["south"] if dy > 0 else []
        east_west = ["west"] if dx < 0 else ["east"] if dx > 0 else []
        return north_south + east_west

    def _observation(self) -> str:
        return self._local_view() if self.view == "local" else self._full_view()

    def _full_view(self) -> str:
        key = "hold" if self._has_key else " ".join(self._directions(self._key))
        door = " ".join(self._directions(self._door)) or "here"
        return f"at {self._agent[0]} {self._agent[1]} . key {key} . door {door} ."

    def _local_view(self) -> str:
        contents = {None: "wall", self._door: "door"}
        if not self._has_key:
            contents[self._key] = "key"
        seen = [
            f"{action.removeprefix('go ')} {contents.get(self._neighbour(action), 'empty')}"
            for action in _MOVES
        ]
        return " . ".join([*seen, f"key {'hold' if self._has_key else 'away'} ."])

    def _info(self) -> dict[str, Any]:
        return {
            "task": _TASK,
            "task_id": self._task_id,
            "admissible_actions": [] if self._is_over else list(self.actions),
            "won": self._won,
        }


def _three_cells(layout: int, size: int) -> list[tuple[int, int]]:
    """Return the `layout`-th ordered choice of three distinct cells (agent, key, door)."""
    free = [(x, y) for y in range(size) for x in range(size)]
    chosen = []
    for _ in range(3):
        layout, index = divmod(layout, len(free))
        chosen.append(free.pop(index))
    return chosen
