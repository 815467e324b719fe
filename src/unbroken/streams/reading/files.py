"""Files: paths and patterns to names and sizes, and bytes by range.

Nothing is kept open. A file is read by range, so that nothing leaks where an iterator is dropped, and nothing is
shared where a process forks.
"""

from __future__ import annotations

import glob
import hashlib
import os
import posixpath
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import fsspec
from fsspec.implementations.local import LocalFileSystem

from unbroken.errors import BadRow
from unbroken.streams.arguments import check_bool, check_one_of, check_whole

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

Result = TypeVar("Result")

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


def patiently(read: Callable[[], Result], retries: int) -> Result:
    """``read()``, tried again where it failed in a way that may pass: after 0.1 s, then 0.2 s, 0.4 s, up to 10 s.

    Up to half of each pause is drawn at random, so that workers that failed together do not come back together.
    """
    pause = 0.1
    for left in range(retries, -1, -1):
        try:
            return read()
        except Exception as error:
            if not left or not _may_pass(error):
                raise
        time.sleep(pause * (1 - _pauses.random() / 2))
        pause = min(2 * pause, 10)
    raise ValueError(f"retries must be at least 0, but got {retries}.")


_pauses = random.SystemRandom()
_FOR_GOOD = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, FileExistsError)
# The libraries under fsspec's file systems raise errors of their own, not all of which are OSErrors.
_NETWORK = {"aiohttp", "botocore", "gcsfs", "google", "azure", "httpx", "huggingface_hub", "requests", "urllib3"}


def _may_pass(error: Exception) -> bool:
    if isinstance(error, _FOR_GOOD):
        return False
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK


def read_blocks(file: SourceFile, start: int, stop: int, access: Access) -> Iterator[bytes]:
    """The bytes of a file from ``start`` on, in blocks: up to ``stop`` at first, then on to the end in larger steps.

    Raises ``BadRow`` where the file is shorter than it was when it was found; ``OSError`` where it cannot be read.
    """
    local = is_local(file.path)
    most = _LOCAL_BLOCK if local else _REMOTE_BLOCK
    at, step = start, 1 << 14
    while at < file.size:
        if at >= stop:
            step = min(2 * step, most)
        end = min(at + most, stop) if at < stop else min(at + step, file.size)
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
        return patiently(lambda: _read_local(path, start, stop), access.retries)
    return patiently(lambda: _read_remote(path, start, stop, access.storage_options), access.retries)


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
