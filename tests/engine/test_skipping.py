"""Samples that fail: passed over where they are made, and counted where they are delivered."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import failing
from unbroken.engine import skipping as skipping_module
from unbroken.engine.cursor import Cursor, Rules
from unbroken.engine.host import MapTask
from unbroken.engine.opening import TorchOpening
from unbroken.engine.skipping import Sound, Watch
from unbroken.errors import InexactDataset, TooManySkipped, UnsealableState
from unbroken.lane_position import LanePosition
from unbroken.position import LanesPosition, MapPosition
from unbroken.seeding import isolated
from unbroken.skipped import LeftOut, Skipping

ANY = Skipping(None)


@pytest.fixture(autouse=True)
def generators_put_back() -> Iterator[None]:
    """A cursor seeds the global generators; whoever calls it puts them back."""
    with isolated(0):
        yield


def silent(what: str, done: int, total: int) -> None: ...


class Lane0:
    """A lane, and the consumer that counts what it delivers."""

    def __init__(self, dataset: Any, position: LanePosition | None = None, size: int = 2, **rules: Any) -> None:
        self.size = size
        self.position = LanePosition() if position is None else position
        self.left_out: list[int] = []
        given = Rules(**{"run": 7, "skipping": ANY, "capture_every": 1, **rules})
        opening = TorchOpening(dataset, use_state=given.resume != "replay", what="the state")
        self.cursor = Cursor(opening, 0, self.position.copy(), given, report=silent)

    def turn(self) -> Any:
        made = self.cursor.make(self.size)
        self.left_out += [each.number for each in made.left_out]
        if made.ended:
            self.position.end(made)
            return None
        self.position.deliver(made, self.size)
        return made.samples

    def rest(self) -> list[Any]:
        return list(iter(self.turn, None))

    def saved(self) -> LanePosition:
        return LanePosition.from_json(json.loads(self.position.to_json()), "lane", exact=False)


# Iterable datasets


@pytest.mark.parametrize(
    ("bad", "size", "turns"),
    [
        ({0}, 3, [[1, 2, 3], [4, 5, 6], [7]]),
        ({7}, 3, [[0, 1, 2], [3, 4, 5], [6]]),
        ({2, 3, 4}, 2, [[0, 1], [5, 6], [7]]),
        ({1, 3, 5}, 2, [[0, 2], [4, 6], [7]]),
        ({5, 6, 7}, 2, [[0, 1], [2, 3], [4]]),
        (set(range(8)), 2, []),
    ],
)
def test_what_fails_is_left_out_and_its_turn_filled_up(bad: set[int], size: int, turns: list[list[int]]) -> None:
    lane = Lane0(failing.Failing(8, bad), size=size)
    assert lane.rest() == turns
    assert lane.left_out == sorted(bad)


def test_a_position_counts_what_was_asked_for_and_lists_what_was_left_out() -> None:
    lane = Lane0(failing.Failing(20, {1, 6, 7}), size=3)
    for _ in range(4):
        lane.turn()
    assert (lane.position.delivered, lane.position.ledger[0]) == (15, 12)
    assert lane.position.sizes == [[0, 4, 1], [4, 5, 6, 7], [9, 3]]
    assert lane.position.left_out() == {1, 6, 7}
    assert [n for n in range(15) if lane.position.starts_batch(n)] == [0, 4, 9, 12]
    lane = Lane0(failing.Failing(5, {3, 4}))
    assert [lane.turn(), lane.turn()] == [[0, 1], [2]]
    assert (lane.position.delivered, lane.position.last_place) == (5, 2)
    lane.position.next_epoch(None)
    assert lane.position.left_out() == frozenset()


BAD_PLACES = st.one_of(
    st.sets(st.integers(0, 25)), st.tuples(st.integers(0, 25), st.integers(0, 25)).map(lambda ends: set(range(*ends)))
)


@given(
    state=st.sampled_from(failing.STATES),
    bad=BAD_PLACES,
    size=st.integers(1, 4),
    every=st.sampled_from([None, 1, 2]),
    seed_by=st.sampled_from(["batch", "sample"]),
    resume=st.sampled_from(["checked", "replay"]),
)
def test_a_lane_goes_on_exactly_from_every_turn(
    state: str, bad: set[int], size: int, every: int | None, seed_by: str, resume: str
) -> None:
    def lane(position: LanePosition | None = None) -> Lane0:
        dataset = failing.Failing(26, bad, state, noise=True)
        return Lane0(dataset, position, size, capture_every=every, seed_by=seed_by, resume=resume)

    reference = lane().rest()
    stopped = lane()
    for done in itertools.count():
        again = lane(stopped.saved())
        assert again.rest() == reference[done:]
        assert sorted({*stopped.left_out, *again.left_out}) == sorted(bad)
        if stopped.turn() is None:
            break


@pytest.mark.parametrize("bad", range(0, 16, 3))
@pytest.mark.parametrize("state", failing.STATES)
def test_a_sample_that_failed_stands_between_the_neighbours_that_fix_a_place(state: str, bad: int) -> None:
    lane, reference = (Lane0(failing.Failing(46, {bad, 45}, state), size=5) for _ in range(2))
    turns = reference.rest()
    for done in range(10):
        assert Lane0(failing.Failing(46, {bad, 45}, state), lane.saved(), size=5).rest() == turns[done:]
        lane.turn()


@given(
    state=st.sampled_from(failing.STATES), once=BAD_PLACES, bad=BAD_PLACES, size=st.integers(1, 3), k=st.integers(0, 9)
)
def test_what_failed_once_stays_left_out_where_it_was_delivered_without(
    state: str, once: set[int], bad: set[int], size: int, k: int
) -> None:
    """Every row is delivered, or it was bad, or it failed before the position was saved."""
    lane = Lane0(failing.Failing(26, bad, state, once=set(once)), size=size)
    before = [row for _ in range(k) for row in lane.turn() or []]
    failed = set(lane.position.left_out()) | (set(lane.left_out) if lane.position.ended else set())
    again = Lane0(failing.Failing(26, bad, state), lane.saved(), size=size)
    assert before + [row for turn in again.rest() for row in turn] == [n for n in range(26) if n not in bad | failed]


@pytest.mark.parametrize("state", ["steps", "none"])
def test_a_sample_that_was_delivered_and_fails_now_is_an_error(state: str) -> None:
    lane = Lane0(failing.Failing(20, set(), state), capture_every=5)
    for _ in range(3):
        lane.turn()
    with pytest.raises((failing.Bad, InexactDataset)):
        Lane0(failing.Failing(20, {4}, state), lane.saved()).turn()


def test_what_was_left_out_stays_left_out_where_nothing_may_be_any_more() -> None:
    lane = Lane0(failing.Failing(12, {2, 3}))
    assert [lane.turn(), lane.turn()] == [[0, 1], [4, 5]]
    assert Lane0(failing.Failing(12, set()), lane.saved(), skipping=None).rest() == [[6, 7], [8, 9], [10, 11]]
    with pytest.raises(failing.Bad):
        Lane0(failing.Failing(12, {2, 8}), lane.saved(), skipping=None).rest()


def test_with_seed_by_sample_the_numbers_of_a_sample_do_not_depend_on_those_that_fail() -> None:
    def rows(bad: set[int]) -> list[float]:
        turns = Lane0(failing.Failing(12, bad, noise=True), seed_by="sample").rest()
        return [row for turn in turns for row in turn]

    assert rows({1, 2, 7}) == [row for row in rows(set()) if int(row) not in {1, 2, 7}]


def test_a_generator_that_raised_is_an_error_and_no_early_end() -> None:
    lane = Lane0(failing.FailingGenerator(9, {5}))
    assert lane.turn() == [0, 1]
    assert lane.turn() == [2, 3]
    with pytest.raises(TooManySkipped) as caught:
        lane.turn()
    assert isinstance(caught.value.__cause__, failing.Bad)
    text = str(caught.value)
    assert text.startswith("FailingGenerator.__iter__() raised Bad: row 5 is bad\nIt is a generator, and a generator")
    assert "an iterator class with __next__" in text
    assert lane.cursor.place == 5


class TriesAgain(failing.StatefulRows):
    """Does not go on after it has raised, but tries the same sample again."""

    def __next__(self) -> Any:
        before = self.next
        try:
            return super().__next__()
        except failing.Bad:
            self.next = before
            raise


@pytest.mark.parametrize("state", ["steps", "late"])
def test_an_iterator_that_tries_the_same_sample_again_is_refused_at_a_resume(state: str) -> None:
    class Trying(failing.Failing):
        def __iter__(self) -> failing.FailingRows:
            rows = TriesAgain(self.bad, self.state, **self.more)
            rows.share = range(self.n)
            return rows

    lane = Lane0(Trying(20, set(), state, once={3}))
    assert [lane.turn(), lane.turn()] == [[0, 1], [2, 3]]
    with pytest.raises(InexactDataset):
        Lane0(Trying(20, set(), state), lane.saved()).turn()


class EndsAfterFailing:
    def __init__(self) -> None:
        self.inner = iter(failing.FailingGenerator(9, {5}))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.inner)


def test_an_iterator_that_ends_right_after_it_raised_is_taken_at_its_word_and_that_is_told() -> None:
    lane = Lane0(EndsAfterFailing(), size=4)
    assert lane.turn() == [0, 1, 2, 3]
    made = lane.cursor.make(4)
    assert made.samples == [4]
    assert [each.error for each in made.left_out] == ["Bad: row 5 is bad (the lane ended right after it)"]


def test_an_iterator_that_does_nothing_but_raise_is_no_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping_module, "MOST_IN_A_ROW", 50)
    with pytest.raises(TooManySkipped, match=r"samples in a row failed: that is no bad sample, but a source that is"):
        Lane0(failing.Failing(100, set(range(10, 100)))).rest()
    assert Lane0(failing.Failing(100, set(range(100)) - {0, 49, 98})).rest() == [[0, 49], [98]]


def test_a_turn_alone_does_not_go_beyond_what_may_be_left_out() -> None:
    dataset = failing.Failing(10**9, range(1, 10**9))  # type: ignore[arg-type]
    with pytest.raises(TooManySkipped, match="4 samples failed, and max_skipped=3 may be left out"):
        Lane0(dataset, skipping=Skipping(3)).rest()


def test_what_is_no_exception_of_a_sample_is_raised_as_ever() -> None:
    class Exits(failing.FailingRows):
        def __next__(self) -> Any:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        Lane0(Exits(set(), "steps")).turn()
    dataset = failing.FailingItself(9, {4})
    dataset.state_dict = lambda: {"lock": object()}  # type: ignore[assignment, dict-item, return-value]
    with pytest.raises(UnsealableState):
        Lane0(dataset).turn()


def test_the_place_of_an_anchor_is_never_next_to_a_sample_that_failed() -> None:
    """Three states in a row judge it, so the samples around it were made one right after the other."""
    lane = Lane0(failing.Failing(400, set(range(0, 400, 7)), "late"), size=5)
    ats = set()
    while lane.turn() is not None:
        if lane.position.anchor is not None and lane.position.anchor.at:
            ats.add(lane.position.anchor.at)
    assert len(ats) > 10
    assert not {at for at in ats if {at - 1, at - 2} & lane.position.left_out()}


# Map-style datasets


def fetched(dataset: Any, indices: Any, skipping: Skipping = ANY, **how: Any) -> tuple[Any, list[str]]:
    how = {"batched": True, "by_sample": False, **how}
    task = MapTask(2, 10, 1, indices)
    samples, left_out = Sound(dataset, skipping, 7, **how).fetch(task, indices)
    return samples, [f"{each.number} {each.where}: {each.error}" for each in left_out]


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("kind", [failing.FailingItems, failing.FailingTogether])
def test_the_items_that_fail_are_left_out_by_name(kind: Any, by_sample: bool) -> None:
    samples, named = fetched(kind(20, {4, 9}), [3, 4, 5, 9], by_sample=by_sample)
    assert [int(sample) for sample in samples] == [3, 5]
    assert named == ["11 index 4 of epoch 2: Bad: row 4 is bad", "13 index 9 of epoch 2: Bad: row 9 is bad"]


def test_items_are_asked_for_by_themselves_only_where_a_batch_of_them_fails() -> None:
    dataset = failing.FailingTogether(20, {4})
    fetched(dataset, [1, 2, 3])
    assert dataset.asked == [1, 2, 3]
    dataset.asked.clear()
    fetched(dataset, [3, 4, 5])
    assert dataset.asked == [3, 4, 3, 4, 5]


def test_items_that_are_asked_for_by_themselves_draw_from_the_start_of_the_batch_on() -> None:
    both = [
        fetched(kind(20, {4}, noise=True), [3, 4, 5])[0] for kind in (failing.FailingItems, failing.FailingTogether)
    ]
    assert torch.equal(torch.stack(both[0]), torch.stack(both[1]))


def test_what_can_only_be_asked_for_batches_is_asked_for_batches_of_one() -> None:
    samples, named = fetched(failing.FailingTogetherOnly(20, {4}), [3, 4, 5])
    assert samples == [3, 5]
    assert named == ["11 index 4 of epoch 2: Bad: one of [4] is bad"]


def test_with_seed_by_sample_the_numbers_of_an_item_do_not_depend_on_those_that_fail() -> None:
    for kind in (failing.FailingItems, failing.FailingTogether):
        whole, _ = fetched(kind(20, set(), noise=True), [3, 4, 5], by_sample=True)
        samples, _ = fetched(kind(20, {4}, noise=True), [3, 4, 5], by_sample=True)
        assert torch.equal(torch.stack(samples), torch.stack([whole[0], whole[2]]))


def test_one_that_is_not_batched_is_itself_or_nothing() -> None:
    assert fetched(failing.FailingItems(20, {4}), 5, batched=False) == (torch.tensor(5), [])
    assert fetched(failing.FailingItems(20, {4}), 4, batched=False) == (
        None,
        ["10 index 4 of epoch 2: Bad: row 4 is bad"],
    )


def test_a_batch_of_which_nothing_is_left_is_passed_over_refused_or_shown_by_another_item() -> None:
    def shape(whole: str, batched: bool = True, bad: Any = frozenset({0, 1, 9})) -> Any:
        dataset = failing.FailingItems(10, bad)
        sound = Sound(dataset, Skipping(None, whole), 7, batched=batched, by_sample=False)
        return sound.shape([LeftOut(0, 9, "index 9", "Bad: bad")])

    assert shape("pass") is None
    assert shape("empty") == [torch.tensor(2)]
    assert shape("empty", batched=False) == torch.tensor(2)
    for refused in (lambda: shape("refuse"), lambda: shape("empty", bad=frozenset(range(10)))):
        with pytest.raises(
            TooManySkipped, match=r"No sample of a batch is left, and ranks have to take the same steps"
        ):
            refused()


# Counting


def some(first: int, last: int) -> list[LeftOut]:
    return [LeftOut(0, number, f"sample {number}", "Bad: bad") for number in range(first, last)]


def test_what_is_made_ahead_counts_against_the_budget_and_in_the_position_only_once_delivered() -> None:
    position = MapPosition()
    watch = Watch(position, Skipping(5))
    watch.expect(some(0, 3))
    watch.expect(some(3, 5))
    assert position.skipped.count == 0
    watch.deliver(some(0, 3))
    assert position.skipped.count == 3
    with pytest.raises(TooManySkipped, match=r"^6 samples failed, and max_skipped=5 may be left out"):
        watch.expect(some(5, 6))
    watch.restart()
    watch.expect(some(3, 5))
    watch.deliver(some(3, 5))
    assert position.skipped.count == 5


def test_lanes_are_counted_each_and_limited_together() -> None:
    position = LanesPosition({0: LanePosition(), 1: LanePosition()})
    watch = Watch(position, Skipping(3))
    before = position.skipped
    for lane in (1, 0):
        watch.expect(some(0, 1))
        watch.deliver(some(0, 1), lane)
    assert {lane: skipped.count for lane, skipped in position.skipped.items()} == {0: 1, 1: 1}
    assert before == {}, "it is replaced, and not changed"
    with pytest.raises(TooManySkipped, match=r"^4 samples failed"):
        watch.expect(some(1, 3))


def test_batches_without_a_sample_do_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping_module, "MOST_IN_A_ROW", 6)
    watch = Watch(MapPosition(), ANY)
    for _ in range(5):
        watch.expect(some(0, 2), nothing=True)
        watch.expect(some(0, 2), nothing=True)
        watch.expect(some(0, 1))
    watch.expect(some(0, 5), nothing=True)
    with pytest.raises(TooManySkipped, match="samples in a row failed"):
        watch.expect(some(5, 6), nothing=True)


def test_the_first_ten_are_told_and_then_a_hundredth_a_thousandth(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(MapPosition(), ANY)
    with caplog.at_level(logging.WARNING, logger="unbroken"):
        watch.deliver(some(0, 7))
        watch.deliver(some(7, 1200))
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == 'on_error="skip" leaves out sample 0: Bad: bad (1 in this run)'
    assert [text.split("(")[1] for text in told] == [f"{n} in this run)" for n in [*range(1, 11), 100, 1000]]
