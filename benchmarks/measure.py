"""Shared by the rows: interleaved repeats, medians, and targets that are met or missed by a number."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

OURS = "unbroken"
Repeats = dict[str, list[float]]


@dataclass(frozen=True)
class Settings:
    """How much is measured. ``scratch`` is a folder for files that rows share."""

    scratch: Path
    quick: bool = False

    def repeats(self, number: int = 5) -> int:
        return 2 if self.quick else number

    def batches(self, number: int) -> int:
        return max(8, number // 10) if self.quick else number


@dataclass(frozen=True)
class Goal:
    """A target: ``measured`` is to be at least (or at most) ``limit``."""

    text: str
    measured: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        return bool(self.measured >= self.limit if self.at_least else self.measured <= self.limit)

    @property
    def verdict(self) -> str:
        if self.met:
            return "met"
        return f"missed by {number(abs(self.measured - self.limit))} {self.unit}"


@dataclass(frozen=True)
class Line:
    """One line of the table: every repeat of every contender, in one unit; the first contender is ours."""

    what: str
    unit: str
    repeats: Repeats
    goals: tuple[Goal, ...] = ()

    @property
    def medians(self) -> dict[str, float]:
        return medians(self.repeats)


def number(value: float) -> str:
    """Three digits that mean something, and no more."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def medians(repeats: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in repeats.items()}


def times_faster(repeats: Repeats, times: float, than: str, ours: str = OURS) -> Goal:
    """Our time goes at least ``times`` times into theirs."""
    middle = medians(repeats)
    return Goal(f"{times:g}x faster than {than}", middle[than] / middle[ours], times, "x", at_least=True)


def at_most_times(repeats: Repeats, times: float, of: str, ours: str = OURS) -> Goal:
    """Our figure is at most ``times`` times another."""
    middle = medians(repeats)
    return Goal(f"at most {times:g}x {of}", middle[ours] / middle[of], times, "x")


def at_most(repeats: Repeats, limit: float, unit: str, ours: str = OURS) -> Goal:
    return Goal(f"at most {limit:g} {unit}", medians(repeats)[ours], limit, unit)


def interleaved(contenders: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[Any]]:
    """What each contender returned in each repeat: A B C A B C ..., so that a slow minute hits all alike.

    Each runs once before, uncounted: imports, caches of the allocator, files in memory. Garbage of one is not collected
    in the time of the next.
    """
    results: dict[str, list[Any]] = {name: [] for name in contenders}
    for _ in range(repeats + 1):
        for name, run in contenders.items():
            gc.collect()
            results[name].append(run())
            no_processes_left()
    return {name: found[1:] for name, found in results.items()}


@contextmanager
def pass_over(loader: Any) -> Iterator[Any]:
    """An iterator over a loader of any make, whose workers are gone at the end."""
    batches = iter(loader)
    try:
        yield batches
    finally:
        # Ours is closed; the peers have no public way, and would go on until their iterator is collected.
        for end in (getattr(loader, "close", None), getattr(batches, "_shutdown_workers", None)):
            if end is not None:
                end()
        no_processes_left()


def no_processes_left() -> None:
    """Wait until every worker has ended, so that none takes time from the next measurement."""
    for process in multiprocessing.active_children():
        process.join(10)
    if left := multiprocessing.active_children():
        raise RuntimeError(f"{len(left)} worker processes of a loader are still there after 10 s: {left}")


def steady(make: Callable[[], Any], batches: int, warm_up: int) -> tuple[float, float]:
    """Microseconds per batch of a loader that is under way: wall clock, and CPU of this process alone.

    A batch is held until the next one is there, as a training loop holds it.
    """
    with pass_over(make()) as source:
        for _ in islice(source, warm_up):
            pass
        began, cpu = perf_counter(), process_time()
        count = sum(1 for _ in islice(source, batches))
        took, used = perf_counter() - began, process_time() - cpu
    if count != batches:
        raise RuntimeError(f"a loader ended after {warm_up + count} batches, of {warm_up + batches} to measure")
    return took / batches * 1e6, used / batches * 1e6


def steady_side_by_side(
    makers: Mapping[str, Callable[[], Any]], settings: Settings, batches: int, warm_up: int, repeats: int = 5
) -> tuple[Repeats, Repeats]:
    """Wall clock and CPU per batch, microseconds, of loaders that are under way."""
    number = settings.batches(batches)
    runs = {name: lambda make=make: steady(make, number, warm_up) for name, make in makers.items()}
    results = interleaved(runs, settings.repeats(repeats))
    wall = {name: [pair[0] for pair in pairs] for name, pairs in results.items()}
    cpu = {name: [pair[1] for pair in pairs] for name, pairs in results.items()}
    return wall, cpu
