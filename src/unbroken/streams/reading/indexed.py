"""Map-style datasets: rows by index, in ranges of indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final

from torch.utils.data import IterableDataset

from unbroken.lanes import Lane
from unbroken.meters import DATASET
from unbroken.seeding import key, seed_globals
from unbroken.streams.reading.files import Access
from unbroken.streams.reading.source import Format, Source
from unbroken.streams.stage import Stage

__all__ = ["Indexed", "Read", "from_map"]

Read: TypeAlias = Callable[[Any, int, int], Sequence[Any]]
"""The rows ``start`` to ``stop`` - 1 of a dataset."""

_CHUNKS_PER_LANE = 8
_MOST_ROWS, _ROWS_AT_ONCE = 64, 32


def from_map(dataset: Any) -> Stage:
    """A stream of the rows of a map-style dataset of torch: ``dataset[i]`` for each ``i`` in ``range(len(dataset))``.

    Where it has ``__getitems__``, rows are asked for by that, up to 32 neighbours at once. Indices are dealt to lanes
    in chunks of up to 64; ``shuffle`` permutes the chunks and mixes rows in its window.

    The global generators of torch, numpy and random are seeded before each row by (seed, epoch, index), so that random
    augmentation makes the same row again after a resume, and in any lane; with ``__getitems__`` before each call, by
    the first index of it, which depends on the number of lanes. Beyond that a row has to be a function of its index.

    Raises ``TypeError`` where ``dataset`` has no length or no rows by index. The iterator raises ``ValueError`` where
    ``__getitems__`` returns another number of rows than it was asked for, and what the dataset raises.
    """
    kind = type(dataset)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(kind, name)]
    if missing or isinstance(dataset, type | Mapping | IterableDataset):
        without = " and ".join(missing) or "rows by number"
        raise TypeError(
            f"from_map: dataset must be a map-style dataset, but a {kind.__name__} has no {without}.\n"
            "Pass an iterable one to from_iterable(lambda lane, lanes: ...)."
        )
    together = hasattr(dataset, "__getitems__")
    read, at_once = (_together, _ROWS_AT_ONCE) if together else (_one, 1)
    length = len(dataset)
    what = f"{kind.__name__}, {length} rows"
    return Source(Indexed("from_map", dataset, length, read, at_once, what, _MOST_ROWS), Access(retries=0))


def _one(dataset: Any, start: int, stop: int) -> list[Any]:
    return [dataset[start]]


def _together(dataset: Any, start: int, stop: int) -> Sequence[Any]:
    rows: Sequence[Any] = dataset.__getitems__(list(range(start, stop)))
    if len(rows) != stop - start:
        raise ValueError(
            f"{type(dataset).__name__}.__getitems__ was asked for {stop - start} rows ({start} to {stop - 1}) and "
            f"returned {len(rows)}. Return one for each index."
        )
    return rows


@final
class _Ranges:
    """All ranges of so many indices."""

    def __init__(self, length: int, size: int) -> None:
        self._length = length
        self._size = size

    def __len__(self) -> int:
        return -(-self._length // self._size)

    def __getitem__(self, number: int) -> range:
        start = number * self._size
        return range(start, min(start + self._size, self._length))


@final
@dataclass(frozen=True)
class Indexed(Format):
    """Rows by index. A chunk is a range of indices, a place counts rows from its start.

    ``caller`` is the function that users call; ``read`` gets ``at_once`` rows, the first of which lies a multiple of
    that after a chunk's start. ``files`` identifies the data; ``most`` is the number of rows of a large chunk. Where
    it ``seeds``, the global generators are seeded before each call of ``read``.
    """

    NAME: ClassVar[str] = "from_map"
    SEEDS: ClassVar[bool] = True
    STAGE: ClassVar[int] = DATASET

    caller: str
    dataset: Any
    length: int
    read: Read
    at_once: int
    files: str
    most: int
    seeds: bool = True

    def __post_init__(self) -> None:
        for name, value in {"NAME": self.caller, "SEEDS": self.seeds}.items():
            object.__setattr__(self, name, value)

    def grain(self, lanes: int) -> int:
        return max(1, min(self.most, self.length // (lanes * _CHUNKS_PER_LANE)))

    def chunks(self, grain: int) -> _Ranges:
        return _Ranges(self.length, grain)

    def fetch(self, chunk: range, place: int) -> Iterator[Any]:
        return iter(())  # a dataset may draw random numbers, which a thread would take from others

    def rows(self, chunk: range, place: int, pieces: Iterator[Any], lane: Lane) -> Iterator[tuple[int, int, Any]]:
        for start in range(chunk.start + place - place % self.at_once, chunk.stop, self.at_once):
            if self.seeds:
                seed_globals(key(lane.seed, self.caller, lane.epoch, start))
            found = self.read(self.dataset, start, min(start + self.at_once, chunk.stop))
            for after, row in enumerate(found, start - chunk.start + 1):
                if after > place:
                    yield after - 1, after, row

    def locate(self, chunk: range, place: int) -> tuple[str, int]:
        return type(self.dataset).__name__, chunk.start + place

    def where(self, chunk: range, place: int) -> str:
        return f"{type(self.dataset).__name__}, row {chunk.start + place}"

    def fields(self) -> dict[str, Any]:
        return {"files": self.files}

    def arguments(self) -> str:
        return type(self.dataset).__name__

    def extent(self) -> str:
        return f"{self.length} rows"
