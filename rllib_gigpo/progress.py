"""One line per iteration, for terminals and logs alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

_HEADER = "iteration  success  return  length  valid   env steps  seconds   left"


class ProgressLines:
    """Prints a table row per training iteration.

    Args:
        total: Number of iterations, for the time left.
        stream: Where to print.
    """

    def __init__(self, total: int, stream: TextIO | None = None):
        self.total = total
        self.stream = stream or sys.stdout
        self.start = time.perf_counter()

    def header(self) -> None:
        """Print the column names and start the clock."""
        self.start = time.perf_counter()
        print(_HEADER, file=self.stream, flush=True)

    def row(self, iteration: int, result: Mapping[str, Any]) -> None:
        """Print one iteration.

        Args:
            iteration: Number of iterations done, from 1.
            result: What `Algorithm.train()` returned.
        """
        found = result["env_runners"]
        seconds = time.perf_counter() - self.start
        left = seconds / iteration * (self.total - iteration)
        print(
            f"{iteration:>4}/{self.total:<4} {found.get('success_rate', float('nan')):>7.1%}"
            f" {found['episode_return_mean']:>8.2f} {found['episode_len_mean']:>7.1f}"
            f" {found['valid_action_rate']:>6.1%}"
            f" {int(found['num_env_steps_sampled_lifetime']):>11,}"
            f" {seconds:>8.1f} {left:>6.0f}",
            file=self.stream,
            flush=True,
        )
