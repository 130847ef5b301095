"""Sokoban: push every box onto a target, in generated rooms or levels from files."""

from envs.sokoban.env import Sokoban

__all__ = ["Sokoban"]
