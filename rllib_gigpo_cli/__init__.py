"""The console script `rllib-gigpo`.

A package of its own beside `rllib_gigpo`: importing that one imports Ray and PyTorch, because it
registers the algorithms with Tune, which takes seconds. Here nothing heavy is imported before a
command runs, so `rllib-gigpo --help` answers at once. Every command is a thin shell around a plain
Python function that does the same.
"""

from rllib_gigpo_cli.app import app, main

__all__ = ["app", "main"]
