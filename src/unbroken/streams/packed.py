"""What the layouts of pack share: documents that are read, and packed rows that are made of pieces of them."""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from unbroken.errors import BadRow, InvalidState
from unbroken.lineage import Origin
from unbroken.meters import TOKENS
from unbroken.streams.arguments import read_state
from unbroken.streams.course import Course, Record
from unbroken.streams.stage import GONE, StageIterator

__all__ = [
    "NOTHING",
    "NO_TOKENS",
    "Block",
    "Columns",
    "Documents",
    "Reached",
    "Row",
    "Tokens",
    "check_layout",
    "kept_of",
    "laid_out",
]

_log = logging.getLogger("unbroken")
_said: list[bool] = []  # once a process

Tokens: TypeAlias = npt.NDArray[np.int64]
Row: TypeAlias = dict[str, npt.NDArray[Any]]

NO_TOKENS: Tokens = np.empty(0, np.int64)

_NO_LABEL = -100
_NO_DOCUMENT = -1


@final
@dataclass(frozen=True)
class Columns:
    """What a packed row holds beside the tokens, and what it is filled up with."""

    pad_id: int
    document_ids: bool
    cu_seqlens: bool


@final
class Block(NamedTuple):
    """Pieces of documents laid end to end, from which rows are cut.

    ``tokens``, ``labels`` and ``positions`` are int64 [tokens]; ``ends`` is the place after the last token of each
    piece, ``origins`` the origins of each (empty where lineage is off).
    """

    tokens: Tokens
    labels: Tokens
    positions: Tokens
    ends: list[int]
    origins: Sequence[tuple[Origin, ...]]

    def row(self, start: int, stop: int, length: int, columns: Columns) -> Row:
        """The tokens ``[start, stop)`` as a row of its own memory, filled up to ``length``."""
        row: Row = {
            "input_ids": _cut(self.tokens[start:stop], length, columns.pad_id),
            "labels": _cut(self.labels[start:stop], length, _NO_LABEL),
            "position_ids": _cut(self.positions[start:stop], length, 0),
        }
        if not (columns.document_ids or columns.cu_seqlens):
            return row
        inner = self.ends[bisect_right(self.ends, start) : bisect_left(self.ends, stop)]
        # A document without tokens has no edge; what comes after the last one is padding.
        edges = np.array([start, *dict.fromkeys(inner), stop, start + length]) - start
        if columns.document_ids:
            numbers = np.arange(len(edges) - 1, dtype=np.int64)
            numbers[-1] = _NO_DOCUMENT
            row["document_ids"] = np.repeat(numbers, edges[1:] - edges[:-1])
        if columns.cu_seqlens:
            row["cu_seqlens"] = np.full(length + 1, length, np.int32)
            row["cu_seqlens"][: len(edges) - 1] = edges[:-1]
        return row

    def origin(self, start: int, stop: int) -> tuple[Origin, ...]:
        """The origins of each piece in ``[start, stop)``, with the tokens of its document that lie there."""
        if not self.origins:
            return ()
        found: list[Origin] = []
        piece = bisect_right(self.ends, start)
        while start < stop:
            end = min(self.ends[piece], stop)
            if end > start:
                first = int(self.positions[start])
                found += [_cut_origin(origin, first, first + end - start) for origin in self.origins[piece]]
            start, piece = end, piece + 1
        return tuple(found)


def laid_out(
    parts: list[Tokens],
    origins: Sequence[tuple[Origin, ...]] = (),
    begun: Mapping[int, int] | None = None,
    followed: Mapping[int, int] | None = None,
) -> Block:
    """The parts end to end. ``begun``: the place in its document at which a part begins, where that is not 0;
    ``followed``: the token that comes after a part, where its document goes on. Both by the number of the part.
    """
    tokens = np.concatenate(parts, dtype=np.int64, casting="unsafe") if parts else NO_TOKENS
    if not len(tokens):
        return Block(NO_TOKENS, NO_TOKENS, NO_TOKENS, [0] * len(parts), origins)
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    ends = np.cumsum(lengths)
    labels = np.empty_like(tokens)
    labels[:-1] = tokens[1:]
    labels[ends - 1] = _NO_LABEL  # where the first part is empty that is the last token, which has none either
    starts = ends - lengths
    for part, place in (begun or {}).items():
        starts[part] -= place
    for part, token in (followed or {}).items():
        labels[ends[part] - 1] = token
    positions = np.arange(len(tokens)) - np.repeat(starts, lengths)
    return Block(tokens, labels, positions, ends.tolist(), origins)


NOTHING = laid_out([])


def _cut(values: Tokens, length: int, fill: int) -> Tokens:
    """A copy, filled up to ``length``."""
    if len(values) == length:
        return np.array(values)
    row: Tokens = np.full(length, fill, np.int64)
    row[: len(values)] = values
    return row


def _cut_origin(origin: Origin, start: int, stop: int) -> Origin:
    """The tokens ``[start, stop)`` of a document, told in those of the stored row that it was cut from."""
    before = max(0, origin.start)
    return origin._replace(start=before + start, stop=before + stop)


