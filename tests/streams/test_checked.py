"""Iterables that are not ours, resumed: exact or refused by name, whatever their state means."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import datasets as awkward
from tests.streams.runs import assert_law, plain, resumed, run, saved
from unbroken.errors import InexactDataset, InvalidState, UnsealableState
from unbroken.lanes import Lane
from unbroken.streams.reading import checked
from unbroken.streams.reading.iterables import from_iterable
from unbroken.streams.stage import Stage

ONE = Lane(0, 1)
ROWS = 90
EXACT = [
    awkward.WellBehaved,
    awkward.StaysAtEnd,
    awkward.Late,
    awkward.LateEntryPerWorker,
    awkward.CoarseEntering,
    awkward.CoarseLeaving,
    awkward.ConstantContent,
    awkward.ConstantLate,
    awkward.ConstantCoarse,
    awkward.RepeatingContent,
    awkward.LiveBuffer,
    awkward.LiveState,
    awkward.DocumentAhead,
    awkward.EpochCounting,
    awkward.EpochSet,
    awkward.PermutationOnOpening,
    awkward.PermutationOnFirstRow,
    awkward.PermutationWithoutState,
    awkward.GeneratorOnOpening,
    awkward.RandomContent,
    awkward.LargeState,
    awkward.Stateless,
    awkward.OwnIterator,
    awkward.OwnIteratorGoingOn,
    awkward.StateOnIterator,
    awkward.StateOnBoth,
]
REFUSED = [awkward.DrawsInFlight, awkward.HiddenBuffer, awkward.OrderByOpenings, awkward.PeriodicCoarse]


def stream_of(kind: Callable[[int], Any], rows: int = ROWS, **options: Any) -> Stage:
    return from_iterable(lambda lane, lanes: kind(rows), **options)


def positions(stage: Stage, lane: Lane = ONE) -> tuple[list[Any], list[str]]:
    """All rows, and the position before each and after the last."""
    rows, found, states = stage.open(lane), [], []
    while True:
        states.append(saved(rows))
        row = next(rows, None)
        if row is None:
            return found, states
        found.append(plain(row))


def outcomes(stage: Stage) -> list[str]:
    """What comes of a resume at every restore point."""
    ref, states = positions(stage)
    found = []
    for k, state in enumerate(states):
        try:
            rest = [plain(row) for row in resumed(stage, ONE, state)]
        except InexactDataset:
            found.append("refused")
        else:
            found.append("exact" if rest == ref[k:] else "wrong")
    return found


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("resume", ["checked", "replay"])
def test_every_restore_point_is_exact(kind: Callable[[int], Any], resume: str) -> None:
    """Cases 7, 8, 9 and 10: late, coarse, ahead, live buffers, state on the iterator or on both, none at all."""
    assert_law(stream_of(kind, resume=resume), Lane(0, 1, epoch=1, seed=3), [1, 0, 7, 30])


@pytest.mark.parametrize("kind", [awkward.Late, awkward.DocumentAhead, awkward.RandomContent, awkward.Stateless])
def test_windows_functions_and_packs_on_top_are_exact(kind: Callable[[int], Any]) -> None:
    """Case 28."""
    stream = stream_of(kind).map(
        lambda row: {"input_ids": np.full(3, int(row["noise"] if isinstance(row, dict) else row))}
    )
    assert_law(stream.shuffle(7, seed=1).pack(5), ONE, [1, 0, 2, 3])


def test_openings_that_are_counted_in_the_state_change_no_row() -> None:
    assert set(outcomes(stream_of(awkward.OpeningsCounted))) == {"exact"}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_lead_back_is_refused_and_replay_is_the_way_out(kind: Callable[[int], Any]) -> None:
    """Case 9: exact or refused, never silently wrong."""
    found = outcomes(stream_of(kind))
    assert found[:20] == ["exact"] * 20  # up to the first anchor it is by count
    assert set(found[40:]) == {"refused"}
    assert set(outcomes(stream_of(kind, resume="replay"))) == {"exact"}


@pytest.mark.parametrize("period", [1, 2, 5, 10])
def test_a_jump_over_rows_that_come_again_is_never_taken_for_none(period: int) -> None:
    assert "wrong" not in outcomes(stream_of(lambda n: awkward.PeriodicAhead(n, period)))


def test_a_position_saved_without_replay_is_loaded_with_it_and_the_other_way_round() -> None:
    ref, states = positions(stream_of(awkward.WellBehaved))
    _, by_count = positions(stream_of(awkward.WellBehaved, resume="replay"))
    for k in (0, 1, 50, ROWS):
        assert list(resumed(stream_of(awkward.WellBehaved, resume="replay"), ONE, states[k])) == ref[k:]
        assert list(resumed(stream_of(awkward.WellBehaved), ONE, by_count[k])) == ref[k:]


def test_rows_that_differ_when_they_are_made_again_are_refused_by_either_way() -> None:
    for resume in ("checked", "replay"):
        stream = stream_of(awkward.UnseededNoise, resume=resume)
        rows = stream.open(ONE)
        for _ in range(5):
            next(rows)
        again = resumed(stream, ONE, saved(rows))
        before = saved(again)
        for _ in range(2):
            with pytest.raises(InexactDataset, match=r"(?s)lane 0 of 1.*made again from its start.*row 5 .*replay"):
                next(again)
            assert saved(again) == before


def test_the_refusal_says_where_and_why_and_the_way_out() -> None:
    _, states = positions(stream_of(awkward.HiddenBuffer))
    with pytest.raises(InexactDataset) as caught:
        next(resumed(stream_of(awkward.HiddenBuffer), ONE, states[60]))
    for words in ("epoch 0", "saved around row", "come to row 60", "does not lead back", 'resume="replay" ignores'):
        assert words in str(caught.value)
    _, states = positions(stream_of(awkward.PeriodicCoarse))
    with pytest.raises(InexactDataset, match="in two ways: its rows repeat"):
        next(resumed(stream_of(awkward.PeriodicCoarse), ONE, states[60]))


class Units:
    """Rows in units; the state moves before each row, after it, on opening a unit, or on leaving one."""

    def __init__(self, units: Sequence[Sequence[int]], moves: str) -> None:
        self.units, self.moves = units, moves
        self.unit = self.row = 0

    def __iter__(self) -> Iterator[int]:
        while self.unit < len(self.units):
            rows = self.units[self.unit]
            self.unit += self.moves == "ahead"
            for row in rows[self.row :]:
                self.row += self.moves == "before"
                yield row
                self.row += self.moves == "after"
            self.unit, self.row = self.unit + (self.moves != "ahead"), 0

    def state_dict(self) -> dict[str, int]:
        return {"unit": self.unit, "row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.unit, self.row = state["unit"], state["row"]


@given(
    units=st.lists(st.lists(st.integers(0, 3), max_size=7), min_size=5, max_size=25),
    times=st.integers(1, 3),
    moves=st.sampled_from(["before", "after", "ahead", "leaving"]),
    k=st.floats(0, 1),
)
def test_whatever_the_state_means_and_rows_repeat_no_resume_is_wrong(
    units: list[list[int]], times: int, moves: str, k: float
) -> None:
    """Units that come again, and rows of few values: a state for each row is exact, others are exact or refused."""
    stream = from_iterable(lambda lane, lanes: Units([unit for unit in units for _ in range(times)], moves))
    ref, states = positions(stream)
    at = round(k * len(ref))
    try:
        assert list(resumed(stream, ONE, states[at])) == ref[at:]
    except InexactDataset:
        assert moves in ("ahead", "leaving")


class Counter:
    """Yields numbers, with a state of ``size`` more numbers; counts the rows that it made and the states it gave."""

    made = states = 0

    def __init__(self, rows: int, size: int = 0) -> None:
        self.rows, self.at, self.more = rows, 0, list(range(size))

    def __iter__(self) -> Iterator[int]:
        while self.at < self.rows:
            self.at += 1
            Counter.made += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, Any]:
        Counter.states += 1
        return {"at": self.at, "more": self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize(("size", "most_states", "most_rows"), [(0, 700, 30), (1000, 150, 200)])
def test_a_resume_makes_few_rows_again_and_states_are_taken_as_they_cost(
    size: int, most_states: int, most_rows: int
) -> None:
    """Cases 1 and 42."""
    stream = from_iterable(lambda lane, lanes: Counter(3000, size))
    rows = stream.open(ONE)
    Counter.states = 0
    for _ in range(2990):
        next(rows)
    assert Counter.states < most_states
    Counter.made = 0
    again = resumed(stream, ONE, saved(rows))
    assert next(again) == 2990
    assert Counter.made < most_rows


def test_rows_made_again_for_want_of_a_state_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 10."""
    monkeypatch.setattr(checked, "_told", set())
    stream = stream_of(awkward.Stateless)
    _, states = positions(stream)
    assert not caplog.records
    for _ in range(2):
        next(resumed(stream, ONE, states[70]))
    (record,) = caplog.records
    assert record.name == "unbroken"
    assert "70 rows of" in record.getMessage() and "no state to go on from" in record.getMessage()


