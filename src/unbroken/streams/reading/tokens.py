"""Token files: rows of one length, or whole documents, of ids that were made beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from unbroken.errors import BadRow
from unbroken.lanes import Lane
from unbroken.streams.arguments import check_bool, check_whole
from unbroken.streams.reading.files import Access, check_access, digest_of, extent_of, is_local
from unbroken.streams.reading.retrying import of_reading
from unbroken.streams.reading.source import Bad, Format, Source
from unbroken.streams.reading.token_files import Bounds, TokenFile, find_token_files, read_tokens_of
from unbroken.streams.stage import Stage

__all__ = ["read_tokens"]

Tokens: TypeAlias = npt.NDArray[np.int64]

_NO_LABEL = -100
_NO_DOCUMENT = -1
_CHUNK_BYTES = 1 << 20
_CHUNKS_PER_LANE = 8
# What is read at a time: of a local file little, so that a resume is quick and 64 lanes hold little.
_LOCAL_BLOCK, _REMOTE_BLOCK = 1 << 17, 1 << 20


def read_tokens(
    paths: Any,
    seq_len: int | None = None,
    *,
    dtype: Any = None,
    offsets: Any = None,
    pad_id: int = 0,
    drop_last: bool = False,
    document_ids: bool = False,
    on_error: str = "raise",
    retries: int = 5,
    read_ahead: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Stage:
    """A stream of token ids from files: rows of ``seq_len``, or documents where that is ``None``.

    ``paths`` are as in ``read_jsonl``. The type of the tokens is what a file says itself: by the header of llm.c or of
    a ``.npy``, or by the ``.idx`` of Megatron beside a ``.bin``. For raw files ``dtype`` says it (``"uint16"``), and no
    ``.idx`` is looked for. ``offsets`` says where documents begin: a path, or one for each file; a pattern such as
    ``"{}.npy"``, in which ``{}`` is the path of the tokens without its suffix; or a function of that path. The layouts
    are those of ``unbroken.streams.reading.token_files``.

    With ``seq_len`` each row is a dict of int64 arrays [seq_len] with memory of their own:

    * ``input_ids``: the tokens of a file one after another, each in one row. The last row of a file is filled up with
      ``pad_id``, or left out with ``drop_last``.
    * ``labels``: the token that comes next, be it in the next row; -100 where the file ends.

    Where documents are known, rows are as ``pack`` makes them: labels are -100 also where a document ends,
    ``position_ids`` count from the start of each document, and with ``document_ids`` there are those, from 0 in each
    row, -1 where padded. Otherwise positions would be the same in every row, and are left out.

    Without ``seq_len`` each row is ``{"input_ids": array [tokens]}``, a document in the dtype of its file, for
    ``pack``. Nothing is appended to it: such files have their separators in them.

    Positions count tokens (documents, without ``seq_len``), and a resume reads on from there. ``seq_len`` may change
    between epochs. ``shuffle`` permutes the chunks, of 1 MiB or less, and in its window the rows of several.

    ``on_error``, ``retries``, ``read_ahead`` and ``storage_options`` are as in ``read_jsonl``. Tokens are read in
    blocks and not mapped, so that a local file that is cut short during a run is an error with a name. What tells of
    documents is mapped; from afar, it is fetched as a whole by each process that needs it.

    Raises ``FileNotFoundError``, ``IsADirectoryError``, ``TypeError`` and ``ValueError`` as their messages say: sizes,
    headers and dtypes that do not fit together are found here. The iterator raises ``BadRow`` where a file has another
    size than it had, an id is negative, or documents do not follow one another.
    """
    name = "read_tokens"
    if seq_len is not None:
        check_whole(name, "seq_len", seq_len, 1)
    check_whole(name, "pad_id", pad_id, np.iinfo(np.int64).min)
    check_bool(name, "drop_last", drop_last)
    check_bool(name, "document_ids", document_ids)
    access = check_access(name, storage_options, retries, read_ahead, on_error, paths)
    files = find_token_files(paths, dtype, offsets, access)
    _check_documents(files, seq_len, document_ids)
    if seq_len is None:
        return Source(_Documents(files, access), access)
    return Source(_Windows(files, seq_len, pad_id, drop_last, document_ids, access), access)


def _check_documents(files: Sequence[TokenFile], seq_len: int | None, document_ids: bool) -> None:
    unknown = next((file.file.path for file in files if file.documents is None), None)
    if unknown is not None and (seq_len is None or document_ids):
        raise ValueError(
            f"read_tokens: {'document_ids' if seq_len else 'rows of one document'} need to know where the documents "
            f"of {unknown} begin.\nPass offsets=, or leave dtype out where an .idx lies beside the file"
            + ("." if seq_len else "; or pass seq_len= for rows of one length.")
        )


class _Chunk(NamedTuple):
    """Tokens (or documents) ``start`` to ``stop`` - 1 of a file."""

    file: TokenFile
    start: int
    stop: int


@final
class _Chunks:
    """All chunks of ``grain`` tokens (or documents) of the files, in order, without a list of them."""

    def __init__(self, files: Sequence[TokenFile], lengths: Sequence[int], grain: int) -> None:
        self._files = files
        self._lengths = lengths
        self._grain = grain
        self._ends = np.cumsum(-(-np.array(lengths, np.int64) // grain))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> _Chunk:
        place = int(np.searchsorted(self._ends, number, side="right"))
        start = (number - (int(self._ends[place - 1]) if place else 0)) * self._grain
        return _Chunk(self._files[place], start, min(start + self._grain, self._lengths[place]))


class _Block(NamedTuple):
    """What was read from token (or document) ``at`` on: ``inputs`` tokens, and the one after them if there is one.

    ``bounds`` are the first tokens of the documents in the chunk and the end of the last, where they are known.
    """

    at: int
    inputs: int
    tokens: npt.NDArray[Any]
    bounds: Bounds | None


@final
@dataclass(frozen=True)
class _Windows(Format):
    """Rows of one length. Places count tokens from the start of a chunk."""

    NAME: ClassVar[str] = "read_tokens"
    UNIT: ClassVar[str] = "token"
    TOKENS: ClassVar[bool] = True
    DIFFERENCES: ClassVar[Mapping[str, str]] = {
        "files": "data, held",
        "offsets": "data, held",
        "seq_len": "held",
        "pad_id": "data",
        "drop_last": "cut",
        "document_ids": "safe",
    }

    files: tuple[TokenFile, ...]
    seq_len: int
    pad_id: int
    drop_last: bool
    document_ids: bool
    access: Access

    def grain(self, lanes: int) -> int:
        rows = sum(file.tokens for file in self.files) // self.seq_len
        return self.seq_len * _grain(self.files, rows, lanes)

    def chunks(self, grain: int) -> _Chunks:
        return _Chunks(self.files, [file.tokens for file in self.files], grain)

    def fetch(self, chunk: _Chunk, place: int) -> Iterator[_Block]:
        file, at, bounds = chunk.file, chunk.start + place, None
        if file.documents is not None and at < chunk.stop:
            bounds = file.documents.around(at, chunk.stop + 1, self.access)
        step = self.seq_len * max(1, _block_bytes(file) // (self.seq_len * file.dtype.itemsize))
        while at < chunk.stop:
            stop = min(at + step, chunk.stop)
            tokens = read_tokens_of(file, at, min(stop + 1, file.tokens), self.access)
            yield _Block(at, stop - at, tokens, bounds)
            at = stop

    def rows(self, chunk: _Chunk, place: int, pieces: Iterator[_Block], lane: Lane) -> Iterator[tuple[int, int, Any]]:
        length = self.seq_len
        for block in pieces:
            at, inputs, tokens, bounds = block
            plain = bounds is None and not _has_negative(tokens)
            place = at - chunk.start
            for start in range(0, inputs, length):
                stop = start + length
                if plain and stop < len(tokens):
                    row = {
                        "input_ids": tokens[start:stop].astype(np.int64),
                        "labels": tokens[start + 1 : stop + 1].astype(np.int64),
                    }
                    yield place, place + length, row
                elif stop <= inputs or not self.drop_last or at + inputs < chunk.file.tokens:
                    stop = min(stop, inputs)
                    yield place, place + stop - start, self._row(block, start, stop)
                place += length

    def _row(self, block: _Block, start: int, stop: int) -> Any:
        """The row of tokens ``start`` to ``stop`` - 1 of a block, which may be fewer than a row has."""
        ids, labels = block.tokens[start:stop], block.tokens[start + 1 : stop + 1]
        if _has_negative(ids):
            return _negative(ids, block.at + start)
        row = {"input_ids": self._filled(ids, self.pad_id), "labels": self._filled(labels, _NO_LABEL)}
        if block.bounds is None:
            return row
        first, last = block.at + start, block.at + stop
        begin, end = np.searchsorted(block.bounds, (first, last), side="right")
        begins = block.bounds[begin:end] - first  # of other documents: in the row, or just after it
        row["labels"][begins - 1] = _NO_LABEL
        inside = np.unique(begins[begins < stop - start])
        starts = np.concatenate([block.bounds[begin - 1 : begin] - first, inside])
        lengths = np.diff(np.concatenate([[0], inside, [stop - start]]))
        row["position_ids"] = self._filled(np.arange(stop - start) - np.repeat(starts, lengths), 0)
        if self.document_ids:
            row["document_ids"] = self._filled(np.repeat(np.arange(len(lengths)), lengths), _NO_DOCUMENT)
        return row

    def _filled(self, values: npt.NDArray[Any], fill: int) -> Tokens:
        if len(values) == self.seq_len:
            return values.astype(np.int64)
        row: Tokens = np.full(self.seq_len, fill, np.int64)
        row[: len(values)] = values
        return row

    def locate(self, chunk: _Chunk, place: int) -> tuple[str, int]:
        return chunk.file.file.path, chunk.start + place

    def where(self, chunk: _Chunk, place: int) -> str:
        return f"{chunk.file.file.path}, token {chunk.start + place}"

    def fields(self) -> dict[str, Any]:
        return {
            "files": _digest(self.files, "tokens"),
            "offsets": _digest_of_offsets(self.files),
            "seq_len": self.seq_len,
            "pad_id": self.pad_id,
            "drop_last": self.drop_last,
            "document_ids": self.document_ids,
        }

    def arguments(self) -> str:
        given = {"pad_id": self.pad_id, "drop_last": self.drop_last, "document_ids": self.document_ids}
        return ", ".join([_named(self.files), str(self.seq_len), *(f"{k}={v}" for k, v in given.items() if v)])

    def extent(self) -> str:
        return _extent(self.files)


@final
@dataclass(frozen=True)
class _Documents(Format):
    """Whole documents. Places count them from the start of a chunk."""

    NAME: ClassVar[str] = "read_tokens"
    UNIT: ClassVar[str] = "token"
    TOKENS: ClassVar[bool] = True
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"files": "data, held", "offsets": "data, held"}

    files: tuple[TokenFile, ...]
    access: Access

    def grain(self, lanes: int) -> int:
        return _grain(self.files, sum(map(_count, self.files)), lanes)

    def chunks(self, grain: int) -> _Chunks:
        return _Chunks(self.files, list(map(_count, self.files)), grain)

    def fetch(self, chunk: _Chunk, place: int) -> Iterator[_Block]:
        file, number = chunk.file, chunk.start + place
        if number >= chunk.stop or file.documents is None:
            return
        bounds = file.documents.bounds(number, chunk.stop, self.access)
        while len(bounds) > 1:
            most = bounds[0] + _block_bytes(file) // file.dtype.itemsize
            taken = max(1, int(np.searchsorted(bounds, most, side="right")) - 1)
            tokens = read_tokens_of(file, int(bounds[0]), int(bounds[taken]), self.access)
            yield _Block(number, len(tokens), tokens, bounds[: taken + 1])
            number, bounds = number + taken, bounds[taken:]

    def rows(self, chunk: _Chunk, place: int, pieces: Iterator[_Block], lane: Lane) -> Iterator[tuple[int, int, Any]]:
        for at, _, tokens, bounds in pieces:
            starts = [] if bounds is None else bounds.tolist()
            negative = _has_negative(tokens)
            for place, (start, stop) in enumerate(pairwise(starts), at - chunk.start):
                ids = tokens[start - starts[0] : stop - starts[0]].copy()
                bad = negative and _has_negative(ids)
                yield place, place + 1, _negative(ids, start) if bad else {"input_ids": ids}

    def locate(self, chunk: _Chunk, place: int) -> tuple[str, int | str]:
        number = chunk.start + place
        try:
            token = chunk.file.documents.start(number, self.access) if chunk.file.documents is not None else 0
        except Exception as error:
            if not isinstance(error, BadRow) and not of_reading(error):
                raise  # what cannot be read may be the reason why this is asked
            return chunk.file.file.path, f"of document {number}"
        return chunk.file.file.path, token

    def where(self, chunk: _Chunk, place: int) -> str:
        return f"{chunk.file.file.path}, document {chunk.start + place}"

    def fields(self) -> dict[str, Any]:
        return {"files": _digest(self.files, "documents"), "offsets": _digest_of_offsets(self.files)}

    def arguments(self) -> str:
        return _named(self.files)

    def extent(self) -> str:
        return f"{_extent(self.files)}, {sum(map(_count, self.files)):,} documents"


def _count(file: TokenFile) -> int:
    return file.documents.count if file.documents is not None else 0


def _grain(files: Sequence[TokenFile], rows: int, lanes: int) -> int:
    """Rows in a chunk: about 1 MiB, and few enough that each lane gets several chunks of a small corpus."""
    total = sum(file.file.size for file in files)
    return max(1, min(rows * _CHUNK_BYTES // max(total, 1), rows // (lanes * _CHUNKS_PER_LANE)))


def _block_bytes(file: TokenFile) -> int:
    return _LOCAL_BLOCK if is_local(file.file.path) else _REMOTE_BLOCK


def _has_negative(tokens: npt.NDArray[Any]) -> bool:
    return tokens.dtype.kind == "i" and len(tokens) > 0 and bool(tokens.min() < 0)


def _negative(tokens: npt.NDArray[Any], at: int) -> Bad:
    place = int(np.flatnonzero(tokens < 0)[0])
    return Bad(
        f"token {at + place} is {tokens[place]}, and ids count from 0",
        "The file may have been written as another dtype than it is read as; pass the right one, or write it again.",
    )


def _digest(files: Sequence[TokenFile], unit: str) -> str:
    """Places are in this unit of these files, so that another one is another corpus."""
    kinds = " and ".join(sorted({file.dtype.name for file in files}))
    return f"{unit} of {kinds}: {digest_of(file.file for file in files)}"


def _digest_of_offsets(files: Sequence[TokenFile]) -> str | None:
    known = [file.documents.file for file in files if file.documents is not None]
    return digest_of(known) if known else None


def _named(files: Sequence[TokenFile]) -> str:
    return f"{files[0].file.path!r}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def _extent(files: Sequence[TokenFile]) -> str:
    return f"{extent_of(file.file for file in files)}, {sum(file.tokens for file in files):,} tokens"
