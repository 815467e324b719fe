"""Rows of tokens from a file of uint16: rows per second, in this process and from one worker.

A row is 2048 tokens and the token after each of them: all hand out dicts of ``input_ids`` and ``labels``, both int64;
"torch, unsplit" hands out one tensor of 2049 instead. litdata and MosaicML read files of their own with the same
tokens, which are written before the clock starts.
"""

from __future__ import annotations

import importlib
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import unbroken
from benchmarks.measure import OURS, Goal, Line, Repeats, Settings, medians, steady_side_by_side
from unbroken.streams.reading.tokens import read_tokens

SEQ_LEN, BATCH = 2048, 8
FILE_BYTES, QUICK_BYTES = 200_000_000, 40_000_000
TORCH, UNSPLIT, LITDATA, MOSAIC = "torch", "torch, unsplit", "litdata", "MosaicML"

Make = Callable[[int], Any]


def split(row: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": row[:-1], "labels": row[1:]}


class Mapped(Dataset[Any]):
    """The file as a memmap, as it is read by hand. It is mapped in the process that reads it."""

    def __init__(self, path: Path, finish: Callable[[torch.Tensor], Any]) -> None:
        self.path, self.finish = path, finish
        self.rows = (path.stat().st_size // 2 - 1) // SEQ_LEN
        self.tokens: Any = None

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> Any:
        if self.tokens is None:
            self.tokens = np.memmap(self.path, np.uint16, "r")
        start = number * SEQ_LEN
        return self.finish(torch.from_numpy(self.tokens[start : start + SEQ_LEN + 1].astype(np.int64)))


class Closing:
    """A loader whose iterator is a generator: closing that lets its workers go."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self.batches = iter(self.loader)
        return self.batches

    def close(self) -> None:
        if self.batches is not None:
            self.batches.close()  # type: ignore[attr-defined]


def unsplit(row: torch.Tensor) -> torch.Tensor:
    return row


def widened(row: Any) -> dict[str, torch.Tensor]:
    return split(torch.from_numpy(row.astype(np.int64)))


def _blocks(path: Path, numbers: range) -> Iterator[Any]:
    yield np.array(np.memmap(path, np.uint16, "r")[numbers.start : numbers.stop])


def of_litdata(path: Path, folder: Path) -> Make:
    import litdata

    size, part = path.stat().st_size // 2, 1000 * (SEQ_LEN + 1)
    loader = litdata.TokensLoader(block_size=SEQ_LEN + 1)
    if not folder.exists():
        litdata.optimize(
            partial(_blocks, path),
            [range(start, min(start + part, size)) for start in range(0, size, part)],
            str(folder),
            chunk_size=4 * part,
            item_loader=loader,
            num_workers=1,
            verbose=False,
        )
    dataset = litdata.StreamingDataset(str(folder), item_loader=loader, shuffle=False, transform=widened)
    return lambda workers: Closing(litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers))


def of_mosaic(path: Path, folder: Path) -> Make:
    import streaming

    tokens = np.memmap(path, np.uint16, "r")
    if not folder.exists():
        with streaming.MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{SEQ_LEN + 1}"}) as writer:
            for start in range(0, len(tokens) - SEQ_LEN, SEQ_LEN):
                writer.write({"tokens": tokens[start : start + SEQ_LEN + 1]})

    class Rows(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> Any:
            return widened(super().__getitem__(at)["tokens"])

    def make(workers: int) -> Any:  # a fresh dataset each time: one that was iterated here hangs in a forked worker
        streaming.base.util.clean_stale_shared_memory()
        return DataLoader(Rows(local=str(folder), batch_size=BATCH, shuffle=False), BATCH, num_workers=workers)

    return make


def contenders(path: Path, scratch: Path) -> dict[str, Make]:
    """By name, a function that makes a loader with so many workers. Peers that are not there are said, and left out."""
    stream = read_tokens(path, SEQ_LEN, dtype="uint16")
    found: dict[str, Make] = {
        OURS: lambda workers: unbroken.StatefulDataLoader(stream, BATCH, num_workers=workers),
        TORCH: lambda workers: DataLoader(Mapped(path, split), BATCH, num_workers=workers),
        UNSPLIT: lambda workers: DataLoader(Mapped(path, unsplit), BATCH, num_workers=workers),
    }
    for name, package, make in ((LITDATA, "litdata", of_litdata), (MOSAIC, "streaming", of_mosaic)):
        try:
            importlib.import_module(package)
        except Exception as error:  # they bring libraries of their own, which may not fit together
            print(f"tokens: {name} is left out: import {package} failed ({type(error).__name__}: {error})")
            continue
        found[name] = make(path, scratch / package)
    multiprocessing.set_start_method(None, force=True)  # litdata changes it for the whole process
    return found


def per_second(repeats: Repeats) -> Repeats:
    """Microseconds a batch as thousands of rows a second."""
    return {name: [BATCH / value * 1e3 for value in values] for name, values in repeats.items()}


def run(settings: Settings) -> list[Line]:
    path = settings.scratch / "tokens.bin"
    size = QUICK_BYTES if settings.quick else FILE_BYTES
    np.random.default_rng(0).integers(0, 50_000, size // 2, np.uint16).tofile(path)
    lines = []
    try:
        makers = contenders(path, settings.scratch)
        for workers, how, times in ((0, "inline", 1), (1, "1 worker", 10)):
            passes = {name: lambda make=make, workers=workers: make(workers) for name, make in makers.items()}
            wall, _ = steady_side_by_side(passes, settings, batches=1000, warm_up=100)
            speeds = per_second(wall)
            ours = medians(speeds)[OURS]
            goals = [Goal(f"{times}x {TORCH}", ours / medians(speeds)[TORCH], times, "x", at_least=True)]
            for name in (LITDATA, MOSAIC):
                if name in speeds:
                    goals.append(Goal(f"ahead of {name}", ours / medians(speeds)[name], 1, "x", at_least=True))
            lines.append(Line(f"token file, rows of {SEQ_LEN} + 1, {how}", "k rows/s", speeds, tuple(goals)))
    finally:
        if "streaming" in sys.modules:  # it leaves names in /dev/shm behind
            sys.modules["streaming"].base.util.clean_stale_shared_memory()
        for folder in ("litdata", "streaming"):
            shutil.rmtree(settings.scratch / folder, ignore_errors=True)
        path.unlink()
    return lines
