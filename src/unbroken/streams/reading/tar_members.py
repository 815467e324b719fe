"""The members of a tar archive, and where the groups of a shard begin.

The format: POSIX.1-2008 ``pax`` ("ustar Interchange Format" and "pax Interchange Format"), and the GNU tar manual,
"Basic Tar Format", for long names, numbers in base 256 and sparse files. Single headers are parsed by ``tarfile``.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import tarfile
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from typing import NamedTuple, final

from unbroken.errors import BadRow
from unbroken.options import say_once
from unbroken.streams.reading.files import Access, SourceFile, is_local, read_range

__all__ = ["BLOCK", "Data", "Member", "Streamed", "first_group", "key_of", "members"]

BLOCK = tarfile.BLOCKSIZE
_LONG_NAME, _LONG_LINK = tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK
_EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_MOST_EXTENDED_BYTES = 1 << 24
# Where small members lie close together one read brings several headers; a far file takes long to answer.
_LOCAL_SPAN, _REMOTE_SPAN = 1 << 14, 1 << 18
_MOST_WALKED = 256
_SKIPPED = re.compile(r"__[^/]*__($|/)")


class Data(ABC):
    """The bytes of an archive, read forwards. ``at`` is the offset of the next one."""

    at: int

    @abstractmethod
    def take(self, count: int) -> bytes:
        """So many bytes, or fewer where the archive ends before."""

    @abstractmethod
    def skip_to(self, offset: int) -> None:
        """Go on to a later offset."""


@final
class Streamed(Data):
    """The bytes of pieces that follow one another from ``at`` on."""

    def __init__(self, pieces: Iterator[bytes], at: int) -> None:
        self.at = at
        self._pieces = pieces
        self._piece = b""
        self._used = 0

    def take(self, count: int) -> bytes:
        used, self._used = self._used, self._used + count
        if self._used <= len(self._piece):
            self.at += count
            return self._piece[used : self._used]
        parts = [self._piece[used:]]
        missing = count - len(parts[0])
        self._piece, self._used = b"", 0
        for piece in self._pieces:
            parts.append(piece[:missing])
            if missing <= len(piece):
                self._piece, self._used = piece, missing
                break
            missing -= len(piece)
        taken = b"".join(parts)
        self.at += len(taken)
        return taken

    def skip_to(self, offset: int) -> None:
        while self.at < offset and self.take(min(offset - self.at, 1 << 18)):
            pass


@final
class _Ranged(Data):
    """The bytes of a plain file by range: what is passed over is not read."""

    def __init__(self, file: SourceFile, access: Access, at: int) -> None:
        self.at = at
        self._file = file
        self._access = access
        self._span = b""
        self._begin = 0

    def take(self, count: int) -> bytes:
        if not self._begin <= self.at <= self._begin + len(self._span) - count:
            step = max(count, _LOCAL_SPAN if is_local(self._file.path) else _REMOTE_SPAN)
            stop = min(self.at + step, self._file.size)
            self._begin = self.at
            self._span = read_range(self._file.path, self.at, stop, self._access) if self.at < stop else b""
        start = self.at - self._begin
        taken = self._span[start : start + count]
        self.at += len(taken)
        return taken

    def skip_to(self, offset: int) -> None:
        self.at = offset


class Member(NamedTuple):
    """A regular file in an archive: the offset of its first header (extended ones come first), its name and size."""

    offset: int
    name: str
    size: int


def members(data: Data, path: str) -> Iterator[Member]:
    """The regular files of an archive from a header on; the content of each comes next in ``data``.

    Folders, links, devices and fifos are passed over. A header for all later members (pax ``g``) may hold anything but
    a path, a size and sparse files: what comes before a place need not be read.

    Raises ``BadRow`` where the archive is damaged or cut short, or holds a sparse file.
    """
    while True:
        first, name, size = data.at, None, None
        while True:
            at = data.at
            header = _header(data.take(BLOCK), path, at, first)
            if header is None:
                return
            if header.type == tarfile.GNUTYPE_SPARSE:
                raise _sparse(path, first, name or header.name)
            if header.type in (_LONG_NAME, _LONG_LINK):
                text = _extended(data, header.size, path, at).partition(b"\0")[0]
                name = text.decode("utf-8", "surrogateescape") if header.type == _LONG_NAME else name
            elif header.type in _EXTENDED or header.type == tarfile.XGLTYPE:
                records = _records(_extended(data, header.size, path, at), path, at)
                if any(field.startswith("GNU.sparse.") for field in records):
                    raise _sparse(path, first, records.get("GNU.sparse.name", name or header.name))
                if header.type == tarfile.XGLTYPE and {"path", "size"} & set(records):
                    raise _damaged(path, at, "a header for all later members gives a path or a size")
                name = records.get("path", name)
                size = _number(records["size"], path, at) if "size" in records else size
            else:
                break
        name = header.name if name is None else name
        size = header.size if size is None else size
        stop = data.at
        if header.isreg() or header.type not in tarfile.SUPPORTED_TYPES:
            stop += -(-size // BLOCK) * BLOCK
        if header.isreg() and not name.endswith("/"):
            yield Member(first, name, size)
        data.skip_to(stop)


def _header(block: bytes, path: str, at: int, first: int) -> tarfile.TarInfo | None:
    """One header; None at the end of the archive."""
    if not block:
        raise _damaged(path, at, "it was cut short: the two blocks of zeros that end an archive are missing")
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        if len(block) == BLOCK and not block.strip(b"\0"):
            if at != first:
                raise _damaged(path, at, "it ends after a header that belongs to a member") from None
            return None
        reason = "it ends in the middle of a header" if len(block) < BLOCK else f"no header of tar ({error})"
        raise _damaged(path, at, reason) from None
    if header.size < 0:
        raise _damaged(path, at, f"a member of {header.size} bytes")
    return header


def _extended(data: Data, size: int, path: str, at: int) -> bytes:
    if size > _MOST_EXTENDED_BYTES:
        raise _damaged(path, at, f"a header of {size} bytes")
    padded = data.take(-(-size // BLOCK) * BLOCK)
    if len(padded) < size:
        raise _damaged(path, at, "it ends in the middle of a header")
    return padded[:size]


def _records(body: bytes, path: str, at: int) -> dict[str, str]:
    """The fields of a pax header: records of ``"%d %s=%s\\n"``, where the number is the length of the whole record."""
    found, place = {}, 0
    while place < len(body) and body[place]:
        digits = body[place : place + 20].partition(b" ")[0]
        length = _number(digits.decode("ascii", "replace"), path, at)
        name, equals, value = body[place + len(digits) + 1 : place + length - 1].partition(b"=")
        if not equals or body[place + length - 1 : place + length] != b"\n":
            raise _damaged(path, at, "a pax header whose records do not fit")
        found[name.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        place += length
    return found


def _number(text: str, path: str, at: int) -> int:
    if not text.isascii() or not text.isdigit():
        raise _damaged(path, at, f"{text!r} in a pax header, where a number belongs")
    return int(text)


def _damaged(path: str, at: int, reason: str) -> BadRow:
    return BadRow(
        f"{path}, byte {at}: no tar archive that can be read from here on: {reason}.\n"
        'Replace the shard by a whole one, take it out of paths, or pass on_error="skip" to leave out the rest of it.'
    )


def _sparse(path: str, at: int, name: str) -> BadRow:
    return BadRow(
        f"{path}, byte {at}: the member {name!r} is stored as a sparse file, which cannot be read.\n"
        'Write the archive again without --sparse, or pass on_error="skip" to leave out the rest of it.'
    )


def key_of(name: str) -> tuple[str, str] | None:
    """``(key, extension)`` of a member: up to the first dot of its base name, and what follows, in lower case.

    As WebDataset groups files (``webdataset.tariterators``: ``base_plus_ext``, ``group_by_keys``). None for a member
    that is of no group: a base name without a dot or with one at its start, and WebDataset's own ``__...__`` names.
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not stem or not dot or _SKIPPED.match(name):
        return None
    return folder + slash + stem, extension.lower()


