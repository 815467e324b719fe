"""Tar shards as WebDataset writes them: one row a group of members that share a key."""

from __future__ import annotations

import contextlib
import io
import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias, final

import numpy as np
import orjson

from unbroken.errors import BadRow
from unbroken.lanes import Lane
from unbroken.streams.identity import identity_of
from unbroken.streams.reading.chunks import Chunk, Chunks, chunk_bytes
from unbroken.streams.reading.compressed import Unpacked
from unbroken.streams.reading.files import (
    Access,
    SourceFile,
    check_access,
    digest_of,
    extent_of,
    find_files,
    one_line,
    read_blocks,
)
from unbroken.streams.reading.source import Bad, Format, Source
from unbroken.streams.reading.tar_members import BLOCK, Data, Streamed, first_group, key_of, members
from unbroken.streams.stage import Stage

__all__ = ["read_tar"]

Decoder: TypeAlias = Callable[[bytes], Any]

# A chunk that no shard is larger than: it stays whole.
_WHOLE = 1 << 50
_MOST_KEYS = 1024
_COMPRESSIONS = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".tzst": "zstd"}
_UNREADABLE = (".bz2", ".tbz", ".tbz2", ".xz", ".txz", ".lz4", ".br", ".zip", ".7z")


def read_tar(
    paths: Any,
    *,
    decode: bool | Mapping[str, Decoder | None] | None = True,
    on_error: str = "raise",
    retries: int = 5,
    read_ahead: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Stage:
    """A stream of the groups of members in tar archives, as WebDataset writes them: ``.tar``, ``.tar.gz``, ``.tgz``,
    ``.tar.zst``.

    ``paths``, ``on_error``, ``retries``, ``read_ahead`` and ``storage_options`` are those of ``read_jsonl``.

    A member's key is its path up to the first dot of its base name, its extension what follows, in lower case.
    Neighbours with the same key are one row: ``{"__key__": key, "__url__": path of the shard, extension: content,
    ...}``. Folders, links, names without an extension, with a dot at their start, and ``__...__`` are passed over.

    ``decode`` makes of the content: text of ``txt`` and ``text`` (UTF-8), objects of ``json``, a whole number of
    ``cls``, ``index`` and ``id``, a uint8 array [height, width, 3] (RGB) of ``jpg``, ``jpeg``, ``png`` and ``webp`` (by
    pillow), an array of ``npy``; other content stays bytes. The last part of an extension counts (``seg.png`` is a
    ``png``). A dict adds decoders or takes the place of these: ``{"png": my_function_of_bytes, "seg.png": None}``,
    where None leaves the bytes. ``False`` or ``None`` leaves all bytes as they are.

    A shard is a chunk that goes to one lane. Where there are fewer shards than lanes, plain ones are cut into ranges of
    bytes, and a group belongs to the range in which its first header lies: to find it the headers of the shard are
    walked once in each process, which takes long for large shards that are far away. A resume reads a plain shard
    from the next group on. A compressed one is one chunk, and a resume unpacks it as ``read_jsonl`` does.

    Raises ``FileNotFoundError``, ``IsADirectoryError``, ``TypeError`` and ``ValueError`` as their messages say. The
    iterator raises ``BadRow`` where a shard is damaged, cut short (the end of an archive is marked) or holds a sparse
    file, where a group has two members of the same extension, and where a member cannot be decoded; ``ImportError``
    where there is an image and no pillow.
    """
    access = check_access("read_tar", storage_options, retries, read_ahead, on_error, paths)
    decoders = _decoders(decode)
    files = tuple(map(_packed, find_files("read_tar", paths, None, access.storage_options, access.retries)))
    own = sorted(decode.items()) if isinstance(decode, Mapping) else []
    said = ", ".join(["default" if decoders else "none", *(f"{ext}={fn and identity_of(fn)}" for ext, fn in own)])
    return Source(_Tar(files, access, decoders, said), access)


def _decoders(decode: Any) -> dict[str, Decoder | None]:
    if decode is None or decode is False:
        return {}
    if decode is True:
        return dict(_DEFAULT)
    if not isinstance(decode, Mapping):
        raise TypeError(f"read_tar: decode must be True, False, None or a dict of functions, but got {decode!r}.")
    for extension, function in decode.items():
        if not isinstance(extension, str) or extension != extension.lower().lstrip("."):
            raise ValueError(
                f'read_tar: decode names an extension {extension!r}. Write it in lower case and without a dot: "jpg".'
            )
        if function is not None and not callable(function):
            raise TypeError(f"read_tar: decode[{extension!r}] must be a function of bytes, but got {function!r}.")
    return {**_DEFAULT, **decode}


def _packed(file: SourceFile) -> SourceFile:
    name = posixpath.basename(file.path.partition("::")[0] if "://" in file.path else file.path).lower()
    if name.endswith(_UNREADABLE):
        raise ValueError(
            f"read_tar: {file.path!r} is compressed in a way that cannot be read.\n"
            "Convert it to .tar, .tar.gz or .tar.zst."
        )
    compression = next((kind for suffix, kind in _COMPRESSIONS.items() if name.endswith(suffix)), None)
    return replace(file, compression=compression)


@final
@dataclass(frozen=True)
class _Tar(Format):
    """Places count bytes of the archive (of a compressed one, of what it holds) from the start of a chunk."""

    NAME: ClassVar[str] = "read_tar"
    UNIT: ClassVar[str] = "group"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"files": "data, held", "decode": "data"}

    files: tuple[SourceFile, ...]
    access: Access
    decoders: Mapping[str, Decoder | None]
    said: str

    def grain(self, lanes: int) -> int:
        sizes = [file.size for file in self.files if file.size]
        return _WHOLE if len(sizes) >= lanes else chunk_bytes(sum(sizes), lanes)

    def chunks(self, grain: int) -> Chunks:
        return Chunks(self.files, grain)

    def fetch(self, chunk: Chunk, place: int) -> Iterator[Any]:
        return self.fetch_from(chunk, place, [])

    def fetch_from(self, chunk: Chunk, place: int, mark: list[int]) -> Iterator[Any]:
        if chunk.file.compression is not None:
            return Unpacked(chunk.file, place, mark, self.access)
        return self._ranged(chunk, place)

    def _ranged(self, chunk: Chunk, place: int) -> Iterator[Any]:
        """The offset of the first group, and then bytes from there on; nothing where there is none."""
        start: int | None = chunk.start + place
        if chunk.start and not place:
            start = first_group(chunk.file, chunk.start, self.access)
        if start is not None and start < chunk.stop:
            yield start
            yield from read_blocks(chunk.file, start, chunk.stop, self.access)

    def rows(self, chunk: Chunk, place: int, pieces: Iterator[Any], lane: Lane) -> Iterator[tuple[int, int, Any]]:
        start = next(pieces, None) if chunk.file.compression is None else place
        if start is None:
            return
        path = chunk.file.path
        for group in _groups(Streamed(pieces, start), path, chunk.stop):
            _remember(path, group.start, group.key)
            yield group.start - chunk.start, group.after - chunk.start, self._row(path, group)
        if chunk.file.compression is not None:
            for _ in pieces:  # its checksum comes last
                pass

    def _row(self, path: str, group: _Group) -> Any:
        row: dict[str, Any] = {"__key__": group.key, "__url__": path}
        for extension, content in group.contents:
            member = f"{group.key}.{extension}"
            if extension in row:
                return Bad(f"two members are named {member!r}", "Give each its own name in the shard.")
            try:
                decoder = self._decoder(extension)
                row[extension] = content if decoder is None else decoder(content)
            except ImportError:
                raise
            except Exception as error:
                return Bad(
                    f"the member {member!r} (key {group.key!r}, extension {extension!r}, {len(content)} bytes) cannot "
                    f"be decoded: {type(error).__name__}: {one_line(error)}",
                    'Replace it, name another decoder for its extension in decode, or pass on_error="skip".',
                )
        return row

    def _decoder(self, extension: str) -> Decoder | None:
        """The decoder of the longest ending of the extension that has one."""
        while extension not in self.decoders:
            dot = extension.find(".") + 1
            if not dot:
                return None
            extension = extension[dot:]
        return self.decoders[extension]

    def locate(self, chunk: Chunk, place: int) -> tuple[str, int | str]:
        path, offset = chunk.file.path, chunk.start + place
        return path, _keys.get((path, offset), offset)

    def where(self, chunk: Chunk, place: int) -> str:
        inside = " of the archive in it" if chunk.file.compression is not None else ""
        return f"{chunk.file.path}, byte {chunk.start + place}{inside}"

    def fields(self) -> dict[str, Any]:
        return {"files": digest_of(self.files), "decode": self.said}

    def arguments(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0].path!r}{more}"

    def extent(self) -> str:
        return extent_of(self.files)


