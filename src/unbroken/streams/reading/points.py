"""Places in the middle of gzip files where unpacking can begin, kept in a folder of this machine or a shared one.

The folder is the one that the environment variable ``UNBROKEN_CACHE`` names, else ``unbroken`` in ``$XDG_CACHE_HOME``,
else ``~/.cache/unbroken``. A data file has one file there, named by a digest of its path or URL, its size and its
version. It holds records, one after another, each for a place: 32 KiB of text, compressed, and where they lead to.

Records are only ever appended, each in one write, and each carries a checksum: whatever several processes or a crash
make of a file, what is not a whole record is passed over. A point is proved once more by the data that it leads to. All
of it may be deleted at any time; a resume then unpacks from the start of the file.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple, final

import xxhash

from unbroken.streams.reading.deflate import WINDOW
from unbroken.streams.reading.files import SourceFile

__all__ = ["WITNESS", "Point", "Points", "cache_folder", "spacing_of"]

WITNESS = 1024
"""So many bytes of the file after a point are known by their checksum."""

_LEAST_SPACING, _MOST_POINTS = 4 << 20, 512
# magic and version, bits, offset, text, offset and text of the member, crc and witness, length of the window
_HEAD = struct.Struct("<4sB4Q3I")
_SUM = struct.Struct("<Q")
_MAGIC = b"UBP1"


def cache_folder() -> str:
    """Where points are kept."""
    named = os.environ.get("UNBROKEN_CACHE")
    if named:
        return named
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        home = os.devnull  # a user without a home keeps nothing
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "unbroken")


def spacing_of(file: SourceFile) -> int:
    """How much text lies between two points: 4 MiB, and more in large files, so that their points stay few."""
    return max(_LEAST_SPACING, file.size // _MOST_POINTS)


@final
class Point(NamedTuple):
    """Where unpacking can begin: at a block of deflate after ``bits`` bits of the byte at ``offset``.

    ``text`` counts the bytes of text before it in the file. ``member`` and ``member_text`` are the offsets, in the file
    and in the text, at which its gzip member begins; ``crc`` is the checksum of the text from there to the point.
    ``witness`` is that of the ``WITNESS`` bytes from ``offset`` on, and ``window`` the text before the point.
    """

    offset: int
    bits: int
    text: int
    member: int
    member_text: int
    crc: int
    witness: int
    window: bytes


@final
class Points:
    """The points of one file. A folder that cannot be read has none, and one that cannot be written gets none."""

    def __init__(self, file: SourceFile) -> None:
        self.spacing = spacing_of(file)
        name = hashlib.sha256(f"{file.path}\0{file.size}\0{file.version}".encode(errors="surrogateescape")).hexdigest()
        self.path = os.path.join(cache_folder(), "gzip", name[:32])
        self._known: list[int] | None = None  # texts of all points, sorted; read when first asked for
        self._not_before = self._passed = 0

    def before(self, text: int) -> Iterator[Point]:
        """Those at or before a place of the text, the nearest first."""
        found = [point for point in self._read() if point.text <= text]
        for point in sorted(found, key=lambda point: point.text, reverse=True):
            yield point._replace(window=zlib.decompress(point.window))

    def due(self, text: int, member: int) -> bool:
        """Whether a point should be made from here on, in a member that begins at the text ``member``.

        It should where both that and the last point are far, and the next point is not near.
        """
        if text < self._not_before or text - member < self.spacing:
            return False
        if self._known is None:
            self._known = sorted(point.text for point in self._read())
        place = bisect.bisect(self._known, text)
        last = self._known[place - 1] if place else 0
        return text - last >= self.spacing and not any(
            later - text < self.spacing // 2 for later in self._known[place : place + 1]
        )

    def add(self, point: Point) -> None:
        """Keep a point."""
        if self._known is not None:
            bisect.insort(self._known, point.text)
        record = _packed(point)
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            opened = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(opened, record)
            finally:
                os.close(opened)

    def pass_over(self, text: int) -> None:
        """No block can be begun at hereabouts: look for the next one a while later, each time twice as long."""
        self._not_before = text + (self.spacing << self._passed)
        self._passed += 1

    def _read(self) -> Iterator[Point]:
        """All of them; the window is compressed yet."""
        try:
            with open(self.path, "rb") as opened:
                data = opened.read()
        except OSError:
            return
        at = data.find(_MAGIC)
        while at >= 0:
            point, after = _unpacked(data, at)
            if point is not None:
                yield point
            at = data.find(_MAGIC, after)


def _packed(point: Point) -> bytes:
    window = zlib.compress(point.window, 1)
    head = _HEAD.pack(_MAGIC, point.bits, point.offset, *point[2:7], len(window))
    return head + window + _SUM.pack(xxhash.xxh3_64_intdigest(head + window))


def _unpacked(data: bytes, at: int) -> tuple[Point | None, int]:
    """The point of the record at a place, if there is a whole one, and where to look for the next."""
    torn = None, at + 1
    if len(data) - at < _HEAD.size:
        return torn
    _, bits, offset, text, member, member_text, crc, witness, length = _HEAD.unpack_from(data, at)
    end = at + _HEAD.size + length
    if length > 2 * WINDOW or len(data) < end + _SUM.size:
        return torn
    if _SUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[at:end]):
        return torn
    window = data[at + _HEAD.size : end]
    return Point(offset, bits, text, member, member_text, crc, witness, window), end + _SUM.size
