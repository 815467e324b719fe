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
from dataclasses import dataclass, field
from typing import Any, final

import fsspec
from fsspec.implementations.local import LocalFileSystem

from unbroken.errors import BadRow
from unbroken.streams.arguments import check_bool, check_one_of, check_whole
from unbroken.streams.reading.patterns import matches_of
from unbroken.streams.reading.retrying import may_pass, patiently, status_of

__all__ = [
    "Access",
    "SourceFile",
    "check_access",
    "digest_of",
    "extent_of",
    "find_files",
    "infer_compression",
    "is_local",
    "one_line",
    "patiently",
    "read_blocks",
    "read_range",
]

_SUFFIXES = {
    "read_arrow": "*.arrow",
    "read_jsonl": "*.jsonl",
    "read_parquet": "*.parquet",
    "read_tar": "*.tar",
    "read_tokens": "*.bin",
}
_LOCAL_BLOCK, _REMOTE_BLOCK = 1 << 18, 1 << 20
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_UNREADABLE = (".7z", ".br", ".bz2", ".lz4", ".rar", ".snappy", ".tar", ".tgz", ".xz", ".zip")


@final
@dataclass(frozen=True)
class SourceFile:
    """A file as it was found: its path (a URL where it is not local), its size in bytes, how it is compressed.

    ``version`` is what tells it from a file of the same path and size that was written later (an ETag, a time), or
    empty where nothing does. It is in no fingerprint: a file that was copied is the same file.
    """

    path: str
    size: int
    compression: str | None = None
    version: str = field(default="", compare=False)


@final
@dataclass(frozen=True)
class Access:
    """How files are reached: ``storage_options`` of fsspec, how often a failed read is tried again, whether the next
    piece is read ahead in a thread, and whether what cannot be read is left out.
    """

    storage_options: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 5
    ahead: bool = False
    skips: bool = False


def check_access(
    reader: str,
    storage_options: Mapping[str, Any] | None,
    retries: int,
    read_ahead: bool | None,
    on_error: str,
    paths: Any = None,
) -> Access:
    """The access that was asked for; ``read_ahead=None`` reads ahead where any of the paths is not local.

    Raises ``TypeError`` and ``ValueError`` as their messages say.
    """
    check_whole(reader, "retries", retries, 0)
    check_one_of(reader, "on_error", on_error, ("raise", "skip"))
    if read_ahead is None:
        listed = [paths] if isinstance(paths, str | os.PathLike) else paths
        listed = list(listed) if isinstance(listed, list | tuple) else []
        read_ahead = any(isinstance(path, str) and not is_local(path) for path in listed)
    check_bool(reader, "read_ahead", read_ahead)
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise TypeError(f"{reader}: storage_options must be a dict, but got {storage_options!r}.")
    return Access(dict(storage_options or {}), retries, read_ahead, on_error == "skip")


