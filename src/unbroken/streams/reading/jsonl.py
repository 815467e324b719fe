"""JSON lines: one row a line, from plain and compressed files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import orjson

from unbroken.errors import BadRow, InvalidState
from unbroken.lanes import Lane
from unbroken.streams.reading.chunks import Chunk, Chunks, chunk_bytes, lines, unpacked
from unbroken.streams.reading.files import SourceFile, digest_of, find_files, read_blocks
from unbroken.streams.stage import ChunkOrder, Stage, StageIterator, read_state

__all__ = ["ReadJsonl", "read_jsonl"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(
    paths: Any, *, compression: str | None = "infer", storage_options: Mapping[str, Any] | None = None
) -> Stage:
    """A stream of the rows of JSON-lines files.

    ``paths`` is a path, or a list of paths: local or of fsspec (``memory://``, ``s3://``, ...), with ``*``, ``?``,
    ``[]`` and ``**`` in patterns. The matches of a pattern are sorted; a file that is named twice is read twice.
    ``compression`` is ``"gzip"``, ``"zstd"``, ``None``, or ``"infer"``: by ``.gz``, ``.zst`` and ``.zstd``.
    ``storage_options`` goes to the fsspec file system; it is in no fingerprint and in no print.

    A row is what its line holds: a dict, or whatever other JSON is there. Blank lines, a byte order mark at the start
    and CRLF are passed over; the last line needs no newline.

    Only sizes are read here. Plain files are cut into byte ranges and dealt to lanes; a compressed file is one chunk,
    so that no more lanes have rows than there are such files, and it is unpacked again from its start on a resume.

    Raises ``FileNotFoundError``, ``IsADirectoryError``, ``TypeError`` and ``ValueError`` as their messages say. The
    iterator raises ``BadRow`` where a line is no JSON or no UTF-8, or a file cannot be unpacked or has changed; its
    position then lies before that line.
    """
    options = dict(storage_options or {})
    files = find_files("read_jsonl", paths, compression, options)
    return ReadJsonl(files, sum(file.size for file in files), options)


@final
@dataclass(frozen=True, repr=False, eq=False)
class ReadJsonl(Stage):
    """The rows of JSON-lines files; ``read_jsonl`` makes it. ``total`` is the size of all files in bytes."""

    NAME: ClassVar[str] = "read_jsonl"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"files": "data"}

    files: tuple[SourceFile, ...]
    total: int
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[Stage, ...]:
        return ()

    def open(self, lane: Lane, order: ChunkOrder | None = None) -> StageIterator:
        return _JsonlIterator(self, lane, order)

    def fields(self) -> dict[str, Any]:
        return {"files": digest_of(self.files)}

    def arguments(self) -> str:
        if len(self.files) == 1:
            return repr(self.files[0].path)
        return f"{self.files[0].path!r} and {len(self.files) - 1} more, {self.total} bytes"


@final
class _JsonlIterator(StageIterator):
    """Position: the number of the chunk in the lane and the byte offset in it (of a compressed file, in its text).

    It also keeps the size of the chunks and the seed of their order: an epoch goes on as it was begun.
    """

    def __init__(self, stage: ReadJsonl, lane: Lane, order: ChunkOrder | None) -> None:
        self._stage = stage
        self._lane = lane
        self._seed = None if order is None else order.seed
        self._chunk_bytes = chunk_bytes(stage.total, lane.count)
        self._number = 0  # of the chunk in the lane
        self._offset = 0  # of the next line, from the start of the chunk
        self._places: tuple[Chunks, Any] | None = None  # all chunks, and their order; found at the first row
        self._chunk: Chunk | None = None
        self._read: tuple[SourceFile, int] | None = None  # file and offset of the line that was read last
        self._lines: Iterator[tuple[int, bytes]] | None = None

    def __next__(self) -> Any:
        number, offset = self._number, self._offset
        try:
            if self._lines is None:
                self._open()
            while True:
                chunk, found = self._chunk, self._lines
                if chunk is None or found is None:
                    raise StopIteration
                for at, line in found:
                    self._read = chunk.file, at
                    try:
                        row = orjson.loads(line)
                    except orjson.JSONDecodeError:
                        text = line.removeprefix(_BYTE_ORDER_MARK) if at == 0 else line
                        if not text.strip():
                            continue
                        row = self._second_try(chunk.file, at, text)
                    self._offset = at + len(line) + 1 - chunk.start
                    return row
                self._number, self._offset = self._number + 1, 0
                self._open()
        except BaseException as error:
            self._lines = None
            if not isinstance(error, StopIteration):  # the next call reads again from the last position
                self._number, self._offset = number, offset
            raise

    def _open(self) -> None:
        """Open the chunk whose turn it is, at the offset; none where the lane has no more."""
        if self._places is None:
            chunks = Chunks(self._stage.files, self._chunk_bytes)
            order = None if self._seed is None else ChunkOrder(self._seed).of(len(chunks), self._lane.epoch)
            self._places = chunks, order
        chunks, order = self._places
        place = self._lane.index + self._number * self._lane.count
        if place >= len(chunks):
            self._lines = None
            return
        chunk = chunks[place if order is None else order[place]]
        self._chunk = chunk
        start = chunk.start + self._offset
        if chunk.file.compression is not None:
            self._lines = lines(self._unpacked(chunk.file, start), start, chunk.stop, inside=False)
        else:
            before = max(0, start - 1)
            blocks = read_blocks(chunk.file, before, chunk.stop, self._stage.storage_options)
            self._lines = lines(blocks, before, chunk.stop, inside=start > 0)

    def _unpacked(self, file: SourceFile, skip: int) -> Iterator[bytes]:
        decompressor, failure = _decompressor(file)
        at = skip
        try:
            blocks = read_blocks(file, 0, file.size, self._stage.storage_options)
            for block in unpacked(blocks, skip, decompressor):
                yield block
                at += len(block)
        except (EOFError, failure) as error:
            raise BadRow(
                f"{file.path}: cannot be unpacked as {file.compression} beyond byte {at} of its text: {error}.\n"
                "Replace the file by a whole one, or take it out of paths."
            ) from error

    def _second_try(self, file: SourceFile, at: int, line: bytes) -> Any:
        """The row of a line whose byte order mark is gone; for any other, raise what is wrong with it."""
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError as wrong:
            error = wrong
        reason = f"no valid JSON ({error})"
        try:
            line.decode()
        except UnicodeDecodeError as wrong:
            reason = f"no valid UTF-8 ({wrong.reason} at byte {wrong.start} of the line)"
        place = f"byte {at}"
        if file.compression is not None:
            blocks = self._unpacked(file, 0)
            place = f"line {_newlines_before(blocks, at) + 1} (byte {at} of its text)"
        start = line[:60].decode(errors="backslashreplace") + ("..." if len(line) > 60 else "")
        raise BadRow(
            f"{file.path}, {place}: the line that begins here is {reason}.\nIt reads {start!r}. "
            "Correct it or take it out of the file."
        ) from error

    def state_dict(self) -> dict[str, Any]:
        return {
            "chunk": self._number,
            "offset": self._offset,
            "chunk_bytes": self._chunk_bytes,
            "order": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        number, offset, size, seed = read_state(
            state, "read_jsonl", chunk=int, offset=int, chunk_bytes=int, order=(int, type(None))
        )
        if self._places is not None:
            raise InvalidState("read_jsonl: rows were read already. Load a position right after open().")
        if size < 1:
            raise InvalidState("read_jsonl: chunk_bytes in a position must be at least 1, but it is 0.")
        self._number, self._offset, self._chunk_bytes, self._seed = number, offset, size, seed

    def close(self) -> None:
        self._lines = None

    def where(self) -> str:
        return "the first row" if self._read is None else f"{self._read[0].path}, byte {self._read[1]}"


def _newlines_before(blocks: Iterator[bytes], stop: int) -> int:
    count = at = 0
    for block in blocks:
        count += block.count(b"\n", 0, max(0, stop - at))
        at += len(block)
        if at >= stop:
            break
    return count


def _decompressor(file: SourceFile) -> tuple[Callable[[], Any], type[Exception]]:
    """What makes a fresh decompressor, and what that raises on bad data."""
    if file.compression == "gzip":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    import zstandard

    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    return context.decompressobj, zstandard.ZstdError
