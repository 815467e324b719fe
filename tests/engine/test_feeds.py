"""What is handed out next, whichever host made it and in whatever order answers came."""

from __future__ import annotations

import copy
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.engine.cursor import Rules
from unbroken.engine.engine import Engine, Reply
from unbroken.engine.feeds import Batching, LaneFeed, MapFeed, RowFeed
from unbroken.engine.host import MapTask, Plan
from unbroken.engine.inline import Inline
from unbroken.errors import LaneError, WorkerTimeout
from unbroken.lanes import Lane
from unbroken.position import LanePosition, LanesPosition, MapPosition
from unbroken.sampling import Step
from unbroken.seeding import read_globals

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Hosts(Engine):
    """Several hosts in this process: each makes its tasks in the order it got them, and any may be ahead of another.

    ``trouble`` is asked before each collect and may raise; ``ahead`` is the most tasks that were ever out.
    """

    def __init__(self, plan: Plan, hosts: int, lookahead: int) -> None:
        self.hosts, self.lookahead = hosts, lookahead
        self.inner = [Inline(replace(plan, dataset=copy.deepcopy(plan.dataset))) for _ in range(hosts)]
        self.queues: list[deque[tuple[int, Any]]] = [deque() for _ in range(hosts)]
        self.replies: dict[int, Any] = {}
        self.tasks: list[tuple[int, Any]] = []
        self.collected = self.ahead = self.opened = 0
        self.trouble: Callable[[int], None] = lambda ticket: None

    def open(self, epoch: int, dataset_epoch: int | None, starts: Mapping[int, LanePosition]) -> None:
        self.opened += 1
        self.queues = [deque() for _ in range(self.hosts)]
        lanes = list(starts)
        for number, inner in enumerate(self.inner):
            inner.open(epoch, dataset_epoch, {lane: starts[lane] for lane in lanes[number :: self.hosts]})

    def submit(self, host: int, task: Any, lease: Any = None) -> int:
        self.tasks.append((host, task))
        self.queues[host].append((len(self.tasks), task))
        self.ahead = max(self.ahead, len(self.tasks) - self.collected)
        return len(self.tasks)

    def collect(self, ticket: int) -> Reply:
        self.trouble(ticket)
        for inner, queue in zip(self.inner, self.queues, strict=True):
            while queue and ticket not in self.replies:
                number, task = queue.popleft()
                try:
                    self.replies[number] = inner.collect(inner.submit(0, task))
                except Exception as error:
                    self.replies[number] = error
        self.collected += 1
        reply = self.replies.pop(ticket)
        if isinstance(reply, Exception):
            raise reply
        assert isinstance(reply, Reply)
        return reply

    def close(self) -> None: ...

    def least_busy(self) -> int:
        return min(range(self.hosts), key=lambda host: len(self.queues[host]))


def deliver(feed: Any) -> Any:
    """The next batch, made and counted as delivered."""
    batch = feed.make()
    feed.commit()
    return batch


def hosts_over(dataset: Any, kind: str, hosts: int, lookahead: int, lanes: int = 1) -> Hosts:
    plan = Plan(dataset, kind, Rules(run=3), lanes, hosts, kind != "unbatched", None, None)
    return Hosts(plan, hosts, lookahead)


def all_of(feed: Any) -> list[Any]:
    found = []
    while True:
        try:
            found.append(deliver(feed))
        except StopIteration:
            return found


# Map-style


def map_feed(engine: Hosts, n: int = 12, size: int = 2, steps: Any = None) -> tuple[MapFeed, MapPosition]:
    position = MapPosition(run=3)
    plan = (Step(list(range(i, i + size)), i, 1, i + size) for i in range(0, n, size))
    return MapFeed(engine, position, iter(steps) if steps is not None else plan, size), position


