"""Datasets, samplers and loaders of the programs that are run beside torch. Rows are numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from tests.beside import Scenario, told

Kind = type[Any]
Who = dict[str, Any]


class Rows(Dataset):
    """Row i is i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.n:
            raise IndexError(f"no row {index}")
        return index


class Together(Rows):
    """Fetches the rows of a batch at once, and tells what it was asked with."""

    def __getitems__(self, indices: Any) -> Any:
        return [(type(indices).__name__, index) for index in indices]


class NotTogether(Rows):
    __getitems__ = None


class Stream(IterableDataset):
    """Shared out among workers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(range(self.n) if info is None else range(info.id, self.n, info.num_workers))


class Told(Stream):
    """Has a length."""

    def __len__(self) -> int:
        return self.n


class Uneven(Stream):
    """Worker 0 has one row, the others have the rest."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            return iter(range(self.n))
        return iter([0] if info.id == 0 else range(1, self.n))


class OnlyOne(Stream):
    """All rows are with worker 1."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(range(self.n) if info is None or info.id == 1 else [])


class Repeats(IterableDataset):
    """Knows nothing of workers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(5))


class OldStyle(IterableDataset):
    """Is iterated by ``__getitem__`` alone."""

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise IndexError
        return index


class OwnIterator(IterableDataset):
    """Is its own iterator."""

    def __iter__(self) -> Iterator[Any]:
        self.at = 0
        return self

    def __next__(self) -> Any:
        self.at += 1
        if self.at > 5:
            raise StopIteration
        return self.at


class Forever(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return itertools.count()


class Duck:
    """Is no ``Dataset``."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return index


class Evens(Sampler):
    """A sampler of a user's."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, self.n, 2))

    def __len__(self) -> int:
        return (self.n + 1) // 2


class Endless(Sampler):
    """Without a length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(3))


class Grows(Sampler):
    """A batch sampler whose batches grow."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[0], [1, 2], [3, 4, 5]])

    def __len__(self) -> int:
        return 3


def named(indices: Any) -> Any:
    """What a dataset was asked with."""
    return type(indices).__name__, told(indices)


class Asked(Rows):
    """A row tells what it was asked with."""

    def __getitem__(self, index: Any) -> Any:
        return named(index)


class Scaled(Dataset):
    """Rows by name."""

    rows: ClassVar = {"a": 1.0, "b": 2.0, "c": 3.0}

    def __getitem__(self, index: str) -> float:
        return self.rows[index]

    def __len__(self) -> int:
        return 3


def as_list(samples: Any) -> Any:
    return samples


def twice(kind: Kind, who: Who, dataset: Any, **arguments: Any) -> Iterator[Any]:
    loader = kind(dataset, **arguments, **who)
    yield from loader
    yield "again"
    yield from loader


def simply(make: Callable[[], Any], **arguments: Any) -> Scenario:
    """A loader over a dataset, passed through twice."""
    return lambda kind, who: twice(kind, who, make(), **arguments)


def with_made(make: Callable[[], Any], arguments: Callable[[], dict[str, Any]]) -> Scenario:
    """The same with arguments that are made anew each time."""
    return lambda kind, who: twice(kind, who, make(), **arguments())


def once(make: Callable[[], Any], arguments: Callable[[], dict[str, Any]]) -> Scenario:
    """Passed through once: without a generator, later epochs draw their own numbers."""
    return lambda kind, who: kind(make(), **arguments(), **who)
