"""Copies of a dataset for lanes in one process: what cannot be written is shared, the rest is copied."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from unbroken.engine.copies import copy_dataset
from unbroken.errors import UncopyableDataset


class Holder:
    """Holds parts by name."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        self.part = part


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def mapped(folder: Path, mode: str) -> Any:
    path = folder / "rows"
    np.arange(12, dtype=np.int64).tofile(path)
    return np.memmap(path, np.int64, mode)


SHARED = {
    "read-only array": lambda folder: read_only(np.arange(5)),
    "part of a read-only array": lambda folder: read_only(np.arange(5))[1:3],
    "array over bytes": lambda folder: np.frombuffer(b"abcd", np.uint8),
    "memmap": lambda folder: mapped(folder, "r"),
    "part of a memmap": lambda folder: mapped(folder, "r")[2:4].reshape(2, 1),
    "Arrow table": lambda folder: pa.table({"a": [1, 2]}),
    "Arrow batch": lambda folder: pa.RecordBatch.from_pydict({"a": [1, 2]}),
    "Arrow column": lambda folder: pa.chunked_array([[1, 2]]),
}
PLACES = {
    "as an attribute": (Holder, lambda holder: holder.part),
    "in a list": (lambda part: Holder(parts=[part]), lambda holder: holder.parts[0]),
    "in a dict in a tuple": (lambda part: Holder(parts=({"a": part},)), lambda holder: holder.parts[0]["a"]),
    "in another object": (lambda part: Holder(inner=Holder(part=part)), lambda holder: holder.inner.part),
    "in a slot": (lambda part: Holder(inner=Slotted(part)), lambda holder: holder.inner.part),
}
PLACES["as an attribute"] = (lambda part: Holder(part=part), lambda holder: holder.part)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SHARED)
def test_what_cannot_be_written_is_shared(tmp_path: Path, name: str, place: str) -> None:
    part = SHARED[name](tmp_path)
    make, find = PLACES[place]
    dataset = make(part)
    again = copy_dataset(dataset)
    assert again is not dataset
    assert find(again) is part


def read_only_view_of_a_writable_array() -> np.ndarray[Any, Any]:
    base = np.arange(5)
    return read_only(base[1:])


COPIED = {
    "array": lambda folder: np.arange(5),
    "read-only view of a writable array": lambda folder: read_only_view_of_a_writable_array(),
    "memmap that is written through": lambda folder: mapped(folder, "r+"),
    "memmap, copy on write": lambda folder: mapped(folder, "c"),
    "tensor": lambda folder: torch.arange(5),
    "list": lambda folder: [1, 2],
    "dict": lambda folder: {"a": [1]},
    "bytearray": lambda folder: bytearray(b"ab"),
    "generator of torch's": lambda folder: torch.Generator().manual_seed(1),
    "generator of numpy's": lambda folder: np.random.default_rng(1),
    "object": lambda folder: Holder(a=1),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", COPIED)
def test_what_can_be_written_is_copied(tmp_path: Path, name: str, place: str) -> None:
    part = COPIED[name](tmp_path)
    make, find = PLACES[place]
    again = find(copy_dataset(make(part)))
    assert again is not part
    if isinstance(part, np.ndarray):
        assert again.tolist() == part.tolist()
        assert not np.shares_memory(again, part)
    elif isinstance(part, torch.Tensor):
        assert again.tolist() == part.tolist()
        assert again.data_ptr() != part.data_ptr()


def test_copies_change_apart_from_each_other() -> None:
    dataset = Holder(state={"done": 0}, rows=np.arange(3))
    one, other = copy_dataset(dataset), copy_dataset(dataset)
    one.state["done"] = 5
    one.rows[0] = 9
    assert (dataset.state, other.state) == ({"done": 0}, {"done": 0})
    assert dataset.rows.tolist() == other.rows.tolist() == [0, 1, 2]


def test_one_part_in_two_places_is_one_part_in_the_copy() -> None:
    shared: list[int] = []
    dataset = Holder(a=shared, b={"c": shared})
    again = copy_dataset(dataset)
    assert again.a is again.b["c"]
    assert again.a is not shared


def test_a_dataset_that_contains_itself_is_copied() -> None:
    dataset = Holder()
    dataset.me = dataset  # type: ignore[attr-defined]
    again = copy_dataset(dataset)
    assert again.me is again


def test_a_dataset_s_own_way_to_be_copied_is_taken() -> None:
    class Reopens:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __deepcopy__(self, memo: dict[int, Any]) -> Reopens:
            return Reopens()

    dataset = Reopens()
    assert copy_dataset(dataset).lock is not dataset.lock


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (lambda: threading.Lock(), "cannot pickle '_thread.lock' object"),
        (lambda: (i for i in ()), "cannot pickle 'generator' object"),
        (lambda: open(__file__, encoding="utf-8"), "cannot pickle '_io.TextIOWrapper' object"),  # noqa: SIM115
    ],
    ids=["lock", "generator", "file"],
)
def test_what_cannot_be_copied_is_an_error_that_names_the_ways_out(part: Any, reason: str) -> None:
    held = part()
    with pytest.raises(UncopyableDataset) as caught:
        copy_dataset(Holder(deep=[{"here": held}]))
    if hasattr(held, "close"):
        held.close()
    assert str(caught.value) == (
        f"Several lanes of Holder share one process, and it cannot be copied: {reason}\n"
        "Give each lane a process of its own (num_workers at least the number of lanes), or open files, generators "
        "and locks in __iter__ instead of __init__."
    )
    assert isinstance(caught.value.__cause__, TypeError)
