"""JSONL and Parquet to packed rows: tokens per second of one core, against the tokenizer alone and the others.

Everything runs pinned to as many cores as there are workers (one at least), worker and training process together, and
with TOKENIZERS_PARALLELISM=false, so that all contenders have the same cores and no more. Figures are tokens per second
per core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

import unbroken
from benchmarks.corpus import END_OF_TEXT, prepare
from benchmarks.measure import OURS, Goal, Line, Settings, interleaved, medians, pass_over
from benchmarks.pipelines import others

SEQ_LEN, BATCH = 2048, 8
RAW_DOCUMENTS = 16
ENCODE, ENCODE_BATCH = "raw encode", "raw encode_batch_fast"
WORKERS = (0, 1, 2)


def raw(encode: Any) -> float:
    """Tokens per second, of documents that are in memory."""
    began = perf_counter()
    tokens = encode()
    return tokens / (perf_counter() - began)


@contextmanager
def cores(number: int) -> Iterator[int]:
    """This process and its workers on so many cores, or as many as there are."""
    before = os.sched_getaffinity(0)
    chosen = sorted(before)[:number]
    os.sched_setaffinity(0, chosen)
    try:
        yield len(chosen)
    finally:
        os.sched_setaffinity(0, before)


def through(make: Any, workers: int, total: int) -> float:
    """Tokens per second per core of a whole epoch, of ``total`` tokens in all; the start of workers is in it.

    A list buffer leaves its last few tokens undelivered; the last row of each of our lanes is filled up.
    """
    with cores(max(1, workers)) as number:
        began = perf_counter()
        with pass_over(make(workers)) as batches:
            rows = sum(len(batch["input_ids"]) for batch in batches)
            took = perf_counter() - began
    tokens = min(total, rows * SEQ_LEN)
    if tokens < 0.95 * total:
        raise RuntimeError(f"a loader delivered {tokens} tokens, of {total}")
    return tokens / took / number


def shard(corpus: Path, texts: list[str]) -> Path:
    """The same documents as four JSONL files, for what shards by file; and as a Parquet file, which is returned."""
    for number in range(4):
        part = b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts[number::4])
        (corpus.parent / f"shard-{number}.jsonl").write_bytes(part)
    parquet = corpus.with_suffix(".parquet")
    pq.write_table(pa.table({"text": texts}), parquet, row_group_size=256)
    return parquet


def run(settings: Settings) -> list[Line]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    corpus, tokenizer = prepare(settings)
    texts = [orjson.loads(line)["text"] for line in corpus.open("rb")]
    parquet = shard(corpus, texts)
    end = tokenizer.token_to_id(END_OF_TEXT)

    def by_document() -> int:
        return sum(len(tokenizer.encode(text).ids) for text in texts)

    def by_batch() -> int:
        groups = (texts[at : at + RAW_DOCUMENTS] for at in range(0, len(texts), RAW_DOCUMENTS))
        return sum(len(found.ids) for group in groups for found in tokenizer.encode_batch_fast(group))

    def ours(source: unbroken.Stage) -> Any:
        stream = source.tokenize(tokenizer, append=END_OF_TEXT).pack(SEQ_LEN)
        return lambda workers: unbroken.StatefulDataLoader(stream, BATCH, num_workers=workers)

    total = by_document() + len(texts)
    makers = {OURS: ours(unbroken.read_jsonl(corpus)), f"{OURS}, Parquet": ours(unbroken.read_parquet(parquet))}
    makers |= others(corpus, tokenizer, end, SEQ_LEN, BATCH)
    runs: dict[str, Any] = {}
    for name, encode in ((ENCODE, by_document), (ENCODE_BATCH, by_batch)):
        runs[name] = lambda encode=encode: _on_one(encode)
    for workers in WORKERS:
        for name, make in makers.items():
            if not (workers and "threads" in name):
                runs[f"{name} {workers}"] = lambda make=make, workers=workers: through(make, workers, total)
    speeds = interleaved(runs, settings.repeats())
    return [_line(speeds, workers, list(makers)) for workers in WORKERS]


def _on_one(encode: Any) -> float:
    with cores(1):
        return raw(encode)


def _line(speeds: dict[str, list[float]], workers: int, names: list[str]) -> Line:
    repeats = {name: speeds[f"{name} {workers}"] for name in names if f"{name} {workers}" in speeds}
    repeats |= {ENCODE_BATCH: speeds[ENCODE_BATCH], ENCODE: speeds[ENCODE]}
    repeats = {name: [value / 1000 for value in values] for name, values in repeats.items()}
    middle = medians(repeats)
    mine = [name for name in repeats if name.startswith(OURS)]
    goals = [
        Goal(
            f"{name}: at least 90 % of {ENCODE_BATCH}",
            middle[name] / middle[ENCODE_BATCH] * 100,
            90,
            "%",
            at_least=True,
        )
        for name in mine
    ]
    for peer in repeats:
        if peer not in mine and not peer.startswith("raw"):
            goals.append(Goal(f"ahead of {peer}", middle[OURS] / middle[peer], 1, "x", at_least=True))
    how = f"{workers} worker{'s' * (workers != 1)}" if workers else "inline"
    return Line(f"JSONL to packed rows of {SEQ_LEN}, {how}, per core", "k tokens/s", repeats, tuple(goals))
