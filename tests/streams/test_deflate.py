"""Deflate begun in the middle: at any bit, at blocks that are found; and gzip members, read as zlib reads them."""

from __future__ import annotations

import gzip
import random
import zlib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unbroken.streams.reading.deflate import WINDOW, Begun, Member, find_block, inflater_at

WORDS = [f"{n * 7919 % 100_003:x}" for n in range(3000)]


def text_of(length: int, seed: int = 0) -> bytes:
    """Words at random, which deflate halves."""
    words = random.Random(seed).choices(WORDS, k=length // 3)
    return " ".join(words).encode()[:length]


def deflated(text: bytes, level: int = 6, memory: int = 8, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, -15, memory, strategy)
    return packer.compress(text) + packer.flush()


@pytest.mark.parametrize("bits", range(8))
@pytest.mark.parametrize("text", [b"", b"a", b"a" * 500, text_of(200_000)])
@pytest.mark.parametrize("window", [b"x", text_of(WINDOW, 1)])
def test_an_inflater_begins_at_any_bit(bits: int, text: bytes, window: bytes) -> None:
    packed = deflated(text)
    moved = int.from_bytes(packed, "little") << bits | (1 << bits) - 1  # the bits before it are ones
    data = moved.to_bytes(len(packed) + 1, "little")
    inflater = inflater_at(data[0], bits, window)
    assert inflater.decompress(data[bool(bits) :]) == text
    assert inflater.eof


@pytest.mark.parametrize(
    ("level", "memory", "strategy"),
    [(1, 8, 0), (6, 8, 0), (9, 9, 0), (6, 1, 0), (6, 8, zlib.Z_FILTERED), (6, 8, zlib.Z_HUFFMAN_ONLY)],
)
@pytest.mark.parametrize("read", [0, 5000, 200_001])
def test_a_block_that_is_found_goes_on_with_the_text(level: int, memory: int, strategy: int, read: int) -> None:
    text = text_of(1_200_000)
    packed = deflated(text, level, memory, strategy)
    inflater = zlib.decompressobj(-15)
    before = inflater.decompress(packed[:read])
    here = inflater.copy()
    data = packed[read : read + 100_000]
    block = find_block(here, data, inflater.decompress(data), before[-WINDOW:])
    assert block is not None
    at = len(before) + block.text
    again = inflater_at(data[block.offset], block.bits, text[max(0, at - WINDOW) : at])
    assert again.decompress(packed[read + block.offset + bool(block.bits) :]) == text[at:]
    assert again.eof


@pytest.mark.parametrize(
    ("text", "level", "strategy"),
    [
        (text_of(300_000), 0, zlib.Z_DEFAULT_STRATEGY),
        (text_of(300_000), 6, zlib.Z_FIXED),
        (random.Random(0).randbytes(300_000), 6, zlib.Z_DEFAULT_STRATEGY),
        (text_of(9000), 6, zlib.Z_DEFAULT_STRATEGY),
        (b"", 6, zlib.Z_DEFAULT_STRATEGY),
    ],
)
def test_where_no_block_has_codes_of_its_own_none_is_found(text: bytes, level: int, strategy: int) -> None:
    packed = deflated(text, level, strategy=strategy)
    assert find_block(zlib.decompressobj(-15), packed, text, b"") is None


def header(flags: int, name: bytes) -> bytes:
    """A gzip header with the fields that the flags say (RFC 1952)."""
    data = b"\x1f\x8b\x08" + bytes([flags]) + b"\0\0\0\0\0\xff"
    data += (len(name).to_bytes(2, "little") + name) * bool(flags & 4)
    data += (name.replace(b"\0", b"") + b"\0") * (bool(flags & 8) + bool(flags & 16))
    return data + (zlib.crc32(data) & 0xFFFF).to_bytes(2, "little") * bool(flags & 2)


def member_of(text: bytes, head: bytes = header(0, b"")) -> bytes:
    return head + deflated(text) + zlib.crc32(text).to_bytes(4, "little") + len(text).to_bytes(4, "little")


def read_in_pieces(member: Any, data: bytes, step: int) -> bytes:
    """What it unpacks of the data, given so many bytes at a time, up to its end."""
    text, at = b"", 0
    while at < len(data) and not member.eof:
        text += member.decompress(data[at : at + step])
        at += step
    return text


@given(
    text=st.binary(max_size=200),
    flags=st.sampled_from([0, 2, 4, 8, 16, 1, 31]),
    name=st.binary(max_size=20),
    step=st.integers(1, 40),
    after=st.binary(max_size=20),
)
def test_a_member_is_read_as_zlib_reads_it(text: bytes, flags: int, name: bytes, step: int, after: bytes) -> None:
    data = member_of(text, header(flags, name)) + after
    member, ref = Member(), zlib.decompressobj(31)
    assert read_in_pieces(member, data, step) == read_in_pieces(ref, data, step) == text
    assert member.eof and ref.eof
    assert member.unused_data == ref.unused_data


@example(place=2, value=1, step=1)  # the method
@given(place=st.integers(0, 400), value=st.integers(1, 255), step=st.sampled_from([1, 7, 1000]))
def test_what_is_wrong_in_a_member_is_said_as_zlib_says_it(place: int, value: int, step: int) -> None:
    """Each byte of the header and the trailer, and many of the data."""
    data = bytearray(member_of(text_of(600), header(31, b"name")))
    data[place % len(data)] ^= value

    def outcome(member: Any) -> str:
        try:
            read_in_pieces(member, bytes(data), step)
        except zlib.error as error:
            return str(error).rpartition(": ")[2]
        return f"end: {member.eof}"

    assert outcome(Member()) == outcome(zlib.decompressobj(31))


def test_a_member_begun_in_the_middle_is_checked_at_its_end() -> None:
    text = text_of(300_000)
    packed = gzip.compress(text)
    inflater = zlib.decompressobj(-15)
    block = find_block(inflater.copy(), packed[10:], inflater.decompress(packed[10:]), b"")
    assert block is not None
    at = 10 + block.offset
    window = text[max(0, block.text - WINDOW) : block.text]
    begun = Begun(packed[at], block.bits, window, zlib.crc32(text[: block.text]), block.text)
    rest = packed[at + bool(block.bits) :]
    member = Member(begun)
    assert member.decompress(rest) == text[block.text :]
    assert member.eof
    with pytest.raises(zlib.error, match="incorrect data check"):
        Member(begun._replace(crc=begun.crc ^ 1)).decompress(rest)
    with pytest.raises(zlib.error, match="incorrect length check"):
        Member(begun._replace(size=begun.size + 1)).decompress(rest)
