"""What a delivered batch costs in its lane's ledger, beside whole hashes of as much."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import xxhash

from benchmarks.datasets import ROW_TOKENS
from benchmarks.measure import OURS, Line, Settings, at_most, interleaved
from unbroken.ledger import digest, entry_of, fold_one


def timed(call: Callable[[Any], Any], value: Any, calls: int) -> float:
    """Microseconds a call."""
    began = perf_counter()
    for _ in range(calls):
        call(value)
    return (perf_counter() - began) / calls * 1e6


def entry(samples: list[torch.Tensor]) -> int:
    """All that is done for a batch: its last sample, by which a resume is checked, and the ledger."""
    return fold_one(0, entry_of(samples, digest(samples[-1])))


def run(settings: Settings) -> list[Line]:
    batch = torch.randint(0, 50_000, (8, ROW_TOKENS), generator=torch.Generator().manual_seed(0))
    whole = batch.numpy().tobytes()
    contenders = {
        OURS: (entry, list(batch)),
        "of the whole as one": (digest, batch),
        "xxh3 of 64 kB": (xxhash.xxh3_64_intdigest, whole[:65536]),
        "crc32": (zlib.crc32, whole),
        "blake2b": (lambda data: hashlib.blake2b(data).digest(), whole),
    }
    calls = settings.batches(2000)
    runs = {
        name: lambda call=call, value=value: timed(call, value, calls) for name, (call, value) in contenders.items()
    }
    times = interleaved(runs, settings.repeats(9))
    return [Line("digest and ledger of a 131 kB batch", "µs", times, (at_most(times, 5, "µs"),))]
