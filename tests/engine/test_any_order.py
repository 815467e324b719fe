"""``in_order=False``: whatever answers come in which order, nothing is lost and nothing repeated."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import datasets as ds
from tests import strategies as draws
from tests.engine.hosts import Hosts, deliver, hosts_over
from unbroken.engine import setup
from unbroken.engine.feeds import MapFeed
from unbroken.errors import WorkerDied, WorkerTimeout
from unbroken.position import MapPosition
from unbroken.sampling import Step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Choose = Callable[[int], int]
"""Of so many that could be the first to answer, the number of the one that is."""


class Whims(Hosts):
    """Hosts of which any may be the first to answer."""

    choose: Choose = staticmethod(lambda number: 0)

    def first_of(self, tickets: Sequence[int]) -> int:
        return tickets[self.choose(len(tickets))]


def whims(kind: str, dataset: Any, hosts: int, lookahead: int, choose: Choose, lanes: int = 1) -> Whims:
    made = hosts_over(dataset, kind, hosts, lookahead, lanes)
    engine = Whims.__new__(Whims)
    engine.__dict__.update(made.__dict__)
    engine.choose = choose  # type: ignore[method-assign]
    return engine


def last(number: int) -> int:
    return number - 1


@contextlib.contextmanager
def any_may_answer(choose: Choose) -> Iterator[None]:
    """Worker processes are hosts in this process."""

    def pool(plan: Any, context: Any, lookahead: int, *others: Any) -> Whims:
        engine = Whims(plan, plan.hosts, lookahead)
        engine.choose = choose  # type: ignore[method-assign]
        return engine

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(setup, "Pool", pool)
        yield


# Map-style


def test_the_batch_that_is_ready_is_delivered_and_the_position_knows_the_hole() -> None:
    position = MapPosition(run=3)
    steps = (Step([i], i, 1, i + 1) for i in range(6))
    feed = MapFeed(whims("map", ds.Numbers(6), 1, 3, last), position, steps, 1, in_order=False)
    seen = []
    for _ in range(6):
        (row,) = deliver(feed).tolist()
        seen.append((row, position.rows, position.beyond))
    assert seen == [
        (2, 0, ((2, 2),)),
        (3, 0, ((2, 3),)),
        (4, 0, ((2, 4),)),
        (5, 0, ((2, 5),)),
        (1, 0, ((1, 5),)),
        (0, 6, ()),
    ]
    with pytest.raises(StopIteration):
        feed.make()


def test_one_that_is_slow_is_not_overtaken_without_end() -> None:
    """What is beyond a hole has to be made known to the next run, so there is a bound to it."""
    position = MapPosition(run=3)
    steps = (Step([i % 5], i, 1, i + 1) for i in range(1000))
    slow_is_first = whims("map", ds.Numbers(5), 2, 2, lambda number: min(1, number - 1))
    feed = MapFeed(slow_is_first, position, steps, 1, in_order=False)
    most = 0
    for _ in range(1000):
        deliver(feed)
        most = max([most, *(end for _, end in position.beyond)])
    assert position.rows == 1000
    assert most == 16 * 2 * 2 - 1


class Broken(ds.Numbers):
    def __getitem__(self, index: int) -> Any:
        if index % 7 == 2:
            raise KeyError(f"row {index}")
        return super().__getitem__(index)


@settings(max_examples=60)
@given(hosts=st.integers(1, 3), lookahead=st.integers(0, 3), data=st.data())
def test_a_batch_that_fails_is_passed_over_and_no_other(hosts: int, lookahead: int, data: st.DataObject) -> None:
    def choose(number: int) -> int:
        return data.draw(st.integers(0, number - 1))

    position = MapPosition(run=3)
    steps = (Step([i], i, 1, i + 1) for i in range(30))
    feed = MapFeed(whims("map", Broken(30), hosts, lookahead, choose), position, steps, 1, in_order=False)
    found, failed = [], 0
    while True:
        try:
            found += deliver(feed).tolist()
        except KeyError:
            failed += 1
        except StopIteration:
            break
    assert failed == 4
    assert sorted(found) == [i for i in range(30) if i % 7 != 2]
    assert position.beyond == () or position.rows in (2, 9, 16, 23)  # one that failed last


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("failure", [WorkerTimeout("late"), WorkerDied("gone")], ids=["late", "gone"])
def test_a_batch_that_did_not_come_is_not_passed_over(failure: Exception, in_order: bool) -> None:
    position = MapPosition(run=3)
    engine = whims("map", ds.Numbers(12), 2, 2, last if not in_order else lambda number: 0)
    steps = (Step([i], i, 1, i + 1) for i in range(12))
    feed = MapFeed(engine, position, steps, 1, in_order=in_order)
    raised: list[int] = []

    def trouble(ticket: int) -> None:
        if len(raised) < 3 and ticket == 4:
            raised.append(ticket)
            raise failure

    engine.trouble = trouble
    found = []
    while len(found) < 12:
        try:
            found += deliver(feed).tolist()
        except type(failure):
            assert position.rows + sum(end - first + 1 for first, end in position.beyond) == len(found)
    assert sorted(found) == list(range(12))
    assert len(raised) == 3


def delivered(batches: Iterator[Any], most: int | None = None) -> Counter[str]:
    """Some batches, or all that are left, as text."""
    return Counter(map(repr, itertools.islice(batches, most)))


def hold(arrange: draws.Setup, data: st.DataObject, most: int) -> None:
    """Two epochs, stopped at any places and resumed under any topology, deliver what a run in order does."""
    reference = arrange()
    batches = iter(reference)
    state = reference.state_dict()
    for epoch in (delivered(batches), delivered(iter(reference))):
        left = epoch.total()
        while left:
            loader = arrange(in_order=data.draw(st.booleans()), **data.draw(draws.workers(most)))
            loader.load_state_dict(state)
            with any_may_answer(lambda number: data.draw(st.integers(0, number - 1))):
                for batch in itertools.islice(loader, data.draw(st.integers(1, 6))):
                    text = repr(batch)
                    assert epoch[text] > 0, "delivered twice, or another batch"
                    epoch[text] -= 1
                    left -= 1
                state = json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("sampler", sorted(draws.SAMPLERS.keys() - {"distributed", "torch's batches, distributed"}))
@settings(max_examples=25)
@given(data=st.data())
def test_nothing_of_a_map_style_dataset_is_lost_or_repeated_at_any_k(sampler: str, data: st.DataObject) -> None:
    """Case 40: with other timings, and on another number of workers, in every run; random numbers are the same too."""
    hold(data.draw(draws.map_style_setups(sampler))[1], data, 3)


@pytest.mark.parametrize("kind", sorted(draws.EXACT))
@settings(max_examples=15)
@given(data=st.data())
def test_nothing_of_an_iterable_dataset_is_lost_or_repeated_at_any_k(kind: str, data: st.DataObject) -> None:
    hold(data.draw(draws.iterable_setups(kind))[1], data, 2)
