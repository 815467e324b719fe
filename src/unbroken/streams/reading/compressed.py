"""The text of compressed files from any place on, by the shortest way to it that is known.

A file is a row of members (gzip, RFC 1952) or frames (zstd, RFC 8878), with zero bytes allowed between. Each can be
unpacked without those before, so the position of a row names the last one that begins before it: its mark. Many
compressors make one member of a whole file; for gzip, places inside are kept in a folder while it is read (``points``).
"""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeAlias, final

import zstandard

from unbroken.errors import BadRow
from unbroken.options import say_once
from unbroken.streams.reading.deflate import WINDOW, Begun, Member, find_block
from unbroken.streams.reading.files import Access, SourceFile, read_blocks
from unbroken.streams.reading.points import WITNESS, Point, Points, cache_folder, spacing_of

__all__ = ["Unpacked"]

Mark: TypeAlias = tuple[int, int]
"""Where a member begins: its offset in the file, and in the text."""

_MOST_WINDOW = 1 << 31  # what zstd writes with --ultra --long=31
_MOST_TRIES = 4


@final
class Unpacked:
    """The text of a compressed file from a place on, in blocks. Where it begins is found out with the first of them.

    ``mark`` is what an earlier one gave for the place, or empty. Raises ``BadRow`` where the file cannot be unpacked or
    is shorter than it was, and what reading it raises.
    """

    def __init__(self, file: SourceFile, place: int, mark: list[int], access: Access) -> None:
        self._file = file
        self._place = place
        self._access = access
        # Of the last member that begins before the last row, and of all later ones that were seen.
        is_before = len(mark) == 2 and mark[1] < place
        self._marks: deque[Mark] = deque([(mark[0], mark[1]) if is_before else (0, 0)])
        self._points = Points(file) if file.compression == "gzip" else None
        self._text = self._from_place()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._text)

    def mark(self, place: int) -> list[int] | None:
        """Offset and text of the last member that begins before a place; ``None`` for the first. Places only grow.

        One that begins right at the place is not it: whether it was seen yet depends on how the file was read.
        """
        marks = self._marks
        while len(marks) > 1 and marks[1][1] < place:
            marks.popleft()
        return list(marks[0]) if marks[0][1] else None

    def _from_place(self) -> Iterator[bytes]:
        file, place = self._file, self._place
        source, member, at = self._start()
        try:
            for text in self._unpack(source, member, at):
                if at + len(text) > place:
                    yield text[max(0, place - at) :]
                at += len(text)
        except (EOFError, zlib.error, zstandard.ZstdError) as error:
            raise BadRow(
                f"{file.path}: cannot be unpacked as {file.compression} beyond byte {at} of its text: {error}.\n"
                "Replace the file by a whole one, or take it out of paths."
            ) from error

    def _start(self) -> tuple[_Input, Member | None, int]:
        """What to read, the member that it is in the middle of, if it is, and the text before."""
        offset, text = self._marks[0]
        if self._place - text > spacing_of(self._file):
            for point in self._points.before(self._place) if self._points else ():
                if point.text <= text:
                    break
                with contextlib.suppress(BadRow):
                    source = _Input(self._file, point.offset, self._access)
                    if source.more() and _witness(source.data) == point.witness:  # else it is of another file
                        self._marks[0] = max(self._marks[0], (point.member, point.member_text))
                        begun = Begun(
                            source.data[0], point.bits, point.window, point.crc, point.text - point.member_text
                        )
                        source.keep(source.data[bool(point.bits) :])
                        return source, Member(begun), point.text
            _tell(self._points is not None)
        return _Input(self._file, offset, self._access), None, text

    def _unpack(self, source: _Input, member: Any, at: int) -> Iterator[bytes]:
        """All text from there on. Raises ``EOFError`` where the last member is cut short."""
        begins = self._marks[0]
        maker = None if self._points is None else _Maker(self._points, member.window if member else b"")
        frames = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
        while member is not None or source.skip_zeros():
            if member is None:
                begins = source.at, at
                if begins > self._marks[-1]:
                    self._marks.append(begins)
                member = frames.decompressobj() if maker is None else Member()
            while not member.eof:
                if not source.more():
                    raise EOFError("it ends in the middle of its data")
                if maker is not None:
                    maker.look(member, at, begins)
                text = member.decompress(source.data)
                if maker is not None:
                    maker.make(source, text)
                source.keep(member.unused_data if member.eof else b"")
                at += len(text)
                if text:
                    yield text
            member = None


@final
class _Input:
    """The bytes of a file from an offset on: ``data`` is what was read of them and not used yet, ``at`` its offset."""

    def __init__(self, file: SourceFile, start: int, access: Access) -> None:
        self.at = start
        self.data = b""
        self._blocks = read_blocks(file, start, file.size, access)

    def more(self) -> bool:
        """Read on where nothing is left; whether there is something now."""
        if not self.data:
            self.data = next(self._blocks, b"")
        return bool(self.data)

    def skip_zeros(self) -> bool:
        """Pass zero bytes over; whether there is something after them."""
        while self.more():
            self.keep(self.data.lstrip(b"\0"))
            if self.data:
                return True
        return False

    def keep(self, rest: bytes) -> None:
        """All of ``data`` but ``rest``, its end, was used."""
        self.at += len(self.data) - len(rest)
        self.data = rest


@final
class _Maker:
    """Makes points while a gzip file is unpacked: told before and after each block of the file that is unpacked."""

    def __init__(self, points: Points, window: bytes) -> None:
        self._points = points
        self._window = window  # the last text of the member
        self._looking: tuple[Any, int, int, Mark] | None = None
        self._tries = 0

    def look(self, member: Member, at: int, begins: Mark) -> None:
        """Text goes on at ``at``, in a member that begins there."""
        if at == begins[1]:
            self._window = b""
        due = self._window and not member.inflater.eof and self._points.due(at, begins[1])
        self._looking = (member.inflater.copy(), member.crc, at, begins) if due else None

    def make(self, source: _Input, text: bytes) -> None:
        """``text`` was unpacked from the data of the source."""
        if self._looking is not None:
            inflater, crc, at, begins = self._looking
            block = find_block(inflater, source.data, text, self._window)
            self._tries += 1
            if block is not None:
                before = text[: block.text]
                point = Point(
                    source.at + block.offset,
                    block.bits,
                    at + block.text,
                    *begins,
                    zlib.crc32(before, crc),
                    _witness(source.data[block.offset :]),
                    (self._window + before)[-WINDOW:],
                )
                self._points.add(point)
            elif self._tries == _MOST_TRIES:
                self._points.pass_over(at)
            if block is not None or self._tries == _MOST_TRIES:
                self._tries = 0
        self._window = text[-WINDOW:] if len(text) >= WINDOW else (self._window + text)[-WINDOW:]


def _witness(data: bytes) -> int:
    return zlib.crc32(data[:WITNESS])


def _tell(is_gzip: bool) -> None:
    if is_gzip:
        say_once(
            "A gzip file is unpacked up to the place where its rows go on, because no place before it is known in "
            f"{cache_folder()!r} at which unpacking could begin.\n"
            "Places are kept there while files are read. For all machines to find them, set the environment variable "
            "UNBROKEN_CACHE to a folder that they share; files of several members (bgzip) need none."
        )
    else:
        say_once(
            "A zstd file is unpacked from the start of a frame up to the place where its rows go on.\n"
            "Files of many frames (as pzstd writes them, and zstd does not) are entered at the nearest one."
        )
