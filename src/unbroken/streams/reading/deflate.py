"""Deflate (RFC 1951) begun in the middle, and gzip members (RFC 1952) of it.

A block of deflate may begin at any bit, and copies from the last 32 KiB of text before it. zlib begins at a bit when it
is first given empty blocks that end at that bit; Python's zlib takes the text before as ``zdict``. It does not tell
where blocks begin, but that shows: a block with codes of its own begins with a description of them, some 60 bytes for
which no text comes out. Where nothing comes out of 16 bytes a block begins close before, and beginning there at each
bit in turn shows at which.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple, final

__all__ = ["WINDOW", "Begun", "Block", "Member", "find_block"]

WINDOW = 1 << 15
# Looking costs as much as unpacking ten times as much; compressors seldom make blocks that are longer than this.
_STEP, _LOOK = 16, 1 << 17
# So much of a block is read again to prove that it begins there, and must then be known in text.
_PROOF_BYTES, _PROOF_TEXT = 4096, 1024
_EXTRA, _NAME, _COMMENT, _HEADER_CRC, _RESERVED = 4, 8, 16, 2, 0xE0


def _bits(*fields: tuple[int, int]) -> tuple[int, int]:
    """``(value, width)`` of fields one after another, the lowest bit first, as section 3.1.1 of RFC 1951 packs them."""
    value = width = 0
    for field, wide in fields:
        value, width = value | field << width, width + wide
    return value, width


# A block with the codes of section 3.2.6 that holds nothing but its end: 10 bits.
_EMPTY = _bits((0, 1), (1, 2), (0, 7))
# One with codes of its own (section 3.2.7), of 91 bits, for the odd places. Code lengths 18 and 1 have a code of one
# bit (1 and 0); by them the literals 0 to 254 have none, literal 255 and the end have one bit each, and so has the only
# distance. It holds nothing but its end.
_EMPTY_ODD = _bits(
    (0, 1),
    (2, 2),
    (0, 5),  # 257 codes of literals and lengths
    (0, 5),  # 1 code of distances
    (14, 4),  # 18 code lengths, in the order 16, 17, 18, 0, 8, ... , 14, 1
    *((int(place in (2, 17)), 3) for place in range(18)),
    *((1, 1), (138 - 11, 7)),
    *((1, 1), (117 - 11, 7)),
    *((0, 1), (0, 1), (0, 1)),
    (1, 1),  # the end
)


def _lead(bits: int) -> tuple[int, int]:
    """Empty blocks whose width leaves the remainder ``bits`` when divided by 8."""
    odd = [_EMPTY_ODD] * (bits % 2)
    even = (bits - 3 * (bits % 2)) // 2 % 4
    return _bits(*odd, *[_EMPTY] * even)


def inflater_at(first: int, bits: int, window: bytes) -> Any:
    """What unpacks raw deflate from a block on that begins after ``bits`` bits of a byte ``first``, which it has read.

    Where ``bits`` is 0 it has read nothing. ``window`` is the text before the block.
    """
    inflater = zlib.decompressobj(-zlib.MAX_WBITS, zdict=window)
    if bits:
        value, width = _lead(bits)
        value, width = _bits((value, width), (first >> bits, 8 - bits))
        inflater.decompress(value.to_bytes(width // 8, "little"))
    return inflater


@final
class Block(NamedTuple):
    """Where a block begins: after ``bits`` bits of the byte at ``offset``, and after ``text`` bytes of text."""

    offset: int
    bits: int
    text: int


def find_block(inflater: Any, data: bytes, text: bytes, window: bytes) -> Block | None:
    """The first block in ``data`` that can be begun at; ``None`` where none is found.

    ``inflater`` is about to read ``data`` and is used up; ``text`` is what it unpacks, ``window`` the text before.
    """
    produced, was_silent = 0, True
    for at in range(0, min(len(data) - _PROOF_BYTES, _LOOK), _STEP):
        found = len(inflater.decompress(data[at : at + _STEP]))
        if inflater.eof or len(text) - produced < _PROOF_TEXT:
            return None
        if not found and not was_silent:
            before = (window + text[:produced])[-WINDOW:]
            block = _proved(data, at, before, text[produced : produced + (_PROOF_BYTES << 10)])
            if block is not None:
                return Block(*block, produced)
        produced, was_silent = produced + found, not found
    return None


def _proved(data: bytes, silent: int, window: bytes, text: bytes) -> tuple[int, int] | None:
    """``(offset, bits)`` of the block that begins ``text``: the bytes from ``silent`` on are part of its header."""
    for place in range((silent - _STEP) * 8, (silent + 2) * 8):
        at, bits = divmod(place, 8)
        head = int.from_bytes(data[at : at + 3], "little") >> bits
        is_last, kind, literals, distances = head & 1, head >> 1 & 3, head >> 3 & 31, head >> 8 & 31
        if is_last or kind != 2 or literals > 29 or distances > 29:
            continue
        try:
            inflater = inflater_at(data[at], bits, window)
            found = inflater.decompress(data[at + bool(bits) : at + _PROOF_BYTES])
        except zlib.error:
            continue
        if len(found) >= _PROOF_TEXT and text.startswith(found):
            return at, bits
    return None


@final
class Begun(NamedTuple):
    """A member in the middle: where its next block begins (``first`` is the byte at its offset), and what was before.

    ``window`` is the text before, ``crc`` that of all the text before in this member, ``size`` its length.
    """

    first: int
    bits: int
    window: bytes
    crc: int
    size: int


@final
class Member:
    """A gzip member, with the methods of ``zlib.decompressobj`` that streams use; its text is checked at its end.

    Begun in the middle, the bytes that it is given are those after the byte ``first`` where ``bits`` is not 0.
    """

    def __init__(self, begun: Begun | None = None) -> None:
        self.eof = False
        self.unused_data = b""
        self.inflater: Any = None  # once the header is read
        self.crc = self.size = 0
        self.window = b"" if begun is None else begun.window
        self._held = b""  # of a header or trailer that is not complete
        if begun is not None:
            self.inflater = inflater_at(begun.first, begun.bits, begun.window)
            self.crc, self.size = begun.crc, begun.size

    def decompress(self, data: bytes) -> bytes:
        """The text of the next bytes. Raises ``zlib.error`` where they are no gzip or the text is not what it was."""
        if self.inflater is None:
            data = self._held + data
            begin = _header_length(data)
            if begin is None:
                self._held = data
                return b""
            self._held, data = b"", data[begin:]
            self.inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        if self.inflater.eof:
            self._end(data)
            return b""
        text: bytes = self.inflater.decompress(data)
        self.crc = zlib.crc32(text, self.crc)
        self.size += len(text)
        if self.inflater.eof:
            self._end(self.inflater.unused_data)
        return text

    def _end(self, data: bytes) -> None:
        data = self._held + data
        if len(data) < 8:
            self._held = data
            return
        if int.from_bytes(data[:4], "little") != self.crc:
            raise zlib.error("incorrect data check")
        if int.from_bytes(data[4:8], "little") != self.size & 0xFFFFFFFF:
            raise zlib.error("incorrect length check")
        self.eof, self.unused_data = True, data[8:]


def _header_length(data: bytes) -> int | None:
    """The length of the header of a gzip member (section 2.3 of RFC 1952); ``None`` where it is not all there.

    Raises ``zlib.error`` where it is none.
    """
    if not b"\x1f\x8b".startswith(data[:2]):
        raise zlib.error("incorrect header check")
    if data[2:3] not in (b"", b"\x08"):
        raise zlib.error("unknown compression method")
    if len(data) < 10:
        return None
    flags, at = data[3], 10
    if flags & _RESERVED:
        raise zlib.error("unknown header flags set")
    if flags & _EXTRA:
        at += 2 + int.from_bytes(data[at : at + 2], "little")
    for flag in (_NAME, _COMMENT):
        if flags & flag:
            at = data.find(b"\0", at) + 1 if at <= len(data) else 0
            if not at:
                return None
    if flags & _HEADER_CRC:
        at += 2
        if len(data) >= at and int.from_bytes(data[at - 2 : at], "little") != zlib.crc32(data[: at - 2]) & 0xFFFF:
            raise zlib.error("header crc mismatch")
    return at if at <= len(data) else None
