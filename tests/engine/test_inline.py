"""Lanes in this process: made when they are collected, with the global generators put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.engine.cursor import Rules
from unbroken.engine.host import MapTask, Plan, RowsTask, TurnTask
from unbroken.engine.inline import Inline
from unbroken.lane_position import LanePosition
from unbroken.lanes import Lane
from unbroken.made import Made, Turn
from unbroken.seeding import read_globals, write_globals


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    before = read_globals()
    yield
    write_globals(before)


def numbers() -> dict[str, int]:
    """What tells the states of the global generators from others."""
    torch_state, random_state, numpy_state = read_globals()
    return {
        "torch": hash(torch_state.numpy().tobytes()),
        "random": hash(random_state),
        "numpy": hash((numpy_state[1].tobytes(), *numpy_state[2:])),
    }


def engine_over(dataset: Any, kind: str, **fields: Any) -> Inline:
    plan = {"lanes": 1, "hosts": 0, "batched": True, "collate_fn": None, "worker_init_fn": None, **fields}
    return Inline(Plan(dataset=dataset, kind=kind, rules=Rules(run=3), **plan))


class Counted(ds.Numbers):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def test_a_batch_is_made_when_it_is_collected_and_not_before() -> None:
    dataset = Counted(8)
    engine = engine_over(dataset, "map")
    engine.open(0, None, {})
    tickets = [engine.submit(0, MapTask(0, i, 1, [i, i + 1])) for i in (0, 2, 4)]
    assert dataset.read == []
    assert engine.collect(tickets[1]).batch.tolist() == [2, 3]
    assert dataset.read == [2, 3]
    assert engine.collect(tickets[0]).batch.tolist() == [0, 1]


def test_turns_of_lanes_are_made_in_the_order_they_are_collected() -> None:
    engine = engine_over(ds.WellBehaved(8), "iterable", lanes=2)
    engine.open(0, None, {0: LanePosition(), 1: LanePosition()})
    tickets = [engine.submit(0, TurnTask(lane, 2)) for lane in (0, 1, 0, 1, 0)]
    replies = [engine.collect(ticket) for ticket in tickets]
    assert [r.batch.tolist() for r in replies[:4]] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert (replies[4].batch, replies[4].made.ended) == (None, True)


class Stream:
    default_lanes = 2

    def open(self, lane: Lane) -> ds.RowIterator:
        return ds.RowIterator(range(lane.index, 5, lane.count))


def test_rows_of_a_stream_come_one_by_one() -> None:
    engine = engine_over(Stream(), "stream", lanes=2)
    engine.open(0, None, {lane: LanePosition(exact=True) for lane in (0, 1)})
    task = RowsTask(((0, 0), (1, 1), (0, 2), (1, 3), (0, 4), (1, 5)), 6, None)
    reply = engine.collect(engine.submit(0, task))
    rows, layout, failure = reply.made
    assert [lane for lane, _, _ in rows] == [0, 1, 0, 1, 0, 1]
    assert [type(made) for _, _, made in rows] == [Made, Made, Turn, Turn, Turn, Made]  # the first of a lane tell more
    assert [made.at for _, _, made in rows[2:5]] == [2, 2, 3] and rows[5][2].ended
    assert (list(reply.batch), layout, failure) == ([0, 1, 2, 3, 4], None, None)


class Draws(ds.Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise KeyError("row 5")
        return float(torch.rand(())) + np.random.randn() + random.gauss(0, 1)


@pytest.mark.parametrize("left_over", [False, True], ids=["even", "a number left over"])
def test_the_global_generators_are_put_back_after_every_batch_and_error(left_over: bool) -> None:
    """Case 18."""
    if left_over:
        np.random.randn()
        random.gauss(0, 1)
    before = numbers()
    engine = engine_over(Draws(8), "map")
    engine.open(0, None, {})
    for indices in ([0, 1], [2, 3]):
        engine.collect(engine.submit(0, MapTask(0, indices[0], 1, indices)))
        assert numbers() == before
    ticket = engine.submit(0, MapTask(0, 4, 1, [4, 5]))
    with pytest.raises(KeyError):
        engine.collect(ticket)
    assert numbers() == before


def test_a_batch_that_failed_can_be_asked_for_again() -> None:
    """As after Ctrl-C in the middle of it."""

    class Interrupted(ds.Numbers):
        times = 0

        def __getitem__(self, index: int) -> Any:
            self.times += 1
            if self.times == 2:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    engine = engine_over(Interrupted(4), "map")
    engine.open(0, None, {})
    ticket = engine.submit(0, MapTask(0, 0, 1, [0, 1]))
    with pytest.raises(KeyboardInterrupt):
        engine.collect(ticket)
    assert engine.collect(ticket).batch.tolist() == [0, 1]


def test_a_loader_that_was_interrupted_goes_on_with_the_batch_it_was_at() -> None:
    class Interrupted(ds.Numbers):
        done = False

        def __getitem__(self, index: int) -> Any:
            if index == 3 and not self.done:
                self.done = True
                raise KeyboardInterrupt
            return super().__getitem__(index)

    loader = StatefulDataLoader(Interrupted(6), batch_size=2)
    iterator = iter(loader)
    got = [next(iterator).tolist()]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    got += [batch.tolist() for batch in iterator]
    assert got == [[0, 1], [2, 3], [4, 5]]


class Stops(ds.Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise StopIteration
        return index


def test_a_stop_iteration_of_a_dataset_s_does_not_end_the_epoch_in_silence() -> None:
    iterator = iter(StatefulDataLoader(Stops(6), batch_size=2))
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="raised StopIteration, which would end the epoch"):
        next(iterator)


def test_sys_exit_in_a_dataset_exits() -> None:
    class Exits(ds.Numbers):
        def __getitem__(self, index: int) -> Any:
            sys.exit(3)

    with pytest.raises(SystemExit) as caught:
        next(iter(StatefulDataLoader(Exits(6))))
    assert caught.value.code == 3


class TellsInfo(ds.Sized, ds.IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.n):
            info = get_worker_info()
            yield (-1, -1) if info is None else (info.id, info.num_workers)


@pytest.mark.parametrize(("lanes", "expected"), [(1, [(-1, -1)] * 2), (3, [(0, 3), (1, 3), (2, 3)] * 2)])
def test_one_lane_inline_sees_no_worker_as_in_torch_and_several_see_their_lane(lanes: int, expected: Any) -> None:
    loader = StatefulDataLoader(TellsInfo(2), batch_size=None, lanes=lanes)
    assert [tuple(map(int, row)) for row in loader] == expected
    assert get_worker_info() is None


def test_one_lane_inline_uses_the_user_s_own_object_and_several_use_copies() -> None:
    dataset = ds.WellBehaved(6)
    iterator = iter(StatefulDataLoader(dataset))
    next(iterator)
    assert dataset.done == 1
    dataset = ds.WellBehaved(6)
    iterator = iter(StatefulDataLoader(dataset, lanes=2))
    next(iterator)
    assert dataset.done == 0


def test_worker_init_is_called_for_every_lane_with_its_worker_info() -> None:
    called: list[Any] = []

    def init(lane: int) -> None:
        info = get_worker_info()
        called.append((lane, None if info is None else (info.id, info.num_workers)))

    list(StatefulDataLoader(ds.WellBehaved(6), lanes=3, worker_init_fn=init))
    assert called == [(0, (0, 3)), (1, (1, 3)), (2, (2, 3))]
