"""What the tests of pack share: documents, and the rows of each layout told token by token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import numpy as np

from tests.streams.runs import write_jsonl
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.streams.course import Course
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage, StageIterator

SEQ_LEN = 6
LENGTHS = [0, 1, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1, 10 * SEQ_LEN]
OVERFLOWS = ["split", "truncate", "drop"]
LASTS = ["pad", "open", "drop"]
ALL_COLUMNS: dict[str, Any] = {"document_ids": True, "cu_seqlens": True}

Row = dict[str, list[int]]


class Token(NamedTuple):
    token: int
    label: int
    place: int
    document: int


def lengths_in_every_order() -> list[int]:
    """Each of the awkward lengths before and after each, itself included."""
    return [length for first in LENGTHS for second in LENGTHS for length in (first, second)]


def documents_of(lengths: Iterable[int]) -> list[list[int]]:
    """Tokens that are all different, from 1 on."""
    documents: list[list[int]] = []
    first = 1
    for length in lengths:
        documents.append(list(range(first, first + length)))
        first += length
    return documents


def stream_of(folder: Path, documents: list[list[int]]) -> Stage:
    return read_jsonl(write_jsonl(folder / "a.jsonl", [{"input_ids": document} for document in documents]))


def web_documents(count: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """Lengths as on the web: log-normal, 600 tokens in the mean, sigma 1.2."""
    lengths = np.random.default_rng(seed).lognormal(np.log(600) - 1.2**2 / 2, 1.2, count)
    return [np.full(max(1, int(length)), number, np.int32) for number, length in enumerate(lengths)]


def kept_of(document: list[int], seq_len: int, overflow: str) -> list[int]:
    if len(document) <= seq_len or overflow == "split":
        return document
    return document[:seq_len] if overflow == "truncate" else []


def told(documents: list[list[int]], seq_len: int, overflow: str) -> list[list[Token]]:
    """What is kept of each document, each token with its label, its place and the number of the document."""
    kept = [kept_of(document, seq_len, overflow) for document in documents]
    return [
        [
            Token(token, document[place + 1] if place + 1 < len(document) else -100, place, number)
            for place, token in enumerate(document)
        ]
        for number, document in enumerate(kept)
    ]


def row_of(tokens: list[Token], length: int, pad_id: int) -> Row:
    """A row of all columns, filled up to ``length``."""
    missing = length - len(tokens)
    order = list(dict.fromkeys(token.document for token in tokens))
    ends = [n + 1 for n in range(len(tokens)) if n + 1 == len(tokens) or tokens[n].document != tokens[n + 1].document]
    return {
        "input_ids": [token.token for token in tokens] + [pad_id] * missing,
        "labels": [token.label for token in tokens] + [-100] * missing,
        "position_ids": [token.place for token in tokens] + [0] * missing,
        "document_ids": [order.index(token.document) for token in tokens] + [-1] * missing,
        "cu_seqlens": ([0, *ends] + [length] * length)[: length + 1],
    }


def rows_of(packed: list[list[Token]], seq_len: int, last: str, pad_id: int) -> list[Row]:
    """The rows, the last one as it is asked for."""
    if packed and len(packed[-1]) < seq_len and last == "drop":
        packed = packed[:-1]
    lengths = [seq_len] * len(packed)
    if packed and last == "open":
        lengths[-1] = len(packed[-1])
    return [row_of(tokens, length, pad_id) for tokens, length in zip(packed, lengths, strict=True)]


def concat_rows(
    documents: list[list[int]], seq_len: int, overflow: str = "split", last: str = "pad", pad_id: int = 0
) -> list[Row]:
    """The rows of layout concat."""
    tokens = [token for document in told(documents, seq_len, overflow) for token in document]
    cut = [tokens[start : start + seq_len] for start in range(0, len(tokens), seq_len)]
    return rows_of(cut, seq_len, last, pad_id)


def windows_of(documents: list[list[Token]], seq_len: int, window: int) -> list[list[list[Token]]]:
    most = max(1, window // seq_len) * seq_len - min(128, seq_len // 8)
    windows: list[list[list[Token]]] = []
    for document in filter(None, documents):
        if not windows or sum(map(len, windows[-1])) + len(document) > most:
            windows.append([])
        windows[-1].append(document)
    return windows


def fitted(documents: list[list[Token]], seq_len: int) -> list[list[Token]]:
    """The rows of a window: every row is looked at for every piece. The emptiest comes last."""
    pieces = [document[at : at + seq_len] for document in documents for at in range(0, len(document), seq_len)]
    rows: list[list[int]] = []
    for number in sorted(range(len(pieces)), key=lambda n: -len(pieces[n])):
        room = [seq_len - sum(len(pieces[n]) for n in row) - len(pieces[number]) for row in rows]
        fits = [n for n, left in enumerate(room) if left >= 0]
        if fits:
            rows[min(fits, key=lambda n: (room[n], n))].append(number)
        else:
            rows.append([number])
    rows.sort(key=lambda row: row[0])
    packed = [[token for n in sorted(row) for token in pieces[n]] for row in rows]
    emptiest = packed.pop(packed.index(min(packed, key=len)))
    return [*packed, emptiest]


def best_fit_rows(
    documents: list[list[int]], seq_len: int, window: int, overflow: str = "split", last: str = "pad", pad_id: int = 0
) -> list[Row]:
    """The rows of layout best_fit."""
    windows = [fitted(held, seq_len) for held in windows_of(told(documents, seq_len, overflow), seq_len, window)]
    return rows_of([row for rows in windows for row in rows], seq_len, last, pad_id)


def found_rows(stage: Stage, lane: Lane | None = None) -> list[Row]:
    """The rows of a lane as lists; their types are checked."""
    rows = list(stage.open(lane or Lane(0, 1)))
    for row in rows:
        assert {str(value.dtype) for name, value in row.items() if name != "cu_seqlens"} == {"int64"}
        assert "cu_seqlens" not in row or row["cu_seqlens"].dtype == np.int32
    return [{name: value.tolist() for name, value in row.items()} for row in rows]


def gone_on(stage: Stage, state: str) -> StageIterator:
    """A fresh iterator of a changed stage at a position."""
    rows = stage.open(Lane(0, 1))
    rows.load_state_dict(json.loads(state))
    return rows


def tokens_in(rows: Iterable[Mapping[str, Any]], pad_id: int = 0) -> Iterator[int]:
    return (int(token) for row in rows for token in row["input_ids"] if token != pad_id)


@final
@dataclass(frozen=True, repr=False, eq=False)
class InMemory(Stage):
    """Rows of a list, dealt to lanes one by one."""

    NAME: ClassVar[str] = "in_memory"

    rows: list[Any]

    @property
    def sources(self) -> tuple[Stage, ...]:
        return ()

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return _InMemoryIterator(self.rows[lane.index :: lane.count])

    def fields(self) -> dict[str, Any]:
        return {}

    def arguments(self) -> str:
        return ""


@final
class _InMemoryIterator(StageIterator):
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows
        self._next = 0

    def __next__(self) -> Any:
        if self._next == len(self._rows):
            raise StopIteration
        self._next += 1
        return self._rows[self._next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]

    def close(self) -> None:
        pass

    def where(self) -> str:
        return f"row {self._next - 1}"

    def origin(self) -> tuple[Origin, ...]:
        return (Origin("in_memory", "", self._next - 1),)
