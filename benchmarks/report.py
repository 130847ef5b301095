"""How benchmarks measure and report: a table for people, then one JSON object as the last line.

Times are CPU seconds of this process: on a quiet machine those of the clock for work in one thread,
and on a busy one not stretched by other processes.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rllib_gigpo.tables import format_table

Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """Run the work once and return its result and the CPU seconds it took."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def best_seconds(
    work: Callable[[Result], object], repeats: int, prepare: Callable[[], Result]
) -> float:
    """Time the work on freshly prepared input, after one run that does not count.

    Args:
        work: What is timed.
        repeats: Runs that count.
        prepare: Makes the input of each run; not timed.

    Returns:
        CPU seconds of the fastest run.
    """
    work(prepare())
    inputs = (prepare() for _ in range(repeats))
    return min(timed(lambda given=given: work(given))[1] for given in inputs)


def report(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    figures: Mapping[str, object],
) -> None:
    """Print a table and, as the last line, the figures as one JSON object.

    Args:
        title: What was measured, and on what.
        header: Names of the columns.
        rows: Cells of the table; floats are shown with three significant digits.
        figures: Figures by name, of JSON's types.

    Raises:
        ValueError: A row is not as long as the header, or a figure is not finite.
    """
    print(format_table(title, header, rows))
    print(json.dumps(figures, allow_nan=False), flush=True)
