"""Whether what a long run holds grows: pure functions over samples.

A series is what one number was over time. Its first third is left out: caches fill, allocators find
their size, and connections are opened. What is judged is the rest, "the window".

Memory. Two estimates of the growth over the window, and the lesser of them, for they fail
differently. One is the slope of Theil and Sen (the median of the slopes of all pairs of samples)
times the length of the window: up to 29 % of the samples may be anything, so bursts and one late
step count for nothing, but teeth of a saw that are long and high tilt it. The other is twice the
distance of the low tenths of both halves, whose middles are half a window apart: what is freed now
and then does not lift it, a single step does. A leak shows in both.

Flat is what grows by less than 2 % of its level or 8 MiB over the window, whichever is more:
allocators take memory from the system by heaps and arenas of some MiB, at any time. Over the 30
minutes that 45 leave, 8 MiB are 0.27 MiB a minute; in a short run a leak must be larger to be seen.

Counts (descriptors, threads, files). What a call opens and closes again only adds to what stays
open, so the least of the last third is compared with the least of the middle third: a leak lifts
it, a burst does not. One more is flat, for a connection that was opened late, and four threads,
which pools start when they are first busy; a leak goes on.

Shared memory. The least of both thirds too, with the limit of memory: Ray's object store touches
new pages until it has once been as full as it gets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

SHARE, MIB_ALLOWED, COUNT_ALLOWED, THREADS_ALLOWED = 0.02, 8.0, 1, 4
_IDLE = ("IDLE", "?")


class Series(NamedTuple):
    """One number over time.

    Attributes:
        seconds: When, since the run began; in order.
        values: What it was.
    """

    seconds: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Series:
        """Return the series of (second, value) pairs."""
        seconds, values = np.array(list(points), dtype=float).reshape(-1, 2).T
        return cls(seconds, values)

    def between(self, start: float, end: float) -> Series:
        """Return what lies between two moments, both included."""
        inside = (self.seconds >= start) & (self.seconds <= end)
        return Series(self.seconds[inside], self.values[inside])


class Growth(NamedTuple):
    """How much a number grew over the window.

    Attributes:
        start: Its level at the beginning.
        end: Its level at the end.
        growth: What of that is growth.
        is_flat: Whether the growth is within the limit.
    """

    start: float
    end: float
    growth: float
    is_flat: bool


def slope(series: Series) -> float:
    """Return the slope of Theil and Sen per second: the median over all pairs of samples.

    Raises:
        ValueError: There are fewer than two samples.
    """
    seconds, values = series
    if len(seconds) < 2:
        raise ValueError(f"{len(seconds)} samples: expected at least 2; sample more often")
    first, second = np.triu_indices(len(seconds), k=1)
    apart = seconds[second] - seconds[first]
    return float(np.median((values[second] - values[first]) / apart))


def memory_growth(series: Series) -> Growth:
    """Judge memory in MiB, over a window.

    Start and end are the medians of the first and the last sixth of the window.
    """
    begin, end = series.seconds[0], series.seconds[-1]
    sixth = (end - begin) / 6
    first = float(np.median(series.between(begin, begin + sixth).values))
    last = float(np.median(series.between(end - sixth, end).values))
    middle = (begin + end) / 2
    low = [
        float(np.quantile(series.between(*half).values, 0.1))
        for half in ((begin, middle), (middle, end))
    ]
    grown = float(min(slope(series) * (end - begin), 2 * (low[1] - low[0])))
    return Growth(first, last, grown, grown <= max(SHARE * first, MIB_ALLOWED))


def least_growth(series: Series, allowed: float) -> Growth:
    """Judge a number that is never below what has leaked: least of the second half over the first.

    Args:
        series: Its window.
        allowed: By how much it may grow.
    """
    middle = (series.seconds[0] + series.seconds[-1]) / 2
    first = float(series.values[series.seconds <= middle].min())
    last = float(series.values[series.seconds > middle].min())
    return Growth(first, last, last - first, last - first <= allowed)


@dataclass
class Role:
    """All processes that do the same, over the window.

    Attributes:
        processes: How many were there all the time.
        came_later: How many were started, or ended, within the window.
        start_mib: Memory of all of them at the beginning.
        end_mib: The same at the end.
        growth_mib: Of the one that grew the most.
        fds_growth: Of the one that grew the most.
        threads_growth: Of the one that grew the most.
        is_flat: Whether every one of them is flat in all three.
    """

    processes: int = 0
    came_later: int = 0
    start_mib: float = 0.0
    end_mib: float = 0.0
    growth_mib: float = -np.inf
    fds_growth: int = 0
    threads_growth: int = 0
    is_flat: bool = True

    def add(self, memory: Growth, fds: Growth, threads: Growth) -> None:
        """Count one process in."""
        counts = (fds, threads)
        first = self.processes == 0
        self.processes += 1
        self.start_mib += memory.start
        self.end_mib += memory.end
        self.growth_mib = max(self.growth_mib, memory.growth)
        grown = [int(count.growth) for count in counts]
        before = grown if first else (self.fds_growth, self.threads_growth)
        self.fds_growth, self.threads_growth = map(max, before, grown)
        self.is_flat &= memory.is_flat and all(count.is_flat for count in counts)

    def figures(self) -> dict[str, Any]:
        """Return it as plain JSON, rounded."""
        shown = {name: round(value, 2) for name, value in vars(self).items() if name != "is_flat"}
        return {**shown, "flat": self.is_flat}


@dataclass
class Judged:
    """What a run's samples come to.

    Attributes:
        roles: By name.
        shared: Shared memory of the run in MiB.
        files: Temporary files by folder.
        values: What else was sampled, by name.
    """

    roles: dict[str, Role]
    shared: Growth
    files: dict[str, Growth]
    values: dict[str, Growth] = field(default_factory=dict)

    @property
    def is_flat(self) -> bool:
        """Whether nothing grows."""
        growths = (self.shared, *self.files.values(), *self.values.values())
        return all(role.is_flat for role in self.roles.values()) and all(
            growth.is_flat for growth in growths
        )


def judge(samples: Sequence[Mapping[str, Any]], allowed: Mapping[str, float]) -> Judged:
    """Judge the samples of a run, all taken while it was training.

    Args:
        samples: In order; each has "seconds", "processes" (name, MiB, descriptors, threads by
            key), "shm_mib", "files" (by folder) and "values" (by name).
        allowed: By how much each of "values" may grow.

    Raises:
        ValueError: There are too few samples to tell anything.
    """
    begin, end = samples[0]["seconds"], samples[-1]["seconds"]
    start = begin + (end - begin) / 3
    window = [sample for sample in samples if sample["seconds"] >= start]
    if len(window) < 6:
        raise ValueError(
            f"{len(window)} samples after the first third: expected at least 6; run for longer "
            "or sample more often"
        )

    def series(number: Any) -> Series:
        return Series.of((sample["seconds"], number(sample)) for sample in window)

    shared = series(lambda sample: sample["shm_mib"])
    limit = max(SHARE * float(shared.values.max()), MIB_ALLOWED)
    return Judged(
        _roles(samples, window),
        least_growth(shared, limit),
        {
            name: least_growth(series(lambda sample, n=name: sample["files"][n]), COUNT_ALLOWED)
            for name in window[0]["files"]
        },
        {
            name: least_growth(series(lambda sample, n=name: sample["values"][n]), limit)
            for name, limit in allowed.items()
        },
    )


def _roles(
    samples: Sequence[Mapping[str, Any]], window: Sequence[Mapping[str, Any]]
) -> dict[str, Role]:
    names: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for sample in samples:
        for key, (name, *_) in sample["processes"].items():
            names[key][name] += 1
    points: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    for sample in window:
        for key, (_, *numbers) in sample["processes"].items():
            points[key].append((sample["seconds"], *numbers))
    roles: defaultdict[str, Role] = defaultdict(Role)
    for key, rows in points.items():
        role = roles[role_of(names[key])]
        if len(rows) < len(window):
            role.came_later += 1
            continue
        seconds, memory, fds, threads = np.array(rows).T
        role.add(
            memory_growth(Series(seconds, memory)),
            least_growth(Series(seconds, fds), COUNT_ALLOWED),
            least_growth(Series(seconds, threads), THREADS_ALLOWED),
        )
    for role in roles.values():
        role.growth_mib = role.growth_mib if role.processes else 0.0
    return dict(sorted(roles.items()))


def role_of(names: Mapping[str, int]) -> str:
    """Return what a process is, from how often it was called what.

    A worker of Ray is idle until an actor takes it.
    """
    busy = {name: count for name, count in names.items() if name not in _IDLE}
    return max(busy or names, key=lambda name: names[name])
