"""Rows of a stream, gathered into batches: whichever host made them, and wherever they were written."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import datasets as ds
from tests.distributed.peers import Words
from tests.engine.hosts import LENGTHS, all_of, deliver, hosts_over, naive_turns, row_feed
from unbroken import StatefulDataLoader
from unbroken.lane_position import LanePosition
from unbroken.position import LanesPosition
from unbroken.seeding import read_globals

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def dict_row(number: int) -> dict[str, Any]:
    return {"x": np.full(3, number), "y": torch.tensor([number, -number], dtype=torch.int32), "z": np.array(number / 2)}


def ragged_row(number: int) -> dict[str, Any]:
    """Every third row has another dtype, and travels by itself."""
    return {"x": np.full(2, number, np.int64 if number % 3 else np.int32)}


def numbers_in(batch: Any) -> list[int]:
    return [int(row[0]) for row in batch["x"]] if isinstance(batch, dict) else [int(row) for row in batch]


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 5), st.booleans(), st.integers(1, 3), st.integers(0, 2), st.data())
def test_rows_of_a_stream_gather_in_the_order_of_turns(
    lengths: list[int], size: int, drop_last: bool, hosts: int, lookahead: int, data: st.DataObject
) -> None:
    """Case 24: batch sizes may change at any place without changing the order."""
    engine = hosts_over(Words(lengths), "stream", hosts, lookahead, len(lengths))
    position = LanesPosition({lane: LanePosition(exact=True) for lane in range(len(lengths))}, run=3)
    order = [100 * lane + first for lane, first, _ in naive_turns(dict(enumerate(lengths)), 1)]
    found: list[int] = []
    feed = row_feed(engine, position, size)
    for _ in range(data.draw(st.integers(0, len(order) // size))):
        found += deliver(feed).tolist()
    size = data.draw(st.integers(1, 5))
    engine = hosts_over(Words(lengths), "stream", data.draw(st.integers(1, 3)), lookahead, len(lengths))
    rest = all_of(row_feed(engine, position.copy(), size, drop_last))
    left = order[len(found) :]
    whole = [left[i : i + size] for i in range(0, len(left), size)]
    assert [batch.tolist() for batch in rest] == [part for part in whole if len(part) == size or not drop_last]
    assert found == order[: len(found)]


@pytest.mark.parametrize("row", [dict_row, ragged_row, int], ids=["dict", "ragged", "int"])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_rows_from_workers_are_the_batches_that_are_made_inline(num_workers: int, batch_size: int, row: Any) -> None:
    """Case 20: whether they were written into one shared place, or came by themselves."""
    lengths = [9, 4, 6, 0, 7]

    def batches(**arguments: Any) -> list[Any]:
        loader = StatefulDataLoader(Words(lengths, row), batch_size=batch_size, **arguments)
        return list(loader)

    inline, from_workers = batches(), batches(num_workers=num_workers)
    assert [numbers_in(batch) for batch in from_workers] == [numbers_in(batch) for batch in inline]
    for a, b in zip(inline, from_workers, strict=True):
        for name in a if isinstance(a, dict) else ():
            assert a[name].dtype == b[name].dtype
            assert torch.equal(a[name], b[name])
    order = [100 * lane + first for lane, first, _ in naive_turns(dict(enumerate(lengths)), 1)]
    assert list(itertools.chain(*map(numbers_in, inline))) == order


def test_rows_that_are_kept_stay_what_they_were() -> None:
    """Case 37: of batches from shared places too."""
    loader = StatefulDataLoader(Words([40, 40], dict_row), batch_size=2, num_workers=2)
    kept = [batch["x"][1] for batch in loader]
    assert [part.tolist() for part in kept] == [[100 + i] * 3 for i in range(40)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_row_at_a_time_is_converted_and_not_collated(num_workers: int) -> None:
    loader = StatefulDataLoader(Words([2, 1], dict_row), batch_size=None, num_workers=num_workers)
    rows = list(loader)
    assert [row["x"].tolist() for row in rows] == [[0, 0, 0], [100, 100, 100], [1, 1, 1]]
    assert all(isinstance(row["x"], torch.Tensor) for row in rows)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_fn_of_a_stream_has_random_numbers_of_its_place(num_workers: int) -> None:
    """It runs in this process, and the global generators are put back."""

    def noisy(rows: list[int]) -> Any:
        return rows, float(torch.rand(())), np.random.rand()

    def batches(state: Any = None) -> list[Any]:
        loader = StatefulDataLoader(Words([3, 3]), batch_size=2, collate_fn=noisy, num_workers=num_workers, seed=1)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        before = str(read_globals())
        found = list(loader)
        assert str(read_globals()) == before
        return found

    reference = batches()
    assert len({noise for _, noise, _ in reference}) == 3
    loader = StatefulDataLoader(Words([3, 3]), batch_size=2, collate_fn=noisy, num_workers=num_workers, seed=1)
    next(iter(loader))
    assert batches(loader.state_dict()) == reference[1:]


def test_a_stop_iteration_of_a_collate_fn_does_not_end_the_epoch_in_silence() -> None:
    def stops(rows: list[int]) -> Any:
        if 3 in rows:
            raise StopIteration
        return rows

    for dataset in (Words([3, 3], lambda number: number % 100 + number // 100), ds.WellBehaved(6), ds.Numbers(6)):
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(StatefulDataLoader(dataset, batch_size=2, collate_fn=stops))


def test_a_row_that_fails_is_asked_for_again_and_nothing_is_lost() -> None:
    """Case 31: a transient error in the middle of a batch."""
    failed: list[int] = []

    def row(number: int) -> int:
        if number == 101 and not failed:
            failed.append(number)
            raise OSError("not now")
        return number

    loader = StatefulDataLoader(Words([3, 3], row), batch_size=2)
    iterator = iter(loader)
    found = [next(iterator).tolist()]
    with pytest.raises(OSError, match="not now"):
        next(iterator)
    found += [batch.tolist() for batch in iterator]
    assert found == [[0, 100], [1, 101], [2, 102]]
