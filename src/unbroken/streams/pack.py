"""Pack: documents of any length to rows of equal length."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from unbroken.errors import BadRow, InvalidState
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.streams.arguments import check_whole, read_state
from unbroken.streams.course import Course
from unbroken.streams.stage import Stage, StageIterator

__all__ = ["Pack"]

Tokens: TypeAlias = npt.NDArray[np.int64]

_NO_LABEL = -100
_NO_DOCUMENT = -1
# Rows are cut from blocks of at least this many tokens, so that short rows cost no call each.
_BLOCK_TOKENS = 1 << 11
# One anchor for so many documents: the more, the less a resume makes again.
_DOCUMENTS_PER_ANCHOR = 1


@final
@dataclass(frozen=True, repr=False, eq=False)
class Pack(Stage):
    """Rows of ``seq_len`` tokens, cut from the documents of a lane one after another (layout ``"concat"``).

    A document is a row with ``input_ids``: whole numbers [tokens], of any length, 0 too. Each row is a dict of int64
    arrays [seq_len]:

    * ``input_ids``: the tokens. Nothing is dropped; only the last row of a lane's epoch is filled up with ``pad_id``.
    * ``labels``: the token that comes next where it is of the same document, be it in the next row; else -100.
    * ``position_ids``: the place of the token in its document, from 0; 0 where padded.
    * ``document_ids``, if asked for: which document of the row the token belongs to, from 0; -1 where padded.

    ``seq_len`` may change at a resume: the tokens that were not delivered come first.

    Raises ``TypeError`` and ``ValueError`` where ``seq_len`` is no whole number of at least 1, ``pad_id`` no whole
    number or ``layout`` is not known. The iterator raises ``BadRow`` where a row is no document.
    """

    NAME: ClassVar[str] = "pack"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {
        "seq_len": "safe",
        "layout": "order",
        "pad_id": "data",
        "document_ids": "safe",
    }

    source: Stage
    seq_len: int
    layout: str = "concat"
    pad_id: int = 0
    document_ids: bool = False

    def __post_init__(self) -> None:
        check_whole("pack", "seq_len", self.seq_len, 1)
        check_whole("pack", "pad_id", self.pad_id, np.iinfo(np.int64).min)
        if not isinstance(self.document_ids, bool):
            raise TypeError(f"pack: document_ids must be True or False, but got {self.document_ids!r}.")
        if self.layout != "concat":
            raise ValueError(f"pack: layout must be 'concat', the one there is, but got {self.layout!r}.")

    @property
    def sources(self) -> tuple[Stage, ...]:
        return (self.source,)

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return _PackIterator(self.source.begin(lane, course), self)

    def fields(self) -> dict[str, Any]:
        return {
            "seq_len": self.seq_len,
            "layout": self.layout,
            "pad_id": self.pad_id,
            "document_ids": self.document_ids,
        }

    def arguments(self) -> str:
        given = {"pad_id": self.pad_id, "document_ids": self.document_ids}
        return ", ".join([str(self.seq_len), *(f"{name}={value}" for name, value in given.items() if value)])


class _Block(NamedTuple):
    """Documents laid end to end: int64 arrays [tokens], and the place after the last token of each document."""

    tokens: Tokens
    labels: Tokens
    positions: Tokens
    ends: list[int]


@final
class _PackIterator(StageIterator):
    """Position: the number of the next document in the lane and how many of its tokens were delivered; an anchor, and
    how many documents to pass over from there. No token is in it: documents are made again.
    """

    def __init__(self, source: StageIterator, stage: Pack) -> None:
        self._source = source
        self._stage = stage
        self._documents: list[Tokens] = []  # those not delivered to their end
        self._head = 0  # tokens of the first of them that were delivered before the block
        self._block = _laid_out([], 0)
        self._at = 0  # the next token in the block
        self._skip = 0  # documents still to pass over after a load
        self._next = 0  # number of the document that the source makes next
        self._anchors = [(0, source.state_dict())]  # (number of a document, the source's state before it)

    def __next__(self) -> dict[str, Tokens]:
        stage = self._stage
        if self._at + stage.seq_len > len(self._block.tokens):
            self._fill()
        tokens, labels, positions, _ = self._block
        start, stop = self._at, min(self._at + stage.seq_len, len(tokens))
        if start == stop:
            raise StopIteration
        self._at = stop
        row = {
            "input_ids": _cut(tokens[start:stop], stage.seq_len, stage.pad_id),
            "labels": _cut(labels[start:stop], stage.seq_len, _NO_LABEL),
            "position_ids": _cut(positions[start:stop], stage.seq_len, 0),
        }
        if stage.document_ids:
            begins = positions[start:stop] == 0
            row["document_ids"] = _cut(np.cumsum(begins) - begins[0], stage.seq_len, _NO_DOCUMENT)
        return row

    def _fill(self) -> None:
        """A new block: what is left of the last one, and documents until there is enough for a row."""
        document, self._head = self._place()
        del self._documents[:document]
        self._block, self._at = _laid_out([], 0), 0
        first = self._next + self._skip - len(self._documents)
        while len(self._anchors) > 1 and self._anchors[1][0] <= first:
            del self._anchors[0]
        held = sum(map(len, self._documents)) - self._head
        try:
            while self._skip:
                self._make()
                self._skip -= 1
            while held < max(self._stage.seq_len, _BLOCK_TOKENS):
                self._documents.append(self._make())
                held += len(self._documents[-1])
        except StopIteration:
            pass
        if self._skip or self._head > (len(self._documents[0]) if self._documents else 0):
            raise InvalidState(
                f"pack: document {first} of a lane was begun ({self._head} tokens), but now it is shorter or is not "
                "there: what it is made from has changed.\nRebuild the stream as it was when the position was saved."
            )
        self._block = _laid_out(self._documents, self._head)

    def _make(self) -> Tokens:
        document = _tokens_of(next(self._source), self._source)
        self._next += 1
        if not self._next % _DOCUMENTS_PER_ANCHOR:
            self._anchors.append((self._next, self._source.state_dict()))
        return document

    def _place(self) -> tuple[int, int]:
        """The document behind the last delivered token (its place in the list), and the tokens delivered of it."""
        if not self._at:
            return 0, self._head
        ends = self._block.ends
        document = bisect_left(ends, self._at)
        if ends[document] == self._at:
            return document + 1, 0
        return document, self._at - ends[document - 1] if document else self._at + self._head

    def state_dict(self) -> dict[str, Any]:
        document, token = self._place()
        number = self._next + self._skip - len(self._documents) + document
        place = bisect_right(self._anchors, number, key=_number_of) - 1
        at, anchor = self._anchors[place]
        return {"anchor": anchor, "since": number - at, "document": number, "token": token}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        anchor, since, document, token = read_state(state, "pack", anchor=dict, since=int, document=int, token=int)
        if since > document:
            raise InvalidState(
                f"pack: a position cannot be {since} documents after its anchor, at document {document}."
            )
        self._source.load_state_dict(anchor)
        self._anchors = [(document - since, self._source.state_dict())]
        self._next, self._skip, self._head = document - since, since, token

    def close(self) -> None:
        self._source.close()

    def where(self) -> str:
        return f"a row packed from documents up to {self._source.where()}"

    def origin(self) -> tuple[Origin, ...]:
        return ()


def _number_of(anchor: tuple[int, dict[str, Any]]) -> int:
    return anchor[0]


def _tokens_of(row: Any, source: StageIterator) -> Tokens:
    ids = row.get("input_ids") if type(row) is dict or isinstance(row, Mapping) else None
    if type(ids) is np.ndarray and ids.ndim == 1 and ids.dtype.kind in "iu":
        return ids
    tokens: Tokens = np.asarray(ids)
    if ids is not None and tokens.ndim == 1 and (tokens.dtype.kind in "iu" or not tokens.size):
        return tokens
    if ids is not None:
        found = f"'input_ids' has the shape {list(tokens.shape)} and the type {tokens.dtype}"
    elif isinstance(row, Mapping):
        found = f"a row has no 'input_ids' (fields: {', '.join(map(repr, row)) or 'none'})"
    else:
        found = f"a row is a {type(row).__name__}, not a dict"
    raise BadRow(
        f"pack: {found}, in {source.where()}.\n"
        "Documents are rows with 'input_ids', whole numbers [tokens]: put tokenize() before pack()."
    )


def _laid_out(documents: list[Tokens], head: int) -> _Block:
    """The documents end to end, without the first ``head`` tokens of the first."""
    if not documents:
        nothing = np.empty(0, np.int64)
        return _Block(nothing, nothing, nothing, [])
    tokens = np.concatenate([documents[0][head:], *documents[1:]], dtype=np.int64, casting="unsafe")
    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    ends = np.cumsum(lengths) - head
    labels = np.empty_like(tokens)
    labels[:-1] = tokens[1:]
    labels[ends[ends > 0] - 1] = _NO_LABEL
    starts = ends - lengths
    lengths[0] -= head
    positions = np.arange(len(tokens)) - np.repeat(starts, lengths)
    return _Block(tokens, labels, positions, ends.tolist())


def _cut(values: Tokens, seq_len: int, fill: int) -> Tokens:
    """A row of its own memory, filled up to ``seq_len``."""
    if len(values) == seq_len:
        return np.array(values)
    row: Tokens = np.full(seq_len, fill, np.int64)
    row[: len(values)] = values
    return row
