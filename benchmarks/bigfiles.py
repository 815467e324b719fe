"""Files of 2 GB: time to the first batch at 90 % of them, and the memory of a worker, against the size of the corpus.

The clock runs from before the loader is made until its first batch is there. The bytes that a resume reads are counted
by the system (``rchar`` of /proc/self/io); what is memory-mapped is not in them.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

import unbroken
from benchmarks.measure import OURS, Goal, Line, Settings, at_most_times, interleaved, pass_over
from benchmarks.resume import FRESH, first_batch, once

SIZE, QUICK_SIZE = 2_000_000_000, 50_000_000
BATCH, WINDOW, LANES = 8, 640, 64
CHUNK = 4 << 20
_LETTERS = np.frombuffer(b"etaoin shrdlu cmfwyp vbgkqj xz. ", np.uint8)


def documents(size: int) -> Iterator[str]:
    """Texts of about 2 kB, ``size`` bytes in all, of letters drawn at random: gzip halves them, about."""
    rng, made = np.random.default_rng(0), 0
    while made < size:
        block = _LETTERS[np.minimum(rng.geometric(0.15, 1 << 20), 32) - 1].tobytes().decode()
        ends = np.cumsum(rng.integers(500, 3500, 1024))
        for start, end in pairwise(ends):
            if end > len(block) or made >= size:
                break
            made += int(end - start)
            yield block[start:end]


def write_jsonl(path: Path, size: int) -> int:
    """Returns the number of rows, as the others do."""
    rows = 0
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    level = {"compresslevel": 1} if path.suffix == ".gz" else {}
    with opened(path, "wb", **level) as file:
        for text in documents(size):
            file.write(orjson.dumps({"text": text}) + b"\n")
            rows += 1
    return rows


def write_parquet(path: Path, size: int) -> int:
    schema = pa.schema([("text", pa.string())])
    texts, count = documents(size), 0
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        while rows := list(islice(texts, 2000)):
            file.write_table(pa.table({"text": rows}, schema))
            count += len(rows)
    return count


def write_tar(path: Path, size: int) -> int:
    with tarfile.open(path, "w") as file:
        for number, text in enumerate(documents(size)):
            member = tarfile.TarInfo(f"{number:09d}.txt")
            member.size = len(text)
            file.addfile(member, io.BytesIO(text.encode()))
    return number + 1


def as_is(rows: list[Any]) -> list[Any]:
    return rows


def bytes_read() -> int:
    """By this process, so far."""
    return int(Path("/proc/self/io").read_text("ascii").split()[1])


def resume_line(what: str, source: unbroken.Stage, rows: int, lanes: int, settings: Settings) -> Line:
    stream = source.shuffle(WINDOW, seed=0)

    def make() -> Any:
        return unbroken.StatefulDataLoader(stream, BATCH, collate_fn=as_is, lanes=lanes)

    loader = make()
    with pass_over(loader) as batches:
        for _ in islice(batches, rows // BATCH * 9 // 10):
            pass
        state = loader.state_dict()

    before = bytes_read()
    once(make, state)
    read = bytes_read() - before
    runs = {OURS: lambda: first_batch(make, state), FRESH: lambda: first_batch(make)}
    times = interleaved(runs, settings.repeats())
    opened = min(lanes, BATCH)
    most = opened * CHUNK / 1e6
    goals = (
        at_most_times(times, 1.5, FRESH),
        Goal(f"reads at most a chunk a lane opened ({opened})", read / 1e6, most, "MB"),
    )
    return Line(f"first batch at 90 % of {what}", "ms", times, goals)


def run(settings: Settings) -> list[Line]:
    size = QUICK_SIZE if settings.quick else SIZE
    folder, name = settings.scratch, f"{size / 1e9:g} GB"
    lines = []
    for what, path, write, read, lanes in (
        ("JSONL", "big.jsonl", write_jsonl, unbroken.read_jsonl, LANES),
        ("Parquet", "big.parquet", write_parquet, unbroken.read_parquet, LANES),
        ("tar", "big.tar", write_tar, unbroken.read_tar, LANES),
        ("JSONL in gz", "big.jsonl.gz", write_jsonl, unbroken.read_jsonl, 1),
    ):
        rows = write(folder / path, size)
        lines.append(resume_line(f"{name} of {what}", read(folder / path), rows, lanes, settings))
        (folder / path).unlink()
    return lines
