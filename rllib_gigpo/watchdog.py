"""Collapse, seen in the metrics: pure functions over what a run reports, iteration by iteration.

A history holds what is looked at of the lines of `metrics.jsonl`, which have "iteration",
"env_runners" and "learners". A detector looks at one number and says since when it is bad, compared
with the best that the run has shown before. What changes in good runs too (entropy, KL, length)
counts only together with a fall of the return.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple, Self

import numpy as np

Points = list[tuple[int, float]]

SIGNALS = (
    "repetition",
    "invalid_actions",
    "zero_variance",
    "entropy",
    "kl",
    "engine_gap",
    "length",
)


class Limits(NamedTuple):
    """When a number is bad.

    Attributes:
        patience: Iterations in a row that must be bad.
        repeated: Share of responses that are loops, and how far it must have risen.
        invalid: The same of invalid actions.
        cut: The same of responses cut at `max_response_tokens`.
        uniform: Share of groups whose episodes all ended alike, while the return is down.
        stalled: Iterations in a row of such groups alone, from the first one on, without success.
        entropy_low: Part of the highest entropy so far.
        entropy_high: Multiple of the lowest entropy so far, which must also have risen by 1.
        kl: KL to the reference per token.
        engine_gap: Mean distance of the engine's and the learner's log-probabilities; None where
            the two have different weights by design.
        longer: Multiple of the first lengths of responses; or one over it.
        fall: Part of the best return that must be lost.
    """

    patience: int = 2
    repeated: tuple[float, float] = (0.3, 0.2)
    invalid: tuple[float, float] = (0.5, 0.3)
    cut: tuple[float, float] = (0.5, 0.3)
    uniform: float = 0.9
    stalled: int = 10
    entropy_low: float = 0.1
    entropy_high: float = 3.0
    kl: float = 1.0
    engine_gap: float | None = 0.02
    longer: float = 2.5
    fall: float = 0.5


@dataclass(frozen=True)
class Alarm:
    """What went wrong.

    Attributes:
        signal: One of `SIGNALS`.
        module: The policy whose learner shows it, or "" where the rollouts do.
        since: First of the bad iterations that last until now.
        iteration: The last iteration.
        value: What the number is now.
        before: What it was at its best.
        message: One sentence.
    """

    signal: str
    module: str
    since: int
    iteration: int
    value: float
    before: float
    message: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes it the same alarm in the next iteration."""
        return (self.signal, self.module, self.since)


def find_alarms(
    history: History, limits: Limits | None = None, signals: Sequence[str] = SIGNALS
) -> list[Alarm]:
    """Return what is wrong at the end of a history.

    Args:
        history: What all iterations so far have told.
        limits: When a number is bad.
        signals: Which signals are looked at.
    """
    limits = limits or Limits()
    found = [alarm for name in signals for alarm in _DETECTORS[name](history, limits)]
    return sorted(found, key=lambda alarm: (alarm.since, SIGNALS.index(alarm.signal)))


# What the detectors read.
_OF_ROLLOUTS = (
    "repeated_response_rate",
    "valid_action_rate",
    "uniform_group_share",
    "success_rate",
    "episode_return_mean",
    "response_cut_rate",
    "response_tokens_mean",
)
_OF_LEARNERS = ("entropy", "kl", "engine_logp_gap")


