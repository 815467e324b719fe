"""Arrow IPC: one row a row of the table, read by record batches, from files, streams and saved datasets."""

from __future__ import annotations

import glob
import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import fsspec
import numpy as np
import pyarrow as pa

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
from unbroken.streams.reading.groups import (
    Groups,
    Numbers,
    Part,
    Parts,
    changed,
    check_unchanged,
    scan_files,
)
from unbroken.streams.reading.messages import Contents, contents_of, dictionaries_of, not_arrow
from unbroken.streams.reading.retrying import patiently
from unbroken.streams.reading.source import Format, Source
from unbroken.streams.stage import Stage

__all__ = ["read_arrow"]

_SUFFIXES = (".arrow", ".arrows", ".feather", ".ipc")


def read_arrow(
    paths: Any,
    *,
    columns: list[str] | None = None,
    on_error: str = "raise",
    retries: int = 5,
    read_ahead: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Stage:
    """A stream of the rows of Arrow IPC files and streams, and of folders that ``datasets`` wrote.

    ``paths`` is a path, or a list of paths: local or of fsspec (``memory://``, ``s3://``, ...), with ``*``, ``?``,
    ``[]`` and ``**`` in patterns. The matches of a pattern are sorted; a file that is named twice is read twice. A
    folder written by ``Dataset.save_to_disk`` stands for its files in their order, with values as they are stored
    (images, audio and class labels are not decoded); of a ``DatasetDict`` name one split.
    ``columns`` names the columns to read; every file must have them.
    ``storage_options`` goes to the fsspec file system; it is in no fingerprint and in no print.

    A read that fails is tried again ``retries`` times, with pauses, where the failure may pass. ``read_ahead`` fetches
    the next piece in a thread; ``None`` does so for paths that are not local. ``on_error="skip"`` leaves out rows
    that have no values in Python, and the rest of a record batch that cannot be read; what was left out is counted
    and named in the position, and left out again after a resume. A file that is no Arrow file is then left out when
    the stream is made, with a warning of the logger ``unbroken``.

    A row is a dict ``{column: value}`` in the order of ``columns``, or of the file; files may differ in their other
    columns and in types. Numbers, text and bytes are those of Python, a list of numbers is a numpy array, a null is
    ``None``; ``unbroken.streams.reading.columns.values_of`` lists all types.

    Where record batches lie is looked up here, in threads: in each file one small read for every one of them. They go
    to lanes as a whole where there are enough of them; else they are cut into ranges of rows, so that every lane has
    work. Local files are mapped into memory while one of their batches is read. Of a file elsewhere the whole batch
    is fetched, whichever columns and rows of it are wanted.

    Raises ``FileNotFoundError``, ``IsADirectoryError``, ``TypeError`` and ``ValueError`` as their messages say, and
    ``BadRow`` where a file is no Arrow file or is cut short. The iterator raises ``BadRow`` where a record batch
    cannot be decoded or a file has changed; its position then lies before the rows that are missing.
    """
    access = check_access("read_arrow", storage_options, retries, read_ahead, on_error, paths)
    wanted = check_columns("read_arrow", columns)

    def scan(file: SourceFile) -> Contents:
        contents = contents_of(file, access)
        _check(file, contents, wanted)
        return contents

    files = find_files("read_arrow", _expanded(paths, access), None, access.storage_options, access.retries)
    groups, places = _planned(scan_files("read_arrow", files, scan, skips=access.skips))
    return Source(_Arrow(groups, places, wanted, access), access)


@final
@dataclass(frozen=True, eq=False)
class _Places:
    """Where record batches lie: byte and length of their messages, int64 of shape [batches].

    ``schemas`` are the schema messages that differ, ``schema_of`` which of them each file has, int64 of shape [files];
    ``dictionaries`` is what is in the files, by number, that have any.
    """

    offsets: Numbers
    lengths: Numbers
    schemas: tuple[bytes, ...]
    schema_of: Numbers
    dictionaries: Mapping[int, Contents]


def _planned(found: Sequence[tuple[SourceFile, Contents]]) -> tuple[Groups, _Places]:
    batches = [batch for _, contents in found for batch in contents.batches]
    groups = Groups(
        tuple(file for file, _ in found),
        np.array([len(contents.batches) for _, contents in found], dtype=np.int64),
        np.array([batch.rows for batch in batches], dtype=np.int64),
    )
    schemas = {schema: number for number, schema in enumerate(dict.fromkeys(contents.schema for _, contents in found))}
    places = _Places(
        np.array([batch.offset for batch in batches], dtype=np.int64),
        np.array([batch.length for batch in batches], dtype=np.int64),
        tuple(schemas),
        np.array([schemas[contents.schema] for _, contents in found], dtype=np.int64),
        {i: contents._replace(batches=()) for i, (_, contents) in enumerate(found) if contents.dictionaries},
    )
    return groups, places


@final
@dataclass(frozen=True, eq=False)
class _Arrow(Format):
    """Places count rows from the start of a chunk."""

    NAME: ClassVar[str] = "read_arrow"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"files": "data, held", "columns": "data"}

    groups: Groups
    places: _Places
    columns: tuple[str, ...] | None
    access: Access

    def grain(self, lanes: int) -> int:
        return self.groups.grain(lanes)

    def chunks(self, grain: int) -> Parts:
        return self.groups.parts(grain)

    def fetch(self, chunk: Part, place: int) -> Iterator[pa.RecordBatch]:
        start, stop = chunk.start + place, chunk.stop
        if start >= stop:
            return
        check_unchanged(chunk.file)
        messages = self._messages(chunk)
        try:
            batch = _decoded(messages, self.columns)
            if batch.num_rows != self.groups.rows[chunk.number]:
                raise ValueError(f"it has {batch.num_rows} rows, and had {self.groups.rows[chunk.number]}")
        except Exception as error:
            if isinstance(error, MemoryError) and not _is_absurd(error):
                raise
            raise BadRow(
                f"{chunk.file.path}: record batch {chunk.group} cannot be decoded: {one_line(error)}.\n"
                "Replace the file by a whole one, or take it out of paths."
            ) from error
        step = batch_rows(batch.get_total_buffer_size(), batch.num_rows)  # nbytes would follow damaged offsets
        for at in range(start, stop, step):
            yield batch.slice(at, min(step, stop - at))

    def _messages(self, chunk: Part) -> list[memoryview]:
        """A stream of one record batch: the schema's message, those of its dictionaries, its own."""
        offset, length = int(self.places.offsets[chunk.number]), int(self.places.lengths[chunk.number])
        contents = self.places.dictionaries.get(chunk.file_number)
        held = [] if contents is None else dictionaries_of(contents, offset)
        wanted = [*((message.offset, message.length) for message in held), (offset, length)]
        schema = memoryview(self.places.schemas[self.places.schema_of[chunk.file_number]])
        if is_local(chunk.file.path):
            return [schema, *_mapped(chunk.file.path, wanted)]
        return [schema, *(_fetched(chunk.file, begin, count, self.access) for begin, count in wanted)]

    def rows(self, chunk: Part, place: int, pieces: Iterator[Any], lane: Lane) -> Iterator[tuple[int, int, Any]]:
        return rows_of(pieces, place, self.columns, validate=True)

    def locate(self, chunk: Part, place: int) -> tuple[str, int]:
        return chunk.file.path, chunk.before + chunk.start + place

    def where(self, chunk: Part, place: int) -> str:
        path, row = self.locate(chunk, place)
        return f"{path}, row {row} (record batch {chunk.group})"

    def fields(self) -> dict[str, Any]:
        return {"files": digest_of(self.groups.files), "columns": self.columns and list(self.columns)}

    def arguments(self) -> str:
        files = self.groups.files
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        return f"{files[0].path!r}{more}" + (f", columns={list(self.columns)}" if self.columns else "")

    def extent(self) -> str:
        return extent_of(self.groups.files)


