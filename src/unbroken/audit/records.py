"""What is kept of a batch: digests and a short text, and no reference to it, so that a loader may reuse its memory."""

from __future__ import annotations

import dataclasses
import hashlib
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

import numpy as np
import torch

from unbroken.audit.content import attributes_of, feed
from unbroken.errors import AuditError

__all__ = ["Record", "Row", "brief", "digest_of", "fields_of", "plain", "record", "row_of", "rows_of"]

_REPR: Final[object] = object.__repr__
_SHOWN: Final = 6  # values, or attributes, of a short text


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
    if isinstance(batch, torch.Tensor) and batch.layout != torch.strided and not batch.is_nested:
        return [batch]
    if isinstance(batch, torch.Tensor | np.ndarray):
        return list(batch.unbind() if isinstance(batch, torch.Tensor) else batch) if batch.ndim else [batch]
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
    names = plain(repr(list(row))).encode() if isinstance(row, Mapping) else type(row).__name__.encode()
    return Row(hashlib.blake2b(names + b"".join(fields), digest_size=8).digest(), fields, brief(row))


def fields_of(row: Any) -> list[str]:
    """The names of a row's fields, in the order of ``Row.fields``: keys, or places."""
    if isinstance(row, Mapping):
        return [plain(str(name)) for name in row]
    return [f"[{place}]" for place in range(len(_values(row)))] if isinstance(row, tuple) else ["the row"]


def _values(row: Any) -> list[Any]:
    if isinstance(row, Mapping):
        return list(row.values())
    return list(row) if isinstance(row, tuple) else [row]


def digest_of(value: Any) -> bytes:
    """16 bytes that stand for structure, types and content. NaN equals NaN; -0.0 and 0.0, 1 and True and 1.0 differ.

    Raises ``AuditError`` for what cannot be compared: it contains itself, or has no content that can be read.
    """
    hasher = hashlib.blake2b(digest_size=16)
    try:
        feed(hasher.update, value)
    except RecursionError:
        raise AuditError(
            f"The audit cannot compare a {_name(value)} of a batch: it is nested too deep.\n"
            "Let the factory return a loader whose batches are flat containers of tensors, arrays and plain values."
        ) from None
    return hasher.digest()


@final
class _Brief(reprlib.Repr):
    """Short texts: tensors and arrays show dtype, shape and their first values, objects their attributes."""

    def repr1(self, x: Any, level: int) -> str:
        try:
            if isinstance(x, torch.Tensor):
                return self._numbers(str(x.dtype).removeprefix("torch."), x.detach().cpu(), x.numel())
            if isinstance(x, np.ndarray):
                return self._numbers(str(x.dtype), x, x.size)
            if getattr(type(x), "__repr__", None) is _REPR and level > 0:
                given = [f"{name}={self.repr1(each, level - 1)}" for name, each in sorted(attributes_of(x).items())]
                more = ["..."] * (len(given) > _SHOWN)
                return f"{type(x).__name__}({', '.join(given[:_SHOWN] + more)})"
            return super().repr1(x, level)
        except Exception:  # a class may be named like a known one, or have a __repr__ that raises
            return f"<{_name(x)}>"

    def _numbers(self, dtype: str, value: Any, count: int) -> str:
        first = value.reshape(-1)[:_SHOWN].tolist()
        texts = [f"{v:.6g}" if isinstance(v, float) else repr(v) for v in first]
        return f"{dtype}{list(value.shape)} [" + ", ".join(texts + ["..."] * (count > len(first))) + "]"


_BRIEF = _Brief()


def brief(value: Any) -> str:
    """A short text of a batch or a row."""
    return str(plain(_BRIEF.repr(value)))


def plain(word: Any) -> Any:
    """A text that can be written as UTF-8; anything else as it is."""
    return word.encode("utf-8", "backslashreplace").decode() if isinstance(word, str) else word


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