class History:
    """What is looked at of all iterations of a run so far, in order.

    A long run keeps it in memory and in every checkpoint: 8 bytes per number. What an iteration
    does not tell, or not as a finite number, is NaN.
    """

    def __init__(self) -> None:
        self._iterations: array[int] = array("q")
        # By module and name; numbers of the rollouts have the module "".
        self._columns: dict[tuple[str, str], array[float]] = {}

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Self:
        """Return the history of iterations."""
        history = cls()
        for line in lines:
            history.add(line)
        return history

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the history of which this is the state."""
        history = cls()
        history._iterations.frombytes(np.asarray(state["iterations"], np.int64).tobytes())
        for module, columns in state["numbers"].items():
            for name, column in columns.items():
                numbers = np.asarray(column, np.float64).tobytes()
                history._columns[module, name] = array("d", numbers)
        return history

    def get_state(self) -> dict[str, Any]:
        """Return arrays: of iterations, and by module and name of numbers."""
        numbers: dict[str, dict[str, Any]] = {}
        for (module, name), column in self._columns.items():
            numbers.setdefault(module, {})[name] = np.array(column)
        return {"iterations": np.array(self._iterations), "numbers": numbers}

    def __len__(self) -> int:
        """Return how many iterations there are."""
        return len(self._iterations)

    @property
    def modules(self) -> list[str]:
        """The modules whose learners have told a number, in order."""
        return sorted({module for module, _ in self._columns} - {""})

    def add(self, line: Mapping[str, Any]) -> None:
        """Add an iteration."""
        before = len(self)
        self._iterations.append(int(line["iteration"]))
        for key, value in _numbers(line):
            if key not in self._columns:
                self._columns[key] = array("d", [math.nan]) * before
            self._columns[key].append(value)
        for column in self._columns.values():
            if len(column) == before:
                column.append(math.nan)

    def forget_after(self, iteration: int) -> None:
        """Remove later iterations."""
        while self._iterations and self._iterations[-1] > iteration:
            for column in (self._iterations, *self._columns.values()):
                column.pop()

    def points(self, name: str, module: str = "") -> Points:
        """Return (iteration, number) of the iterations that tell the number."""
        column = self._columns.get((module, name), ())
        told = zip(self._iterations, column, strict=False)
        return [(iteration, value) for iteration, value in told if not math.isnan(value)]


def _numbers(line: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], float]]:
    """Return what is looked at of an iteration, by module and name."""
    learners = line.get("learners") or {}
    parts = [("", line.get("env_runners"), _OF_ROLLOUTS)]
    parts += [(str(module), values, _OF_LEARNERS) for module, values in learners.items()]
    for module, values, names in parts:
        if not isinstance(values, Mapping) or module == "__all_modules__":
            continue
        for name in names:
            value = values.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                yield (module, name), float(value)


# Detectors ---------------------------------------------------------------------------------------

_SHARE, _NUMBER = "{:.0%}", "{:.3g}"


def repetition(history: History, limits: Limits) -> Iterator[Alarm]:
    """Find responses that are loops of a few tokens."""
    points = history.points("repeated_response_rate")
    bad, before = _risen(points, limits.repeated)
    what = f"{_SHARE} of the responses are loops of a few tokens"
    yield from _alarm("repetition", points, bad, limits.patience, before, what)


def invalid_actions(history: History, limits: Limits) -> Iterator[Alarm]:
    """Find that the format of actions, or which of them are possible, is being forgotten."""
    points = [(i, 1.0 - v) for i, v in history.points("valid_action_rate")]
    bad, before = _risen(points, limits.invalid)
    what = f"{_SHARE} of the actions are invalid"
    yield from _alarm("invalid_actions", points, bad, limits.patience, before, what)


def zero_variance(history: History, limits: Limits) -> Iterator[Alarm]:
    """Find that the episodes of a group all end alike, in failure: no advantage is left."""
    points = history.points("uniform_group_share")
    before = _best(points, min)
    what = f"the episodes of {_SHARE} of the groups all end alike"
    down = _down(history, limits)
    bad = [v >= limits.uniform and i in down for i, v in points]
    alarms = list(_alarm("zero_variance", points, bad, limits.patience, before, what))
    success = dict(history.points("success_rate"))
    never = [v >= limits.uniform and success.get(i, 1.0) < 0.5 for i, v in points]
    if not alarms and all(never):
        what = f"{what}, without success"
        alarms += _alarm("zero_variance", points, never, limits.stalled, before, what)
    yield from alarms


def entropy(history: History, limits: Limits) -> Iterator[Alarm]:
    """Find a policy that says one thing only, or anything at all, and earns less by it."""
    down = _down(history, limits)
    what = f"the entropy is {_NUMBER} nat per token"
    for module, points in _learned(history, "entropy"):
        highest, lowest = _best(points, max), _best(points, min)
        low, high = [], []
        for (i, v), most, least in zip(points, highest, lowest, strict=True):
            low.append(i in down and v <= limits.entropy_low * most)
            high.append(i in down and v >= max(limits.entropy_high * least, least + 1.0))
        yield from _alarm("entropy", points, low, limits.patience, highest, what, module)
        yield from _alarm("entropy", points, high, limits.patience, lowest, what, module)


def kl(history: History, limits: Limits) -> Iterator[Alarm]:
    """Find a policy that has left its reference far behind, and earns less by it."""
    down = _down(history, limits)
    what = f"the KL to the reference is {_NUMBER} nat per token"
    for module, points in _learned(history, "kl"):
        bad = [v >= limits.kl and i in down for i, v in points]
        yield from _alarm("kl", points, bad, limits.patience, _best(points, min), what, module)


def engine_gap(history: History, limits: Limits) -> Iterator[Alarm]:
    """Find an engine that does not compute what the learner computes."""
    if limits.engine_gap is None:
        return
    what = f"log-probabilities of engine and learner differ by {_NUMBER} per token"
    for module, points in _learned(history, "engine_logp_gap"):
        bad = [v >= limits.engine_gap for _, v in points]
        before = _best(points, min)
        yield from _alarm("engine_gap", points, bad, limits.patience, before, what, module)


def length(history: History, limits: Limits) -> Iterator[Alarm]:
    """Find responses that are cut off, or of another length than at first while less is earned."""
    points = history.points("response_cut_rate")
    bad, before = _risen(points, limits.cut)
    what = f"{_SHARE} of the responses are cut at max_response_tokens"
    yield from _alarm("length", points, bad, limits.patience, before, what)
    down = _down(history, limits)
    points = history.points("response_tokens_mean")
    values = [value for _, value in points]
    first = [median(values[: min(3, max(1, n))]) for n in range(len(values))]
    bad = [
        i in down and not v / limits.longer < start < v * limits.longer
        for (i, v), start in zip(points, first, strict=True)
    ]
    what = f"a response has {_NUMBER} tokens"
    yield from _alarm("length", points, bad, limits.patience, first, what)


_DETECTORS: dict[str, Callable[[History, Limits], Iterator[Alarm]]] = {
    "repetition": repetition,
    "invalid_actions": invalid_actions,
    "zero_variance": zero_variance,
    "entropy": entropy,
    "kl": kl,
    "engine_gap": engine_gap,
    "length": length,
}


# Parts -------------------------------------------------------------------------------------------


def _learned(history: History, name: str) -> list[tuple[str, Points]]:
    """Return a number of every policy's learner, by policy and iteration."""
    return [(module, history.points(name, module)) for module in history.modules]


