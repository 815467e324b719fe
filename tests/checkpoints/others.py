"""Datasets for the loaders of others and ours, and what torchdata's delivers after a load of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader as Other

__all__ = ["BareRows", "OwnIterator", "Rows", "StatefulIterator", "Table", "batches_of", "rest_of", "saved_after"]


def mine(length: int) -> range:
    """The rows of a worker; the last has fewer, so that workers end at different turns."""
    info = get_worker_info()
    if info is None:
        return range(length)
    return range(info.id, length - info.id * 4, info.num_workers)


class BareRows(IterableDataset[int]):
    """Rows without a state."""

    def __init__(self, length: int = 50) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from mine(self.length)


class Rows(IterableDataset[int]):
    """Rows with a state on the dataset, which stays at its end."""

    def __init__(self, length: int = 50) -> None:
        self.length = length
        self.done = 0

    def __iter__(self) -> Iterator[int]:
        rows = mine(self.length)
        while self.done < len(rows):
            self.done += 1
            yield rows[self.done - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "seen": (1, None), "window": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"] == (1, None)
        assert state["window"].tolist() == [0, 1, 2]
        self.done = state["done"]


class StatefulIterator(IterableDataset[int]):
    """Rows with a state on the iterator."""

    def __iter__(self) -> Iterator[int]:
        return _Rows()


class OwnIterator(IterableDataset[int]):
    """Its own iterator, with a state."""

    def __init__(self) -> None:
        self.rows = _Rows()

    def __iter__(self) -> Iterator[int]:
        self.rows = _Rows()
        return self

    def __next__(self) -> int:
        return next(self.rows)

    def state_dict(self) -> dict[str, Any]:
        return self.rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows.load_state_dict(state)


class _Rows(Iterator[int]):
    def __init__(self) -> None:
        self.rows, self.done = mine(50), 0

    def __next__(self) -> int:
        if self.done == len(self.rows):
            raise StopIteration
        self.done += 1
        return self.rows[self.done - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Table(Dataset[int]):
    """Map-style: each index is its own row."""

    def __init__(self, length: int = 50) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index


def batches_of(batches: Any) -> list[Any]:
    """Batches as plain values."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def saved_after(make: Callable[[], Other[Any]], steps: int | None) -> dict[str, Any]:
    """The state of a torchdata loader after so many batches; ``None``: after the epoch."""
    loader = make()
    batches = iter(loader)
    if steps is None:
        list(batches)
        return loader.state_dict()
    for _ in range(steps):
        next(batches)
    state = loader.state_dict()
    list(batches)  # so that its workers end by themselves
    return state


def rest_of(make: Callable[[], Other[Any]], state: dict[str, Any]) -> list[Any]:
    """What a torchdata loader delivers in its next pass after a load."""
    loader = make()
    loader.load_state_dict(state)
    return batches_of(loader)