@pytest.mark.parametrize(("hosts", "lookahead"), [(1, 0), (1, 2), (3, 1), (2, 4)])
def test_map_style_batches_are_delivered_in_the_order_of_steps(hosts: int, lookahead: int) -> None:
    """Case 40: whichever host is faster."""
    feed, position = map_feed(hosts_over(ds.Numbers(12), "map", hosts, lookahead))
    rows = []
    for expected in range(0, 12, 2):
        assert deliver(feed).tolist() == [expected, expected + 1]
        rows.append(position.rows)
    assert rows == [2, 4, 6, 8, 10, 12]
    with pytest.raises(StopIteration):
        deliver(feed)


@pytest.mark.parametrize(("hosts", "lookahead"), [(1, 0), (1, 2), (3, 1), (2, 4)])
def test_no_more_tasks_are_out_than_hosts_may_have(hosts: int, lookahead: int) -> None:
    for kind, dataset in (("map", ds.Numbers(60)), ("iterable", ds.WellBehaved(60))):
        engine = hosts_over(dataset, kind, hosts, lookahead, lanes=4)
        lanes = LanesPosition({lane: LanePosition() for lane in range(4)}, run=3)
        feed = map_feed(engine, 60)[0] if kind == "map" else LaneFeed(engine, lanes, 2, 1)
        for _ in range(25):
            deliver(feed)
        assert engine.ahead == max(1, hosts * lookahead)