def _mapped(path: str, wanted: Iterable[tuple[int, int]]) -> list[memoryview]:
    """Pieces of a local file, by offset and length. They are its pages, and nothing else of it stays open."""
    with pa.memory_map(path) as mapped:
        found = []
        for offset, length in wanted:
            mapped.seek(offset)
            found.append(memoryview(mapped.read_buffer(length)))
    return found


def _fetched(file: SourceFile, offset: int, length: int, access: Access) -> memoryview:
    data = read_range(file.path, offset, offset + length, access)
    if len(data) < length:
        raise changed(file, f"ends at byte {offset + len(data)}")
    return memoryview(data)


def _decoded(messages: Sequence[memoryview], columns: tuple[str, ...] | None) -> pa.RecordBatch:
    names = pa.ipc.read_schema(pa.py_buffer(messages[0])).names
    options = pa.ipc.IpcReadOptions(
        use_threads=False, included_fields=None if columns is None else [names.index(name) for name in columns]
    )
    with pa.ipc.open_stream(pa.PythonFile(_Joined(messages), mode="r"), options=options) as stream:
        return stream.read_next_batch()


@final
class _Joined:
    """Pieces of memory as one file for pyarrow, without a copy: no read goes beyond the message that it began in."""

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self.closed = False
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")
        self._at = 0

    def read(self, count: int) -> memoryview:
        if not self._piece:
            self._piece = next(self._pieces, self._piece)
        data, self._piece = self._piece[:count], self._piece[count:]
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self.closed = True