def kept_of(length: int, seq_len: int, overflow: str) -> int:
    """How many tokens of a document are kept; it is longer than a row where that is fewer than there are, or split."""
    if length <= seq_len or overflow == "split":
        return length
    return seq_len if overflow == "truncate" else 0


def check_layout(state: Any, layout: str) -> None:
    """Raises ``InvalidState`` where a position is one of the other layout."""
    own, other = ("token", "window") if layout == "concat" else ("window", "token")
    if isinstance(state, Mapping) and other in state and own not in state:
        saved = "best_fit" if layout == "concat" else "concat"
        raise InvalidState(
            f"pack: this position is one of layout {saved!r}, and cannot be gone on with as {layout!r}.\n"
            f"Rebuild the stream with layout={saved!r}, and change the layout where an epoch begins."
        )


@final
class Reached(Record):
    """How far documents were packed, and which of those were gone already.

    Rows that stages after this one hold are packed again on a resume, and that needs all the documents. So a document
    whose source was taken out of a mix is passed over only where it was never packed. Kept where there is a mix.
    """

    def __init__(self) -> None:
        self.place = (0, 0, 0)  # epoch, document, token: all before it was packed
        self._gone: list[list[int]] = []  # [epoch, document] of each; replaced, never changed

    def pass_over(self, epoch: int, document: int, packed: int) -> bool:
        """Whether a document that is gone can be passed over: not more than ``packed`` tokens of it were packed."""
        if [epoch, document] in self._gone:
            return True
        if self.place > (epoch, document, packed):
            return False
        self._gone = [*self._gone, [epoch, document]]
        return True

    def begin_at(self, epoch: int, document: int) -> None:
        """Nothing before this document is packed again."""
        self._gone = [place for place in self._gone if place >= [epoch, document]]

    def state_dict(self) -> Any:
        return {"place": list(self.place), "gone": self._gone}

    def load_state_dict(self, state: Any) -> None:
        place, gone = read_state(state, "pack", place=list, gone=list)
        try:
            epoch, document, token = map(int, place)
            self._gone = [[int(epoch), int(document)] for epoch, document in gone]
        except (TypeError, ValueError) as error:
            raise InvalidState(f"pack: how far a position has packed cannot be read: {error}.") from None
        self.place = epoch, document, token


@final
class Documents:
    """The documents of a lane's epoch, one by one. ``number`` is that of the next, ``origins`` are of the last.

    Their tokens are ``counted`` for the source of this name; None where a stage before this has counted them.
    """

    def __init__(
        self, source: StageIterator, epoch: int, record: Reached | None, course: Course, counted: str | None
    ) -> None:
        self.source = source
        self.lineage = course.lineage
        self.meter = course.meter
        self._counts = None if counted is None else course.meter.source(counted)
        self.number = 0
        self._epoch = epoch
        self._record = record
        self.keeps_record = record is not None
        self._failed: InvalidState | None = None  # for good: what was packed before cannot be packed again

    def read(self) -> Tokens | None:
        """The next one: whole numbers [tokens]; ``None`` where its source was taken out of a mix.

        Raises ``BadRow`` where the row is no document.
        """
        if self._failed is not None:
            raise self._failed
        row = next(self.source)
        ids = None if row is GONE else _tokens_of(row, self.source)
        if not self.number and ids is not None and "labels" in row and not _said:
            _said.append(True)
            _log.warning(
                "pack: documents have 'labels' of their own, which are not used: labels of packed rows are the next "
                "tokens. To leave tokens out of the loss, mark them by document_ids or a map() after pack()."
            )
        self.number += 1
        if self._counts is not None and ids is not None:
            self._counts[TOKENS] += len(ids)
        return ids

    @property
    def origins(self) -> tuple[Origin, ...]:
        return self.source.origin() if self.lineage else ()

    def load(self, anchor: Mapping[str, Any], number: int, first: int) -> dict[str, Any]:
        """Go to where the document of this number comes next; ``first`` is the first that is packed again.

        Returns the anchor as the source has it.
        """
        self.source.load_state_dict(anchor)
        self.number = number
        if self._record is not None:
            self._record.begin_at(self._epoch, first)
        return self.source.state_dict()

    def reach(self, document: int, token: int = 0) -> None:
        """All before this token of this document is packed."""
        if self._record is not None:
            self._record.place = max(self._record.place, (self._epoch, document, token))

    def pass_over_gone(self, packed: int = 0) -> None:
        """The document that was read last is gone, and ``packed`` of its tokens were packed and delivered.

        Raises ``InvalidState`` where more of it was packed.
        """
        document = self.number - 1
        if self._record is not None and not self._record.pass_over(self._epoch, document, packed):
            self._failed = InvalidState(
                f"pack: a source was taken out of a mix, and document {document} of a lane, which is of it, stands in "
                "rows that were packed and not all delivered: without it they cannot be packed again.\n"
                "Keep the source in the mix with weight 0 until the next checkpoint, and take it out then."
            )
            raise self._failed


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
