"""One lane of any dataset: what it makes, what of it can be made again, and when it says that it cannot."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import get_worker_info

from tests import datasets as ds
from tests import strategies as draws
from unbroken.engine import cursor as cursor_module
from unbroken.engine.cursor import Cursor, Rules
from unbroken.engine.opening import StreamOpening, TorchOpening, lane_info
from unbroken.errors import InexactDataset, InvalidState, UnsealableState
from unbroken.lane_position import LanePosition
from unbroken.lanes import Lane
from unbroken.made import Made
from unbroken.position import LanesPosition
from unbroken.seeding import isolated


@pytest.fixture(autouse=True)
def generators_put_back() -> Iterator[None]:
    """A cursor seeds the global generators; whoever calls it puts them back."""
    with isolated(0):
        yield


def silent(what: str, done: int, total: int) -> None: ...


class Lane0:
    """A lane, and the consumer that counts what it delivers."""

    def __init__(self, dataset: Any, position: LanePosition | None = None, size: int = 2, **rules: Any) -> None:
        report = rules.pop("report", silent)
        self.rules = Rules(**{"run": 7, **rules})
        self.size = size
        self.position = position or LanePosition(exact=self.rules.resume == "trust")
        opening = TorchOpening(dataset, use_state=self.rules.resume != "replay", what="the state")
        self.cursor = Cursor(opening, 0, self.position_made_from(), self.rules, report=report)

    def position_made_from(self) -> LanePosition:
        """The cursor has a copy: what the consumer counts must not move it."""
        return LanesPosition({0: self.position}).copy().lanes[0]

    def turn(self) -> Any:
        """The samples of the next turn, delivered; None at the end."""
        made = self.cursor.make(self.size)
        if made.ended:
            self.position.end(made)
            return None
        self.position.deliver(made, self.size)
        return made.samples

    def rest(self) -> list[Any]:
        return list(iter(self.turn, None))

    def saved(self) -> LanePosition:
        """The position through JSON, as a checkpoint has it."""
        leaf = json.loads(LanesPosition({0: self.position}).leaf_of_all())
        return LanePosition.from_json(leaf["lanes"][0], "lane", self.position.exact)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("drop_last", [False, True])
def test_turns_are_of_the_size_asked_for_and_the_last_may_be_shorter(size: int, drop_last: bool) -> None:
    turns = Lane0(ds.WellBehaved(10), size=size, drop_last=drop_last).rest()
    whole = [list(range(i, min(i + size, 10))) for i in range(0, 10, size)]
    assert turns == [turn for turn in whole if len(turn) == size or not drop_last]


def test_a_lane_that_has_ended_makes_nothing_more() -> None:
    lane = Lane0(ds.WellBehaved(2))
    lane.rest()
    for _ in range(3):
        made = lane.cursor.make(2)
        assert (made.ended, made.samples, made.number) == (True, [], 0)
    assert Lane0(ds.WellBehaved(2), LanePosition(ended=True, carry='"c"')).cursor.make(2).carry == '"c"'


def test_a_cursor_knows_the_number_of_the_sample_that_comes_next() -> None:
    lane = Lane0(ds.WellBehaved(5))
    seen = [lane.cursor.place]
    while lane.turn():
        seen.append(lane.cursor.place)
    assert seen == [0, 2, 4, 5]


@pytest.mark.parametrize("resume", ["checked", "replay"])
@pytest.mark.parametrize("every", [None, 1, 2, 3])
@pytest.mark.parametrize("kind", sorted(draws.EXACT))
def test_what_was_delivered_is_never_made_again_and_nothing_is_left_out(
    kind: str, every: int | None, resume: str
) -> None:
    """Case 9: opened at every position, each kind of state leads on with the next sample."""
    rules = {"capture_every": every, "resume": resume}
    reference = Lane0(draws.EXACT[kind](15), **rules).rest()
    lane = Lane0(draws.EXACT[kind](15), **rules)
    for done in range(len(reference) + 1):
        again = Lane0(draws.EXACT[kind](15), lane.saved(), **rules)
        assert again.rest() == reference[done:], f"after {done} turns"
        lane.turn()


@given(
    kind=st.sampled_from(sorted(draws.EXACT)),
    n=st.integers(0, 20),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    every=st.sampled_from([None, 1, 2]),
    data=st.data(),
)
def test_chains_of_positions_with_changing_batch_sizes_lead_on(
    kind: str, n: int, sizes: list[int], every: int | None, data: st.DataObject
) -> None:
    """Cases 3 and 24: the random numbers of delivered batches are those of their own bounds."""
    position: LanePosition | None = None
    done: list[Any] = []
    for size in sizes:
        lane = Lane0(draws.EXACT[kind](n), position, size=size, capture_every=every)
        for _ in range(data.draw(st.integers(0, 4))):
            done += lane.turn() or []
        if lane.position.ended:
            return
        position = lane.saved()
    rest = Lane0(draws.EXACT[kind](n), position, size=sizes[-1], capture_every=every).rest()
    again = [sample for turn in rest for sample in turn]
    if not kind.startswith("random content"):  # whose numbers depend on the bounds of the batches to come
        assert done + again == [sample for turn in Lane0(draws.EXACT[kind](n)).rest() for sample in turn]


@pytest.mark.parametrize("every", [None, 1, 2])
@pytest.mark.parametrize("kind", sorted(draws.REFUSED_OR_EXACT))
def test_a_state_that_does_not_lead_back_is_refused_and_never_believed(kind: str, every: int | None) -> None:
    """Case 9: exact or refused, never silently wrong."""
    make = draws.REFUSED_OR_EXACT[kind]
    reference = Lane0(make(15), capture_every=every).rest()
    lane = Lane0(make(15), capture_every=every)
    for done in range(len(reference) + 1):
        again = Lane0(make(15), lane.saved(), capture_every=every)
        with contextlib.suppress(InexactDataset):
            assert again.rest() == reference[done:], f"after {done} turns"
        lane.turn()


def test_the_refusal_says_where_and_names_the_ways_out() -> None:
    lane = Lane0(ds.UnseededNoise(12), capture_every=1)
    for _ in range(4):
        lane.turn()
    with pytest.raises(InexactDataset) as caught:
        Lane0(ds.UnseededNoise(12), lane.saved(), capture_every=1).turn()
    text = str(caught.value)
    assert text.startswith("UnseededNoise did not make again what it had delivered.\nLane 0, epoch 0: opened at ")
    assert "it should have come to sample 8" in text
    assert 'resume="replay"' in text
    assert 'resume="trust"' in text


def test_a_trusted_state_is_taken_at_its_word() -> None:
    """The place after the sample; nothing is made again, and nothing is checked."""
    made: list[int] = []

    class Noted(ds.UnseededNoise):
        def row(self, number: int) -> Any:
            made.append(number)
            return super().row(number)

    lane = Lane0(Noted(12), resume="trust", capture_every=1)
    for _ in range(3):
        lane.turn()
    made.clear()
    rest = Lane0(Noted(12), lane.saved(), resume="trust", capture_every=1).rest()
    assert [number for turn in rest for number, _ in turn] == made == list(range(6, 12))


def test_an_error_of_the_dataset_s_is_raised_as_it_is() -> None:
    class Broken(ds.WellBehaved):
        def row(self, number: int) -> int:
            if number == 3:
                raise KeyError("row 3")
            return number

    lane = Lane0(Broken(6))
    assert lane.turn() == [0, 1]
    with pytest.raises(KeyError, match="row 3"):
        lane.turn()
    assert get_worker_info() is None


def test_an_error_of_a_dataset_that_cannot_load_its_state_is_raised_as_it_is() -> None:
    class Refuses(ds.WellBehaved):
        def load_state_dict(self, state: Any) -> None:
            raise OSError("the file is gone")

    lane = Lane0(Refuses(12), capture_every=1)
    for _ in range(4):
        lane.turn()
    with pytest.raises(OSError, match="the file is gone"):
        Lane0(Refuses(12), lane.saved(), capture_every=1).turn()


def test_a_state_that_cannot_be_carried_is_refused_when_it_is_first_captured() -> None:
    class Unsealable(ds.WellBehaved):
        def state_dict(self) -> Any:
            return {"f": print}

    with pytest.raises(UnsealableState, match=r"^the state\['dataset'\]\['f'\]"):
        Lane0(Unsealable(4)).turn()


def test_a_position_that_counts_without_an_anchor_was_changed() -> None:
    with pytest.raises(InvalidState, match="lane 0 counts samples but has no anchor"):
        Lane0(ds.WellBehaved(4), LanePosition(delivered=2)).turn()


# Random numbers


class Draws(ds.Sized, ds.IterableDataset):
    """A sample of each generator."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.n):
            yield float(torch.rand(())), np.random.rand(), random.random()


