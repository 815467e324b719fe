"""What the tests of the streams share: files, runs, and the law as one function."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from unbroken.lanes import Lane
from unbroken.streams.stage import Stage, StageIterator

TORN = object()


def packed_as(name: str, data: bytes) -> bytes:
    """``data`` compressed as the end of a name says."""
    if name.endswith(".gz"):
        return gzip.compress(data)
    return zstandard.ZstdCompressor().compress(data) if name.endswith(".zst") else data


def write_jsonl(path: Path, rows: Iterable[Any], newline: str = "\n", at_end: bool = True) -> Path:
    """A file of JSON lines, compressed as its name says."""
    text = newline.join(json.dumps(row) for row in rows)
    path.write_bytes(packed_as(path.name, (text + newline * (at_end and bool(text))).encode()))
    return path


def plain(row: Any) -> Any:
    """A row in values that compare: an array is its dtype and its list."""
    if isinstance(row, dict):
        return {name: plain(value) for name, value in row.items()}
    if isinstance(row, torch.Tensor):
        row = row.numpy()
    return (str(row.dtype), row.tolist()) if isinstance(row, np.ndarray) else row


def run(stage: Stage, lane: Lane | None = None) -> list[Any]:
    """All rows of a lane."""
    with stage.open(lane or Lane(0, 1)) as rows:
        return [plain(row) for row in rows]


def run_lanes(stage: Stage, count: int, **place: int) -> list[list[Any]]:
    """All rows of each of ``count`` lanes."""
    return [run(stage, Lane(index, count, **place)) for index in range(count)]


def saved(rows: StageIterator) -> str:
    return json.dumps(rows.state_dict())


def resumed(stage: Stage, lane: Lane, state: str) -> StageIterator:
    """A fresh iterator at a position, which it then reports itself."""
    rows = stage.open(lane)
    rows.load_state_dict(json.loads(state))
    assert saved(rows) == state
    return rows


def without_reached(state: str) -> str:
    """A position without how far each mix was read: pack reads in blocks, and they begin elsewhere after a resume."""
    position = json.loads(state)
    for name, record in position.get("journal", {}).items():
        if name.rpartition("/")[2] == "mix":
            del record["reached"]
    return json.dumps(position)


def assert_law(stage: Stage, lane: Lane, chain: Sequence[int] = ()) -> list[Any]:
    """``run[:k] + resume(position_k) == run`` for every k, and for one chain of stops so many rows apart.

    The positions themselves are equal too (but for ``without_reached``), and none changes once it was taken. Returns
    the rows.
    """
    ref, positions, texts = [], [], []
    rows = stage.open(lane)
    while True:
        positions.append(rows.state_dict())
        texts.append(json.dumps(positions[-1]))
        try:
            ref.append(plain(next(rows)))
        except StopIteration:
            break
    at_end = saved(rows)
    assert [json.dumps(position) for position in positions] == texts
    for k, text in enumerate([*texts, at_end]):
        rows = resumed(stage, lane, text)
        for n in range(min(k, len(ref)), len(ref)):
            assert without_reached(saved(rows)) == without_reached(texts[n])
            assert plain(next(rows)) == ref[n]
        assert next(rows, TORN) is TORN
    found, state = [], texts[0]
    for apart in [*chain, len(ref) + 1]:
        rows = resumed(stage, lane, state)
        found += [plain(row) for _, row in zip(range(apart), rows, strict=False)]
        state = saved(rows)
    assert found == ref
    return ref