def test_states_are_kept_as_they_are_through_json() -> None:
    class Odd(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"at": (self.at, b"\xff", np.arange(3), {1: 2**80}, float("inf"))}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at, data, array, numbers, most = state["at"]
            assert (data, array.tolist(), numbers, most) == (b"\xff", [0, 1, 2], {1: 2**80}, float("inf"))

    stream = from_iterable(lambda lane, lanes: Odd(60))
    _, states = positions(stream)
    assert json.loads(states[50])["at"] > 0
    assert_law(stream, ONE, [3])


def test_a_state_that_no_position_can_carry_is_refused_at_the_first_row() -> None:
    class Holding(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "lock": itertools.count()}

    rows = from_iterable(lambda lane, lanes: Holding(60)).open(ONE)
    for _ in range(2):
        with pytest.raises(UnsealableState, match=r"the state of .*lane 0 of 1.*\['lock'\] is a itertools.count"):
            next(rows)
    assert run(from_iterable(lambda lane, lanes: Holding(60), resume="replay")) == list(range(60))


@pytest.mark.parametrize("when", [0, 1, 17, 40, 59])
@pytest.mark.parametrize("where", ["row", "state_dict", "__iter__", "load_state_dict"])
@pytest.mark.parametrize("error", [OSError, KeyError, StopIteration])
def test_after_an_exception_the_next_call_goes_on_and_nothing_is_lost(
    when: int, where: str, error: type[Exception]
) -> None:
    """Cases 31 and 35: also where a generator has ended by its exception."""
    left = {where: when}

    def fail(what: str) -> None:
        if what in left:
            left[what] -= 1
            if left[what] < 0:
                del left[what]
                raise error("once")

    class Failing(Counter):
        def __iter__(self) -> Iterator[int]:
            fail("__iter__")
            return self.all()

        def all(self) -> Iterator[int]:
            for row in super().__iter__():
                try:
                    fail("row")
                except StopIteration as stop:
                    raise OSError from stop
                yield row

        def state_dict(self) -> dict[str, Any]:
            fail("state_dict")
            return super().state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            fail("load_state_dict")
            super().load_state_dict(state)

    stream = from_iterable(lambda lane, lanes: Failing(60))
    rows, found, failures = stream.open(ONE), [], 0
    while len(found) < 60:
        before = saved(rows)
        try:
            found.append(next(rows))
        except (error, OSError, RuntimeError) as caught:
            failures += 1
            assert "once" in str(caught) or isinstance(caught, OSError | RuntimeError)
            assert saved(rows) == before
        if len(found) == 30:
            rows = resumed(stream, ONE, saved(rows))
    assert found == list(range(60))
    assert failures <= 1
    assert next(rows, None) is None


def test_after_close_the_next_row_comes_all_the_same() -> None:
    rows = stream_of(awkward.WellBehaved).open(ONE)
    found = []
    for _ in range(ROWS):
        found.append(next(rows))
        before = saved(rows)
        rows.close()
        rows.close()
        assert saved(rows) == before
    assert found == list(range(ROWS))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": -1}, "rows in a position must be a whole number of at least 0"),
        ({"last": [1]}, "cut short or changed"),
        ({"last": ["1", "2"]}, "cut short or changed"),
        ({"witnesses": [None]}, "cut short or changed"),
        ({"after": None}, "cut short or changed"),
        ({"rows": 20}, "cut short or changed"),
        ({"before": 3}, "before in a position must be"),
    ],
)
def test_what_is_no_position_is_refused(change: dict[str, Any], text: str) -> None:
    """Case 27."""
    _, states = positions(stream_of(awkward.WellBehaved))
    rows = stream_of(awkward.WellBehaved).open(ONE)
    with pytest.raises(InvalidState, match=text):
        rows.load_state_dict({**json.loads(states[50]), **change})
    assert saved(rows) == states[0]
    next(rows)
    with pytest.raises(InvalidState, match="Load a position right after open"):
        rows.load_state_dict(json.loads(states[50]))
