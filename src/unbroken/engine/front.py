"""How far the steps of a map-style dataset were delivered, and which of them beyond that."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

from unbroken.position import MapPosition
from unbroken.sampling import Step

__all__ = ["Front"]


@dataclass(slots=True)
class _Entry:
    step: Step
    done: bool


@final
class Front:
    """The steps from a position on, and which of them were delivered.

    The front is the first step that was not. A position has the rows before it, and as ``beyond`` the steps behind it
    that were delivered too, counted from the front. ``cursor_size`` is that of a turn of a custom sampler.
    """

    def __init__(self, position: MapPosition, steps: Iterator[Step], cursor_size: int) -> None:
        self._position = position
        self._steps = steps
        self._cursor_size = cursor_size
        self._entries: deque[_Entry] = deque()  # from the front on
        self._first = 0  # the number of the front; the steps have numbers from 0
        self._number = 0
        self._before = position.beyond
        self._done = 0
        self._failed: list[int] = []
        self._error: Exception | None = None

    @property
    def ahead(self) -> int:
        """How many steps are under way from the front on, whether they were delivered or not."""
        return len(self._entries) - len(self._failed)

    def next_step(self) -> tuple[int, Step] | None:
        """The next step that was not delivered, and its number; None at the end. Raises what the sampler raises."""
        if self._error is not None:
            raise self._error
        self._take_known()
        step = next(self._steps, None)
        if step is None:
            return None
        self._entries.append(_Entry(step, False))
        self._number += 1
        return self._number - 1, step

    def _take_known(self) -> None:
        """Take the steps that come next and were delivered before this run."""
        if not self._before:
            return
        while any(first <= self._number <= last for first, last in self._before):
            step = next(self._steps, None)
            if step is None:
                return
            self._entries.append(_Entry(step, True))
            self._done += 1
            self._number += 1

    def fail(self, number: int) -> None:
        """A step could not be made. With the next delivery it is passed over."""
        self._failed.append(number)

    def deliver(self, number: int, entry: int | None) -> None:
        """Count a delivered step."""
        if number == self._first and not (self._failed or self._before or self._done):  # as it is in order
            self._first += 1
            self._pass(self._entries.popleft().step)
        else:
            self.pass_over((*self._failed, number))
            self._failed.clear()
        self._position.deliver(self._position.rows, entry)

    def pass_over(self, numbers: Iterable[int]) -> None:
        """These steps are done, with or without a delivery."""
        for done in numbers:
            self._entries[done - self._first].done = True
            self._done += 1
        try:
            self._take_known()
        except Exception as error:  # of the sampler: it is no fault of the step that is delivered
            self._error = error
        while self._entries and self._entries[0].done:
            self._first += 1
            self._done -= 1
            self._pass(self._entries.popleft().step)
        if self._done or self._before or self._position.beyond:
            self._position.beyond = self._beyond() if self._done or self._before else ()

    def _pass(self, step: Step) -> None:
        """All steps up to this one are done."""
        position = self._position
        for _ in range(step.over):
            position.next_epoch(None)
        position.rows = step.rows
        if step.made is not None:
            position.cursor.deliver(step.made, self._cursor_size)

    def _beyond(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the steps that were delivered behind the front: the first and the last of each."""
        done = [(place, place) for place, entry in enumerate(self._entries) if entry.done]
        known = len(self._entries)
        for first, last in self._before:  # of which some have not come up again since the load
            if last - self._first >= known:
                done.append((max(first - self._first, known), last - self._first))
        ranges: list[tuple[int, int]] = []
        for first, last in done:
            if ranges and ranges[-1][1] + 1 == first:
                ranges[-1] = ranges[-1][0], last
            else:
                ranges.append((first, last))
        return tuple(ranges)