def test_the_same_place_has_the_same_random_numbers_and_every_other_has_others() -> None:
    def numbers(**rules: Any) -> list[Any]:
        return [sample for turn in Lane0(Draws(6), **rules).rest() for sample in turn]

    for seed_by in ("batch", "sample"):
        assert numbers(seed_by=seed_by) == numbers(seed_by=seed_by)
        runs = [numbers(seed_by=seed_by, run=run) for run in (1, 2)]
        runs.append(numbers(seed_by=seed_by, run=1, word="sampler"))
        assert len({number for run in runs for sample in run for number in sample}) == 3 * 6 * 3


def test_seeded_by_sample_the_numbers_do_not_depend_on_the_batch_size() -> None:
    def numbers(size: int) -> list[Any]:
        return [sample for turn in Lane0(Draws(7), size=size, seed_by="sample").rest() for sample in turn]

    assert numbers(1) == numbers(2) == numbers(7)


def test_the_next_epoch_has_other_numbers_and_goes_on_with_the_dataset_s_own_state() -> None:
    lane = Lane0(Draws(4))
    first = lane.rest()
    lane.position.next_epoch(None)
    assert Lane0(Draws(4), lane.saved()).rest() != first
    dataset = ds.EpochCounting(6)
    pristine = TorchOpening(ds.EpochCounting(6), use_state=True, what="the state").carry()
    lane = Lane0(dataset, pristine=pristine)
    orders = []
    for _ in range(3):
        orders.append(lane.rest())
        lane.position.next_epoch(pristine)
        lane = Lane0(ds.EpochCounting(6), lane.saved(), pristine=pristine)
    assert len({str(order) for order in orders}) == 3


