"""Parquet: one row a row of the table, read by row groups."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from unbroken.errors import BadRow
from unbroken.lanes import Lane
from unbroken.streams.reading.columns import batch_rows, check_columns, check_schema, rows_of
from unbroken.streams.reading.files import (
    Access,
    SourceFile,
    check_access,
    digest_of,
    extent_of,
    find_files,
    is_local,
    one_line,
    read_range,
)
from unbroken.streams.reading.groups import Groups, Part, Parts, changed, check_unchanged, scan_files
from unbroken.streams.reading.source import Format, Source
from unbroken.streams.stage import Stage

__all__ = ["read_parquet"]

# A file ends in its footer, the footer's length (little-endian, 4 bytes) and these 4 bytes; it begins with them too.
# https://parquet.apache.org/docs/file-format/
_MAGIC, _LEAST_BYTES = b"PAR1", 12
_TAIL_BYTES = 1 << 16  # mostly all of the footer, in one read
_LOCAL_BUFFER, _REMOTE_BUFFER = 1 << 18, 1 << 20
# Of a row group that lies far away, all is read at once up to this size, rather than column by column.
_WHOLE_BYTES = 8 << 20
_MOST_KEPT_BYTES = 64 << 20


def read_parquet(
    paths: Any,
    *,
    columns: list[str] | None = None,
    on_error: str = "raise",
    retries: int = 5,
    read_ahead: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Stage:
    """A stream of the rows of Parquet files.

    ``paths`` is a path, or a list of paths: local or of fsspec (``memory://``, ``s3://``, ...), with ``*``, ``?``,
    ``[]`` and ``**`` in patterns. The matches of a pattern are sorted; a file that is named twice is read twice.
    ``columns`` names the columns to read; every file must have them, and the others are not decoded.
    ``storage_options`` goes to the fsspec file system; it is in no fingerprint and in no print.

    A read that fails is tried again ``retries`` times, with pauses, where the failure may pass. ``read_ahead`` fetches
    the next piece in a thread; ``None`` does so for paths that are not local. ``on_error="skip"`` leaves out rows
    that have no values in Python, and the rest of a row group that cannot be read; what was left out is counted and
    named in the position, and left out again after a resume. A file that is no Parquet file is then left out when the
    stream is made, with a warning of the logger ``unbroken``.

    A row is a dict ``{column: value}`` in the order of ``columns``, or of the file; files may differ in their other
    columns and in types. Numbers, text and bytes are those of Python, a list of numbers is a numpy array, a null is
    ``None``; ``unbroken.streams.reading.columns.values_of`` lists all types. A timestamp of the old type INT96 is in
    microseconds. Checksums of pages are verified where they were written.

    The footers are read here, in threads. A row group goes to one lane as a whole where there are enough of them; else
    row groups are cut into ranges of rows, so that every lane has work. A lane decodes a row group from its start, and
    so does a resume: no other row group is read, and of the rows before the place no Python values are made.

    Raises ``FileNotFoundError``, ``IsADirectoryError``, ``TypeError`` and ``ValueError`` as their messages say, and
    ``BadRow`` where a file has no footer that can be read. The iterator raises ``BadRow`` where a row group cannot be
    decoded or a file has changed; its position then lies before the rows that are missing.
    """
    access = check_access("read_parquet", storage_options, retries, read_ahead, on_error, paths)
    wanted = check_columns("read_parquet", columns)

    def scan(file: SourceFile) -> tuple[int, list[int]]:
        footer = _read_footer(file, access)
        metadata = _parsed(file, footer)
        check_schema("read_parquet", file.path, metadata.schema.to_arrow_schema(), wanted)
        digest = xxhash.xxh3_64_intdigest(footer)
        _footers.put(file, digest, metadata)
        return digest, [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    files = find_files("read_parquet", paths, None, access.storage_options, access.retries)
    found = scan_files("read_parquet", files, scan, skips=access.skips)
    groups = Groups(
        tuple(file for file, _ in found),
        np.array([len(rows) for _, (_, rows) in found], dtype=np.int64),
        np.array([count for _, (_, rows) in found for count in rows], dtype=np.int64),
    )
    footers = np.array([digest for _, (digest, _) in found], dtype=np.uint64)
    return Source(_Parquet(groups, footers, wanted, access), access)


@final
@dataclass(frozen=True, eq=False)
class _Parquet(Format):
    """Places count rows from the start of a chunk. ``footers`` are their digests, uint64 of shape [files]."""

    NAME: ClassVar[str] = "read_parquet"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"files": "data, held", "columns": "data"}

    groups: Groups
    footers: npt.NDArray[np.uint64]
    columns: tuple[str, ...] | None
    access: Access

    def grain(self, lanes: int) -> int:
        return self.groups.grain(lanes)

    def chunks(self, grain: int) -> Parts:
        return self.groups.parts(grain)

    def fetch(self, chunk: Part, place: int) -> Iterator[pa.RecordBatch]:
        if place >= chunk.stop - chunk.start:
            return
        check_unchanged(chunk.file)
        metadata = _footer_of(chunk.file, int(self.footers[chunk.file_number]), self.access)
        file = _RangeFile(chunk.file, self.access)
        try:
            yield from _batches(file, metadata, chunk, place, self.columns)
        except (BadRow, MemoryError):
            raise
        except Exception as error:
            if file.failure is not None:  # not what was read is at fault, but the reading
                raise file.failure from None
            raise BadRow(
                f"{chunk.file.path}: row group {chunk.group} cannot be decoded: {one_line(error)}.\n"
                "Replace the file by a whole one, or take it out of paths."
            ) from error

    def rows(self, chunk: Part, place: int, pieces: Iterator[Any], lane: Lane) -> Iterator[tuple[int, int, Any]]:
        return rows_of(pieces, place, self.columns, validate=False)

    def locate(self, chunk: Part, place: int) -> tuple[str, int]:
        return chunk.file.path, chunk.before + chunk.start + place

    def where(self, chunk: Part, place: int) -> str:
        path, row = self.locate(chunk, place)
        return f"{path}, row {row} (row group {chunk.group})"

    def fields(self) -> dict[str, Any]:
        return {"files": digest_of(self.groups.files), "columns": self.columns and list(self.columns)}

    def arguments(self) -> str:
        files = self.groups.files
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        return f"{files[0].path!r}{more}" + (f", columns={list(self.columns)}" if self.columns else "")

    def extent(self) -> str:
        return extent_of(self.groups.files)


def _batches(
    file: _RangeFile, metadata: Any, chunk: Part, place: int, columns: tuple[str, ...] | None
) -> Iterator[pa.RecordBatch]:
    """The record batches of a chunk from a place on; of those before it, none."""
    group = metadata.row_group(chunk.group)
    start, stop, size = _extent(group, columns)
    if not is_local(file.path) and stop - start <= _WHOLE_BYTES:
        file.keep(start, stop)
    table = pq.ParquetFile(
        pa.PythonFile(file, mode="r"),
        metadata=metadata,
        pre_buffer=False,
        buffer_size=_LOCAL_BUFFER if is_local(file.path) else _REMOTE_BUFFER,
        coerce_int96_timestamp_unit="us",
        page_checksum_verification=True,
    )
    at, wanted = 0, chunk.start + place
    # Threads of pyarrow would compete with the other lanes, and do not come along into a forked process.
    for batch in table.iter_batches(
        batch_rows(size, group.num_rows),
        row_groups=[chunk.group],
        columns=columns and list(columns),
        use_threads=False,
    ):
        begin, at = at, at + batch.num_rows
        if at > wanted:
            first = max(0, wanted - begin)
            yield batch.slice(first, min(at, chunk.stop) - begin - first)
        if at >= chunk.stop:
            return
    raise BadRow(
        f"{file.path}: row group {chunk.group} ends after {at} rows, but its footer says {group.num_rows}.\n"
        "Replace the file by a whole one, or take it out of paths."
    )


def _extent(group: Any, columns: tuple[str, ...] | None) -> tuple[int, int, int]:
    """Where the columns of a row group lie in the file, from and to, and their bytes once decompressed."""
    start = stop = size = 0
    for number in range(group.num_columns):
        column = group.column(number)
        path = column.path_in_schema
        if columns is None or any(path == name or path.startswith(f"{name}.") for name in columns):
            begin = column.data_page_offset
            if column.has_dictionary_page and 0 < column.dictionary_page_offset < begin:
                begin = column.dictionary_page_offset
            start, stop = min(start or begin, begin), max(stop, begin + column.total_compressed_size)
            size += column.total_uncompressed_size
    return start, stop, size


@final
class _RangeFile:
    """A file for pyarrow that is read by range: nothing is open, and what fails in passing is tried again.

    ``failure`` is the error of the last read that failed. pyarrow hands errors on, but has ``OSError`` of its own too.
    """

    def __init__(self, file: SourceFile, access: Access) -> None:
        self.path = file.path
        self.closed = False
        self.failure: Exception | None = None
        self._file = file
        self._access = access
        self._at = 0
        self._kept = 0, b""

    def keep(self, start: int, stop: int) -> None:
        """Read these bytes at once, and hold them."""
        self._kept = start, bytes(self._range(start, stop))

    def read(self, count: int = -1) -> bytes | memoryview:
        start = self._at
        stop = min(self._file.size, start + count) if count >= 0 else self._file.size
        kept_at, kept = self._kept
        if kept_at <= start and stop <= kept_at + len(kept):
            data: bytes | memoryview = memoryview(kept)[start - kept_at : stop - kept_at]
        else:
            data = self._range(start, stop)
        self._at = stop
        return data

    def _range(self, start: int, stop: int) -> bytes:
        try:
            data = read_range(self.path, start, stop, self._access)
            if len(data) < stop - start:
                raise changed(self._file, f"ends at byte {start + len(data)}")
        except Exception as error:
            self.failure = error
            raise
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self.closed = True


@final
class _Footers:
    """The footers that this process read last, by path, size and digest: some are large, or lie far away.

    Threads share it. It is emptied when it has grown to some 64 MiB, as they are written in files.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, int], Any] = {}
        self._bytes = 0

    def get(self, file: SourceFile, digest: int) -> Any:
        return self._found.get((file.path, file.size, digest))

    def put(self, file: SourceFile, digest: int, metadata: Any) -> None:
        if self._bytes + metadata.serialized_size > _MOST_KEPT_BYTES:
            self._found, self._bytes = {}, 0
        self._found[file.path, file.size, digest] = metadata
        self._bytes += metadata.serialized_size


