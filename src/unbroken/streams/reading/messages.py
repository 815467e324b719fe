"""Arrow IPC messages: where they begin, and how many rows each holds, from their headers alone.

The layout of files, streams and headers is that of https://arrow.apache.org/docs/format/Columnar.html and of
``Message.fbs`` and ``File.fbs`` there; tables are read as https://flatbuffers.dev/internals/ tells.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple, final

from unbroken.errors import BadRow
from unbroken.streams.reading.files import Access, SourceFile, is_local, read_range

__all__ = ["Contents", "Message", "contents_of", "dictionaries_of", "not_arrow"]

_MAGIC = b"ARROW1"
_FIRST_MESSAGE = 8  # in the file format: after the magic bytes and two of padding
_END_BYTES = 4 + len(_MAGIC)  # the footer's length, and the magic bytes again
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_LOCAL_WINDOW, _REMOTE_WINDOW = 1 << 12, 1 << 16
_MOST_ROWS = 1 << 48  # of a batch: what says more is damaged


@final
class Message(NamedTuple):
    """Where a message begins in its file, its bytes with header and body, and what its header says.

    ``rows`` are those of a record batch. A dictionary has an ``id``, and ``adds`` says that it goes on from the one
    before it rather than taking its place.
    """

    kind: int
    offset: int
    length: int
    rows: int = 0
    id: int = 0
    adds: bool = False


@final
class Contents(NamedTuple):
    """What is in a file: its schema message as bytes, and its record batches and dictionaries in order."""

    schema: bytes
    batches: tuple[Message, ...]
    dictionaries: tuple[Message, ...]
    is_stream: bool


def contents_of(file: SourceFile, access: Access) -> Contents:
    """What is in a file of either format; its first bytes tell which it is.

    Reads a small piece for each message. Raises ``BadRow`` where it is no Arrow file, or not whole.
    """
    window = _Window(file, access)
    if file.size < _FIRST_MESSAGE:
        raise not_arrow(file, f"it has {file.size} bytes")
    is_stream = window.take(0, len(_MAGIC)) != _MAGIC
    try:
        first = _message_at(window, 0 if is_stream else _FIRST_MESSAGE)
        if first is None or first.kind != _SCHEMA:
            raise not_arrow(file, "it does not begin with a schema")
        schema = window.take(first.offset, first.length)
        messages = list(_streamed(window, first) if is_stream else _listed(window))
    except struct.error as error:
        raise not_arrow(file, f"a header in it cannot be read ({error})") from error
    for message in messages:
        if message.kind not in (_DICTIONARY, _BATCH):
            raise not_arrow(file, f"at byte {message.offset} it has a message of kind {message.kind}, and no table")
    batches = tuple(message for message in messages if message.kind == _BATCH)
    return Contents(schema, batches, tuple(m for m in messages if m.kind == _DICTIONARY), is_stream)


def dictionaries_of(contents: Contents, offset: int) -> list[Message]:
    """Those that hold for the record batch at an offset: of each id the last one, and what was added to it.

    In a stream those count that stand before the batch; in the file format all do.
    """
    found: list[Message] = []
    for message in contents.dictionaries:
        if message.offset < offset or not contents.is_stream:
            found = [one for one in found if message.adds or one.id != message.id]
            found.append(message)
    return found


def not_arrow(file: SourceFile, reason: str) -> BadRow:
    return BadRow(
        f"{file.path}: is no whole Arrow IPC file: {reason}.\n"
        'Replace it, take it out of paths, or pass on_error="skip".'
    )


def _streamed(window: _Window, first: Message) -> Iterator[Message]:
    """The messages after the schema, up to the end mark or, as the format allows, the end of the file."""
    at = first.offset + first.length
    while at < window.file.size:
        message = _message_at(window, at)
        if message is None:
            return
        yield message
        at += message.length


def _listed(window: _Window) -> Iterator[Message]:
    """The messages that the footer of a file lists: dictionaries first, then record batches."""
    end = window.file.size - _END_BYTES
    tail = window.take(end, _END_BYTES) if end > _FIRST_MESSAGE else b""
    if not tail.endswith(_MAGIC):
        raise not_arrow(window.file, f"it begins with {_MAGIC.decode()} and does not end in it")
    length = struct.unpack_from("<i", tail)[0]
    if not 0 < length <= end - _FIRST_MESSAGE:
        raise not_arrow(window.file, f"its footer would have {length} bytes")
    footer = _root(window.take(end - length, length))
    for number, kind in ((2, _DICTIONARY), (3, _BATCH)):
        for offset in footer.offsets(number):
            message = _message_at(window, offset)
            if message is None or message.kind != kind:
                raise not_arrow(window.file, f"its footer leads to byte {offset}, and no message is there")
            yield message


def _message_at(window: _Window, at: int) -> Message | None:
    """The message that begins at a byte; None where the end mark is there."""
    length = struct.unpack("<i", window.take(at, 4))[0]
    prefix = 4
    if length == -1:  # before version 0.15 of Arrow the length came at once
        length = struct.unpack("<i", window.take(at + 4, 4))[0]
        prefix = 8
    if length == 0:
        return None
    if length < 0:
        raise not_arrow(window.file, f"at byte {at} it has a header of {length} bytes")
    table = _root(window.take(at + prefix, length))
    kind, body, header = table.value(1, "<B"), table.value(3, "<q"), table.table(2)
    whole = prefix + length + body
    if body < 0 or header is None or at + whole > window.file.size:
        raise not_arrow(window.file, f"it is cut short in the message at byte {at}, or damaged there")
    if kind == _DICTIONARY:
        return Message(kind, at, whole, id=header.value(0, "<q"), adds=bool(header.value(2, "<B")))
    rows = header.value(0, "<q") if kind == _BATCH else 0
    if not 0 <= rows <= _MOST_ROWS:
        raise not_arrow(window.file, f"at byte {at} it has {rows} rows")
    return Message(kind, at, whole, rows)


@final
class _Table(NamedTuple):
    """A table of flatbuffers: bytes, and where in them it begins. Its fields are found through its list of offsets."""

    data: bytes
    at: int

    def _field(self, number: int) -> int:
        """Where a field lies; 0 where it was left out, as a default is."""
        offsets = self.at - struct.unpack_from("<i", self.data, self.at)[0]
        entry = 4 + 2 * number
        if entry >= struct.unpack_from("<H", self.data, offsets)[0]:
            return 0
        inside = struct.unpack_from("<H", self.data, offsets + entry)[0]
        return self.at + inside if inside else 0

    def value(self, number: int, layout: str) -> Any:
        at = self._field(number)
        return struct.unpack_from(layout, self.data, at)[0] if at else 0

    def table(self, number: int) -> _Table | None:
        at = self._field(number)
        return _Table(self.data, at + struct.unpack_from("<I", self.data, at)[0]) if at else None

    def offsets(self, number: int) -> list[int]:
        """Those of a list of blocks: offset (8 bytes), length of the header (4, and 4 unused), length of the body."""
        at = self._field(number)
        if not at:
            return []
        at += struct.unpack_from("<I", self.data, at)[0]
        count = struct.unpack_from("<I", self.data, at)[0]
        if 24 * count > len(self.data):
            raise struct.error(f"a list of {count} blocks in {len(self.data)} bytes")
        return [struct.unpack_from("<q", self.data, at + 4 + 24 * block)[0] for block in range(count)]


def _root(data: bytes) -> _Table:
    return _Table(data, struct.unpack_from("<I", data)[0])


@final
class _Window:
    """Bytes of a file by place. What lies near is read along, so that small messages need no read each."""

    def __init__(self, file: SourceFile, access: Access) -> None:
        self.file = file
        self._access = access
        self._least = _LOCAL_WINDOW if is_local(file.path) else _REMOTE_WINDOW
        self._at = 0
        self._data = b""

    def take(self, at: int, count: int) -> bytes:
        """``count`` bytes from ``at`` on. Raises ``BadRow`` where the file ends before, ``OSError``."""
        if at < 0 or at + count > self.file.size:
            raise not_arrow(self.file, f"bytes {at} to {at + count} should be in it, and it has {self.file.size}")
        if not self._at <= at <= at + count <= self._at + len(self._data):
            stop = min(self.file.size, at + max(count, self._least))
            self._at, self._data = at, read_range(self.file.path, at, stop, self._access)
            if len(self._data) < count:
                raise not_arrow(self.file, f"it ends at byte {at + len(self._data)}")
        return self._data[at - self._at : at - self._at + count]
