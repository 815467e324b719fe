"""Copies of a dataset for lanes that share one process: what cannot be written is shared, the rest is copied."""

from __future__ import annotations

import copy
import gc
import types
from typing import Any

import numpy as np

from unbroken.errors import UncopyableDataset

__all__ = ["copy_dataset"]

_LEAVES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, bytes, int, float)


def copy_dataset(dataset: Any) -> Any:
    """A deep copy that shares read-only arrays and memmaps, and Arrow tables, with the original.

    Raises ``UncopyableDataset`` where it cannot be copied (an open file, a generator, a lock).
    """
    try:
        return copy.deepcopy(dataset, {id(part): part for part in _unwritable(dataset)})
    except Exception as error:
        raise UncopyableDataset(
            f"Several lanes of {type(dataset).__qualname__} share one process, and it cannot be copied: {error}\n"
            "Give each lane a process of its own (num_workers at least the number of lanes), or open files, "
            "generators and locks in __iter__ instead of __init__."
        ) from error


def _unwritable(root: Any) -> list[Any]:
    found, seen, queue = [], {id(root)}, [root]
    while queue:
        part = queue.pop()
        if _is_unwritable(part):
            found.append(part)
            continue
        if isinstance(part, _LEAVES):
            continue
        for inner in gc.get_referents(part):
            if id(inner) not in seen and not isinstance(inner, _LEAVES):
                seen.add(id(inner))
                queue.append(inner)
    return found


def _is_unwritable(part: Any) -> bool:
    if isinstance(part, np.ndarray):
        base: Any = part
        while isinstance(base, np.ndarray):
            if base.flags.writeable:
                return False
            base = base.base
        return True
    kind = type(part)
    return kind.__module__.startswith("pyarrow") and kind.__name__ in ("Table", "RecordBatch", "ChunkedArray")