def _best(points: Points, of: Callable[..., float]) -> list[float]:
    """Return per point the best that came before it, smoothed by medians of three.

    The first point has only itself to be compared with.
    """
    values = [value for _, value in points]
    smooth = [median(values[max(0, n - 2) : n + 1]) for n in range(len(values))]
    best = list(accumulate(smooth, of))
    return best[:1] + best[:-1]


def _down(history: History, limits: Limits) -> set[int]:
    """Return the iterations whose return is far below the best before them."""
    points = history.points("episode_return_mean")
    found, worst = set(), math.inf
    for (iteration, value), best in zip(points, _best(points, max), strict=True):
        worst = min(worst, value)
        if best > value and best - value >= limits.fall * max(abs(best), best - worst):
            found.add(iteration)
    return found


def _risen(points: Points, limit: tuple[float, float]) -> tuple[list[bool], list[float]]:
    """Return which points are high and were lower before, and what they were at their lowest."""
    lowest = _best(points, min)
    high, rise = limit
    bad = [v >= high and v >= low + rise for (_, v), low in zip(points, lowest, strict=True)]
    return bad, lowest


def _alarm(
    signal: str,
    points: Points,
    bad: Sequence[bool],
    patience: int,
    before: Sequence[float],
    what: str,
    module: str = "",
) -> Iterator[Alarm]:
    """Raise an alarm where the last points, at least `patience` of them, are all bad."""
    count = 0
    while count < len(bad) and bad[-1 - count]:
        count += 1
    if count < patience:
        return
    since, value, reference = points[-count][0], points[-1][1], before[-count]
    form = _SHARE if _SHARE in what else _NUMBER
    whose = f" (module {module!r})" if module not in ("", "default_policy") else ""
    was = "" if since == points[0][0] else f"; at its best before that: {form.format(reference)}"
    yield Alarm(
        signal=signal,
        module=module,
        since=since,
        iteration=points[-1][0],
        value=value,
        before=reference,
        message=f"{what.format(value)}{whose}, since iteration {since}{was}",
    )
