"""The text pipelines of others, as people write them: JSONL to packed rows. Each is imported only where it is run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset

from benchmarks.peers import LOADERS

GRAIN, GRAIN_THREADS, DATASETS, LIST_BUFFER = "Grain", "Grain, 16 threads", "datasets + list buffer", "list buffer"


class ListBuffer(IterableDataset[Any]):
    """The packer that trainers write by hand: a Python list of tokens, which is also the state."""

    def __init__(self, corpus: Path, tokenizer: Tokenizer, end: int, seq_len: int) -> None:
        self.corpus, self.tokenizer, self.end, self.seq_len = corpus, tokenizer, end, seq_len
        self.documents, self.tokens = 0, []

    def texts(self) -> Iterator[str]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        with self.corpus.open("rb") as lines:
            for line in islice(lines, first + step * self.documents, None, step):
                yield orjson.loads(line)["text"]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        size = self.seq_len
        for text in self.texts():
            self.documents += 1
            self.tokens.extend(self.tokenizer.encode(text).ids)
            self.tokens.append(self.end)
            while len(self.tokens) >= size + 1:
                row = torch.tensor(self.tokens[: size + 1])
                self.tokens = self.tokens[size:]
                yield {"input_ids": row[:-1], "labels": row[1:]}

    def state_dict(self) -> dict[str, Any]:
        return {"documents": self.documents, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.documents, self.tokens = state["documents"], state["tokens"]


class Streamed(ListBuffer):
    """The same list, fed by a streaming dataset of ``datasets``, which shards itself by worker."""

    def texts(self) -> Iterator[str]:
        import datasets

        shards = [str(path) for path in sorted(self.corpus.parent.glob("shard-*.jsonl"))]
        stream = datasets.load_dataset("json", data_files=shards, split="train", streaming=True)
        for row in stream:
            yield row["text"]


class IndexedJsonl:
    """JSON lines by number, for Grain: the offset of each line is looked for at the start."""

    def __init__(self, corpus: Path) -> None:
        self.corpus = corpus
        lengths = [len(line) for line in corpus.open("rb")]
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.file: Any = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        if self.file is None:
            self.file = self.corpus.open("rb")
        # One system call, so that threads may share the file.
        start, stop = int(self.offsets[number]), int(self.offsets[number + 1])
        row: dict[str, Any] = orjson.loads(os.pread(self.file.fileno(), stop - start, start))
        return row

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "file": None}


class Encode:
    """A transform of Grain: text to ids."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.tokenizer, self.end = tokenizer, end

    def __call__(self, row: dict[str, Any], rng: Any = None) -> dict[str, Any]:
        return {"input_ids": np.array([*self.tokenizer.encode(row["text"]).ids, self.end], np.int64)}


def grain_pipeline(
    corpus: Path, tokenizer: Tokenizer, end: int, seq_len: int, batch: int, workers: int, threads: int
) -> Any:
    import grain
    from grain.experimental import ConcatThenSplitIterDataset

    read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads and 500)
    rows = (
        grain.MapDataset.source(IndexedJsonl(corpus)).seed(0).random_map(Encode(tokenizer, end)).to_iter_dataset(read)
    )
    packed = ConcatThenSplitIterDataset(rows, length_struct={"input_ids": seq_len + 1}).batch(batch)
    if workers:
        packed = packed.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return packed


def others(corpus: Path, tokenizer: Tokenizer, end: int, seq_len: int, batch: int) -> dict[str, Callable[[int], Any]]:
    """By name, a function that makes a loader with so many workers. Batches are dicts with ``input_ids``."""

    def by_hand(kind: type[ListBuffer]) -> Callable[[int], Any]:
        def make(workers: int) -> Any:  # a fresh dataset each time: its place is kept in it
            return LOADERS["torchdata"](kind(corpus, tokenizer, end, seq_len), batch, num_workers=workers)

        return make

    def of_grain(threads: int) -> Callable[[int], Any]:
        return lambda workers: grain_pipeline(corpus, tokenizer, end, seq_len, batch, workers, threads)

    found = {LIST_BUFFER: by_hand(ListBuffer)}
    if importlib.util.find_spec("datasets"):
        found[DATASETS] = by_hand(Streamed)
    if importlib.util.find_spec("grain"):
        found |= {GRAIN: of_grain(0), GRAIN_THREADS: of_grain(16)}
    return found
