"""What a loader knows of its own running: how long it was waited for, and what its hosts count and time."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import final

from unbroken.locks import new_lock
from unbroken.meters import BYTES, ROWS, STAGES, TOKENS, Meter, Totals

__all__ = ["RECENT", "Stats", "View"]

_log = logging.getLogger("unbroken")

RECENT = 100
"""Over so many batches the numbers that say how things are now are taken."""


class View(ABC):
    """Who shows it while it runs (see ``display``)."""

    @abstractmethod
    def show(self, now: float) -> float:
        """Called with a batch. Returns the time, by the clock of the stats, before which it need not be called."""

    @abstractmethod
    def pause(self) -> None:
        """Show nothing more until the next batch. May be called again, from any thread and from a finalizer."""


@final
class _Hosts:
    """The meters of all hosts that are, and what those have counted that were."""

    def __init__(self, own: Meter) -> None:
        self._lock = new_lock()
        self._meters = [own]
        self._ended = Totals()

    def watch(self, meter: Meter) -> None:
        with self._lock:
            for ended in [each for each in self._meters if each.ended]:
                self._ended.add(ended)
                self._meters.remove(ended)
            self._meters.append(meter)

    def totals(self) -> Totals:
        with self._lock:
            return self._ended.plus(self._meters)


@final
class Stats:
    """What a loader measures. The training process writes it with each batch; any thread may read it.

    ``own`` is the meter of the training process: of lanes that it hosts itself, and of batches that it puts together.
    ``restarts`` counts the worker processes that were replaced; ``progress`` says whether it is to be shown. A copy
    begins at zero.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter, *, progress: bool = False) -> None:
        self.clock = clock
        self.progress = progress
        self.own = Meter(clock=clock)
        self.restarts = 0
        self._batches = 0
        self._waited = 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT + 1)  # when each batch came, and the wait for it
        self._hosts = _Hosts(self.own)
        self._view: View | None = None
        self._due = math.inf  # when the view wants to be called next

    def watch(self, meter: Meter) -> None:
        """Another host begins; what those that ended have counted is kept."""
        self._hosts.watch(meter)

    def delivered(self, began: float) -> None:
        """A batch is handed out, that was asked for when the clock stood at ``began``."""
        now = self.clock()
        waited = now - began
        self._batches += 1
        self._waited += waited
        self._recent.append((now, waited))
        if now >= self._due and self._view is not None:
            try:
                self._due = self._view.show(now)
            except Exception:  # a handler of the log, say: what is shown is no reason to stop
                self._view, self._due = None, math.inf
                _log.exception("The progress of the loader is not shown any more.")

    def show_on(self, view: View | None) -> None:
        """From the next batch on it is shown, and nobody else."""
        self.pause()
        self._view, self._due = view, math.inf if view is None else -math.inf

    def pause(self) -> None:
        """No batch is on its way: nothing is shown until one is asked for again."""
        if self._view is not None:
            self._view.pause()
            self._due = -math.inf

    def totals(self) -> Totals:
        """What all hosts have counted since this process began."""
        return self._hosts.totals()

    def numbers(self, now: Mapping[str, int]) -> dict[str, float]:
        """All of it, and what holds ``now``, as a flat dict. See ``StatefulDataLoader.stats``."""
        totals, recent = self.totals(), list(self._recent)
        elapsed = recent[-1][0] - recent[0][0] if recent else 0.0
        count, waited = len(recent) - 1, sum(wait for _, wait in recent[1:])
        found: dict[str, float] = {
            "batches": self._batches,
            "batches_per_second": count / elapsed if elapsed > 0 else 0.0,
            "wait_seconds": self._waited,
            "wait_seconds_per_batch": waited / count if count > 0 else 0.0,
            "wait_share": min(1.0, waited / elapsed) if elapsed > 0 else 0.0,
            **now,
            "skipped": now.get("skipped", 0) + totals.skipped,
            "restarts": self.restarts,
        }
        found |= {f"seconds/{stage}": seconds for stage, seconds in zip(STAGES, totals.seconds, strict=True)}
        for place, what in ((ROWS, "rows"), (TOKENS, "tokens"), (BYTES, "bytes")):
            found[what] = sum(numbers[place] for numbers in totals.sources.values())
            named = {name: numbers[place] for name, numbers in sorted(totals.sources.items()) if name}
            found |= {f"{what}/{name}": count for name, count in named.items() if count}
        return found

    def anew(self) -> Stats:
        """For a copy of the loader."""
        return _new(self.progress)

    def __reduce__(self) -> tuple[Callable[[bool], Stats], tuple[bool]]:
        return _new, (self.progress,)


def _new(progress: bool) -> Stats:
    return Stats(progress=progress)
