"""Map, filter and flat_map: a function of each row, or of a few rows at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any, ClassVar, final

import numpy as np

from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.seeding import key, seed_globals
from unbroken.streams.arguments import check_bool, check_function, check_whole, read_state
from unbroken.streams.course import Course
from unbroken.streams.gauge import timed
from unbroken.streams.identity import identity_of
from unbroken.streams.stage import GONE, Stage, StageIterator

__all__ = ["Filter", "FlatMap", "Map"]


class _OfRows(Stage):
    """What the three have in common: a function of rows, and how it is called."""

    source: Stage
    fn: Callable[..., Any]
    rng: bool
    batched: int | None

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "SEEDS", not self.rng)

    @property
    def sources(self) -> tuple[Stage, ...]:
        return (self.source,)

    @property
    def counts_rows(self) -> bool:
        return self.NAME == "flat_map" or self.batched is not None

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        source = self.source.begin(lane, course)
        path = [course.path] if course.path else []
        place = key(lane.seed, self.NAME, *path, self.depth, lane.epoch, lane.index)
        if self.NAME == "flat_map" or self.batched is not None:
            return _BatchesIterator(source, self, place, course)
        return _RowsIterator(source, self, place, course)

    def arguments(self) -> str:
        return self._called(_name_of(self.fn))

    def _called(self, fn: str) -> str:
        return fn + ", rng=True" * self.rng + (f", batched={self.batched}" if self.batched is not None else "")


@final
@dataclass(frozen=True, repr=False, eq=False)
class Map(_OfRows):
    """``fn(row)`` in place of each row.

    Before each call the global generators of torch, numpy and random are seeded by the row's place (seed, epoch,
    lane, the stage's place in the stream, the row's number in the lane), so that a ``fn`` that draws random numbers
    makes the same row again after a resume. With ``rng=True`` it is ``fn(row, rng)`` instead: ``rng`` is a
    ``numpy.random.Generator`` (Philox) keyed by the same place, for this call only; the global generators are left
    alone, and a row costs some 6 µs less.

    With ``batched=n`` ``fn`` gets a list of n rows (of fewer at the lane's end) and returns a list of as many; its
    random numbers are keyed by the first of them. A batch that was delivered in part is made again on a resume. ``fn``
    must be a function of what it is given, and not depend on rows that it saw before.

    Raises ``TypeError`` where ``fn`` cannot be called with so many arguments, or ``rng`` is no bool, ``TypeError`` and
    ``ValueError`` where ``batched`` is no whole number of at least 1. What ``fn`` raises keeps its type, but for
    ``StopIteration``, which would end the stream and becomes a ``RuntimeError``; the next row (or batch) that is asked
    for is the one after. The iterator raises ``ValueError`` and ``TypeError`` where ``fn`` returns no list of as many
    rows; ``InvalidState`` where a source was taken out of a mix and rows of a batch are missing.
    """

    NAME: ClassVar[str] = "map"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"map": "data"}

    source: Stage
    fn: Callable[..., Any]
    rng: bool = False
    batched: int | None = None

    def fields(self) -> dict[str, Any]:
        return {"map[]": self._called(identity_of(self.fn))}


@final
@dataclass(frozen=True, repr=False, eq=False)
class Filter(_OfRows):
    """Only the rows for which ``fn(row)`` is true.

    Random numbers, ``rng`` and ``batched`` are as with ``Map``; with ``batched=n`` ``fn`` returns a list (or an array)
    of True and False, one for each row that it got. It raises what ``Map`` raises. The iterator raises ``InvalidState``
    also without ``batched`` where a source was taken out of a mix: which of its rows passed cannot be known.
    """

    NAME: ClassVar[str] = "filter"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"filter": "data"}

    source: Stage
    fn: Callable[..., Any]
    rng: bool = False
    batched: int | None = None

    def fields(self) -> dict[str, Any]:
        return {"filter[]": self._called(identity_of(self.fn))}


@final
@dataclass(frozen=True, repr=False, eq=False)
class FlatMap(_OfRows):
    """The rows of ``fn(row)``, any number of them, in place of each row.

    ``fn`` returns any iterable but text, dicts and sets, or is a generator; all of it is taken at once, so an error in
    its middle is one of the whole row. What was delivered in part is made again on a resume. Random numbers, ``rng``
    and ``batched`` are as with ``Map``; with ``batched=n`` ``fn`` gets a list of rows, returns any number, and in
    lineage each comes from all the rows of its batch.

    It raises what ``Map`` raises. The iterator raises ``TypeError`` where ``fn`` returns no such iterable, and
    ``InvalidState`` also without ``batched`` where a source was taken out of a mix: how many rows came from its rows
    cannot be known without it.
    """

    NAME: ClassVar[str] = "flat_map"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"flat_map": "data"}

    source: Stage
    fn: Callable[..., Iterable[Any]]
    rng: bool = False
    batched: int | None = None

    def fields(self) -> dict[str, Any]:
        return {"flat_map[]": self._called(identity_of(self.fn))}


def _check(stage: _OfRows) -> None:
    check_function(stage.NAME, stage.fn)
    check_bool(stage.NAME, "rng", stage.rng)
    if stage.batched is not None:
        check_whole(stage.NAME, "batched", stage.batched, 1)
    try:
        signature = inspect.signature(stage.fn, follow_wrapped=False)
    except (TypeError, ValueError):  # made in C, without a signature
        return
    if _binds(signature, 1 + stage.rng):
        return
    given = "the row" if stage.batched is None else "a list of rows"
    if stage.rng:
        given = f"two arguments, {given} and a numpy.random.Generator"
        way_out = "rng=True passes two arguments: give fn a second parameter, or leave rng=True out."
    else:
        given = f"one argument, {given}"
        way_out = "Pass rng=True to get a numpy.random.Generator as second one; bind others with functools.partial."
    raise TypeError(
        f"{stage.NAME}: fn must take {given}, but {_name_of(stage.fn)}({', '.join(signature.parameters)}) cannot "
        f"be called so.\n{way_out}"
    )


def _binds(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*range(arguments))
    except TypeError:
        return False
    return True


def _name_of(fn: Any) -> str:
    return identity_of(fn).rpartition(":")[0]


@final
class _Call:
    """The calls of ``fn``, each under random numbers of its own: a function of the lane's place and a row's number."""

    def __init__(self, stage: _OfRows, place: int, where: Callable[[], str]) -> None:
        self._name = stage.NAME
        self._fn = stage.fn
        self._place = place
        self._where = where
        # To set the state of one generator costs 0.3 µs, to make another one 6. Philox has a stream for each key.
        self._bits = np.random.Philox(key=0) if stage.rng else None
        self._rng = np.random.Generator(self._bits) if self._bits is not None else None
        self._key = [place, 0]
        self._state: Any = {"bit_generator": "Philox", "state": {"counter": [0] * 4, "key": self._key}}
        self._state |= {"buffer": [0] * 4, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}

    def one(self, given: Any, number: int) -> Any:
        """What ``fn`` returns. Raises ``RuntimeError`` where it raises ``StopIteration``."""
        try:
            if self._bits is None:
                seed_globals(key(self._place, number))
                return self._fn(given)
            self._key[1] = number
            self._bits.state = self._state
            return self._fn(given, self._rng)
        except StopIteration as error:
            raise self._stopped() from error

    def many(self, given: Any, number: int) -> list[Any]:
        """All that is in the iterable that ``fn`` returns. Raises ``TypeError`` where it returns none."""
        found = self.one(given, number)
        if isinstance(found, str | bytes | Mapping | set | frozenset) or not hasattr(found, "__iter__"):
            raise TypeError(
                f"{self._name}: fn ({_name_of(self._fn)}) must return a list (or another iterable in a fixed order) "
                f"here, but returned a {type(found).__name__}, for {self._where()}.\n"
                "Return a list, of one item where there is one."
            )
        try:
            return list(found)
        except StopIteration as error:
            raise self._stopped() from error

    def _stopped(self) -> RuntimeError:
        return RuntimeError(
            f"{self._name}: fn ({_name_of(self._fn)}) raised StopIteration, for {self._where()}. The stream would end "
            "there as if it had no more rows.\nCatch it in fn, or use next(iterator, default)."
        )


@final
class _RowsIterator(StageIterator):
    """Position: that of the source, and how many of its rows went through."""

    def __init__(self, source: StageIterator, stage: _OfRows, place: int, course: Course) -> None:
        self._source = source
        self._name = stage.NAME
        self._call = timed(course.meter, _Call(stage, place, source.where).one)
        self._rows = 0

    def __next__(self) -> Any:
        while True:
            row = next(self._source)
            number, self._rows = self._rows, self._rows + 1
            if row is GONE:
                if self._name == "filter":
                    raise _cannot_be_made_again("filter")
                return row
            result = self._call(row, number)
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


@final
class _BatchesIterator(StageIterator):
    """Position: the anchor before the batch, the number of rows before it, the count taken of what it gave, its size.

    On a load the batch is made again, with the size that it was begun with; a new size begins with the next one.
    """

    def __init__(self, source: StageIterator, stage: _OfRows, place: int, course: Course) -> None:
        self._source = source
        self._stage = stage
        self._call = timed(course.meter, _Call(stage, place, self.where).many)
        self._anchor = source.state_dict()
        self._rows = 0
        self._taken = 0
        self._size = stage.batched or 1
        self._batch: list[Any] = []  # kept when the source raises, so that a second try loses nothing
        self._behind = 0  # how many rows are behind what was made
        self._made: list[Any] = []  # the next one last
        # Origins of the batch and of what comes next, where they were asked for; that of the last row
        self._origins: list[list[tuple[Origin, ...]]] | None = [[], []] if course.lineage else None
        self._origin: tuple[Origin, ...] = ()

    def __next__(self) -> Any:
        while not self._made:
            self._fill()
            self._make()
        row = self._made.pop()
        if self._origins is not None:
            self._origin = self._origins[1].pop()
        if self._made:
            self._taken += 1
        else:
            self._advance()
        return row

    def _fill(self) -> None:
        batch, source = self._batch, self._source
        try:
            while len(batch) < self._size:
                batch.append(next(source))
                if self._origins is not None:
                    self._origins[0].append(source.origin())
        except StopIteration:
            if not batch and not self._taken:
                raise
        if any(row is GONE for row in batch):
            raise _cannot_be_made_again(self._stage.NAME + (f"(batched={self._size})" if self._stage.batched else ""))

    def _make(self) -> None:
        batch, self._behind = self._batch, len(self._batch)
        try:
            made, origins = self._result(batch) if batch else ([], [])
        except Exception:
            if not self._taken:  # it never came to anything, and is passed over
                self._advance()
            raise
        if self._taken and self._taken >= len(made):
            raise InvalidState(
                f"{self._stage.NAME}: {self._taken} rows were delivered of what fn made of {self._behind or 'some'} "
                f"rows, but now it gives {len(made)}: fn or what it reads from has changed.\n"
                "Rebuild the stream as it was when the position was saved; fn must be a function of its rows."
            )
        if not made:
            self._advance()
            return
        self._made = made[self._taken :][::-1]
        self._batch = []
        if self._origins is not None:
            self._origins = [[], origins[self._taken :][::-1]]

    def _result(self, batch: list[Any]) -> tuple[list[Any], list[tuple[Origin, ...]]]:
        """What comes of a batch, and the origins of each row where they were asked for."""
        stage, origins = self._stage, [] if self._origins is None else self._origins[0]
        made = self._call(batch[0] if stage.batched is None else batch[:], self._rows)
        if stage.NAME == "flat_map":
            return made, [tuple(origin for row in origins for origin in row)] * (len(made) if origins else 0)
        if len(made) != len(batch):
            raise ValueError(
                f"{stage.NAME}: with batched={stage.batched} fn ({_name_of(stage.fn)}) must return one item for each "
                f"row, but it got {len(batch)} rows and returned {len(made)} items, for {self.where()}.\n"
                "Return as many; flat_map(fn, batched=...) takes any number."
            )
        if stage.NAME == "map":
            return made, list(origins)
        # What is in an array of bools is no bool itself.
        kept = [item.item() if type(item) is not bool and hasattr(item, "item") else item for item in made]
        if odd := [item for item in kept if type(item) is not bool]:
            raise TypeError(
                f"filter: with batched={stage.batched} fn ({_name_of(stage.fn)}) must return True or False for each "
                f"row, but returned {str(odd[0])[:80]!r} ({type(odd[0]).__name__}), for {self.where()}."
            )
        return list(compress(batch, kept)), list(compress(origins, kept))

    def _advance(self) -> None:
        """The batch is done with: the anchor moves behind it."""
        self._anchor = self._source.state_dict()
        self._rows, self._taken, self._size = self._rows + self._behind, 0, self._stage.batched or 1
        self._batch = []
        if self._origins is not None:
            self._origins = [[], []]

    def state_dict(self) -> dict[str, Any]:
        return {"anchor": self._anchor, "rows": self._rows, "taken": self._taken, "size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        name = self._stage.NAME
        anchor, rows, taken, size = read_state(state, name, anchor=dict, rows=int, taken=int, size=int)
        if size < 1:
            raise InvalidState(f"{name}: size in a position must be at least 1, but it is 0.")
        self._source.load_state_dict(anchor)
        self._anchor = self._source.state_dict()
        self._rows, self._taken, self._size = rows, taken, size

    def close(self) -> None:
        self._source.close()

    def where(self) -> str:
        place = self._source.where()
        return place if self._stage.batched is None else f"a batch of rows that ends in {place}"

    def origin(self) -> tuple[Origin, ...]:
        return self._origin


def _cannot_be_made_again(stage: str) -> InvalidState:
    return InvalidState(
        f"{stage}: a source was taken out of a mix while rows of it that were read and not yet delivered stand before "
        f"{stage}, and what comes of them cannot be made again without it.\n"
        "Keep it in the mix with weight 0 until the next checkpoint, and take it out then."
    )