def test_a_state_that_stays_at_the_end_is_put_back_for_the_next_epoch() -> None:
    """Case 12: never an empty epoch."""
    pristine = TorchOpening(ds.StaysAtEnd(4), use_state=True, what="the state").carry()
    lane = Lane0(ds.StaysAtEnd(4), pristine=pristine)
    expected = lane.rest()
    lane.position.next_epoch(pristine)
    again = Lane0(ds.StaysAtEnd(4), lane.saved(), pristine=pristine)
    assert again.turn() == expected[0]
    assert Lane0(ds.StaysAtEnd(4), again.saved(), pristine=pristine).rest() == expected[1:]


# What the dataset sees


def test_worker_info_is_set_while_the_dataset_runs_and_at_no_other_time() -> None:
    seen: list[Any] = []

    class Looks(ds.Stateless):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            seen.append((info.id, info.num_workers))
            yield from range(4)

    dataset = Looks(4)
    info = lane_info(1, 3, 0, dataset)
    opening = TorchOpening(dataset, use_state=True, what="the state")
    cursor = Cursor(opening, 1, LanePosition(), Rules(run=1), report=silent, info=info)
    assert not cursor.make(2).unaware
    assert seen == [(1, 3)]
    assert get_worker_info() is None


def test_a_dataset_that_never_looks_is_known_for_it() -> None:
    """Case 11."""
    dataset = ds.UnawareOfWorkers(4)
    opening = TorchOpening(dataset, use_state=True, what="the state")
    cursor = Cursor(opening, 1, LanePosition(), Rules(run=1), report=silent, info=lane_info(1, 3, 0, dataset))
    assert [cursor.make(2).unaware, cursor.make(2).unaware] == [True, False]


