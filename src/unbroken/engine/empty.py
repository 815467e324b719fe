"""A batch with no row in it: what a rank that ran out yields while others go on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from unbroken.lineage import Lineage

__all__ = ["emptied"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def emptied(batch: Any) -> Any:
    """A batch of the same structure without rows: tensors and arrays ``[0, ...]`` of the same dtype, lists empty.

    Dicts, tuples and named tuples keep their structure, and so do lists of columns of one length, as default collation
    makes them. What has no rows (a number, a tensor without dimensions) stays as it is. Nothing of the batch is held.

    Raises ``TypeError`` where it cannot be told what the rows of a batch are.
    """
    if isinstance(batch, torch.Tensor):
        return batch.new_empty((0, *batch.shape[1:])) if batch.ndim else batch.clone()
    if isinstance(batch, np.ndarray):
        return np.empty((0, *batch.shape[1:]), batch.dtype) if batch.ndim else batch.copy()
    if isinstance(batch, Mapping):
        return _emptied_mapping(batch)
    if isinstance(batch, Lineage):
        return Lineage()
    if isinstance(batch, list | tuple):
        return _emptied_sequence(batch)
    if isinstance(batch, (*_PLAIN, np.generic)):
        return batch
    raise TypeError(
        f'at_end="pad" needs batches without rows, and cannot make one of a {type(batch).__qualname__}.\n'
        'Return tensors, arrays, dicts, tuples or lists of these from collate_fn, or use at_end="stop".'
    )


def _emptied_mapping(batch: Mapping[Any, Any]) -> Any:
    fields = {name: emptied(value) for name, value in batch.items()}
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return fields
    other = copy.copy(batch)
    other.update(fields)
    return other


def _emptied_sequence(batch: list[Any] | tuple[Any, ...]) -> Any:
    if hasattr(batch, "_fields"):
        return type(batch)(*map(emptied, batch))
    columns = [_rows(value) for value in batch]
    loose = all(rows is None for rows in columns)
    if loose or (isinstance(batch, list) and None not in columns and len(set(columns)) > 1):
        return type(batch)()
    return type(batch)(emptied(value) for value in batch)


def _rows(value: Any) -> int | None:
    """The rows of a column; None for what is no column."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.shape[0] if value.ndim else None
    if isinstance(value, Mapping):
        return next((rows for rows in map(_rows, value.values()) if rows is not None), 0)
    if isinstance(value, list | tuple):
        inner = {_rows(part) for part in value}
        return inner.pop() if len(inner) == 1 and None not in inner else len(value)
    return None
