"""The memory of a worker: against the size of the corpus, and over many batches."""

from __future__ import annotations

from itertools import islice
from typing import Any

import psutil

import unbroken
from benchmarks.bigfiles import write_jsonl
from benchmarks.measure import OURS, Goal, Line, Settings, pass_over

SIZES = (1_000_000_000, 4_000_000_000)
QUICK_SIZES = (20_000_000, 80_000_000)
BATCHES = 50_000


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def worker_memory(loader: Any, batches: int, first: int) -> tuple[float, float]:
    """Unshared memory of the worker in MB: after ``first`` batches, and after ``batches`` of them."""
    with pass_over(loader) as source:
        for _ in islice(source, first):
            pass
        worker = psutil.Process().children()[0]
        early = worker.memory_full_info().uss / 1e6
        for _ in islice(source, batches - first):
            pass
        return early, worker.memory_full_info().uss / 1e6


def run(settings: Settings) -> list[Line]:
    sizes = QUICK_SIZES if settings.quick else SIZES
    batches = settings.batches(BATCHES)
    found: dict[str, list[float]] = {}
    grown = 0.0
    for size in sizes:
        path = settings.scratch / f"{size}.jsonl"
        write_jsonl(path, size)
        stream = unbroken.read_jsonl(path).shuffle(6400, seed=0).tokenize(ids_of).pack(512)
        loader = unbroken.StatefulDataLoader(stream.repeat(), 8, num_workers=1)
        early, late = worker_memory(loader, batches if size == sizes[0] else batches // 10, batches // 10)
        found[f"{size / 1e9:g} GB"] = [early]
        if size == sizes[0]:
            grown = late - early
            found[f"{size / 1e9:g} GB, after {batches} batches"] = [late]
        path.unlink()
    small, large = found[f"{sizes[0] / 1e9:g} GB"][0], found[f"{sizes[1] / 1e9:g} GB"][0]
    goals = (
        Goal("4 times the corpus: no more memory (10 MB)", large - small, 10, "MB"),
        Goal(f"after {batches} batches: no more memory (10 MB)", grown, 10, "MB"),
    )
    return [Line("memory of the worker, unshared", "MB", {OURS: [small], **found}, goals)]
