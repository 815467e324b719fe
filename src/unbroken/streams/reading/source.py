"""What all formats share: chunks dealt to lanes, the place in a chunk, reading ahead, and rows that cannot be read.

A format says how files are cut into chunks and what the rows of a chunk are. The rest is the same for all, and here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, final

from unbroken.errors import BadRow, InvalidState
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.meters import DECODE
from unbroken.seeding import key
from unbroken.streams.arguments import read_state
from unbroken.streams.course import ChunkOrder, Course
from unbroken.streams.gauge import Gauge
from unbroken.streams.reading.ahead import Forked, Pieces
from unbroken.streams.reading.files import Access, one_line
from unbroken.streams.reading.retrying import of_reading
from unbroken.streams.reading.skips import Rows, Skips, with_row
from unbroken.streams.stage import Stage, StageIterator

__all__ = ["Bad", "ChunkList", "Format", "Source"]

_log = logging.getLogger("unbroken")
_told: set[tuple[str, int, int]] = set()  # once a process


@final
class Bad(NamedTuple):
    """In place of a row that cannot be read: why not (``no valid JSON (...)``), and what the user can do about it."""

    reason: str
    way_out: str


class ChunkList(Protocol):
    """All chunks of some files, in their order. Nothing has to be kept of each."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...


class Format(ABC):
    """How one format is cut into chunks and read. Frozen: what moves is in the iterators that it returns.

    A place in a chunk is a whole number, 0 at its start; what it counts is the format's affair (bytes, rows, ...).
    ``NAME`` is the function that users call. ``SEEDS``: whether making a row runs the user's code under random numbers
    that the format seeds. ``UNIT`` is what the row in lineage counts, in words. ``STAGE`` is what making a row counts
    as (see ``unbroken.meters``); ``TOKENS``: pieces have ``tokens`` (an array), of which ``inputs`` are read.
    """

    NAME: ClassVar[str]
    UNIT: ClassVar[str] = "row"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"files": "data, held"}
    SEEDS: ClassVar[bool] = False
    STAGE: ClassVar[int] = DECODE
    TOKENS: ClassVar[bool] = False

    @abstractmethod
    def grain(self, lanes: int) -> int:
        """How finely to cut for so many lanes, at least 1. It is in positions: an epoch goes on as it was begun."""

    @abstractmethod
    def chunks(self, grain: int) -> ChunkList:
        """All chunks in the order of the files: a length and items by number, without reading any."""

    @abstractmethod
    def fetch(self, chunk: Any, place: int) -> Iterator[Any]:
        """What is read for the rows from a place on, in pieces. All input is done here: it may run in a thread.

        The iterator may know a shorter way to later places, and then has a method ``mark(place)`` for it: whole numbers
        that a position holds beside the place, and a function of it alone; ``None`` where there is none.

        Raises ``BadRow`` or ``OSError`` where the rest of the chunk cannot be read.
        """

    def fetch_from(self, chunk: Any, place: int, mark: list[int]) -> Iterator[Any]:
        """As ``fetch``, by the mark that an iterator of ``fetch`` gave for the place."""
        return self.fetch(chunk, place)

    @abstractmethod
    def rows(self, chunk: Any, place: int, pieces: Iterator[Any], lane: Lane) -> Iterator[tuple[int, int, Any]]:
        """``(its place, the place after it, row)`` for each row from a place on; ``Bad`` in place of a bad row."""

    @abstractmethod
    def locate(self, chunk: Any, place: int) -> tuple[str, int | str]:
        """``(file, row)`` of a place, as lineage names them."""

    @abstractmethod
    def where(self, chunk: Any, place: int) -> str:
        """A place in words, for an error: the file, and where in it. It may read the file."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """What belongs in the fingerprint."""

    @abstractmethod
    def arguments(self) -> str:
        """The arguments as they are written in ``repr(stream)``."""

    @abstractmethod
    def extent(self) -> str:
        """How much there is, in words: ``12 files, 1.2 GB``."""


@final
@dataclass(frozen=True, repr=False, eq=False)
class Source(Stage):
    """The rows of files in some format. The functions ``read_*`` make it."""

    NAME: ClassVar[str] = "read"

    format: Format
    access: Access

    def __post_init__(self) -> None:
        names = {"NAME": self.format.NAME, "DIFFERENCES": self.format.DIFFERENCES, "SEEDS": self.format.SEEDS}
        names["COUNTS_TOKENS"] = self.format.TOKENS
        for name, value in names.items():
            object.__setattr__(self, name, value)

    @property
    def sources(self) -> tuple[Stage, ...]:
        return ()

    @property
    def keeps_record(self) -> bool:
        return self.access.skips

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return _SourceIterator(self, lane, course)

    def fields(self) -> dict[str, Any]:
        return self.format.fields()

    def arguments(self) -> str:
        return self.format.arguments()

    def extent(self, lanes: int) -> str:
        chunks = len(self.format.chunks(self.format.grain(lanes)))
        return f"{self.format.extent()}, {chunks} chunk{'s' * (chunks != 1)} on {lanes} lanes"


@final
class _Progress:
    """Where a lane stands among its chunks: the number of the chunk in the lane, and the place in it.

    ``mark`` gives the mark of a place in that chunk, where its format knows marks; ``left_out`` are the rows left out
    before it. ``chunk`` is the chunk itself, once it was looked up.
    """

    __slots__ = ("chunk", "left_out", "mark", "number", "place")

    def __init__(
        self,
        number: int,
        place: int,
        mark: Callable[[int], list[int] | None] | None = None,
        left_out: Rows = (0, 0),
    ) -> None:
        self.number = number
        self.place = place
        self.mark = mark
        self.left_out = left_out
        self.chunk: Any = None


@final
class _SourceIterator(StageIterator):
    """Position: the number of the chunk in the lane and the place in it; where that has a mark, a list of both.

    It also keeps the grain of the chunks and the seed of their order: an epoch goes on as it was begun.
    """

    def __init__(self, source: Source, lane: Lane, course: Course) -> None:
        self._format = source.format
        self._access = source.access
        # Sources of one mix draw apart, where a format draws at all.
        self._lane = replace(lane, seed=key(lane.seed, "source", course.path)) if course.path else lane
        self._gauge = Gauge(course.meter, course.path.rstrip("/") or source.NAME, source.format.STAGE)
        self._seed = None if course.order is None else course.order.seed
        self._grain = source.format.grain(lane.count)
        skips = partial(Skips, course.meter)
        self._skips = course.journal.keep(f"{course.path}{source.NAME}", skips) if source.keeps_record else None
        self._at = _Progress(0, 0)
        self._last: tuple[Any, int] | None = None  # the chunk and the place of the row that was yielded last
        self._dealt: tuple[ChunkList, Any] | None = None  # all chunks, and their order; made at the first row
        self._rows: Iterator[tuple[int, int, Any]] | None = None
        self._next: tuple[int, Pieces] | None = None  # what is read ahead of the next chunk, and its number

    def __next__(self) -> Any:
        at = self._at
        number, place, mark, left_out = at.number, at.place, at.mark, at.left_out
        gauge = self._gauge
        if live := gauge.live:
            left = gauge.left = gauge.left - 1
            if not left:
                gauge.begin()
        try:
            while True:
                chunk = at.chunk
                if chunk is None:
                    chunk = at.chunk = self._chunk(at.number)
                if chunk is None:
                    raise StopIteration
                if self._skips is None:
                    if self._rows is None:
                        self._rows = self._format.rows(chunk, at.place, self._pieces(chunk), self._lane)
                    for start, after, row in self._rows:
                        self._last = chunk, start
                        if type(row) is Bad:
                            raise BadRow(f"{self._format.where(chunk, start)}: {row.reason}.\n{row.way_out}")
                        at.place = after
                        if live:
                            if gauge.began:
                                gauge.end()
                            gauge.counts[0] += 1
                        return row
                else:
                    found = self._next_good(chunk, self._skips)
                    if found is None:
                        raise BadRow(
                            f"{self._format.locate(chunk, 0)[0]}: other rows of it can be read now than when the "
                            "position was saved, and windows and batches count on those.\n"
                            "Put the file back as it was, and resume again."
                        )
                    if found:
                        if gauge.began:
                            gauge.end()
                        gauge.counts[0] += 1
                        return found[0]
                at.number, at.place, at.mark, at.chunk, self._rows = at.number + 1, 0, None, None, None
        except BaseException as error:
            self._rows = None
            gauge.began = 0.0
            if not isinstance(error, StopIteration):  # the next call reads again from the last position
                self._next, self._at = None, _Progress(number, place, mark, left_out)
            if isinstance(error, Forked):
                return next(self)
            raise

    def _next_good(self, chunk: Any, skips: Skips) -> list[Any] | None:
        """The next row of the chunk that is not to be left out, if there is one; ``None`` where others can be read now
        than when this was read first.
        """
        at, epoch = self._at, self._lane.epoch
        if (epoch, at.number, at.place) <= skips.forgotten:
            raise BadRow(
                f"{self._format.NAME}: so much could not be read and was left out between the anchor of this position "
                "and its place that not all of it is known any more.\nResume from a position that was saved later."
            )
        try:
            while skips.at((epoch, at.number, at.place)) != "rest":
                if self._rows is None:
                    self._rows = self._format.rows(chunk, at.place, self._pieces(chunk), self._lane)
                found = next(self._rows, None)
                before = epoch, at.number, at.place
                if found is None:
                    if before < skips.reached and skips.reached[:2] == before[:2]:
                        return None
                    break
                start, at.place, row = found
                self._last = chunk, start
                place = epoch, at.number, start
                is_bad = type(row) is Bad
                if is_bad:
                    skips.add(place, "row", self.where(), row.reason)
                if is_bad or skips.at(place):
                    at.left_out = with_row(at.left_out, place)
                if not skips.reach(before, (epoch, at.number, at.place), at.left_out):
                    return None
                if not (is_bad or skips.at(place)):
                    return [row]
        except Exception as error:
            if not isinstance(error, BadRow) and not of_reading(error):
                raise
            place, file = (epoch, at.number, at.place), self._format.locate(chunk, at.place)[0]
            if place < skips.reached:  # rows that came after this were delivered, and are counted on
                raise BadRow(
                    f"{file}: cannot be read from {self._format.UNIT} {at.place} of a chunk on, and could be when the "
                    f"position was saved: {one_line(error)}\nPut the file back as it was, and resume again."
                ) from error
            skips.add(place, "rest", file, one_line(error))
            skips.reach(place, place, at.left_out)
        return []

    def _chunk(self, number: int) -> Any:
        """The chunk of this number in the lane; None where the lane has no more."""
        if self._dealt is None:
            chunks = self._format.chunks(self._grain)
            order = None if self._seed is None else ChunkOrder(self._seed).of(len(chunks), self._lane.epoch)
            self._dealt = chunks, order
            if not self._lane.index and 0 < len(chunks) < self._lane.count:
                _tell_of_few(self._gauge.name, len(chunks), self._lane.count)
        chunks, order = self._dealt
        place = self._lane.index + number * self._lane.count
        if place >= len(chunks):
            return None
        return chunks[place if order is None else order[place]]

    def _pieces(self, chunk: Any) -> Iterator[Any]:
        at = self._at
        if not self._access.ahead:
            fetched = self._fetch(chunk)
            at.mark = getattr(fetched, "mark", None)
            return self._gauge.pieces(fetched)
        ready, self._next = self._next, None
        if ready is None or ready[0] != at.number or at.place:
            ready = at.number, Pieces(self._fetch(chunk))
        at.mark = getattr(ready[1].fetched, "mark", None)
        return self._gauge.pieces(ready[1].going_on(self._look_ahead))

    def _fetch(self, chunk: Any) -> Iterator[Any]:
        at = self._at
        mark = None if at.mark is None else at.mark(at.place)
        if mark is None:
            return self._format.fetch(chunk, at.place)
        return self._format.fetch_from(chunk, at.place, mark)

    def _look_ahead(self) -> None:
        """This chunk is being read: begin with the next one, while the rows of this one are used."""
        number = self._at.number + 1
        chunk = self._chunk(number)
        if chunk is not None:
            self._next = number, Pieces(self._format.fetch(chunk, 0))

    def state_dict(self) -> dict[str, Any]:
        at = self._at
        mark = None if at.mark is None else at.mark(at.place)
        place = at.place if mark is None else [at.place, *mark]
        state = {"chunk": at.number, "place": place, "grain": self._grain, "order": self._seed}
        return state if self._skips is None else {**state, "left_out": list(at.left_out)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        left_out = [0, 0]  # where the position was saved with on_error="raise"
        if isinstance(state, Mapping) and "left_out" in state:
            left_out, state = state["left_out"], {name: state[name] for name in state if name != "left_out"}
        number, place, grain, seed = read_state(
            state, self._format.NAME, chunk=int, place=(int, list), grain=int, order=(int, type(None))
        )
        if type(left_out) is not list or len(left_out) != 2 or not all(type(part) is int for part in left_out):
            raise InvalidState(f"{self._format.NAME}: left_out in a position has two whole numbers, not {left_out!r}.")
        place, *mark = place or [None] if isinstance(place, list) else [place]
        if not all(type(part) is int and 0 <= part < 1 << 62 for part in (place, *mark)) or max(number, grain) >> 62:
            raise InvalidState(f"{self._format.NAME}: a place in a position has whole numbers, not {[place, *mark]!r}.")
        if self._dealt is not None:
            raise InvalidState(f"{self._format.NAME}: rows were read already. Load a position right after open().")
        if grain < 1:
            raise InvalidState(f"{self._format.NAME}: grain in a position must be at least 1, but it is 0.")
        self._at = _Progress(number, place, (lambda _: mark) if mark else None, (left_out[0], left_out[1]))
        self._grain, self._seed = grain, seed

    def close(self) -> None:
        if self._next is not None:
            self._next[1].close()
        self._rows = self._next = None

    def where(self) -> str:
        if self._last is None:
            return "the first row"
        file, row = self._format.locate(*self._last)
        return f"{file}, {self._format.UNIT} {row}"

    def origin(self) -> tuple[Origin, ...]:
        if self._last is None:
            return ()
        return (Origin(self._gauge.name, *self._format.locate(*self._last)),)


def _tell_of_few(name: str, chunks: int, lanes: int) -> None:
    if (name, chunks, lanes) not in _told:
        _told.add((name, chunks, lanes))
        _log.warning(
            f"{name}: there are {chunks} chunks on {lanes} lanes, so {lanes - chunks} lanes have no rows of it (in a "
            f"mix its share is smaller by that). Give more files, or lanes={chunks} or fewer."
        )
