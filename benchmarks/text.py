"""JSONL to packed rows: tokens per second of one core, against the tokenizer alone.

Everything runs pinned to one core, worker and training process together, and with TOKENIZERS_PARALLELISM=false, so that
all contenders have the same core and no more; a figure is then tokens per second per core, whatever the processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import orjson
import torch
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset

import unbroken
from benchmarks.corpus import END_OF_TEXT, prepare
from benchmarks.measure import OURS, Goal, Line, Settings, interleaved, medians, pass_over
from benchmarks.peers import LOADERS

SEQ_LEN, BATCH = 2048, 8
RAW_DOCUMENTS = 16
ENCODE, ENCODE_BATCH = "raw encode", "raw encode_batch_fast"


class ListBuffer(IterableDataset[Any]):
    """The packer that trainers write by hand: a Python list of tokens, which is also the state."""

    def __init__(self, corpus: Path, tokenizer: Tokenizer, end: int) -> None:
        self.corpus, self.tokenizer, self.end = corpus, tokenizer, end
        self.documents, self.tokens = 0, []

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        with self.corpus.open("rb") as lines:
            for number, line in enumerate(lines):
                if number < self.documents:
                    continue
                self.documents += 1
                self.tokens.extend(self.tokenizer.encode(orjson.loads(line)["text"]).ids)
                self.tokens.append(self.end)
                while len(self.tokens) >= SEQ_LEN + 1:
                    row = torch.tensor(self.tokens[: SEQ_LEN + 1])
                    self.tokens = self.tokens[SEQ_LEN:]
                    yield {"input_ids": row[:-1], "labels": row[1:]}

    def state_dict(self) -> dict[str, Any]:
        return {"documents": self.documents, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.documents, self.tokens = state["documents"], state["tokens"]


def raw(encode: Any) -> float:
    """Tokens per second, of documents that are in memory."""
    began = perf_counter()
    tokens = encode()
    return tokens / (perf_counter() - began)


def through(loader: Any, total: int) -> float:
    """Tokens per second of a whole epoch, of ``total`` tokens in all; the start of a worker is in it.

    A list buffer leaves its last few tokens undelivered; the last row of each of our lanes is filled up.
    """
    began = perf_counter()
    with pass_over(loader) as batches:
        rows = sum(len(batch["input_ids"]) for batch in batches)
        took = perf_counter() - began
    tokens = min(total, rows * SEQ_LEN)
    if tokens < 0.95 * total:
        raise RuntimeError(f"a loader delivered {tokens} tokens, of {total}")
    return tokens / took


def run(settings: Settings) -> list[Line]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    corpus, tokenizer = prepare(settings)
    texts = [orjson.loads(line)["text"] for line in corpus.open("rb")]
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream = unbroken.read_jsonl(corpus).tokenize(tokenizer, append=END_OF_TEXT).pack(SEQ_LEN)

    def by_document() -> int:
        return sum(len(tokenizer.encode(text).ids) for text in texts)

    def by_batch() -> int:
        groups = (texts[at : at + RAW_DOCUMENTS] for at in range(0, len(texts), RAW_DOCUMENTS))
        return sum(len(found.ids) for group in groups for found in tokenizer.encode_batch_fast(group))

    total = by_document() + len(texts)

    def ours(workers: int) -> float:
        return through(unbroken.StatefulDataLoader(stream, BATCH, num_workers=workers), total)

    def list_buffer(workers: int) -> float:
        dataset = ListBuffer(corpus, tokenizer, end)
        return through(LOADERS["torchdata"](dataset, BATCH, num_workers=workers), total)

    runs: dict[str, Any] = {ENCODE: lambda: raw(by_document), ENCODE_BATCH: lambda: raw(by_batch)}
    for workers in (0, 1):
        runs[f"{OURS} {workers}"] = lambda workers=workers: ours(workers)
        runs[f"list buffer {workers}"] = lambda workers=workers: list_buffer(workers)
    speeds = interleaved(runs, settings.repeats())
    return [_line(speeds, workers, how) for workers, how in ((0, "inline"), (1, "1 worker on the same core"))]


def _line(speeds: dict[str, list[float]], workers: int, how: str) -> Line:
    peer = "torchdata, list buffer"
    repeats = {OURS: speeds[f"{OURS} {workers}"], peer: speeds[f"list buffer {workers}"]}
    repeats |= {ENCODE_BATCH: speeds[ENCODE_BATCH], ENCODE: speeds[ENCODE]}
    repeats = {name: [value / 1000 for value in values] for name, values in repeats.items()}
    middle = medians(repeats)
    goals = (
        Goal(f"at least 90 % of {ENCODE_BATCH}", middle[OURS] / middle[ENCODE_BATCH] * 100, 90, "%", at_least=True),
        Goal(f"ahead of {peer}", middle[OURS] / middle[peer], 1, "x", at_least=True),
    )
    return Line(f"JSONL to packed rows of {SEQ_LEN}, one core, {how}", "k tokens/s", repeats, goals)
