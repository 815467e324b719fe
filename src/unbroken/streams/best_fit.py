"""Pack's layout "best_fit": documents whole, each in the fullest row that has room for it.

Best-fit decreasing is of D. S. Johnson, A. Demers, J. D. Ullman, M. R. Garey and R. L. Graham, "Worst-Case Performance
Bounds for Simple One-Dimensional Packing Algorithms", SIAM Journal on Computing 3 (1974); for the documents of language
models it is used in H. Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024 (arXiv 2404.10830).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from unbroken.errors import InvalidState
from unbroken.lineage import Origin
from unbroken.meters import PACK
from unbroken.streams.arguments import read_state
from unbroken.streams.packed import NOTHING, Columns, Documents, Row, Tokens, check_layout, kept_of, laid_out
from unbroken.streams.stage import StageIterator

__all__ = ["BestFitIterator", "Fit", "best_fit"]

# Rows are laid out together until they have so many tokens, so that short rows cost no call each.
_BLOCK_TOKENS = 1 << 11
# A window is so much short of whole rows: one that is not often needs a further row, which stays nearly empty.
_SLACK_TOKENS = 128


def best_fit(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Rows of ``seq_len`` for pieces of these lengths, from 1 to ``seq_len``: the numbers of the pieces in each.

    Pieces are placed from the longest to the shortest, each into the row with the least room that is enough. The rows
    come in the order of the pieces that opened them, and pieces within a row in their own: both as they were read, so
    that neither lengths nor the number of pieces in a row go up or down over time.
    """
    count = len(lengths)
    rows: list[list[int]] = []
    room: list[int] = []  # room * count + row of each row that is not full, sorted
    for piece in sorted(range(count), key=lengths.__getitem__, reverse=True):
        length = lengths[piece]
        place = bisect_left(room, length * count)
        if place == len(room):
            row, left = len(rows), seq_len - length
            rows.append([piece])
        else:
            left, row = divmod(room.pop(place), count)
            left -= length
            rows[row].append(piece)
        if left:
            insort(room, left * count + row)
    rows.sort()  # by the first piece, which opened the row
    for pieces in rows:
        pieces.sort()
    return rows


@final
class Fit(NamedTuple):
    """How a window is packed. ``window`` is in tokens; the others are those of ``Pack``."""

    seq_len: int
    window: int
    overflow: str
    last: str
    columns: Columns


@final
class _Piece(NamedTuple):
    """The tokens ``[start, stop)`` of a document."""

    ids: Tokens
    start: int
    stop: int
    document: int
    origins: tuple[Origin, ...]


@final
class _Ahead(NamedTuple):
    """A document that was read and is in no window yet, and the anchor before it."""

    ids: Tokens
    document: int
    anchor: dict[str, Any]
    origins: tuple[Origin, ...]


@final
@dataclass(slots=True)
class _Filling:
    """A window that is being filled: pieces, their tokens, and the documents that the overflow rule was for."""

    pieces: list[_Piece] = field(default_factory=list)
    tokens: int = 0
    cut: set[int] = field(default_factory=set)
    dropped: int = 0


@final
class _Window(NamedTuple):
    """Where a window begins: the anchor before its first document, and that document's number; and its size."""

    anchor: dict[str, Any]
    document: int
    size: int


