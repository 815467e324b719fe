"""What is handed out next, whichever host made it and in whatever order answers came."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import datasets as ds
from tests.distributed.peers import Words
from tests.engine.hosts import (
    LENGTHS,
    Hosts,
    all_of,
    deliver,
    fails_once,
    hosts_over,
    lane_feed,
    map_feed,
    naive_turns,
    row_feed,
)
from unbroken import StatefulDataLoader
from unbroken.engine.host import MapTask
from unbroken.errors import LaneError, WorkerTimeout
from unbroken.lane_position import LanePosition
from unbroken.position import LanesPosition

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


# Map-style


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
        feed = map_feed(engine, 60)[0] if kind == "map" else lane_feed(engine, lanes, 2)
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


def test_tasks_of_a_map_style_dataset_tell_their_place() -> None:
    engine = hosts_over(ds.Numbers(4), "map", 1, 0)
    feed, _ = map_feed(engine, 4)
    all_of(feed)
    assert [task for _, task in engine.tasks] == [MapTask(0, 0, 1, [0, 1]), MapTask(0, 2, 1, [2, 3])]


# Made ahead


KINDS = ["map", "iterable", "stream"]


def feed_of(kind: str, engine: Hosts) -> tuple[Any, Any]:
    """A feed of some ten batches, and the position that it moves."""
    if kind == "map":
        return map_feed(engine, 20)
    lanes = LanesPosition({lane: LanePosition(exact=kind == "stream") for lane in range(3)}, run=3)
    return (lane_feed(engine, lanes, 2) if kind == "iterable" else row_feed(engine, lanes, 2)), lanes


def engine_of(kind: str, hosts: int, lookahead: int) -> Hosts:
    dataset = {"map": ds.Numbers(20), "iterable": ds.Uneven([7, 2, 9]), "stream": Words([7, 2, 9])}[kind]
    return hosts_over(dataset, kind, hosts, lookahead, lanes=3)


def place_of(position: Any) -> Any:
    """Where a position stands; how often states are captured depends on time."""
    if not isinstance(position, LanesPosition):
        return position.leaf(shared=False)
    lanes = position.lanes.values()
    return position.step, [(lane.epoch, lane.turns, lane.delivered, lane.ended, lane.ledger) for lane in lanes]


def one_by_one(kind: str) -> tuple[list[list[int]], list[Any]]:
    """The batches of a feed that delivers each when it is made, and the places before, between and after them."""
    feed, position = feed_of(kind, engine_of(kind, 1, 0))
    batches, places = [], [place_of(position)]
    while True:
        try:
            batches.append(deliver(feed).tolist())
        except StopIteration:
            feed.end()
            return batches, [*places, place_of(position)]
        places.append(place_of(position))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(hosts=st.integers(1, 3), lookahead=st.integers(0, 2), data=st.data())
def test_what_is_made_ahead_counts_when_it_is_delivered(
    kind: str, hosts: int, lookahead: int, data: st.DataObject
) -> None:
    """Case 2: ends of lanes too."""
    batches, places = one_by_one(kind)
    feed, position = feed_of(kind, engine_of(kind, hosts, lookahead))
    held: list[Any] = []
    found: list[list[int]] = []
    made = 0
    while len(found) < len(batches):
        if made < len(batches) and (not held or data.draw(st.booleans())):
            held.append(feed.make())
            made += 1
        else:
            batch, record = held.pop(0)
            feed.commit(record)
            found.append(batch.tolist())
        assert place_of(position) == places[len(found)]
    with pytest.raises(StopIteration):
        feed.make()
    assert place_of(position) == places[len(found)]
    feed.end()
    assert place_of(position) == places[-1]
    assert found == batches


@pytest.mark.parametrize("failure", [WorkerTimeout("late"), OSError("disk")], ids=["timeout", "error"])
@pytest.mark.parametrize("kind", ["iterable", "stream"])
@pytest.mark.parametrize("at", range(1, 11))
def test_what_was_made_before_an_error_is_delivered_before_the_next_try(kind: str, at: int, failure: Exception) -> None:
    engine = engine_of(kind, 2, 2)
    feed, position = feed_of(kind, engine)
    collected = itertools.count(1)
    trouble = fails_once(failure, at)
    engine.trouble = lambda ticket: trouble(next(collected))
    found: list[list[int]] = []
    held: list[Any] = []
    failures = 0

    def deliver_all() -> None:
        for batch, record in held:
            feed.commit(record)
            found.append(batch.tolist())
        held.clear()

    while True:
        try:
            held.append(feed.make())
        except StopIteration:
            break
        except type(failure):
            failures += 1
            if not isinstance(failure, WorkerTimeout):  # one that is late is waited for, whatever is held
                deliver_all()
    deliver_all()
    feed.end()
    batches, places = one_by_one(kind)
    assert failures == 1
    assert found == batches
    assert place_of(position) == places[-1]


@pytest.mark.parametrize("failure", [WorkerTimeout("late"), KeyboardInterrupt()], ids=["timeout", "Ctrl-C"])
@pytest.mark.parametrize("kind", ["map", "iterable", "stream"])
def test_a_batch_that_is_late_is_waited_for_again(kind: str, failure: BaseException) -> None:
    """Nothing is lost and nothing comes twice when the user goes on."""
    dataset = {"map": ds.Numbers(12), "iterable": ds.WellBehaved(12), "stream": Words([6, 6])}[kind]
    engine = hosts_over(dataset, kind, 2, 2, lanes=2)
    lanes = LanesPosition({lane: LanePosition(exact=kind == "stream") for lane in range(2)}, run=3)
    feed: Any = {
        "map": lambda: map_feed(engine)[0],
        "iterable": lambda: lane_feed(engine, lanes, 2),
        "stream": lambda: row_feed(engine, lanes, 3),
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


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_lanes_take_turns_and_nothing_else_decides(lengths: list[int], size: int, hosts: int, lookahead: int) -> None:
    """Case 20: the order is a function of lanes and their lengths, never of hosts or prefetch."""
    engine = hosts_over(ds.Uneven(lengths), "iterable", hosts, lookahead, len(lengths))
    position = LanesPosition({lane: LanePosition() for lane in range(len(lengths))}, run=3)
    found = [batch.tolist() for batch in all_of(lane_feed(engine, position, size))]
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
    feed = lane_feed(engine, position, 2)
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
    with pytest.raises(
        LaneError,
        match=r"This rank has no data: of its lanes \[1\] none has a row, or rows enough for a batch, in epoch 0",
    ):
        next(iter(loader))
