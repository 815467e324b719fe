"""Shuffle: chunks in a random order, and rows at random within a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.seeding import key
from unbroken.streams.arguments import check_whole, read_state
from unbroken.streams.course import Course
from unbroken.streams.stage import Stage, StageIterator

__all__ = ["Shuffle"]


@final
@dataclass(frozen=True, repr=False, eq=False)
class Shuffle(Stage):
    """Chunks in a random order, and rows at random within a window.

    The order of the chunks is a permutation keyed by (seed, epoch). ``window`` counts rows over all lanes: each lane
    holds ``ceil(window / lanes)`` rows, fills them, permutes them, yields them all and fills again, so that a row
    moves by less than two windows. The permutation of a window is keyed by (seed, epoch, lane, its number).

    ``seed`` is a whole number of 64 bits; ``None`` takes the loader's. Where several shuffles stand in one stream,
    the one next to the files orders the chunks.

    Raises ``TypeError`` and ``ValueError`` where ``window`` is no whole number of at least 1, or ``seed`` none of 64
    bits.
    """

    NAME: ClassVar[str] = "shuffle"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"window": "order", "shuffle_seed": "order, held"}

    source: Stage
    window: int
    seed: int | None = None

    def __post_init__(self) -> None:
        check_whole("shuffle", "window", self.window, 1)
        if self.seed is not None:
            check_whole("shuffle", "seed", self.seed, 0, (1 << 64) - 1)

    @property
    def sources(self) -> tuple[Stage, ...]:
        return (self.source,)

    @property
    def counts_rows(self) -> bool:
        return True

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        seed = lane.seed if self.seed is None else self.seed
        if course.path:  # sources of one mix in orders of their own
            seed = key(seed, "shuffle", course.path)
        source = self.source.begin(lane, course.shuffled(seed))
        return _ShuffleIterator(source, lane, -(-self.window // lane.count), seed, lineage=course.lineage)

    def fields(self) -> dict[str, Any]:
        return {"window": self.window, "shuffle_seed": self.seed}

    def arguments(self) -> str:
        return f"window={self.window}" + ("" if self.seed is None else f", seed={self.seed}")


@final
class _ShuffleIterator(StageIterator):
    """Position: the anchor at the window's start, the window's number, the count taken, its size and seed.

    A window is read again on a load. It keeps the size and the seed that it was begun with, so that other ones lose
    and repeat nothing: a new size begins with the next window, a new seed with the next epoch.
    """

    def __init__(self, source: StageIterator, lane: Lane, size: int, seed: int, *, lineage: bool) -> None:
        self._source = source
        self._lane = lane
        self._next_size = self._size = size
        self._seed = seed
        self._anchor = source.state_dict()
        self._window = 0
        self._taken = 0
        self._filling: list[Any] = []  # kept when the source raises, so that a second try loses nothing
        self._rows: list[Any] = []  # the next one last
        # Origins of what is filled and of what comes next, where they were asked for; that of the last row
        self._origins: list[list[tuple[Origin, ...]]] | None = [[], []] if lineage else None
        self._origin: tuple[Origin, ...] = ()

    def __next__(self) -> Any:
        if not self._rows:
            self._fill()
        row = self._rows.pop()
        if self._origins is not None:
            self._origin = self._origins[1].pop()
        if self._rows:
            self._taken += 1
        else:
            self._anchor = self._source.state_dict()
            self._window, self._taken, self._size = self._window + 1, 0, self._next_size
        return row

    def _fill(self) -> None:
        filling, source = self._filling, self._source
        try:
            while len(filling) < self._size:
                filling.append(next(source))
                if self._origins is not None:
                    self._origins[0].append(source.origin())
        except StopIteration:
            if not filling and not self._taken:
                raise
        if self._taken >= len(filling):
            raise InvalidState(
                f"shuffle: {self._taken} rows of window {self._window} of lane {self._lane.index} were delivered, but "
                f"now it has {len(filling)} rows: what it is filled from has changed.\n"
                "Rebuild the stream as it was when the position was saved."
            )
        place = key(self._seed, "window", self._lane.epoch, self._lane.index, self._window)
        order = _permutation(len(filling), place)[self._taken :][::-1]
        self._rows = [filling[i] for i in order]
        if self._origins is not None:
            self._origins = [[], [self._origins[0][i] for i in order]]
        self._filling = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "anchor": self._anchor,
            "window": self._window,
            "taken": self._taken,
            "size": self._size,
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        anchor, window, taken, size, seed = read_state(
            state, "shuffle", anchor=dict, window=int, taken=int, size=int, seed=int
        )
        if taken >= size:
            raise InvalidState(f"shuffle: a position {taken} rows into a window of {size} cannot be.")
        self._source.load_state_dict(anchor)
        self._anchor = self._source.state_dict()
        self._window, self._taken, self._size, self._seed = window, taken, size, seed

    def close(self) -> None:
        self._source.close()

    def where(self) -> str:
        return f"a row of the window that was filled up to {self._source.where()}"

    def origin(self) -> tuple[Origin, ...]:
        return self._origin


def _permutation(length: int, place: int) -> list[int]:
    """A permutation of ``range(length)`` from a 64-bit key.

    The order of random numbers rather than a shuffle by a ``Generator``: numpy keeps the stream of a bit generator
    the same in every version, and not what a ``Generator`` makes of it.
    """
    if length == 1:
        return [0]
    order: list[int] = np.argsort(np.random.PCG64(place).random_raw(length), kind="stable").tolist()
    return order