def _check(file: SourceFile, contents: Contents, columns: tuple[str, ...] | None) -> None:
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(contents.schema))
        names = schema.names  # which are decoded only now
    except Exception as error:
        raise not_arrow(file, f"its schema cannot be read ({one_line(error)})") from error
    if names == ["indices"] and b"huggingface" in (schema.metadata or {}):
        raise _not_flat(file.path, "is a file of indices into a dataset, as select() and shuffle() leave it")
    check_schema("read_arrow", file.path, schema, columns)


def _expanded(paths: Any, access: Access) -> Any:
    """The paths, with the files of a folder of ``datasets`` in its place."""
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if isinstance(paths, bytes | Mapping) or not isinstance(paths, Iterable):
        return paths  # whoever finds the files says what is wrong with it
    return [file for path in paths for file in patiently(partial(_inside, path, access), access.retries, str(path))]


def _inside(path: Any, access: Access) -> list[Any]:
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str) or name.endswith(_SUFFIXES) or glob.has_magic(name):
        return [path]
    files, folder = fsspec.core.url_to_fs(name, **access.storage_options)
    if not files.isdir(folder):
        return [path]
    if files.exists(posixpath.join(folder, "dataset_dict.json")):
        splits = json.loads(files.cat_file(posixpath.join(folder, "dataset_dict.json")))["splits"]
        raise ValueError(
            f"read_arrow: {name!r} is a DatasetDict with the splits {', '.join(map(repr, splits))}.\n"
            f"Name one of them: {_beside(name, splits[0] if splits else 'train')!r}."
        )
    if not files.exists(posixpath.join(folder, "state.json")):
        return [path]
    try:
        state = json.loads(files.cat_file(posixpath.join(folder, "state.json")))
        found = [_beside(name, listed["filename"]) for listed in state["_data_files"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"read_arrow: state.json in {name!r} is none that save_to_disk() wrote ({one_line(error)}).\n"
            "Name the .arrow files themselves, or save the dataset again."
        ) from error
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise _not_flat(name, "was saved with indices that choose and order its rows")
    return found


def _not_flat(name: str, what: str) -> ValueError:
    return ValueError(
        f"read_arrow: {name!r} {what}, and rows are read here in the order of the files.\n"
        "Call flatten_indices() on the dataset and save it again, or pass it to from_hf()."
    )


def _beside(folder: str, name: str) -> str:
    """The path of a file in a folder, of a URL in a chain too."""
    first, chained, rest = folder.partition("::")
    if "://" in first or not chained:
        return posixpath.join(first, name) + chained + rest
    return posixpath.join(folder, name)


def _is_absurd(error: MemoryError) -> bool:
    """Whether more was asked for than any machine has: a damaged size, and no want of memory."""
    asked = re.search(r"size (\d+)", str(error))
    return asked is not None and int(asked[1]) >> 44 > 0