@final
class _Starts:
    """Where the groups of one shard begin, as far as its headers were walked. For several threads."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._found = array("q")
        self._ended = False
        self._lock = threading.Lock()

    def first_from(self, offset: int, access: Access) -> int | None:
        """The first start at or after an offset; None where there is none."""
        with self._lock:
            if not self._ended and (not self._found or self._found[-1] < offset):
                self._walk(offset, access)
            place = bisect.bisect_left(self._found, offset)
            return self._found[place] if place < len(self._found) else None

    def _walk(self, offset: int, access: Access) -> None:
        last = self._found[-1] if self._found else -1
        key = None
        for member in members(_Ranged(self._file, access, max(0, last)), self._file.path):
            found = key_of(member.name)
            if found is None or found[0] == key:
                continue
            key = found[0]
            if member.offset > last:
                self._found.append(member.offset)
                if member.offset >= offset:
                    return
        self._ended = True


# A lock that a thread holds does not come along into a forked process, so each process has its own.
_walked: dict[int, dict[tuple[str, int, str], _Starts]] = {}


def first_group(file: SourceFile, offset: int, access: Access) -> int | None:
    """Where the first group at or after an offset begins; None where there is none.

    Its headers are walked from the start of the file, and not looked for in the middle: a member may be an archive
    itself. What was found is kept in this process. Raises as ``members`` does, and ``OSError``.
    """
    if not is_local(file.path):
        say_once(
            "read_tar: there are fewer shards than lanes, so they are cut into ranges of bytes, and the headers of "
            "each are read once in each process to find where groups begin.\n"
            "That takes long for large shards that are far away: write more of them, or pass fewer lanes to the loader."
        )
    process = os.getpid()
    if process not in _walked:
        _walked.clear()
    known = _walked.setdefault(process, {})
    name = file.path, file.size, file.version
    if name not in known and len(known) >= _MOST_WALKED:
        with contextlib.suppress(RuntimeError, StopIteration):  # another thread has put one in or taken one out
            known.pop(next(iter(known)), None)
    return known.setdefault(name, _Starts(file)).first_from(offset, access)