def test_a_batch_that_fails_is_passed_over_as_in_torch() -> None:
    class Broken(ds.Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise KeyError("row 5")
            return super().__getitem__(index)

    feed, position = map_feed(hosts_over(Broken(12), "map", 2, 2))
    got: list[Any] = [deliver(feed).tolist(), deliver(feed).tolist()]
    with pytest.raises(KeyError, match="row 5"):
        deliver(feed)
    assert position.rows == 4
    got += [batch.tolist() for batch in all_of(feed)]
    assert got == [[0, 1], [2, 3], [6, 7], [8, 9], [10, 11]]


def fails_once(failure: BaseException, at: int) -> Callable[[int], None]:
    raised: list[int] = []

    def trouble(ticket: int) -> None:
        if ticket == at and not raised:
            raised.append(ticket)
            raise failure

    return trouble


@pytest.mark.parametrize("failure", [WorkerTimeout("late"), KeyboardInterrupt()], ids=["timeout", "Ctrl-C"])
@pytest.mark.parametrize("kind", ["map", "iterable", "stream"])
def test_a_batch_that_is_late_is_waited_for_again(kind: str, failure: BaseException) -> None:
    """Nothing is lost and nothing comes twice when the user goes on."""
    dataset = {"map": ds.Numbers(12), "iterable": ds.WellBehaved(12), "stream": Words([6, 6])}[kind]
    engine = hosts_over(dataset, kind, 2, 2, lanes=2)
    lanes = LanesPosition({lane: LanePosition(exact=kind == "stream") for lane in range(2)}, run=3)
    feed: Any = {
        "map": lambda: map_feed(engine)[0],
        "iterable": lambda: LaneFeed(engine, lanes, 2, 1),
        "stream": lambda: RowFeed(engine, lanes, Batching(3, True, False, None, 1)),
    }[kind]()
    engine.trouble = fails_once(failure, 3)
    found: list[int] = []
    failures = 0
    while True:
        try:
            found += deliver(feed).tolist()
        except StopIteration:
            break
        except BaseException as error:
            assert error is failure
            failures += 1
    assert failures == 1
    everything = list(range(12)) if kind != "stream" else [*range(6), *range(100, 106)]
    assert sorted(found) == everything


# Torch iterable datasets


def naive_turns(lengths: dict[int, int], size: int) -> list[tuple[int, int, int]]:
    """(lane, first row, rows) of each turn: the live lane with the fewest turns taken, the lowest first."""
    turns, found = dict.fromkeys(lengths, 0), []
    live = set(lengths)
    while live:
        lane = min(live, key=lambda number: (turns[number], number))
        first = turns[lane] * size
        if first >= lengths[lane]:
            live.remove(lane)
            continue
        found.append((lane, first, min(size, lengths[lane] - first)))
        turns[lane] += 1
    return found


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_lanes_take_turns_and_nothing_else_decides(lengths: list[int], size: int, hosts: int, lookahead: int) -> None:
    """Case 20: the order is a function of lanes and their lengths, never of hosts or prefetch."""
    engine = hosts_over(ds.Uneven(lengths), "iterable", hosts, lookahead, len(lengths))
    position = LanesPosition({lane: LanePosition() for lane in range(len(lengths))}, run=3)
    found = [batch.tolist() for batch in all_of(LaneFeed(engine, position, size, 1))]
    expected = naive_turns(dict(enumerate(lengths)), size)
    assert found == [list(range(100 * lane + first, 100 * lane + first + n)) for lane, first, n in expected]
    assert position.step == len(found)


def test_after_an_error_the_lanes_stand_where_they_were_delivered() -> None:
    class Broken(ds.WellBehaved):
        mended = False

        def row(self, number: int) -> int:
            if number == 5 and not Broken.mended:
                Broken.mended = True
                raise OSError("not now")
            return number

    engine = hosts_over(Broken(12), "iterable", 1, 2, lanes=1)
    position = LanesPosition({0: LanePosition()}, run=3)
    feed = LaneFeed(engine, position, 2, 1)
    found = [deliver(feed).tolist(), deliver(feed).tolist()]
    with pytest.raises(OSError, match="not now"):
        deliver(feed)
    assert position.lanes[0].delivered == 4
    assert found + [batch.tolist() for batch in all_of(feed)] == [[i, i + 1] for i in range(0, 12, 2)]


def test_lanes_that_repeat_each_other_are_told_with_the_remedy() -> None:
    """Case 11."""
    loader = StatefulDataLoader(ds.UnawareOfWorkers(4), batch_size=2, lanes=2)
    with pytest.warns(UserWarning, match="Lanes 0 and 1 yield the same samples") as caught:
        batches = [batch.tolist() for batch in loader]
    assert batches == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert len(caught) == 1
    assert "get_worker_info()" in str(caught[0].message)
    assert "pass lanes=1" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_rank_without_any_data_is_an_error_that_says_what_to_change() -> None:
    """Case 22."""
    loader = StatefulDataLoader(ds.Files([3]), batch_size=2, lanes=2, dp_rank=1, dp_world_size=2)
    with pytest.raises(LaneError, match=r"This rank has no data: its lanes \[1\] yielded nothing in epoch 0"):
        next(iter(loader))


# Streams


class Words(ds.Sized, ds.IterableDataset):
    """Lane l has ``lengths[l]`` rows, 100 l and on, each made by ``row``."""

    def __init__(self, lengths: list[int], row: Callable[[int], Any] = lambda number: number) -> None:
        super().__init__(sum(lengths))
        self.lengths, self.row = lengths, row
        self.default_lanes = len(lengths)

    def open(self, lane: Lane) -> Any:
        return Rows(range(100 * lane.index, 100 * lane.index + self.lengths[lane.index]), self.row)

    def describe(self) -> dict[str, Any]:
        return {}

    def difference_class(self, field: str) -> str:
        return "data"

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a stream is opened lane by lane")


class Rows(ds.RowIterator):
    def __init__(self, share: range, row: Callable[[int], Any]) -> None:
        super().__init__(share)
        self.row = row

    def __next__(self) -> Any:
        return self.row(super().__next__())


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
    feed = RowFeed(engine, position, Batching(size, True, False, None, 1))
    for _ in range(data.draw(st.integers(0, len(order) // size))):
        found += deliver(feed).tolist()
    size = data.draw(st.integers(1, 5))
    engine = hosts_over(Words(lengths), "stream", data.draw(st.integers(1, 3)), lookahead, len(lengths))
    rest = all_of(RowFeed(engine, position.copy(), Batching(size, True, drop_last, None, 1)))
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


def test_tasks_of_a_map_style_dataset_tell_their_place() -> None:
    engine = hosts_over(ds.Numbers(4), "map", 1, 0)
    feed, _ = map_feed(engine, 4)
    all_of(feed)
    assert [task for _, task in engine.tasks] == [MapTask(0, 0, 1, [0, 1]), MapTask(0, 2, 1, [2, 3])]