class Stream:
    default_lanes = 1

    def __init__(self, n: int) -> None:
        self.n = n

    def open(self, lane: Lane) -> ds.RowIterator:
        return ds.RowIterator(range(self.n))


def test_a_stream_is_never_made_again_from_further_back_than_the_last_row() -> None:
    opened: list[int] = []

    class Noted(Stream):
        def open(self, lane: Lane) -> ds.RowIterator:
            class Rows(ds.RowIterator):
                def __next__(self) -> int:
                    row = super().__next__()
                    opened.append(row)
                    return row

            return Rows(range(self.n))

    position = LanePosition(exact=True)
    cursor = Cursor(StreamOpening(Noted(9), Lane(0, 1)), 0, position, Rules(run=1), report=silent)  # type: ignore[arg-type]
    for _ in range(4):
        position.deliver(cursor.make(1), 1)
    opened.clear()
    cursor = Cursor(StreamOpening(Noted(9), Lane(0, 1)), 0, position, Rules(run=1), report=silent)  # type: ignore[arg-type]
    assert [cursor.make(1).samples for _ in range(5)] == [[4], [5], [6], [7], [8]]
    assert opened == [4, 5, 6, 7, 8]


# The cost


class Clock:
    """Stands still but where it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cursor_module, "perf_counter", clock)
    return clock


class Timed(ds.WellBehaved):
    """A row takes a millisecond, a state as long as it is told."""

    def __init__(self, n: int, clock: Clock, seconds: float) -> None:
        super().__init__(n)
        self.clock, self.seconds, self.spent = clock, seconds, 0.0

    def row(self, number: int) -> int:
        self.clock.now += 0.001
        return number

    def state_dict(self) -> Any:
        self.clock.now += self.seconds
        self.spent += self.seconds
        return super().state_dict()


@pytest.mark.parametrize("seconds", [0.00001, 0.001, 0.1])
def test_captures_cost_two_percent_of_the_time_of_making_samples(clock: Clock, seconds: float) -> None:
    """Case 42: whatever a state costs."""
    dataset = Timed(20_000, clock, seconds)
    lane = Lane0(dataset, size=10)
    lane.rest()
    produced = 20.0
    first = 4 * seconds  # the opening's, and the first one, whose cost nobody knows before
    assert dataset.spent - first <= 0.025 * produced
    assert dataset.spent >= min(0.01 * produced, 100 * seconds)


@pytest.mark.parametrize("every", [1, 3])
def test_told_how_often_a_cursor_captures_as_often(every: int) -> None:
    captured = []
    lane = Lane0(ds.WellBehaved(24), capture_every=every)
    for turn in range(1, 13):
        made: Made = lane.cursor.make(2)
        if made.capture is not None:
            captured.append(turn)
    assert captured == list(range(every, 13, every))


def test_remaking_is_reported_now_and_then(clock: Clock) -> None:
    """Case 10."""

    class Slow(ds.Stateless):
        def __iter__(self) -> Iterator[int]:
            for row in range(self.n):
                clock.now += 0.1
                yield row

    told: list[Any] = []
    lane = Lane0(Slow(100))
    for _ in range(20):
        lane.turn()
    again = Lane0(Slow(100), lane.saved(), report=lambda *report: told.append(report))
    assert again.turn() == [40, 41]
    assert 5 <= len(told) <= 20
    assert all(what == "lane 0" and total == 40 for what, _, total in told)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


# The positions that are saved are the consumer's alone


def test_what_is_made_ahead_is_not_in_the_position() -> None:
    """Case 2."""
    ahead, behind = (Lane0(ds.Late(20), capture_every=1) for _ in range(2))
    made = [ahead.cursor.make(2) for _ in range(6)]
    for turn in made[:3]:
        ahead.position.deliver(turn, 2)
        behind.turn()
    assert ahead.saved() == behind.saved()
    assert Lane0(ds.Late(20), ahead.saved(), capture_every=1).turn() == [6, 7]
