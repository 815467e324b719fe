"""The digest of a delivered batch, beside whole hashes of as much."""

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
from unbroken.ledger import digest


def timed(call: Callable[[Any], Any], value: Any, calls: int) -> float:
    """Microseconds a call."""
    began = perf_counter()
    for _ in range(calls):
        call(value)
    return (perf_counter() - began) / calls * 1e6


def run(settings: Settings) -> list[Line]:
    batch = torch.randint(0, 50_000, (8, ROW_TOKENS), generator=torch.Generator().manual_seed(0))
    whole = batch.numpy().tobytes()
    contenders = {
        OURS: (digest, batch),
        "xxh3 of 64 kB": (xxhash.xxh3_64_intdigest, whole[:65536]),
        "crc32": (zlib.crc32, whole),
        "blake2b": (lambda data: hashlib.blake2b(data).digest(), whole),
    }
    calls = settings.batches(2000)
    runs = {
        name: lambda call=call, value=value: timed(call, value, calls) for name, (call, value) in contenders.items()
    }
    times = interleaved(runs, settings.repeats(9))
    return [Line("digest of a 131 kB batch", "µs", times, (at_most(times, 5, "µs"),))]
