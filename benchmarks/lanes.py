"""Rows of a stream on worker processes: what the training process spends to put them together into batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

import unbroken
from benchmarks.datasets import ROW_TOKENS
from benchmarks.measure import OURS, Line, Settings, at_most, steady_side_by_side


class Rows:
    """One lane: the same rows round and round."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.taken += 1
        return self.rows[self.taken % len(self.rows)]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.taken = state["taken"]


class PreloadedStream(IterableDataset[Any]):
    """A lane stream that reads nothing: each row is a dict of one int64 array [2049]."""

    default_lanes = 8

    def __init__(self) -> None:
        numbers = np.random.default_rng(0).integers(0, 50_000, (64, ROW_TOKENS))
        self.rows = [{"input_ids": row} for row in numbers]

    def __iter__(self) -> Rows:
        return self.open(unbroken.Lane(0, 1))

    def open(self, lane: unbroken.Lane) -> Rows:
        return Rows(self.rows)

    def describe(self) -> dict[str, Any]:
        return {"rows": len(self.rows)}

    def difference_class(self, field: str) -> str:
        return "data"


def run(settings: Settings) -> list[Line]:
    stream = PreloadedStream()
    makers = {OURS: lambda: unbroken.StatefulDataLoader(stream, batch_size=8, num_workers=2)}
    wall, cpu = steady_side_by_side(makers, settings, batches=3000, warm_up=200)
    what = "8 rows of 2049 from 8 lanes on 2 workers"
    return [
        Line(f"{what}: CPU of the training process", "µs/batch", cpu, (at_most(cpu, 60, "µs"),)),
        Line(f"{what}: wall clock", "µs/batch", wall),
    ]
