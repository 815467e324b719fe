"""Chunks: files cut into byte ranges, and the lines of one range.

A chunk is a range of bytes. A line belongs to the chunk in which its first byte lies, so chunks need no index: the
start is moved to the next line when the chunk is opened. A compressed file is one chunk.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, final

import numpy as np

from unbroken.streams.reading.files import SourceFile

__all__ = ["Chunk", "Chunks", "chunk_bytes", "lines"]

_MOST_CHUNK_BYTES = 4 << 20
_CHUNKS_PER_LANE = 8


def chunk_bytes(total: int, lanes: int) -> int:
    """The size of a chunk: at most 4 MiB, and small enough that each lane gets several of a small corpus."""
    return max(1, min(_MOST_CHUNK_BYTES, total // (lanes * _CHUNKS_PER_LANE)))


class Chunk(NamedTuple):
    """Bytes ``start`` to ``stop`` - 1 of a file; of a compressed one, all of the text inside."""

    file: SourceFile
    start: int
    stop: int


@final
class Chunks:
    """All chunks of the files, in order, without a list of them."""

    def __init__(self, files: Sequence[SourceFile], size: int) -> None:
        self._files = files
        self._size = size
        sizes = np.array([file.size for file in files], dtype=np.int64)
        whole = np.array([file.compression is not None for file in files])
        self._ends = np.cumsum(np.where(whole, sizes > 0, -(-sizes // size)))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Chunk:
        place = int(np.searchsorted(self._ends, number, side="right"))
        file = self._files[place]
        if file.compression is not None:
            return Chunk(file, 0, sys.maxsize)
        start = (number - (int(self._ends[place - 1]) if place else 0)) * self._size
        return Chunk(file, start, min(start + self._size, file.size))


def lines(blocks: Iterable[bytes], offset: int, stop: int, *, inside: bool) -> Iterator[tuple[int, bytes]]:
    """The lines that begin before ``stop``, each with the offset of its first byte and without its newline.

    ``blocks`` begin at ``offset``. Where that may be ``inside`` a line, what comes before the first newline is
    dropped: to begin with the first line at or after x, pass the bytes from x - 1 on.
    """
    blocks = iter(blocks)
    if inside:
        for block in blocks:
            cut = block.find(b"\n") + 1
            offset += cut or len(block)
            if cut and offset < stop:
                blocks = itertools.chain([block[cut:]], blocks)
                break
            if offset >= stop:
                return
    parts: list[bytes] = []
    for block in blocks:
        found = block.split(b"\n")
        if len(found) == 1:
            parts.append(block)
            continue
        parts.append(found[0])
        found[0] = b"".join(parts)
        parts = [found.pop()]
        for line in found:
            if offset >= stop:
                return
            yield offset, line
            offset += len(line) + 1
        if offset >= stop:
            return
    last = b"".join(parts)
    if last:
        yield offset, last
