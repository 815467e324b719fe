"""Datasets that cost next to nothing themselves: what is measured is the loader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

ROW_TOKENS = 2049


def token_rows(number: int = 64) -> list[torch.Tensor]:
    """Rows of 2049 int64, each another."""
    return list(torch.randint(0, 50_000, (number, ROW_TOKENS), generator=torch.Generator().manual_seed(0)))


class Preloaded(IterableDataset[Any]):
    """The same samples round and round, without end. It has no state."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return cycle(self.samples)


class Counted(IterableDataset[Any]):
    """The same samples round and round; its state is how many were taken."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.taken += 1
            yield self.samples[self.taken % len(self.samples)]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Mapped(Dataset[Any]):
    """A map-style dataset of any length over a few samples."""

    def __init__(self, samples: list[Any], length: int) -> None:
        self.samples = samples
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]