def find_files(
    reader: str, paths: Any, compression: str | None, storage_options: Mapping[str, Any], retries: int = 5
) -> tuple[SourceFile, ...]:
    """The files that ``paths`` name, with their sizes: paths in the order given, the matches of a pattern sorted.

    What fails and may pass is tried again ``retries`` times.

    Raises ``TypeError`` on what is no path, ``FileNotFoundError`` where nothing is there, ``IsADirectoryError`` on a
    folder, and ``ValueError`` on an empty list, a size that cannot be known or a compression that cannot be read.
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else paths
    if isinstance(listed, bytes | Mapping) or not isinstance(listed, Iterable):
        raise TypeError(f"{reader}: paths must be a path or a list of paths, but got a {type(paths).__name__}.")
    found: list[SourceFile] = []
    fresh: set[int] = set()  # file systems whose listings were dropped: they may be older than the files
    for path in listed:
        if not isinstance(path, str | os.PathLike) or not isinstance(name := os.fspath(path), str):
            raise TypeError(f"{reader}: a path must be a str or a Path, but got {path!r} ({type(path).__name__}).")
        files, inner = _reach(name, storage_options)
        if hash(files) not in fresh:
            files.invalidate_cache()
            fresh.add(hash(files))
        for match, info in _matches(reader, name, files, inner, retries):
            if info.get("size") is None:
                raise ValueError(
                    f"{reader}: the size of {match!r} is not known, and chunks are cut by it. Copy it first."
                )
            packed = infer_compression(reader, match, compression)
            found.append(SourceFile(match, int(info["size"]), packed, _version_of(info)))
    if not found:
        raise ValueError(f"{reader}: paths is empty. Name at least one file.")
    return tuple(found)


def _matches(reader: str, path: str, files: Any, inner: str, retries: int) -> list[tuple[str, Any]]:
    """``(path or URL, what the file system says of it)`` of each file that a path or pattern names."""
    try:
        found = patiently(lambda: files.info(inner), retries, path)  # first: a name may have brackets in it
    except Exception as error:
        if not glob.has_magic(path) or may_pass(error):
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(f"{reader}: there is no file {path!r}. Correct the path.") from None
            raise
    else:
        if found["type"] == "directory":
            pattern = posixpath.join(path, _SUFFIXES.get(reader, "*"))
            raise IsADirectoryError(
                f"{reader}: {path!r} is a folder. Name its files by a pattern, such as {pattern!r}."
            )
        return [(found["name"] if isinstance(files, LocalFileSystem) else path, found)]
    matches = matches_of(files, inner, retries)
    if not matches:
        raise FileNotFoundError(f"{reader}: nothing matches {path!r}. Correct the pattern.")
    is_local_one = isinstance(files, LocalFileSystem)
    return [(match["name"] if is_local_one else _url_of(path, match["name"]), match) for match in matches]


def _version_of(info: Mapping[str, Any]) -> str:
    names = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified", "updated", "created")
    return next((str(info[name]) for name in names if info.get(name)), "")


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


def extent_of(files: Iterable[SourceFile]) -> str:
    """Their number and size, in words: ``12 files, 1.2 GB``."""
    listed = list(files)
    size, unit = float(sum(file.size for file in listed)), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{len(listed)} file{'s' * (len(listed) != 1)}, {size:.3g} {unit}"


def one_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_local(path: str) -> bool:
    """Whether a path, as files have it, is one of this machine."""
    return "://" not in path and "::" not in path


def read_blocks(file: SourceFile, start: int, stop: int, access: Access) -> Iterator[bytes]:
    """The bytes of a file from ``start`` on, in blocks: up to ``stop`` at first, then on to the end in larger steps.

    Up to ``stop`` the blocks end at the same places of the file, wherever they begin: what can be unpacked of a damaged
    file is then the same too.

    Raises ``BadRow`` where the file is shorter than it was when it was found; ``OSError`` where it cannot be read.
    """
    local = is_local(file.path)
    most = _LOCAL_BLOCK if local else _REMOTE_BLOCK
    at, step = start, 1 << 14
    while at < file.size:
        if at >= stop:
            step = min(2 * step, most)
        end = min((at // most + 1) * most, stop) if at < stop else min(at + step, file.size)
        block = read_range(file.path, at, end, access)
        if not block:
            raise BadRow(
                f"{file.path}: ends at byte {at}, but had {file.size} bytes when the stream was made.\n"
                "Put the file back as it was, or make the stream again from the new one."
            )
        yield block
        at += len(block)


def read_range(path: str, start: int, stop: int, access: Access) -> bytes:
    """Bytes ``start`` to ``stop`` - 1 of a file, or fewer where it ends before. Raises ``OSError``."""
    if is_local(path):
        return patiently(lambda: _read_local(path, start, stop), access.retries, path)
    return patiently(lambda: _read_remote(path, start, stop, access.storage_options), access.retries, path)


def _read_local(path: str, start: int, stop: int) -> bytes:
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.pread(opened, stop - start, start)
        while 0 < len(found) < stop - start:  # one call reads 2 GiB at most, and some file systems less
            more = os.pread(opened, stop - start - len(found), start + len(found))
            if not more:
                break
            found += more
        return found
    finally:
        os.close(opened)


def _read_remote(path: str, start: int, stop: int, storage_options: Mapping[str, Any]) -> bytes:
    files, inner = _reach(path, storage_options)
    try:
        block: bytes = files.cat_file(inner, start=start, end=stop)
    except Exception as error:
        if status_of(error) == 416:  # "range not satisfiable": the file ends before
            return b""
        raise
    if len(block) > stop - start:
        raise BadRow(
            f"{path}: asked for {stop - start} bytes from byte {start} on, its server sent {len(block)}: it does not "
            "read files by range.\nCopy the file first, or have it done by a path that begins with 'simplecache::'."
        )
    return block


_reached: dict[int, Any] = {}


def _reach(path: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a path, and the path in it.

    Found anew each time: file systems of fsspec belong to the process that made them, and fsspec caches them there.
    They are kept here as well. In a forked process fsspec drops those of its parent, and s3fs then waits in vain for
    the connections to close, with the help of a thread that is not there.
    """
    files, inner = fsspec.core.url_to_fs(path, **storage_options)
    _reached[hash(files)] = files
    return files, inner
