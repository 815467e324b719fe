"""Rows of iterables that are not ours: their own state, whose meaning is checked, and a count.

What the state of an iterable means cannot be known: the place after the row that it yielded last, the one before it,
or the start of a shard. So a position names an older state, the anchor, and how many rows came since; a resume opens
there and makes these rows again, and the digests of some of them must come again at their places.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, ClassVar, final

from unbroken.errors import InexactDataset, InvalidState
from unbroken.lanes import Lane
from unbroken.ledger import digest
from unbroken.lineage import Origin
from unbroken.meters import DATASET, ROWS
from unbroken.seeding import key, seed_globals
from unbroken.state import seal, unseal
from unbroken.streams.arguments import check_one_of, read_state
from unbroken.streams.course import Course
from unbroken.streams.gauge import Gauge
from unbroken.streams.reading.track import Anchor, Track
from unbroken.streams.stage import Stage, StageIterator

__all__ = ["Checked", "Supply"]

# Fewer rows than these are made again without a word, where there is a state.
_LONG = 10_000
_END = object()
_log = logging.getLogger("unbroken")
_told: set[str] = set()


class Supply(ABC):
    """Where the iterables come from: one for each lane. Frozen.

    ``NAME`` is the function that users call. ``APART``: whether iterables of one lane do not touch one another, so that
    a second one may be opened beside the first to try a state. ``HINT`` is what else to do about states that lose rows.
    """

    NAME: ClassVar[str]
    DIFFERENCES: ClassVar[Mapping[str, str]] = {}
    APART: ClassVar[bool] = False
    HINT: ClassVar[str] = ""

    @abstractmethod
    def open(self, lane: Lane) -> Iterable[Any] | None:
        """A new iterable for a lane's epoch, which no other lane shares; None where the lane has no rows."""

    @abstractmethod
    def what(self) -> str:
        """What is iterated, in a few words: its type."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """What belongs in the fingerprint."""

    @abstractmethod
    def arguments(self) -> str:
        """The arguments as they are written in ``repr(stream)``."""

    @abstractmethod
    def extent(self, lanes: int) -> str:
        """How much there is, in words; empty where that is not known."""


@final
@dataclass(frozen=True, repr=False, eq=False)
class Checked(Stage):
    """The rows of iterables that are not ours.

    ``resume="checked"`` uses their own state where they have one, and checks it; ``"replay"`` makes everything again
    from the start of the epoch. It is in no fingerprint: a position of one can be loaded by the other.

    The global generators of torch, numpy and random are seeded before each row by its place (seed, epoch, lane, number
    of the row), and before an iterable is made by (seed, epoch, lane), so that what draws from them makes the same
    rows again. The first row is made under the numbers of the opening.

    Raises ``ValueError`` where ``resume`` is neither.
    """

    NAME: ClassVar[str] = "read"
    SEEDS: ClassVar[bool] = True

    supply: Supply
    resume: str = "checked"

    def __post_init__(self) -> None:
        check_one_of(self.supply.NAME, "resume", self.resume, ("checked", "replay"))
        for name, value in {"NAME": self.supply.NAME, "DIFFERENCES": self.supply.DIFFERENCES}.items():
            object.__setattr__(self, name, value)

    @property
    def sources(self) -> tuple[Stage, ...]:
        return ()

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return _CheckedIterator(self.supply, lane, course, replay=self.resume == "replay")

    def fields(self) -> dict[str, Any]:
        return self.supply.fields()

    def arguments(self) -> str:
        return self.supply.arguments()

    def extent(self, lanes: int) -> str:
        return self.supply.extent(lanes)


@final
class _Subject:
    """One iterable, open.

    State on the iterable: load, then iterate. State on its iterator, an iterable that is its own iterator included:
    iterate, then load. Both: the iterable's, iterate, the iterator's.
    """

    def __init__(self, iterable: Iterable[Any], what: str, state: str | None) -> None:
        saved = {} if state is None else unseal(state)
        own = hasattr(iterable, "__next__")
        if "iterable" in saved and not own and _stateful(iterable):
            iterable.load_state_dict(saved["iterable"])  # type: ignore[attr-defined]
        self._iterable = iterable
        self._iterator: Iterator[Any] = iter(iterable)
        if "iterator" in saved and _stateful(self._iterator):
            self._iterator.load_state_dict(saved["iterator"])  # type: ignore[attr-defined]
        self._what = what

    @property
    def stateful(self) -> bool:
        return _stateful(self._iterable) or _stateful(self._iterator)

    def advance(self) -> Any:
        """The next row, or ``_END``."""
        return next(self._iterator, _END)

    def capture(self) -> str:
        """The sealed state between two rows: later changes to what was handed out do not reach it."""
        state = {}
        if self._iterator is not self._iterable and _stateful(self._iterable):
            state["iterable"] = self._iterable.state_dict()  # type: ignore[attr-defined]
        if _stateful(self._iterator):
            state["iterator"] = self._iterator.state_dict()  # type: ignore[attr-defined]
        return seal(state, f"the state of {self._what}")

    def close(self) -> None:
        if isinstance(self._iterator, GeneratorType):
            self._iterator.close()


def _stateful(subject: Any) -> bool:
    return callable(getattr(subject, "state_dict", None)) and callable(getattr(subject, "load_state_dict", None))


@final
class _CheckedIterator(StageIterator):
    """Position: the anchor, how many rows were made, and the digests of the last two."""

    def __init__(self, supply: Supply, lane: Lane, course: Course, *, replay: bool) -> None:
        self._supply = supply
        self._lane = lane
        self._replay = replay
        self._source = course.path.rstrip("/") or supply.NAME
        self._gauge = Gauge(course.meter, self._source, DATASET)
        self._what = f"{supply.what()}, lane {lane.index} of {lane.count}"
        self._place = key(lane.seed, supply.NAME, *filter(None, [course.path]), lane.epoch, lane.index)
        self._track = Track(Anchor(), 0, [], looks=False)
        self._subject: _Subject | None = None
        self._ended = False
        self._untried = supply.APART and not lane.index and not replay

    def __next__(self) -> Any:
        gauge = self._gauge
        gauge.left -= 1
        if not gauge.left:
            gauge.begin()
        try:
            if self._subject is None and not self._ended:
                self._open()
            elif self._untried and self._track.anchor.at:
                self._try()
            row = _END if self._subject is None else self._make(self._subject, self._track, seeded=self._track.rows > 0)
        except BaseException as error:
            gauge.began = 0.0
            self.close()  # an iterator that has raised may be at its end: the next call makes it anew
            if isinstance(error, StopIteration):
                raise RuntimeError(f"{self._what}: a StopIteration was raised where no row was asked for.") from error
            raise
        if row is _END:
            self._ended = True
            self.close()
            raise StopIteration
        if gauge.began:
            gauge.end()
        gauge.counts[ROWS] += 1
        return row

    def _make(self, subject: _Subject, track: Track, *, seeded: bool) -> Any:
        """The next row, or ``_END``. The position moves once nothing can fail any more."""
        if seeded:
            seed_globals(key(self._place, track.rows))
        row = subject.advance()
        if row is not _END:
            track.note(digest(row), subject.capture)
        return row

    def _open(self) -> None:
        """Open where the position lies. Raises ``InexactDataset`` where no state leads there."""
        goal = self._track
        anchor = Anchor() if self._replay else goal.anchor
        failures: list[Exception | None] = []

        def leads_to(state: str | None, first: int) -> bool:
            try:
                if self._reach(goal, anchor, state, first):
                    return True
                failures.append(None)
            except Exception as error:  # a state that does not fit may make any iterable raise anything
                failures.append(error)
            return False

        found = [next((place for place in alike if leads_to(*place)), None) for alike in anchor.hypotheses]
        fits = [place for place in found if place is not None]
        if len(fits) == 1 and (found[-1] is not None or leads_to(*fits[0])):
            self._untried = self._untried and not anchor.at
            return
        self._ended = False
        errors = [error for error in failures if error is not None]
        if errors and (None not in failures or isinstance(errors[0], OSError)):
            raise errors[0]
        raise InexactDataset(self._inexact_text(goal, anchor, repeats=len(fits) > 1)) from next(iter(errors), None)

    def _try(self) -> None:
        """Open at the first anchor, beside what is open: a state that loses rows is better found now than later."""
        track, (subject, self._subject) = self._track, (self._subject, None)
        self._open()
        self.close()
        self._track, self._subject = track, subject

    def _reach(self, goal: Track, anchor: Anchor, state: str | None, first: int) -> bool:
        """Open at a state and make again what came from row ``first`` on; whether the digests agree."""
        self.close()
        seed_globals(key(self._place, "open"))
        iterable = self._supply.open(self._lane)
        if iterable is None:
            self._ended = not goal.rows
            return self._ended
        subject = _Subject(iterable, self._what, state)
        looks = subject.stateful and not self._replay
        if not first:
            self._tell(goal.rows, looks)
            if looks:
                subject.capture()  # one that cannot be sealed is refused now, not after some rows
        track, expected = Track(anchor, first, [], looks=looks), goal.expected()
        for number in range(first, goal.rows):
            row = self._make(subject, track, seeded=number > first)
            if row is _END or expected.get(number, track.last[-1]) != track.last[-1]:
                subject.close()
                return False
        self._subject, self._track = subject, track
        return True

    def _tell(self, rows: int, looks: bool) -> None:
        if self._supply.NAME in _told or not rows or (looks and rows < _LONG):
            return
        _told.add(self._supply.NAME)
        _log.warning(
            f"{self._supply.NAME}: {rows} rows of {self._what} are made again, because "
            + ("no state of it leads closer." if looks else "it has no state to go on from.")
            + "\nGive it (or its iterator) state_dict and load_state_dict that step with its rows, to start at once."
        )

    def _inexact_text(self, goal: Track, anchor: Anchor, *, repeats: bool) -> str:
        opened = f"opened at the state saved around row {anchor.at}" if anchor.at else "made again from its start"
        where = f"{self._supply.NAME}: {self._what}, epoch {self._lane.epoch}: {opened}, it "
        if repeats:
            return (
                f"{where}came to row {goal.rows} in two ways: its rows repeat, and no state tells them apart.\n"
                'resume="replay" ignores its state and makes everything again from the start of the epoch.'
            )
        return (
            f"{where}should have come to row {goal.rows} with the rows it had made, and did not.\n"
            "Either its state_dict() does not lead back to the place (something it needs is not in it), or its rows "
            "differ when they are made again (a random generator of its own without a seed, a thread, other files, the "
            f"clock).{self._supply.HINT}\n"
            'resume="replay" ignores its state and makes everything again from the start of the epoch.'
        )

    def state_dict(self) -> dict[str, Any]:
        return self._track.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        text = (str, type(None))
        rows, last, at, before, after, first, witnesses = read_state(
            state, self._supply.NAME, rows=int, last=list, at=int, before=text, after=text, first=int, witnesses=list
        )
        if self._subject is not None or self._ended or self._track.rows:
            raise InvalidState(f"{self._supply.NAME}: rows were read already. Load a position right after open().")
        marks = all(type(mark) is int for mark in [*last, *witnesses])
        if not marks or len(last) != min(rows, 2) or (at and (after is None or first + len(witnesses) > rows)):
            raise InvalidState(f"{self._supply.NAME}: this position was cut short or changed: its parts do not fit.")
        self._track = Track(Anchor(at, before, after, first, tuple(witnesses)), rows, last, looks=False)

    def close(self) -> None:
        subject, self._subject = self._subject, None
        if subject is not None:
            subject.close()

    def where(self) -> str:
        return f"{self._what}, row {self._track.rows - 1}" if self._track.rows else f"{self._what}, the first row"

    def origin(self) -> tuple[Origin, ...]:
        return (Origin(self._source, self._what, self._track.rows - 1),) if self._track.rows else ()
