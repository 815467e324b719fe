"""Files: paths and patterns to names and sizes, and bytes by range.

Nothing is kept open. A file is read by range, so that nothing leaks where an iterator is dropped, and nothing is
shared where a process forks.
"""

from __future__ import annotations

import glob
import hashlib
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import fsspec
from fsspec.implementations.local import LocalFileSystem

from unbroken.errors import BadRow

__all__ = ["SourceFile", "digest_of", "find_files", "infer_compression", "read_blocks"]

_LOCAL_BLOCK, _REMOTE_BLOCK = 1 << 18, 1 << 20
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_UNREADABLE = (".7z", ".br", ".bz2", ".lz4", ".rar", ".snappy", ".tar", ".tgz", ".xz", ".zip")


@final
@dataclass(frozen=True)
class SourceFile:
    """A file as it was found: its path (a URL where it is not local), its size in bytes, how it is compressed."""

    path: str
    size: int
    compression: str | None = None


def find_files(
    reader: str, paths: Any, compression: str | None, storage_options: Mapping[str, Any]
) -> tuple[SourceFile, ...]:
    """The files that ``paths`` name, with their sizes: paths in the order given, the matches of a pattern sorted.

    Raises ``TypeError`` on what is no path, ``FileNotFoundError`` where nothing is there, ``IsADirectoryError`` on a
    folder, and ``ValueError`` on an empty list, a size that cannot be known or a compression that cannot be read.
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else paths
    if isinstance(listed, bytes | Mapping) or not isinstance(listed, Iterable):
        raise TypeError(f"{reader}: paths must be a path or a list of paths, but got a {type(paths).__name__}.")
    found: list[SourceFile] = []
    for path in listed:
        if not isinstance(path, str | os.PathLike) or not isinstance(name := os.fspath(path), str):
            raise TypeError(f"{reader}: a path must be a str or a Path, but got {path!r} ({type(path).__name__}).")
        for match, size in _matches(reader, name, storage_options):
            found.append(SourceFile(match, size, infer_compression(reader, match, compression)))
    if not found:
        raise ValueError(f"{reader}: paths is empty. Name at least one file.")
    return tuple(found)


def _matches(reader: str, path: str, storage_options: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    files, inner = fsspec.core.url_to_fs(path, **storage_options)
    is_pattern = glob.has_magic(path) and not files.exists(inner)  # a name may have brackets in it
    if is_pattern:
        listing = files.glob(inner, detail=True)
        matches = [listing[name] for name in sorted(listing) if listing[name]["type"] != "directory"]
        if not matches:
            raise FileNotFoundError(f"{reader}: nothing matches {path!r}. Correct the pattern.")
    else:
        try:
            matches = [files.info(inner)]
        except FileNotFoundError:
            raise FileNotFoundError(f"{reader}: there is no file {path!r}. Correct the path.") from None
        if matches[0]["type"] == "directory":
            pattern = posixpath.join(path, "*.jsonl")
            raise IsADirectoryError(
                f"{reader}: {path!r} is a folder. Name its files by a pattern, such as {pattern!r}."
            )
    for match in matches:
        name = match["name"]
        if not isinstance(files, LocalFileSystem):
            name = _url_of(path, name) if is_pattern else path
        if match.get("size") is None:
            raise ValueError(f"{reader}: the size of {name!r} is not known, and chunks are cut by it. Copy it first.")
        yield name, int(match["size"])


def _url_of(pattern: str, match: str) -> str:
    """The URL of a match: what stands before and after the path in the pattern stays."""
    if "://" in match:
        return match
    first, chained, rest = pattern.partition("::")
    if "://" in first or not chained:
        return f"{first.partition('://')[0]}://{match}{chained}{rest}"
    return f"{pattern.rpartition('://')[0]}://{match}"


def infer_compression(reader: str, path: str, compression: str | None) -> str | None:
    """``compression`` itself, or what the end of the name says where it is ``"infer"``."""
    if compression in (None, "gzip", "zstd"):
        return compression
    if compression != "infer":
        raise ValueError(f"{reader}: compression must be 'infer', 'gzip', 'zstd' or None, but got {compression!r}.")
    suffix = posixpath.splitext(path.partition("::")[0])[1].lower()
    if suffix in _UNREADABLE:
        raise ValueError(
            f"{reader}: {path!r} is compressed in a way that cannot be read ({suffix}).\n"
            "Convert it to .gz or .zst, or pass compression=None where the name misleads."
        )
    return _COMPRESSIONS.get(suffix)


def digest_of(files: Iterable[SourceFile]) -> str:
    """Number, bytes and a digest of names and sizes.

    Names count from the folder that all files lie in, so that a whole corpus may move.
    """
    listed = list(files)
    shared = os.path.commonprefix([file.path for file in listed])  # noqa: RUF071 - of URLs too; cut at a slash
    above = shared.rfind("/") + 1
    hasher = hashlib.sha256()
    for file in listed:
        hasher.update(f"{file.path[above:]}\0{file.size}\0{file.compression}\0".encode(errors="surrogateescape"))
    total = sum(file.size for file in listed)
    return f"{len(listed)} file{'s' * (len(listed) != 1)}, {total} bytes, sha256:{hasher.hexdigest()[:16]}"


def read_blocks(file: SourceFile, start: int, stop: int, storage_options: Mapping[str, Any]) -> Iterator[bytes]:
    """The bytes of a file from ``start`` on, in blocks: up to ``stop`` at first, then on to the end in larger steps.

    Raises ``BadRow`` where the file is shorter than it was when it was found.
    """
    is_local = "://" not in file.path and "::" not in file.path
    most = _LOCAL_BLOCK if is_local else _REMOTE_BLOCK
    at, step = start, 1 << 14
    while at < file.size:
        if at >= stop:
            step = min(2 * step, most)
        end = min(at + most, stop) if at < stop else min(at + step, file.size)
        block = _read_local(file.path, at, end) if is_local else _read_remote(file.path, at, end, storage_options)
        if not block:
            raise BadRow(
                f"{file.path}: ends at byte {at}, but had {file.size} bytes when the stream was made.\n"
                "Put the file back as it was, or make the stream again from the new one."
            )
        yield block
        at += len(block)


def _read_local(path: str, start: int, stop: int) -> bytes:
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(opened, stop - start, start)
    finally:
        os.close(opened)


def _read_remote(path: str, start: int, stop: int, storage_options: Mapping[str, Any]) -> bytes:
    # Found anew each time: file systems of fsspec belong to the process that made them, and it caches them.
    files, inner = fsspec.core.url_to_fs(path, **storage_options)
    block: bytes = files.cat_file(inner, start=start, end=stop)
    return block