_footers = _Footers()


def _footer_of(file: SourceFile, digest: int, access: Access) -> Any:
    """The metadata of a file; raises ``BadRow`` where its footer is another than when the stream was made."""
    metadata = _footers.get(file, digest)
    if metadata is None:
        footer = _read_footer(file, access)
        if xxhash.xxh3_64_intdigest(footer) != digest:
            raise changed(file, "has another footer")
        metadata = _parsed(file, footer)
        _footers.put(file, digest, metadata)
    return metadata


def _read_footer(file: SourceFile, access: Access) -> bytes:
    """The end of a file: its footer, the footer's length, and the magic bytes."""
    if file.size < _LEAST_BYTES:
        raise _not_parquet(file, f"it has {file.size} bytes")
    tail = _read_end(file, min(file.size, _TAIL_BYTES), access)
    if tail[-4:] != _MAGIC:
        raise _not_parquet(file, f"it ends in {tail[-4:]!r}, not in {_MAGIC!r}")
    length = struct.unpack("<I", tail[-8:-4])[0] + 8
    if length > file.size - len(_MAGIC):
        raise _not_parquet(file, f"its footer would have {length} bytes, and it has {file.size}")
    return (tail if length <= len(tail) else _read_end(file, length, access))[-length:]


def _read_end(file: SourceFile, length: int, access: Access) -> bytes:
    data = read_range(file.path, file.size - length, file.size, access)
    if len(data) < length:
        raise changed(file, f"ends at byte {file.size - length + len(data)}")
    return data


def _parsed(file: SourceFile, footer: bytes) -> Any:
    try:
        # What stands before the footer is not looked at.
        return pq.read_metadata(pa.BufferReader(_MAGIC + footer))
    except Exception as error:
        raise _not_parquet(file, f"its footer cannot be read ({one_line(error)})") from error


def _not_parquet(file: SourceFile, reason: str) -> BadRow:
    return BadRow(
        f'{file.path}: is no whole Parquet file: {reason}.\nReplace it, take it out of paths, or pass on_error="skip".'
    )
