"""Map and filter: a function of each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.seeding import key, seed_globals
from unbroken.streams.arguments import check_function, read_state
from unbroken.streams.course import Course
from unbroken.streams.identity import identity_of
from unbroken.streams.stage import Stage, StageIterator

__all__ = ["Filter", "Map"]


@final
@dataclass(frozen=True, repr=False, eq=False)
class Map(Stage):
    """``fn(row)`` in place of each row.

    Before each call the global generators of torch, numpy and random are seeded by the row's place (seed, epoch,
    lane, the stage's place in the stream, the row's number in the lane), so that a ``fn`` that draws random numbers
    makes the same row again after a resume. ``fn`` must not depend on rows that it saw before.

    Raises ``TypeError`` where ``fn`` cannot be called. What ``fn`` raises keeps its type; the next row that is asked
    for is the one after.
    """

    NAME: ClassVar[str] = "map"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"map": "data"}
    SEEDS: ClassVar[bool] = True

    source: Stage
    fn: Callable[[Any], Any]
    rng: bool = False
    batched: int | None = None

    def __post_init__(self) -> None:
        check_function("map", self.fn)

    @property
    def sources(self) -> tuple[Stage, ...]:
        return (self.source,)

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return _RowsIterator(self.source.begin(lane, course), lane, self.fn, "map", self.depth)

    def fields(self) -> dict[str, Any]:
        return {"map[]": identity_of(self.fn)}

    def arguments(self) -> str:
        return identity_of(self.fn).rpartition(":")[0]


@final
@dataclass(frozen=True, repr=False, eq=False)
class Filter(Stage):
    """Only the rows for which ``fn(row)`` is true.

    The global generators are seeded before each call as ``Map`` does it. Raises ``TypeError`` where ``fn`` cannot be
    called.
    """

    NAME: ClassVar[str] = "filter"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"filter": "data"}
    SEEDS: ClassVar[bool] = True

    source: Stage
    fn: Callable[[Any], Any]
    rng: bool = False
    batched: int | None = None

    def __post_init__(self) -> None:
        check_function("filter", self.fn)

    @property
    def sources(self) -> tuple[Stage, ...]:
        return (self.source,)

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return _RowsIterator(self.source.begin(lane, course), lane, self.fn, "filter", self.depth)

    def fields(self) -> dict[str, Any]:
        return {"filter[]": identity_of(self.fn)}

    def arguments(self) -> str:
        return identity_of(self.fn).rpartition(":")[0]


@final
class _RowsIterator(StageIterator):
    """Position: that of the source, and how many of its rows went through."""

    def __init__(self, source: StageIterator, lane: Lane, fn: Callable[[Any], Any], name: str, depth: int) -> None:
        self._source = source
        self._fn = fn
        self._name = name
        self._place = key(lane.seed, name, depth, lane.epoch, lane.index)
        self._rows = 0

    def __next__(self) -> Any:
        while True:
            row = next(self._source)
            number, self._rows = self._rows, self._rows + 1
            seed_globals(key(self._place, number))
            result = self._fn(row)
            if self._name == "map":
                return result
            if result:
                return row

    def state_dict(self) -> dict[str, Any]:
        return {"source": self._source.state_dict(), "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        source, rows = read_state(state, self._name, source=dict, rows=int)
        self._source.load_state_dict(source)
        self._rows = rows

    def close(self) -> None:
        self._source.close()

    def where(self) -> str:
        return self._source.where()

    def origin(self) -> tuple[Origin, ...]:
        return self._source.origin()
