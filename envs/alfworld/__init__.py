"""ALFWorld: household tasks played as text."""

from envs.alfworld.env import ANCHORS, ALFWorld
from envs.alfworld.games import TASK_TYPES

__all__ = ["ANCHORS", "TASK_TYPES", "ALFWorld"]
