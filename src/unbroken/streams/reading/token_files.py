"""Token files: which dtype they hold, where their tokens begin, and where their documents do.

What is read, all of it little-endian:

* Raw tokens and nothing else, as nanoGPT writes uint16 (``data/openwebtext/prepare.py`` in karpathy/nanoGPT).
* llm.c: 256 int32 of header, of which the first three are a magic number, a version and the number of tokens: 20240520
  and version 1 for uint16, 20240801 and version 7 for uint32 (``dev/data/data_common.py`` in karpathy/llm.c).
* ``.npy`` of one dimension (``numpy.lib.format``).
* Megatron's pair of a ``.bin`` of raw tokens and an ``.idx``: 9 bytes ``MMIDIDX`` and two zeros; uint64 version, 1;
  uint8 code of the dtype; uint64 number of sequences; uint64 number of document indices; then for each sequence its
  tokens (int32), for each its byte offset (int64), and the document indices (int64): 0, and after each document the
  number of the sequence that comes next (``megatron/core/datasets/indexed_dataset.py`` in NVIDIA/Megatron-LM).
* Offsets: the token that each document begins with, and at the end, or not, the number of tokens: whole numbers in a
  ``.npy``, or raw int64.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import struct
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from unbroken.errors import BadRow
from unbroken.streams.reading.files import Access, SourceFile, find_files, is_local, read_range

__all__ = ["Documents", "TokenFile", "find_token_files", "read_tokens_of"]

Array: TypeAlias = npt.NDArray[Any]
Bounds: TypeAlias = npt.NDArray[np.int64]
Dtype: TypeAlias = "np.dtype[Any]"

_READER = "read_tokens"
_HEAD_BYTES = 1024
_NPY = b"\x93NUMPY"
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
_INDEX = struct.Struct("<9sQBQQ")
_INDEX_MAGIC, _INDEX_VERSION = b"MMIDIDX\0\0", 1
_INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_THREADS = 16
_MOST_HELD = 32


@final
class _Held:
    """What this process has at hand of the files that tell where documents begin. Each process has its own."""

    def __init__(self) -> None:
        self._files: dict[SourceFile, Array] = {}

    def __reduce__(self) -> tuple[type[_Held], tuple[()]]:
        return _Held, ()

    def all_of(self, file: SourceFile, access: Access) -> Array:
        """The bytes of a file: of a local one a map, of which only what is looked at is read; else all of it."""
        found = self._files.get(file)
        if found is None:
            if is_local(file.path):
                _check_size(file, os.stat(file.path).st_size)
                found = np.asarray(np.memmap(file.path, np.uint8, "r"))
            else:
                found = np.frombuffer(read_range(file.path, 0, file.size, access), np.uint8)
            _check_size(file, len(found))
            if len(self._files) >= _MOST_HELD:
                self._files.clear()
            self._files[file] = found
        return found

    def part(self, file: SourceFile, dtype: str | Dtype, at: int, count: int, access: Access) -> Array:
        """``count`` numbers from byte ``at`` of a file on."""
        found = self.all_of(file, access)[at : at + count * np.dtype(dtype).itemsize]
        return np.frombuffer(found, dtype)


class Documents(ABC):
    """Where the ``count`` documents of a token file begin: they lie one after another, and hold all its ``tokens``."""

    file: SourceFile
    count: int
    tokens: int

    @abstractmethod
    def start(self, number: int, access: Access) -> int:
        """The first token of a document; for ``count``, the number of tokens."""

    @abstractmethod
    def starts(self, first: int, last: int, access: Access) -> Bounds:
        """The same of documents ``first`` to ``last``, that one too: int64 [last - first + 1]. Raises ``BadRow``."""

    def bounds(self, first: int, last: int, access: Access) -> Bounds:
        """The same, checked: from 0 on, ascending, inside of the file. Raises ``BadRow`` where it is not so."""
        found = self.starts(first, last, access)
        begins = found[0] >= 0 if first else found[0] == 0
        if not begins or found[-1] > self.tokens or (found[1:] < found[:-1]).any():
            raise BadRow(
                f"{self.file.path}: documents {first} to {last} do not begin one after another in {self.tokens} "
                "tokens.\nWrite it again from the file of tokens that it belongs to."
            )
        return found

    def around(self, start: int, stop: int, access: Access) -> Bounds:
        """The bounds of the documents that hold tokens ``start`` to ``stop`` - 1. Raises ``BadRow``."""
        numbers = range(self.count)
        first = bisect_right(numbers, start, key=lambda number: self.start(number, access))
        last = bisect_left(numbers, stop, first, key=lambda number: self.start(number, access))
        return self.bounds(max(0, first - 1), last, access)


@final
@dataclass(frozen=True)
class _Offsets(Documents):
    """A list of offsets: ``entries`` of them, of ``dtype``, from byte ``begin`` of the file on."""

    file: SourceFile
    count: int
    tokens: int
    begin: int
    dtype: Dtype
    entries: int
    held: _Held

    def start(self, number: int, access: Access) -> int:
        if number == self.count:
            return self.tokens
        return int(self.held.part(self.file, self.dtype, self.begin, self.entries, access)[number])

    def starts(self, first: int, last: int, access: Access) -> Bounds:
        listed = self.held.part(self.file, self.dtype, self.begin, self.entries, access)[first : last + 1]
        found = listed.astype(np.int64)
        return found if first + len(found) == last + 1 else np.append(found, self.tokens)


@final
@dataclass(frozen=True)
class _Index(Documents):
    """An ``.idx`` of ``sequences``. Where its document indices name none, ``named`` is 0 and each sequence is one."""

    file: SourceFile
    count: int
    tokens: int
    dtype: Dtype
    sequences: int
    named: int
    held: _Held

    def _part(self, dtype: str, at: int, count: int, access: Access) -> Array:
        return self.held.part(self.file, dtype, _INDEX.size + at, count, access)

    def start(self, number: int, access: Access) -> int:
        if self.named:
            number = int(self._part("<i8", 12 * self.sequences + 8 * number, 1, access)[0])
        if not 0 <= number < self.sequences:
            return self.tokens
        return int(self._part("<i8", 4 * self.sequences + 8 * number, 1, access)[0]) // self.dtype.itemsize

    def starts(self, first: int, last: int, access: Access) -> Bounds:
        numbers = np.arange(first, last + 1)
        if self.named:
            numbers = self._part("<i8", 12 * self.sequences + 8 * first, len(numbers), access).astype(np.int64)
        begin, end = int(numbers[0]), int(numbers[-1])
        fits = 0 <= begin and end <= self.sequences and not (numbers[1:] < numbers[:-1]).any()
        if fits:
            sizes = self._part("<i4", 4 * begin, end - begin, access).astype(np.int64)
            pointers = self._part("<i8", 4 * self.sequences + 8 * begin, min(end + 1, self.sequences) - begin, access)
            ends = self.start(first, access) + np.concatenate([[0], np.cumsum(sizes)])
            fits = bool((pointers == ends[: len(pointers)] * self.dtype.itemsize).all())
            fits &= end < self.sequences or int(ends[-1]) == self.tokens
        if not fits:
            raise BadRow(
                f"{self.file.path}: in documents {first} to {last} the sizes, the pointers and the document indices do "
                "not fit together.\nWrite the pair of files again."
            )
        return ends[numbers - begin]


@final
@dataclass(frozen=True)
class TokenFile:
    """``tokens`` ids of ``dtype`` from byte ``begin`` of a file on; ``documents`` where they are known."""

    file: SourceFile
    begin: int
    dtype: Dtype
    tokens: int
    documents: Documents | None


def find_token_files(paths: Any, dtype: Any, offsets: Any, access: Access) -> tuple[TokenFile, ...]:
    """The files that ``paths`` name. Read are the first bytes of each, and a few of what tells where documents begin.

    Raises ``TypeError``, ``ValueError`` and ``FileNotFoundError`` as their messages say.
    """
    asked = None if dtype is None else _asked_dtype(dtype)
    files = find_files(_READER, paths, None, access.storage_options, access.retries)
    beside = _offsets_of(files, offsets)
    held = _Held()
    if all(is_local(file.path) for file in files):
        return tuple(_describe(file, path, asked, held, access) for file, path in zip(files, beside, strict=True))
    with ThreadPoolExecutor(_THREADS) as threads:
        return tuple(threads.map(lambda file, path: _describe(file, path, asked, held, access), files, beside))


def read_tokens_of(file: TokenFile, start: int, stop: int, access: Access) -> Array:
    """Tokens ``start`` to ``stop`` - 1 of a file, in its dtype, read-only.

    Raises ``BadRow`` where the file has not the size that it had; ``OSError`` where it cannot be read.
    """
    if is_local(file.file.path):
        _check_size(file.file, os.stat(file.file.path).st_size)
    at = file.begin + start * file.dtype.itemsize
    data = read_range(file.file.path, at, file.begin + stop * file.dtype.itemsize, access)
    if len(data) < (stop - start) * file.dtype.itemsize:
        _check_size(file.file, at + len(data))
    return np.frombuffer(data, file.dtype)


def _check_size(file: SourceFile, found: int) -> None:
    if found != file.size:
        raise BadRow(
            f"{file.path}: has {found} bytes, but had {file.size} when the stream was made.\n"
            "Put the file back as it was, or make the stream again from the new one."
        )


def _asked_dtype(dtype: Any) -> Dtype:
    try:
        found: Dtype = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{_READER}: dtype must be such as 'uint16' or 'uint32', but got {dtype!r}.") from None
    if not _is_token(found):
        raise ValueError(f"{_READER}: dtype must be of whole numbers that fit int64, little-endian, but got {dtype!r}.")
    return found


def _is_token(dtype: Dtype) -> bool:
    return dtype.kind in "iu" and dtype.str != "<u8" and dtype.newbyteorder("<") == dtype


def _offsets_of(files: tuple[SourceFile, ...], offsets: Any) -> list[Any]:
    """For each file the path of its offsets; None where nothing was said."""
    if offsets is None:
        return [None] * len(files)
    if callable(offsets):
        return [offsets(file.path) for file in files]
    if isinstance(offsets, str) and "{}" in offsets:
        return [offsets.replace("{}", posixpath.splitext(file.path)[0]) for file in files]
    listed = [offsets] if isinstance(offsets, str | os.PathLike) else offsets
    if not isinstance(listed, list | tuple):
        raise TypeError(
            f"{_READER}: offsets must be a path, a list of paths, a pattern with {{}} or a function, but got "
            f"{offsets!r} ({type(offsets).__name__})."
        )
    if len(listed) != len(files):
        raise ValueError(
            f"{_READER}: offsets names {len(listed)} file{'s' * (len(listed) != 1)} for {len(files)} files of tokens.\n"
            "Name one for each of them, or pass a pattern such as '{}.npy', in which {} is the path without its suffix."
        )
    return list(listed)


def _describe(file: SourceFile, offsets: Any, asked: Dtype | None, held: _Held, access: Access) -> TokenFile:
    begin, dtype = _header_of(file, access)
    lists: SourceFile | None = None
    if offsets is not None:
        lists = find_files(_READER, offsets, None, access.storage_options, access.retries)[0]
    elif dtype is None and asked is None and file.path.endswith(".bin"):
        with contextlib.suppress(FileNotFoundError):
            lists = find_files(
                _READER, file.path.removesuffix("bin") + "idx", None, access.storage_options, access.retries
            )[0]
    index = _index_of(lists, file, held, access) if lists is not None and lists.path.endswith(".idx") else None
    kind = dtype or (index.dtype if index is not None else asked)
    if kind is None:
        raise ValueError(
            f"{_READER}: {file.path}: has no header that tells the type of its tokens, and no .idx beside it.\n"
            "Pass dtype='uint16', dtype='uint32', or what else they were written as."
        )
    if asked is not None and asked != kind:
        raise ValueError(
            f"{_READER}: {file.path}: has tokens of {kind.name}, as its header or index says, but dtype={asked.name!r} "
            "was given.\nLeave dtype out."
        )
    tokens, over = divmod(file.size - begin, kind.itemsize)
    if over:
        raise ValueError(
            f"{_READER}: {file.path}: has {tokens} tokens of {kind.name}, and {over} bytes more that are no whole "
            "one.\nPass the dtype that it was written with, or write it again."
        )
    listed = _offsets_in(lists, tokens, held, access) if lists is not None and index is None else index
    return TokenFile(file, begin, kind, tokens, listed)


def _header_of(file: SourceFile, access: Access) -> tuple[int, Dtype | None]:
    """Where the tokens of a file begin, and their dtype if its own first bytes tell."""
    head = read_range(file.path, 0, min(file.size, _HEAD_BYTES), access)
    if head.startswith(_INDEX_MAGIC):
        raise ValueError(f"{_READER}: {file.path}: is an index. Name the .bin that belongs to it.")
    if head.startswith(_NPY):
        begin, dtype, count = _npy_header(file, head)
        _check_length(file, begin + count * dtype.itemsize)
        return begin, dtype
    magic, version, count = struct.unpack_from("<iii", head) if len(head) == _HEAD_BYTES else (0, 0, 0)
    if magic not in _LLM_C:
        return 0, None
    known, name = _LLM_C[magic]
    if version != known:
        raise ValueError(f"{_READER}: {file.path}: has a header of version {version}, and version {known} can be read.")
    _check_length(file, _HEAD_BYTES + count * np.dtype(name).itemsize)
    return _HEAD_BYTES, np.dtype(name)


def _npy_header(file: SourceFile, head: bytes) -> tuple[int, Dtype, int]:
    """Where the numbers of a ``.npy`` begin, their dtype, and how many there are."""
    stream = BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise ValueError(f"{_READER}: {file.path}: the header of this .npy cannot be read: {error}") from None
    if len(shape) != 1 or not _is_token(dtype):
        raise ValueError(
            f"{_READER}: {file.path}: has the shape {list(shape)} and the type {dtype}.\n"
            "Save one dimension, of whole numbers that fit int64, little-endian."
        )
    return stream.tell(), dtype, shape[0]


def _check_length(file: SourceFile, expected: int) -> None:
    if file.size != expected:
        raise ValueError(
            f"{_READER}: {file.path}: has {file.size} bytes, but its header tells of {expected}: it was cut short or "
            "changed.\nWrite or copy it again."
        )


def _number(file: SourceFile, dtype: Dtype, at: int, access: Access) -> int:
    return int(np.frombuffer(read_range(file.path, at, at + dtype.itemsize, access), dtype)[0])


def _offsets_in(file: SourceFile, tokens: int, held: _Held, access: Access) -> _Offsets:
    head = read_range(file.path, 0, min(file.size, _HEAD_BYTES), access)
    begin, dtype, entries = _npy_header(file, head) if head.startswith(_NPY) else (0, np.dtype("<i8"), file.size // 8)
    _check_length(file, begin + entries * dtype.itemsize)
    first = _number(file, dtype, begin, access) if entries else tokens
    last = _number(file, dtype, begin + (entries - 1) * dtype.itemsize, access) if entries else tokens
    if first or last > tokens:
        raise ValueError(
            f"{_READER}: {file.path}: documents begin at token {first} to {last}, but must begin at 0 and within the "
            f"{tokens} tokens of their file.\nOffsets count tokens, not bytes: pass those that belong to the file."
        )
    return _Offsets(file, entries - (entries > 0 and last == tokens), tokens, begin, dtype, entries, held)


def _index_of(file: SourceFile, data: SourceFile, held: _Held, access: Access) -> _Index:
    head = read_range(file.path, 0, min(file.size, _INDEX.size), access)
    if len(head) < _INDEX.size or not head.startswith(_INDEX_MAGIC):
        raise ValueError(
            f"{_READER}: {file.path}: is no index of Megatron: it begins with {head[:9]!r}, not {_INDEX_MAGIC!r}.\n"
            "Pass offsets= where documents are told in another way, or dtype= to read the .bin without it."
        )
    _, version, code, sequences, listed = _INDEX.unpack(head)
    dtype = np.dtype(_INDEX_DTYPES.get(code, "V"))
    if version != _INDEX_VERSION or not _is_token(dtype):
        raise ValueError(
            f"{_READER}: {file.path}: has version {version} and tokens of {dtype.name if dtype.itemsize else code}; "
            f"version {_INDEX_VERSION} and whole numbers can be read."
        )
    least = _INDEX.size + 12 * sequences + 8 * listed
    if file.size < least:
        raise ValueError(
            f"{_READER}: {file.path}: has {file.size} bytes, but {sequences} sequences and {listed} document indices "
            f"take {least}: it was cut short.\nWrite or copy it again."
        )
    end = 0
    if sequences:
        size = _number(file, np.dtype("<i4"), _INDEX.size + 4 * (sequences - 1), access)
        end = size * dtype.itemsize + _number(file, np.dtype("<i8"), _INDEX.size + 12 * sequences - 8, access)
    if end != data.size:
        raise ValueError(
            f"{_READER}: {file.path}: ends at byte {end} of {data.path}, which has {data.size} bytes.\n"
            "They do not belong together, or one was cut short: write or copy the pair again."
        )
    last = _number(file, np.dtype("<i8"), least - 8, access) if listed > 1 else sequences
    if last != sequences:
        raise ValueError(
            f"{_READER}: {file.path}: its last document ends with sequence {last} of {sequences}.\n"
            "Write it again and end the last document, or pass dtype= to read the .bin without it."
        )
    count = listed - 1 if listed > 1 else sequences
    return _Index(file, count, end // dtype.itemsize, dtype, sequences, max(0, listed - 1), held)
