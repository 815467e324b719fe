"""JSON lines: one row a line, from plain and compressed files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import orjson

from unbroken.lanes import Lane
from unbroken.streams.reading.chunks import Chunk, Chunks, chunk_bytes, lines
from unbroken.streams.reading.compressed import Unpacked
from unbroken.streams.reading.files import (
    Access,
    SourceFile,
    check_access,
    digest_of,
    extent_of,
    find_files,
    read_blocks,
)
from unbroken.streams.reading.source import Bad, Format, Source
from unbroken.streams.stage import Stage

__all__ = ["read_jsonl"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(
    paths: Any,
    *,
    compression: str | None = "infer",
    on_error: str = "raise",
    retries: int = 5,
    read_ahead: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Stage:
    """A stream of the rows of JSON-lines files.

    ``paths`` is a path, or a list of paths: local or of fsspec (``memory://``, ``s3://``, ...), with ``*``, ``?``,
    ``[]`` and ``**`` in patterns. The matches of a pattern are sorted; a file that is named twice is read twice.
    ``compression`` is ``"gzip"``, ``"zstd"``, ``None``, or ``"infer"``: by ``.gz``, ``.zst`` and ``.zstd``.
    ``storage_options`` goes to the fsspec file system; it is in no fingerprint and in no print.

    A read that fails is tried again ``retries`` times, with pauses, where the failure may pass. ``read_ahead`` fetches
    the next piece in a thread; ``None`` does so for paths that are not local. ``on_error="skip"`` leaves out lines
    that are no JSON, and the rest of a file that cannot be read; what was left out is counted and named in the
    position, and left out again after a resume.

    A row is what its line holds: a dict, or whatever other JSON is there. Blank lines, a byte order mark at the start
    and CRLF are passed over; the last line needs no newline.

    Only sizes are read here. Plain files are cut into byte ranges and dealt to lanes; a compressed file is one chunk:
    no more lanes have rows than there are such files. A resume inside one unpacks from the nearest place before: the
    start of a gzip member or zstd frame, which the position names (``bgzip`` and ``pzstd`` write many; ``gzip``,
    ``pigz`` and ``zstd`` one for the whole file), or for gzip a place in the middle that was kept on this machine when
    the file was read (see ``unbroken.streams.reading.points``; some 0.5 % of the text, in ``~/.cache/unbroken`` or the
    folder that ``UNBROKEN_CACHE`` names). Where it knows none, it unpacks from the start: the rows are the same, and
    what helps is said once.

    Raises ``FileNotFoundError``, ``IsADirectoryError``, ``TypeError`` and ``ValueError`` as their messages say. The
    iterator raises ``BadRow`` where a line is no JSON or no UTF-8, or a file cannot be unpacked or has changed; its
    position then lies before that line.
    """
    access = check_access("read_jsonl", storage_options, retries, read_ahead, on_error, paths)
    files = find_files("read_jsonl", paths, compression, access.storage_options, retries)
    return Source(_Jsonl(files, sum(file.size for file in files), access), access)


@final
@dataclass(frozen=True)
class _Jsonl(Format):
    """Places count bytes from the start of a chunk (of a compressed file, of its text)."""

    NAME: ClassVar[str] = "read_jsonl"
    UNIT: ClassVar[str] = "byte"

    files: tuple[SourceFile, ...]
    total: int
    access: Access

    def grain(self, lanes: int) -> int:
        return chunk_bytes(self.total, lanes)

    def chunks(self, grain: int) -> Chunks:
        return Chunks(self.files, grain)

    def fetch(self, chunk: Chunk, place: int) -> Iterator[bytes]:
        if chunk.file.compression is not None:
            return Unpacked(chunk.file, place, [], self.access)
        return read_blocks(chunk.file, max(0, chunk.start + place - 1), chunk.stop, self.access)

    def fetch_from(self, chunk: Chunk, place: int, mark: list[int]) -> Iterator[bytes]:
        return Unpacked(chunk.file, place, mark, self.access)

    def rows(self, chunk: Chunk, place: int, pieces: Iterator[bytes], lane: Lane) -> Iterator[tuple[int, int, Any]]:
        begin, start = chunk.start, chunk.start + place
        if chunk.file.compression is not None:
            found = lines(pieces, start, chunk.stop, inside=False)
        else:
            found = lines(pieces, max(0, start - 1), chunk.stop, inside=start > 0)
        for at, line in found:
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                text = line.removeprefix(_BYTE_ORDER_MARK) if at == 0 else line
                if not text.strip():
                    continue
                row = _second_try(text)
            yield at - begin, at + len(line) + 1 - begin, row

    def locate(self, chunk: Chunk, place: int) -> tuple[str, int]:
        return chunk.file.path, chunk.start + place

    def where(self, chunk: Chunk, place: int) -> str:
        at = chunk.start + place
        if chunk.file.compression is None:
            return f"{chunk.file.path}, byte {at}"
        before = _newlines_before(Unpacked(chunk.file, 0, [], self.access), at)
        return f"{chunk.file.path}, line {before + 1} (byte {at} of its text)"

    def fields(self) -> dict[str, Any]:
        return {"files": digest_of(self.files)}

    def arguments(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0].path!r}{more}"

    def extent(self) -> str:
        return extent_of(self.files)


def _second_try(line: bytes) -> Any:
    """The row of a line whose byte order mark is gone; for any other, what is wrong with it."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        reason = f"no valid JSON ({error})"
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        reason = f"no valid UTF-8 ({wrong.reason} at byte {wrong.start} of the line)"
    start = line[:60].decode(errors="backslashreplace") + ("..." if len(line) > 60 else "")
    return Bad(
        f"the line that begins here is {reason}",
        f'It reads {start!r}. Correct it, take it out of the file, or pass on_error="skip".',
    )


def _newlines_before(blocks: Iterator[bytes], stop: int) -> int:
    count = at = 0
    for block in blocks:
        count += block.count(b"\n", 0, max(0, stop - at))
        at += len(block)
        if at >= stop:
            break
    return count