@final
class BestFitIterator(StageIterator):
    """Position: the anchor at the window's start, the number of its first document, its size, and the rows taken.

    Rows taken are ``cuts``: pairs of a seq_len and how many rows of it were taken. Where another seq_len was loaded,
    the pieces in the rows that were not taken are packed again with that, and there is a further pair. No token is
    in a position: the window is read and packed again.
    """

    def __init__(self, documents: Documents, fit: Fit) -> None:
        self._documents = documents
        self._fit = fit
        self._window = _Window(documents.source.state_dict(), 0, fit.window)
        self._cuts = [(fit.seq_len, 0)]
        self._overflow = 0  # documents that the rule was for, in the windows from which rows were taken
        self._filling = _Filling()  # kept when the source raises, so that a second try loses nothing
        self._ahead: _Ahead | None = None
        self._ended = False  # whether this window is the last
        self._rows: list[list[_Piece]] = []  # not laid out yet, the next one last
        self._block = NOTHING
        self._spans: list[tuple[int, int]] = []  # of the rows in the block, the next one last
        self._span = (0, 0)  # of the row that was yielded last

    def __next__(self) -> Row:
        meter = self._documents.meter
        while not self._spans:
            if self._rows:
                began = meter.clock()
                self._lay_out()
                meter.add_seconds(PACK, began)
            else:
                self._fill()
        self._span = start, stop = self._spans.pop()
        fit, at_end = self._fit, not self._spans and not self._rows
        length = stop - start if at_end and self._ended and fit.last == "open" else fit.seq_len
        if self._documents.keeps_record:
            self._documents.reach(self._following()[1])
        if at_end:
            self._begin_next()
        else:
            seq_len, taken = self._cuts[-1]
            self._cuts[-1] = seq_len, taken + 1
        began = meter.clock()
        row = self._block.row(start, stop, length, fit.columns)
        meter.add_seconds(PACK, began)
        return row

    def _fill(self) -> None:
        """The rows of the window that were not taken. Raises ``StopIteration`` where there is no further window."""
        self._ended = self._read_window()
        began = self._documents.meter.clock()
        fit, filling, cuts = self._fit, self._filling, self._cuts
        fresh = not cuts[0][1]
        if self._ended and fresh and not filling.pieces:
            self._overflow += filling.dropped
            self._filling = _Filling()
            self._begin_next()
            raise StopIteration
        if cuts[-1][0] != fit.seq_len:
            cuts = [*cuts, (fit.seq_len, 0)]
        pieces, counted = filling.pieces, 0
        rows: list[list[_Piece]] = []
        for step, (seq_len, taken) in enumerate(cuts):
            if step:
                pieces = sorted((piece for row in rows for piece in row), key=_in_order)
            counted = len(filling.cut)
            rows = self._pack(pieces, seq_len, filling.cut)
            if taken and taken >= len(rows):
                raise InvalidState(
                    f"pack: {taken} rows of {seq_len} tokens of a window that begins with document "
                    f"{self._window.document} of a lane were delivered, but now it has {len(rows)}: what it is made "
                    "from has changed.\nRebuild the stream as it was when the position was saved."
                )
            rows = rows[taken:]
        if fresh:
            self._overflow += filling.dropped + len(filling.cut)
        elif not cuts[-1][1]:  # packed again with this seq_len for the first time
            self._overflow += len(filling.cut) - counted
        if self._ended and fit.last == "drop" and rows and _tokens_of(rows[-1]) < fit.seq_len:
            rows.pop()
        self._rows, self._cuts, self._filling = rows[::-1], cuts, _Filling()
        self._documents.meter.add_seconds(PACK, began)
        if not rows:
            self._begin_next()

    def _read_window(self) -> bool:
        """Read until the window is full: the next document with tokens has no room. Returns whether there is none."""
        documents, filling, overflow = self._documents, self._filling, self._fit.overflow
        seq_len = self._cuts[0][0]
        most = max(1, self._window.size // seq_len) * seq_len - min(_SLACK_TOKENS, seq_len // 8)
        while True:
            ahead = self._ahead
            if ahead is None:
                anchor = documents.source.state_dict()
                try:
                    ids = documents.read()
                except StopIteration:
                    return True
                if ids is None:
                    documents.pass_over_gone()
                    continue
                origins = documents.origins if documents.lineage else ()
                self._ahead = ahead = _Ahead(ids, documents.number - 1, anchor, origins)
            length = len(ahead.ids)
            kept = kept_of(length, seq_len, overflow)
            if filling.pieces and kept and filling.tokens + kept > most:
                return False
            self._ahead = None
            if kept:
                ids = ahead.ids if kept == length else ahead.ids[:kept]
                filling.pieces.append(_Piece(ids, 0, kept, ahead.document, ahead.origins))
                filling.tokens += kept
            if kept < length and kept:
                filling.cut.add(ahead.document)
            elif kept < length:
                filling.dropped += 1

    def _pack(self, pieces: list[_Piece], seq_len: int, cut: set[int]) -> list[list[_Piece]]:
        """The rows of a window, or of what is left of it; that with the fewest tokens comes last."""
        short: list[_Piece] = []
        for piece in pieces:
            ids, start, stop, document, origins = piece
            if stop - start <= seq_len:
                short.append(piece)
            elif self._fit.overflow == "split":
                for place in range(start, stop, seq_len):
                    short.append(_Piece(ids, place, min(place + seq_len, stop), document, origins))
            else:
                cut.add(document)
                if self._fit.overflow == "truncate":
                    stop = start + seq_len
                    short.append(_Piece(ids[:stop], start, stop, document, origins))
        rows = [
            [short[i] for i in numbers] for numbers in best_fit([piece.stop - piece.start for piece in short], seq_len)
        ]
        if rows:  # whether the window is the last one can be another after a source was taken out of a mix
            rows.append(rows.pop(min(range(len(rows)), key=lambda row: _tokens_of(rows[row]))))
        return rows

    def _lay_out(self) -> None:
        """The next rows end to end."""
        parts: list[Tokens] = []
        origins: list[tuple[Origin, ...]] = []
        begun: dict[int, int] = {}
        followed: dict[int, int] = {}
        spans: list[tuple[int, int]] = []
        at = 0
        while self._rows and at < _BLOCK_TOKENS:
            first = at
            for ids, start, stop, _, origin in self._rows.pop():
                if start:
                    begun[len(parts)] = start
                if stop < len(ids):
                    followed[len(parts)] = int(ids[stop])
                parts.append(ids[start:stop])
                origins.append(origin)
                at += stop - start
            spans.append((first, at))
        self._block, self._spans = laid_out(parts, origins, begun, followed), spans[::-1]

    def _following(self) -> tuple[dict[str, Any], int]:
        """Where the next window begins."""
        ahead = self._ahead
        if ahead is None:
            return self._documents.source.state_dict(), self._documents.number
        return ahead.anchor, ahead.document

    def _begin_next(self) -> None:
        self._window = _Window(*self._following(), self._fit.window)
        self._cuts = [(self._fit.seq_len, 0)]

    def state_dict(self) -> dict[str, Any]:
        anchor, document, size = self._window
        return {
            "anchor": anchor,
            "document": document,
            "window": size,
            "cuts": [list(cut) for cut in self._cuts],
            "overflow": self._overflow,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_layout(state, "best_fit")
        anchor, document, size, cuts, overflow = read_state(
            state, "pack", anchor=dict, document=int, window=int, cuts=list, overflow=int
        )
        read = _read_cuts(cuts)
        anchor = self._documents.load(anchor, document, document)
        if not read[0][1]:  # none of this window was taken: it is packed as the stage says
            read, size = [(self._fit.seq_len, 0)], self._fit.window
        self._window, self._cuts, self._overflow = _Window(anchor, document, size), read, overflow

    def close(self) -> None:
        self._documents.source.close()

    def where(self) -> str:
        return f"a row packed from documents up to {self._documents.source.where()}"

    def origin(self) -> tuple[Origin, ...]:
        return self._block.origin(*self._span)


def _tokens_of(row: list[_Piece]) -> int:
    return sum(piece.stop - piece.start for piece in row)


def _in_order(piece: _Piece) -> tuple[int, int]:
    return piece.document, piece.start


def _read_cuts(cuts: list[Any]) -> list[tuple[int, int]]:
    whole = all(isinstance(cut, list) and len(cut) == 2 and all(type(part) is int for part in cut) for cut in cuts)
    read = [(cut[0], cut[1]) for cut in cuts] if whole else []
    if not read or any(seq_len < 1 or taken < min(1, len(read) - 1) for seq_len, taken in read):
        raise InvalidState(
            f"pack: cuts in a position must be pairs of a seq_len and the rows taken with it, but are {cuts!r}.\n"
            "Load what state_dict() of the same pipeline returned."
        )
    return read
