"""``from_map``: rows of a map-style dataset by index."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from tests.datasets import WithLength
from tests.streams.runs import assert_law, resumed, run, run_lanes, saved
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.streams.reading.indexed import from_map


class Augmented(Dataset[Any]):
    """Row i is i and noise from each of the global generators."""

    def __init__(self, length: int = 100) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {"id": index, "noise": random.random() + float(np.random.rand()) + float(torch.rand(()))}


class Together(Augmented):
    """Is asked for several rows at once."""

    def __init__(self, length: int = 100) -> None:
        super().__init__(length)
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> Sequence[Any]:
        self.asked.append(indices)
        return [self[index] for index in indices]


def ids(rows: Sequence[Any]) -> list[int]:
    return [row["id"] for row in rows]


@pytest.mark.parametrize("dataset", [Augmented(), Together()])
@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(0, 3), Lane(2, 3, epoch=1), Lane(1, 2, epoch=2, seed=5)])
def test_every_restore_point_is_exact_with_and_without_a_window(dataset: Augmented, lane: Lane) -> None:
    """Case 17: augmentations come again."""
    stream = from_map(dataset)
    assert_law(stream, lane, [1, 0, 20, 3])
    assert_law(stream.shuffle(16, seed=2).map(lambda row: {**row, "more": random.random()}), lane, [1, 0, 20, 3])


@given(length=st.integers(0, 300), lanes=st.sampled_from([1, 2, 7, 64]), together=st.booleans(), window=st.booleans())
def test_lanes_share_out_every_row_once(length: int, lanes: int, together: bool, window: bool) -> None:
    stream = from_map(Together(length) if together else Augmented(length))
    found = [row for rows in run_lanes(stream.shuffle(9) if window else stream, lanes) for row in rows]
    assert sorted(ids(found)) == list(range(length))


def test_one_lane_has_the_rows_in_their_order() -> None:
    assert ids(run(from_map(Augmented()))) == list(range(100))


def test_the_random_numbers_of_a_row_are_a_function_of_seed_epoch_and_index() -> None:
    """The same in any lane and order, others in each epoch."""

    def noises(lanes: int, **place: int) -> dict[int, float]:
        stream = from_map(Augmented()).shuffle(10, seed=lanes)
        return {row["id"]: row["noise"] for rows in run_lanes(stream, lanes, **place) for row in rows}

    assert noises(1) == noises(2) == noises(7)
    drawn = [*noises(1).values(), *noises(1, epoch=1).values(), *noises(1, seed=1).values()]
    assert len(set(drawn)) == 300


def test_rows_are_asked_for_together_and_each_of_them_once() -> None:
    dataset = Together(1000)
    assert ids(run(from_map(dataset))) == list(range(1000))
    assert sum(map(len, dataset.asked)) == 1000
    assert len(dataset.asked) <= 1000 / 30


def test_a_resume_asks_for_no_more_than_a_few_rows_again() -> None:
    dataset = Together(10_000)
    rows = from_map(dataset).open(Lane(0, 1))
    for _ in range(9007):
        next(rows)
    dataset.asked.clear()
    assert next(resumed(from_map(dataset), Lane(0, 1), saved(rows)))["id"] == 9007
    assert [len(asked) for asked in dataset.asked] == [32]


def test_other_number_of_rows_than_asked_for_is_an_error() -> None:
    class Short(Together):
        def __getitems__(self, indices: list[int]) -> Sequence[Any]:
            return [self[index] for index in indices[1:]]

    with pytest.raises(ValueError, match=r"Short.__getitems__ was asked for 12 rows \(0 to 11\) and returned 11"):
        run(from_map(Short()))


def test_an_error_of_the_dataset_keeps_its_type_and_the_place() -> None:
    """Cases 31 and 35."""
    failures = [OSError("once"), KeyError("mine")]

    class Failing(Augmented):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 30 and failures:
                raise failures.pop(0)
            return super().__getitem__(index)

    rows = from_map(Failing()).open(Lane(0, 1))
    assert ids([next(rows) for _ in range(30)]) == list(range(30))
    before = saved(rows)
    for error in (OSError, KeyError):
        with pytest.raises(error):
            next(rows)
        assert saved(rows) == before
    assert rows.where() == "Failing, row 29"
    assert ids(list(rows)) == list(range(30, 100))


def test_a_list_and_a_dataset_of_tensors_are_map_style() -> None:
    assert run(from_map(["a", "b", "c"])) == ["a", "b", "c"]
    rows = list(from_map(TensorDataset(torch.arange(5), torch.arange(5) * 2)).open(Lane(0, 1)))
    assert [(int(a), int(b)) for a, b in rows] == [(n, 2 * n) for n in range(5)]


def test_lineage_names_the_dataset_and_the_index() -> None:
    rows = from_map(Augmented()).shuffle(30, seed=1).open(Lane(1, 2), lineage=True)
    for row in rows:
        assert rows.origin() == (Origin("from_map", "Augmented", row["id"]),)


def test_the_fingerprint_is_type_and_length() -> None:
    assert from_map(Augmented()).describe() == {"stages": "from_map", "files": "Augmented, 100 rows"}
    assert from_map(Augmented()).difference_class("files") == "data, held"
    assert repr(from_map(Augmented())) == "from_map(Augmented)"
    assert "from_map(Augmented)   100 rows, 100 chunks on 64 lanes" in str(from_map(Augmented()))


def test_iterating_leaves_the_global_generators_alone() -> None:
    """Case 18."""
    random.seed(1)
    ref = random.random()
    random.seed(1)
    assert len(list(from_map(Augmented()))) == 100
    assert random.random() == ref


def test_a_stage_travels_to_another_process() -> None:
    assert run(pickle.loads(pickle.dumps(from_map(Together())))) == run(from_map(Together()))


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (iter([1]), "a list_iterator has no __len__ and __getitem__"),
        ({1, 2}, "a set has no __getitem__"),
        ({"a": 1}, "a dict has no rows by number"),
        (WithLength(9), "a WithLength has no rows by number"),
        (Augmented, "a ABCMeta has no __len__ and __getitem__"),
    ],
)
def test_what_is_not_map_style_fails_at_construction(dataset: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        from_map(dataset)
    assert text.replace("a ABCMeta", f"a {type(Augmented).__name__}") in str(caught.value)
    assert "from_iterable" in str(caught.value)