class _Group(NamedTuple):
    """Neighbours with the same key: the offset of the first header, that of the next group, and the contents."""

    start: int
    after: int
    key: str
    contents: list[tuple[str, bytes]]


def _groups(data: Data, path: str, stop: int) -> Iterator[_Group]:
    """The groups that begin before ``stop``. Raises ``BadRow`` as ``members`` does, and where a member is cut short."""
    key, start = "", -1
    contents: list[tuple[str, bytes]] = []
    for member in members(data, path):
        found = key_of(member.name)
        if found is None:
            continue
        if found[0] != key or start < 0:
            if start >= 0:
                yield _Group(start, member.offset, key, contents)
            if member.offset >= stop:
                return
            key, start, contents = found[0], member.offset, []
        content = data.take(member.size)
        if len(content) < member.size:
            raise BadRow(
                f"{path}, byte {data.at}: ends in the middle of the member {member.name!r}, which begins at byte "
                f"{member.offset} and has {member.size} bytes.\n"
                'Replace the shard by a whole one, or pass on_error="skip" to leave out the rest of it.'
            )
        contents.append((found[1], content))
    if start >= 0:
        yield _Group(start, data.at - BLOCK, key, contents)  # the block of zeros that ends the archive


# The keys of the groups that were read last, by path and offset: lineage asks for them right after a row.
_keys: dict[tuple[str, int], str] = {}


def _remember(path: str, offset: int, key: str) -> None:
    _keys[path, offset] = key
    if len(_keys) > _MOST_KEYS:
        with contextlib.suppress(RuntimeError, StopIteration):  # another thread has put one in or taken one out
            _keys.pop(next(iter(_keys)), None)


def _image(content: bytes) -> Any:
    """uint8 [height, width, 3], RGB."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "read_tar: there are images in these shards, and pillow is not installed.\n"
            "Install it (pip install pillow), or pass decode=False or other decoders."
        ) from error
    with Image.open(io.BytesIO(content)) as image:
        return np.array(image.convert("RGB"))


def _array(content: bytes) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False)


_DEFAULT: Mapping[str, Decoder] = {
    **dict.fromkeys(("txt", "text"), bytes.decode),
    "json": orjson.loads,
    **dict.fromkeys(("cls", "index", "id"), int),
    **dict.fromkeys(("jpg", "jpeg", "png", "webp"), _image),
    "npy": _array,
}
