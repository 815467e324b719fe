"""Pack: documents of any length to rows of equal length."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.meters import PACK
from unbroken.streams.arguments import check_bool, check_one_of, check_whole, read_state
from unbroken.streams.best_fit import BestFitIterator, Fit
from unbroken.streams.course import Course
from unbroken.streams.packed import (
    NO_TOKENS,
    NOTHING,
    Columns,
    Documents,
    Reached,
    Row,
    Tokens,
    check_layout,
    kept_of,
    laid_out,
)
from unbroken.streams.stage import Stage, StageIterator

__all__ = ["Pack"]

# Rows are cut from blocks of at least this many tokens, so that short rows cost no call each.
_BLOCK_TOKENS = 1 << 11
# One anchor for so many documents: the more, the less a resume makes again.
_DOCUMENTS_PER_ANCHOR = 1


@final
@dataclass(frozen=True, repr=False, eq=False)
class Pack(Stage):
    """Rows of ``seq_len`` tokens, made of documents.

    A document is a row with ``input_ids``: whole numbers [tokens], of any length, 0 too. ``layout`` says how documents
    become rows, of a lane's documents in one epoch:

    * ``"concat"`` lays them end to end and cuts: every row but the last is full, and documents are cut at its ends.
    * ``"best_fit"`` keeps them whole: in a window of documents, each goes into the fullest row that has room for it,
      and rows are filled up. A window has ``window`` tokens, in each lane and whatever ``seq_len`` is; it is held in
      memory, and read and tokenised again on a resume. The larger it is, the fuller are the rows: with lengths as on
      the web (log-normal, mean 600, sigma 1.2) and the default, over 99 % of the tokens in rows of 512 to 131 072
      are of documents. Rows come in the order in which their longest documents were read, the emptiest one last.

    ``overflow`` says what becomes of a document longer than a row: ``"split"`` loses nothing of it: it goes on in the
    next row (concat), or is cut into full rows and a rest that is packed like a document (best_fit). ``"truncate"``
    keeps its first ``seq_len`` tokens, ``"drop"`` leaves it out; how many documents of the lane that met in this epoch
    is in the position, under ``overflow``.

    ``last`` is about the last row of the lane's epoch, where it is not full: ``"pad"`` fills it up, ``"open"`` leaves
    it shorter, ``"drop"`` leaves it out with what it holds.

    Each row is a dict of int64 arrays [seq_len]:

    * ``input_ids``: the tokens, filled up with ``pad_id``.
    * ``labels``: the token that comes next where it is of the same document, be it in another row; else -100. They are
      shifted already, for the cross entropy of ``logits`` and ``labels`` at the same place.
    * ``position_ids``: the place of the token in its document, from 0, also where the document goes on in another row;
      0 where padded.
    * ``document_ids``, if asked for: which document of the row the token belongs to, from 0; -1 where padded.
    * ``cu_seqlens``, if asked for: int32 [seq_len + 1], where documents begin and end in the row, from 0; padding is
      one more document. It is filled up with seq_len, so that rows stack. Those of a batch are joined by::

          rows, length = len(batch["cu_seqlens"]), batch["input_ids"].shape[1]
          offsets = length * torch.arange(rows, dtype=torch.int32)[:, None]
          cu_seqlens = (batch["cu_seqlens"] + offsets).flatten().unique_consecutive()

      for ``input_ids.flatten()`` and attention of variable lengths (``flash_attn_varlen_func``). It takes the repeats
      out, which are sequences of length 0: not all versions of such functions can do with them.

    ``seq_len`` may change at a resume: the tokens that were not delivered come first. Another ``window`` holds from the
    next window on. Another ``layout`` can only be had between epochs.

    With lineage a row has an origin for each piece of a document in it, with the tokens of the document that it is.

    Raises ``TypeError`` and ``ValueError`` where ``seq_len`` or ``window`` is no whole number of at least 1, ``pad_id``
    no whole number, or a word not known. The iterator raises ``BadRow`` where a row is no document, and
    ``InvalidState`` where documents that rows were packed of are not there any more.
    """

    NAME: ClassVar[str] = "pack"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {
        "seq_len": "cut",
        "layout": "order, held",
        "overflow": "data",
        "last": "cut",
        "pack_window": "cut",
        "pad_id": "data",
        "document_ids": "safe",
        "cu_seqlens": "safe",
    }

    source: Stage
    seq_len: int
    layout: str
    overflow: str
    last: str
    window: int
    columns: Columns

    def __post_init__(self) -> None:
        columns = self.columns
        check_whole("pack", "seq_len", self.seq_len, 1)
        check_one_of("pack", "layout", self.layout, ("concat", "best_fit"))
        check_one_of("pack", "overflow", self.overflow, ("split", "truncate", "drop"))
        check_one_of("pack", "last", self.last, ("pad", "open", "drop"))
        check_whole("pack", "window", self.window, 1)
        check_whole("pack", "pad_id", columns.pad_id, np.iinfo(np.int64).min)
        check_bool("pack", "document_ids", columns.document_ids)
        check_bool("pack", "cu_seqlens", columns.cu_seqlens)

    @property
    def sources(self) -> tuple[Stage, ...]:
        return (self.source,)

    @property
    def keeps_record(self) -> bool:
        return any(stage.named for stage in self.source._all())

    @property
    def counts_rows(self) -> bool:
        return True

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        record = course.journal.keep(f"{course.path}pack {self.depth}", Reached) if self.keeps_record else None
        below = list(self.source._all())
        counted = None if any(stage.COUNTS_TOKENS for stage in below) else course.source_of(below)
        documents = Documents(self.source.begin(lane, course), lane.epoch, record, course, counted)
        if self.layout == "concat":
            return _ConcatIterator(documents, self)
        return BestFitIterator(documents, Fit(self.seq_len, self.window, self.overflow, self.last, self.columns))

    def fields(self) -> dict[str, Any]:
        columns = self.columns
        return {
            "seq_len": self.seq_len,
            "layout": self.layout,
            "overflow": self.overflow,
            "last": self.last,
            "pack_window": self.window,
            "pad_id": columns.pad_id,
            "document_ids": columns.document_ids,
            "cu_seqlens": columns.cu_seqlens,
        }

    def arguments(self) -> str:
        said = {"layout": "concat", "overflow": "split", "last": "pad", "pad_id": 0}
        said |= {"document_ids": False, "cu_seqlens": False}
        given = [f"{name}={value!r}" for name, value in self.fields().items() if value != said.get(name, value)]
        return ", ".join([str(self.seq_len), *given, *([f"window={self.window}"] * (self.layout == "best_fit"))])


@final
class _ConcatIterator(StageIterator):
    """Position: the number of the next document in the lane and how many of its tokens were delivered; an anchor, and
    how many documents to pass over from there. No token is in it: documents are made again.

    It also keeps the seq_len by which it was decided what of that document is kept, and a count of overflow.
    """

    def __init__(self, documents: Documents, stage: Pack) -> None:
        self._from = documents
        self._stage = stage
        self._documents: list[Tokens] = []  # those not delivered to their end
        self._origins: list[tuple[Origin, ...]] = []  # of each, where they are asked for
        self._head = 0  # tokens of the first of them that were delivered before the block
        self._block = NOTHING
        self._at = 0  # the next token in the block
        self._skip = 0  # documents still to pass over after a load
        self._anchors = [(0, documents.source.state_dict())]  # (number of a document, the source's state before it)
        self._begun = (-1, 0)  # the number of a document that was begun with another seq_len, and that
        self._counted = 0  # documents that the overflow rule was for, without
        self._overflow: list[int] = []  # these, from the first in the block on: their numbers

    def __next__(self) -> Row:
        stage = self._stage
        if self._at + stage.seq_len > len(self._block.tokens):
            self._fill()
        start, stop = self._at, min(self._at + stage.seq_len, len(self._block.tokens))
        length = stage.seq_len
        if stop - start < length:
            if start == stop or stage.last == "drop":
                self._end()
                raise StopIteration
            length = stop - start if stage.last == "open" else length
        self._at = stop
        if self._from.keeps_record:
            document, token = self._place()
            self._from.reach(self._number_of(document), token)
        began = self._from.meter.clock()
        row = self._block.row(start, stop, length, stage.columns)
        self._from.meter.add_seconds(PACK, began)
        return row

    def _fill(self) -> None:
        """A new block: what is left of the last one, and documents until there is enough for a row."""
        document, self._head = self._place()
        first = self._number_of(document)
        del self._documents[:document], self._origins[:document]
        self._block, self._at = NOTHING, 0
        while len(self._anchors) > 1 and self._anchors[1][0] <= first:
            del self._anchors[0]
        passed = bisect_left(self._overflow, first)
        self._counted += passed
        del self._overflow[:passed]
        held = sum(map(len, self._documents)) - self._head
        try:
            while self._skip:
                self._from.read()
                self._keep_anchor()
                self._skip -= 1
            while held < max(self._stage.seq_len, _BLOCK_TOKENS):
                held += self._take()
        except StopIteration:
            pass
        if self._skip or self._head > (len(self._documents[0]) if self._documents else 0):
            raise InvalidState(
                f"pack: document {first} of a lane was begun ({self._head} tokens), but now it is shorter or is not "
                "there: what it is made from has changed.\nRebuild the stream as it was when the position was saved."
            )
        parts = self._documents
        if self._head:
            parts = [parts[0][self._head :], *parts[1:]]
        began = self._from.meter.clock()
        self._block = laid_out(parts, self._origins, {0: self._head} if self._head else None)
        self._from.meter.add_seconds(PACK, began)

    def _take(self) -> int:
        """Read a document and hold what is kept of it. Returns how many of its tokens are still to be delivered."""
        documents, stage = self._from, self._stage
        number, head = documents.number, 0 if self._documents else self._head
        ids = documents.read()
        if ids is None:
            documents.pass_over_gone(head)
            ids = NO_TOKENS
            if head:
                self._head = head = 0
        elif stage.overflow != "split":
            seq_len = self._begun[1] if number == self._begun[0] else stage.seq_len
            kept = kept_of(len(ids), seq_len, stage.overflow)
            if kept < len(ids):
                ids = ids[: max(kept, head)]
                self._overflow.append(number)
        self._documents.append(ids)
        if documents.lineage:
            self._origins.append(documents.origins)
        self._keep_anchor()
        return len(ids) - head

    def _keep_anchor(self) -> None:
        number = self._from.number
        if not number % _DOCUMENTS_PER_ANCHOR:
            self._anchors.append((number, self._from.source.state_dict()))

    def _end(self) -> None:
        """Every document was delivered or left out."""
        self._documents, self._origins, self._head = [], [], 0
        self._block, self._at = NOTHING, 0
        self._anchors = [(self._from.number, self._from.source.state_dict())]
        self._counted, self._overflow = self._counted + len(self._overflow), []

    def _place(self) -> tuple[int, int]:
        """The document behind the last delivered token (its place in the list), and the tokens delivered of it."""
        if not self._at:
            return 0, self._head
        ends = self._block.ends
        document = bisect_left(ends, self._at)
        if ends[document] == self._at:
            return document + 1, 0
        return document, self._at - ends[document - 1] if document else self._at + self._head

    def _number_of(self, document: int) -> int:
        """The number in the lane of a document in the list."""
        return self._from.number + self._skip - len(self._documents) + document

    def state_dict(self) -> dict[str, Any]:
        document, token = self._place()
        number = self._number_of(document)
        at, anchor = self._anchors[bisect_right(self._anchors, number, key=_first) - 1]
        return {
            "anchor": anchor,
            "since": number - at,
            "document": number,
            "token": token,
            "seq_len": self._begun[1] if number == self._begun[0] else self._stage.seq_len,
            "overflow": self._counted + bisect_left(self._overflow, number),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_layout(state, "concat")
        anchor, since, document, token, seq_len, overflow = read_state(
            state, "pack", anchor=dict, since=int, document=int, token=int, seq_len=int, overflow=int
        )
        if since > document:
            raise InvalidState(
                f"pack: a position cannot be {since} documents after its anchor, at document {document}."
            )
        self._anchors = [(document - since, self._from.load(anchor, document - since, document))]
        self._skip, self._head, self._counted = since, token, overflow
        self._begun = (document, seq_len) if token else (-1, 0)

    def close(self) -> None:
        self._from.source.close()

    def where(self) -> str:
        return f"a row packed from documents up to {self._from.source.where()}"

    def origin(self) -> tuple[Origin, ...]:
        if not self._at:
            return ()
        start = (self._at - 1) // self._stage.seq_len * self._stage.seq_len
        return self._block.origin(start, self._at)


def _first(anchor: tuple[int, dict[str, Any]]) -> int:
    return anchor[0]
