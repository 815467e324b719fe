"""Take and skip: the first rows of each epoch, and all the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.streams.arguments import check_whole, read_state
from unbroken.streams.course import Course
from unbroken.streams.stage import Stage, StageIterator

__all__ = ["Skip", "Take"]


@final
@dataclass(frozen=True, repr=False, eq=False)
class Take(Stage):
    """The first ``rows`` rows of each epoch, counted over all lanes.

    Row k of lane l is row ``k * lanes + l`` of all, in the order in which lanes take turns; a lane yields its rows
    whose number is below ``rows``. A lane that has fewer leaves its share to no other, so that the total can be less
    than ``rows``. Before ``repeat`` it counts anew in each pass. Nothing is read beyond the last row.

    Raises ``TypeError`` and ``ValueError`` where ``rows`` is no whole number of at least 0. Loading a position raises
    ``InvalidState`` where more rows were taken than there are to be now.
    """

    NAME: ClassVar[str] = "take"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"take": "data"}

    source: Stage
    rows: int

    def __post_init__(self) -> None:
        check_whole("take", "rows", self.rows, 0)

    @property
    def sources(self) -> tuple[Stage, ...]:
        return (self.source,)

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return _TakeIterator(self.source.begin(lane, course.in_order()), _share(self.rows, lane))

    def fields(self) -> dict[str, Any]:
        return {"take": self.rows}

    def arguments(self) -> str:
        return str(self.rows)


@final
@dataclass(frozen=True, repr=False, eq=False)
class Skip(Stage):
    """All but the first ``rows`` rows of each epoch, counted over all lanes as ``Take`` counts.

    ``take(n)`` and ``skip(n)`` of one stream share out its rows. The rows that are left out are read, and what stands
    before makes them.

    Raises ``TypeError`` and ``ValueError`` where ``rows`` is no whole number of at least 0.
    """

    NAME: ClassVar[str] = "skip"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"skip": "data"}

    source: Stage
    rows: int

    def __post_init__(self) -> None:
        check_whole("skip", "rows", self.rows, 0)

    @property
    def sources(self) -> tuple[Stage, ...]:
        return (self.source,)

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return _SkipIterator(self.source.begin(lane, course.in_order()), _share(self.rows, lane))

    def fields(self) -> dict[str, Any]:
        return {"skip": self.rows}

    def arguments(self) -> str:
        return str(self.rows)


def _share(rows: int, lane: Lane) -> int:
    """How many of the first ``rows`` rows of all are in a lane."""
    return max(0, -(-(rows - lane.index) // lane.count))


@final
class _TakeIterator(StageIterator):
    """Position: that of the source, and how many of its rows were taken."""

    def __init__(self, source: StageIterator, most: int) -> None:
        self._source = source
        self._most = most
        self._rows = 0

    def __next__(self) -> Any:
        if self._rows >= self._most:
            self._source.close()  # what was read ahead is not needed
            raise StopIteration
        row = next(self._source)
        self._rows += 1
        return row

    def state_dict(self) -> dict[str, Any]:
        return {"source": self._source.state_dict(), "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        source, rows = read_state(state, "take", source=dict, rows=int)
        if rows > self._most:
            raise InvalidState(
                f"take: {rows} rows of this lane were taken when the position was saved, but now its share is "
                f"{self._most}.\nTake as many rows as then, or more."
            )
        self._source.load_state_dict(source)
        self._rows = rows

    def close(self) -> None:
        self._source.close()

    def where(self) -> str:
        return self._source.where()

    def origin(self) -> tuple[Origin, ...]:
        return self._source.origin()


@final
class _SkipIterator(StageIterator):
    """Position: that of the source, and how many rows are still to be left out.

    Not how many were: an epoch goes on as it was begun, and another number begins with the next one.
    """

    def __init__(self, source: StageIterator, left: int) -> None:
        self._source = source
        self._left = left

    def __next__(self) -> Any:
        while self._left:
            next(self._source)
            self._left -= 1
        return next(self._source)

    def state_dict(self) -> dict[str, Any]:
        return {"source": self._source.state_dict(), "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        source, left = read_state(state, "skip", source=dict, left=int)
        self._source.load_state_dict(source)
        self._left = left

    def close(self) -> None:
        self._source.close()

    def where(self) -> str:
        return self._source.where()

    def origin(self) -> tuple[Origin, ...]:
        return self._source.origin()
