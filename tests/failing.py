"""Datasets some samples of which fail, each with a state as ``datasets`` has them."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from tests.datasets import my_share

# What of the state of a dataset says where it is: after every row, late by a row, the shard of three rows (known on
# entering it, or counted as read already), or nothing.
STATES = ("steps", "late", "coarse", "ahead", "none")
_SHARD = 3


class Bad(ValueError):
    """What a bad sample raises."""


class FailingRows:
    """An iterator over the rows of a lane that raises for some, and goes on with the next. ``once``: those that fail
    the first time, and never again.
    """

    def __init__(self, bad: Set[int], state: str, noise: bool = False, once: set[int] | None = None) -> None:
        self.bad = bad
        self.once = once
        self.kind = state
        self.noise = noise
        self.next = 0
        self.state: dict[str, int] | None = None
        self.share = range(0)

    def __iter__(self) -> FailingRows:
        return self

    def __next__(self) -> Any:
        place, self.next = self.next, self.next + 1
        if place >= len(self.share):
            self.next = 0
            self.state = {"next": 0}
            raise StopIteration
        reads = {"steps": place + 1, "late": place, "coarse": place // _SHARD * _SHARD}
        self.state = {"next": reads.get(self.kind, (place // _SHARD + 1) * _SHARD)}
        row = self.share[place]
        noise = float(torch.rand(())) if self.noise else 0
        if self.once is not None and row in self.once:
            self.once.remove(row)
            raise Bad(f"row {row} is bad this once")
        if row in self.bad:
            raise Bad(f"row {row} is bad")
        return row + noise

    def save(self) -> dict[str, int]:
        return {"next": 0} if self.state is None else dict(self.state)

    def load(self, state: dict[str, int]) -> None:
        self.next, self.state = state["next"], dict(state)


class StatefulRows(FailingRows):
    def state_dict(self) -> dict[str, int]:
        return self.save()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.load(state)


class Failing(IterableDataset):
    """Its iterator has the state."""

    def __init__(self, n: int, bad: Set[int], state: str = "steps", **more: Any) -> None:
        self.n = n
        self.bad = bad
        self.state = state
        self.more = more

    def __iter__(self) -> FailingRows:
        kind = FailingRows if self.state == "none" else StatefulRows
        rows = kind(self.bad, self.state, **self.more)
        rows.share = my_share(self.n)
        return rows


class FailingItself(FailingRows, IterableDataset):
    """Is its own iterator, and has the state; the end starts it over."""

    def __init__(self, n: int, bad: Set[int], state: str = "steps", **more: Any) -> None:
        super().__init__(bad, state, **more)
        self.n = n

    def __iter__(self) -> FailingItself:
        self.share = my_share(self.n)
        return self

    def state_dict(self) -> dict[str, int]:
        return self.save()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.load(state)


class FailingItems(Dataset):
    """A map-style one. ``asked``: the indices that were asked for, one by one."""

    def __init__(self, n: int, bad: Set[int], noise: bool = False) -> None:
        self.n = n
        self.bad = bad
        self.noise = noise
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        noise = float(torch.rand(())) if self.noise else 0
        if index in self.bad:
            raise Bad(f"row {index} is bad")
        return torch.tensor(index + noise)


class FailingTogether(FailingItems):
    """Is asked for all rows of a batch at once, and draws once for each."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [super(FailingTogether, self).__getitem__(index) for index in indices]


class FailingTogetherOnly(Dataset):
    """Can only be asked for several rows at once."""

    def __init__(self, n: int, bad: Set[int]) -> None:
        self.n = n
        self.bad = bad

    def __len__(self) -> int:
        return self.n

    def __getitems__(self, indices: list[int]) -> list[int]:
        if self.bad.intersection(indices):
            raise Bad(f"one of {indices} is bad")
        return indices


class FailingGenerator(IterableDataset):
    """A generator, which is over when it has raised."""

    def __init__(self, n: int, bad: Set[int]) -> None:
        self.n = n
        self.bad = bad

    def __iter__(self) -> Iterator[int]:
        for row in my_share(self.n):
            if row in self.bad:
                raise Bad(f"row {row} is bad")
            yield row
