"""What is kept of a batch: digests and a short text, and no reference to it, so that a loader may reuse its memory."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import reprlib
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, final

import numpy as np
import torch

__all__ = ["Record", "Row", "brief", "digest_of", "fields_of", "record", "row_of", "rows_of"]


@final
@dataclasses.dataclass(frozen=True)
class Record:
    """A delivered batch: equal where structure, types, dtypes, shapes and bytes are."""

    digest: bytes
    brief: str = dataclasses.field(compare=False)
    rows: tuple[bytes, ...] = dataclasses.field(compare=False)


@final
@dataclasses.dataclass(frozen=True)
class Row:
    """A row: its digest, that of each of its fields (8 bytes each), and a short text."""

    digest: bytes
    fields: tuple[bytes, ...] = dataclasses.field(compare=False)
    brief: str = dataclasses.field(compare=False)


def rows_of(batch: Any) -> list[Any]:
    """The rows of a batch as default collation makes them: along the first dimension, through dicts and tuples.

    A list or tuple of tensors, arrays or containers is taken for columns, any other for rows.
    """
    if isinstance(batch, torch.Tensor | np.ndarray):
        return list(batch) if batch.ndim else [batch]
    if isinstance(batch, Mapping):
        columns = [rows_of(value) for value in batch.values()]
        if columns and len({len(column) for column in columns}) == 1:
            return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]
        return [batch]
    if isinstance(batch, list | tuple):
        if all(isinstance(value, torch.Tensor | np.ndarray | Mapping | list | tuple) for value in batch):
            columns = [rows_of(value) for value in batch]
            if len({len(column) for column in columns}) == 1:
                return list(zip(*columns, strict=True))
        return list(batch)
    return [batch]


def record(batch: Any, rows: Callable[[Any], Iterable[Any]]) -> Record:
    """What is kept of a batch, and of the rows that a function finds in it."""
    return Record(digest_of(batch), brief(batch), tuple(digest_of(row) for row in rows(batch)))


def row_of(row: Any) -> Row:
    """What is kept of a row. Its fields are the values of a dict or tuple; another row is one field."""
    fields = tuple(digest_of(value)[:8] for value in _values(row))
    names = repr(list(row)).encode() if isinstance(row, Mapping) else type(row).__name__.encode()
    return Row(hashlib.blake2b(names + b"".join(fields), digest_size=8).digest(), fields, brief(row))


def fields_of(row: Any) -> list[str]:
    """The names of a row's fields, in the order of ``Row.fields``: keys, or places."""
    if isinstance(row, Mapping):
        return [str(name) for name in row]
    return [f"[{place}]" for place in range(len(_values(row)))] if isinstance(row, tuple) else ["the row"]


def _values(row: Any) -> list[Any]:
    if isinstance(row, Mapping):
        return list(row.values())
    return list(row) if isinstance(row, tuple) else [row]


def digest_of(value: Any) -> bytes:
    """16 bytes that stand for structure, types and content. NaN equals NaN; -0.0 and 0.0, 1 and True and 1.0 differ."""
    hasher = hashlib.blake2b(digest_size=16)
    _feed(hasher.update, value)
    return hasher.digest()


def _feed(update: Callable[[Any], None], value: Any) -> None:
    kind = type(value)
    update(f"{kind.__module__}.{kind.__qualname__}:".encode())
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, np.ndarray):
        update(f"{value.shape}".encode())
        _feed(update, value.tolist())
    elif isinstance(value, str | bytes | bytearray | bool | int | float | complex | type(None)):
        text = repr(value).encode()
        update(f"{len(text)}:".encode() + text)
    elif isinstance(value, Mapping | list | tuple):
        update(f"{len(value)}:".encode())
        for item in value.items() if isinstance(value, Mapping) else value:
            _feed(update, item)
    elif isinstance(value, Set):
        for digest in sorted(digest_of(item) for item in value):
            update(digest)
    elif dataclasses.is_dataclass(value):
        _feed(update, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    else:
        update(pickle.dumps(value))


@final
class _Brief(reprlib.Repr):
    """Short texts: tensors and arrays show dtype, shape and their first values."""

    def repr_Tensor(self, value: torch.Tensor, level: int) -> str:
        first = value.detach().cpu().reshape(-1)[:6].tolist()
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {self._values(first, value.numel())}"

    def repr_ndarray(self, value: np.ndarray[Any, Any], level: int) -> str:
        return f"{value.dtype}{list(value.shape)} {self._values(value.reshape(-1)[:6].tolist(), value.size)}"

    def _values(self, first: list[Any], count: int) -> str:
        texts = [f"{v:.6g}" if isinstance(v, float) else repr(v) for v in first]
        return "[" + ", ".join(texts + ["..."] * (count > len(first))) + "]"


_BRIEF = _Brief()


def brief(value: Any) -> str:
    """A short text of a batch or a row."""
    return _BRIEF.repr(value)
