"""Packing alone: nanoseconds a token of each layout beside the tokenizer's, and how full the rows are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from time import process_time
from typing import Any, ClassVar, final

import numpy as np
import orjson

from benchmarks.corpus import prepare
from benchmarks.measure import Goal, Line, Settings, interleaved, medians
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.streams.course import Course
from unbroken.streams.stage import Stage, StageIterator

SEQ_LEN, LONG_SEQ_LEN = 2048, 8192
DOCUMENTS = 8000
MEAN, SIGMA = 600, 1.2  # of the lengths of web documents: log-normal, in tokens
RAW_DOCUMENTS = 16
RAW = "raw encode_batch_fast"


@final
@dataclass(frozen=True, repr=False, eq=False)
class InMemory(Stage):
    """Documents of a list, all in one lane."""

    NAME: ClassVar[str] = "in_memory"

    documents: list[dict[str, Any]]

    @property
    def sources(self) -> tuple[Stage, ...]:
        return ()

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return _InMemoryIterator(self.documents)

    def fields(self) -> dict[str, Any]:
        return {}

    def arguments(self) -> str:
        return ""


@final
class _InMemoryIterator(StageIterator):
    def __init__(self, documents: list[dict[str, Any]]) -> None:
        self._documents = iter(documents)
        self._next = 0

    def __next__(self) -> Any:
        self._next += 1
        return next(self._documents)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError("a benchmark of packing resumes nothing")

    def close(self) -> None:
        pass

    def where(self) -> str:
        return f"document {self._next - 1}"

    def origin(self) -> tuple[Origin, ...]:
        return ()


def run(settings: Settings) -> list[Line]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, settings.batches(DOCUMENTS)).astype(int) + 1
    stream = InMemory([{"input_ids": generator.integers(1, 50_000, n).astype(np.int32)} for n in lengths.tolist()])
    corpus, tokenizer = prepare(settings)
    texts = [orjson.loads(line)["text"] for line in corpus.open("rb")][: settings.batches(1000)]

    def raw() -> float:
        groups = [texts[at : at + RAW_DOCUMENTS] for at in range(0, len(texts), RAW_DOCUMENTS)]
        began = process_time()
        tokens = sum(len(found.ids) for group in groups for found in tokenizer.encode_batch_fast(group))
        return (process_time() - began) / tokens * 1e9

    def packing(stage: Stage) -> float:
        """A position is taken after every row, as a loader does."""
        began, rows = process_time(), stage.open(Lane(0, 1))
        for _ in rows:
            rows.state_dict()
        return (process_time() - began) / int(lengths.sum()) * 1e9

    def fill(seq_len: int) -> float:
        """Percent of the tokens in rows that are of documents, but for the last row."""
        rows = list(stream.pack(seq_len, "best_fit", last="drop").open(Lane(0, 1)))
        return sum(np.count_nonzero(row["input_ids"]) for row in rows) / (len(rows) * seq_len) * 100

    names = ("best_fit", "concat")
    layouts = {layout: stream.pack(SEQ_LEN, layout) for layout in names}
    contenders = {name: lambda stage=stage: packing(stage) for name, stage in layouts.items()}
    times = interleaved({**contenders, RAW: raw}, settings.repeats())
    middle = medians(times)
    goals = tuple(Goal(f"{name}: at most 3 % of {RAW}", middle[name] / middle[RAW] * 100, 3, "%") for name in names)
    lines = [Line(f"packing into rows of {SEQ_LEN}", "ns a token", times, goals)]
    for seq_len in (SEQ_LEN, LONG_SEQ_LEN):
        full = fill(seq_len)
        goal = Goal("at least 99 %", full, 99, "%", at_least=True)
        lines.append(Line(f"how full best_fit's rows of {seq_len} are", "%", {"best_fit": [full]}, (goal,)))
    return lines
