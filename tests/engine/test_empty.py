"""A batch without rows has everything else of the batch that it was made of."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from unbroken.engine.empty import emptied
from unbroken.testing import rows_of


class Pair(NamedTuple):
    x: Any
    y: Any


def shape_of(value: Any) -> Any:
    """A batch as structure, types, dtypes and shapes."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), value.dtype, tuple(value.shape)
    if isinstance(value, dict | UserDict):
        return type(value), {name: shape_of(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [shape_of(part) for part in value]
    return value


X, Y = torch.ones(4, 3, dtype=torch.int32), torch.ones(4)
NO_X, NO_Y = torch.ones(0, 3, dtype=torch.int32), torch.ones(0)
BATCHES = {
    "tensor": (X, NO_X),
    "numbers": (Y, NO_Y),
    "no dimension": (torch.tensor(3.0), torch.tensor(3.0)),
    "array": (np.ones((4, 2), np.float16), np.ones((0, 2), np.float16)),
    "dict": ({"x": X, "y": Y, "note": "epoch 1", "n": 4}, {"x": NO_X, "y": NO_Y, "note": "epoch 1", "n": 4}),
    "ordered": (OrderedDict(x=X), OrderedDict(x=NO_X)),
    "user dict": (UserDict(x=X), UserDict(x=NO_X)),
    "tuple": ((X, Y), (NO_X, NO_Y)),
    "named tuple": (Pair(X, {"z": Y}), Pair(NO_X, {"z": NO_Y})),
    "columns": ([X, Y], [NO_X, NO_Y]),
    "ragged": ([torch.ones(2), torch.ones(3)], []),
    "samples": ([torch.tensor(1), torch.tensor(2)], []),
    "texts": (["a", "b"], []),
    "texts in a column": ([X, ("a", "b", "c", "d")], [NO_X, ()]),
    "dicts": ([{"x": torch.ones(2)}, {"x": torch.ones(3)}], []),
    "empty": ([], []),
    "none": (None, None),
    "numpy number": (np.int64(3), np.int64(3)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_emptied_of_its_rows_alone(name: str) -> None:
    batch, expected = BATCHES[name]
    found = emptied(batch)
    assert shape_of(found) == shape_of(expected)
    assert shape_of(emptied(found)) == shape_of(expected)


SAMPLES = st.recursive(
    st.sampled_from([1, 2.5, torch.ones(3), np.ones(2, np.int16), "text"]),
    lambda part: st.lists(part, min_size=1, max_size=3).map(tuple) | st.dictionaries(st.sampled_from("abc"), part),
    max_leaves=5,
)


@given(SAMPLES, st.integers(1, 4))
def test_what_default_collation_makes_has_no_rows_left(sample: Any, number: int) -> None:
    batch = emptied(default_collate([sample] * number))
    assert all(len(column) == 0 for column in columns_of(batch))


def columns_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [column for part in value.values() for column in columns_of(part)]
    if isinstance(value, list | tuple):
        return [column for part in value for column in columns_of(part)]
    return [value]


def test_nothing_of_the_batch_is_held_or_shared() -> None:
    """Its memory is a slot that others wait for."""
    batch = {"x": X.clone(), "y": torch.tensor(2.0)}
    found = emptied(batch)
    assert found["x"].untyped_storage().nbytes() == 0
    found["y"] += 1
    assert float(batch["y"]) == 2.0
    assert rows_of({"x": found["x"]}) == []


def test_what_cannot_be_emptied_is_named_with_the_way_out() -> None:
    class Graph:
        pass

    with pytest.raises(TypeError, match=r'cannot make one of a .*Graph(?s:.*)use at_end="stop"'):
        emptied({"x": X, "graph": Graph()})
