"""Weights: who has the turns of a mix, and the history that makes them the same again."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.streams.weights import History, Moment, Turns, plan_of

A, B, AB, ABC = {"a": 1.0}, {"b": 1.0}, {"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 1.0, "c": 2.0}
WEIGHTS = st.lists(st.sampled_from([0.001, 0.1, 0.5, 1, 1, 3, 1000]), min_size=2, max_size=8)

ONE = Lane(0, 1)


def history(weights: Any = AB, saved: Any = None, schedule: Any = None) -> History:
    made = History(plan_of(weights, schedule or weights), 0)
    if saved is not None:
        made.load_state_dict(json.loads(json.dumps(saved)))
    return made


def reached(weights: Any, moment: Moment, saved: Any = None) -> Any:
    """The record after all rows before a moment were made by some weights."""
    made = history(weights, saved)
    made.turns_at(made._reached, ONE, ())
    made.reach(moment)
    return made.state_dict()


def names_at(record: History, row: int, lane: Lane = ONE, epoch: int = 0) -> list[str]:
    turns = record.turns_at((epoch, row), lane, ())
    return [] if turns is None else turns.names


# ---- turns


def test_draws_follow_the_weights_and_not_their_order() -> None:
    rows = 40_000
    turns = Turns.of({"a": 7, "b": 2, "c": 1})
    drawn = [turns.drawn(11, row) for row in range(rows)]
    for name, share in (("a", 0.7), ("b", 0.2), ("c", 0.1)):
        assert abs(drawn.count(name) - rows * share) < 4 * math.sqrt(rows * share * (1 - share))
    assert drawn == [Turns.of({"c": 1, "a": 7, "b": 2}).drawn(11, row) for row in range(rows)]
    assert drawn != [turns.drawn(12, row) for row in range(rows)]


def test_neighbouring_draws_do_not_depend_on_one_another() -> None:
    turns = Turns.of({"a": 1, "b": 1})
    drawn = "".join(turns.drawn(5, row) for row in range(20_000))
    pairs = Counter(drawn[row : row + 2] for row in range(0, 20_000, 2))
    assert all(abs(pairs[pair] - 2500) < 200 for pair in ("aa", "ab", "ba", "bb"))


def test_the_draws_are_the_same_in_every_version() -> None:
    """They decide which rows saved positions lead to, so they may never change."""
    turns = Turns.of({"a": 1, "b": 2, "c": 0.5})
    assert "".join(turns.drawn(1, row) for row in range(24)) == "ababababbbbbbbabbbbabbcc"


def test_weights_of_any_size_can_be_drawn_from() -> None:
    turns = Turns.of({"a": 1e-100, "b": 1e100, "c": 1e-100})
    assert {turns.drawn(1, row) for row in range(1000)} == {"b"}
    assert turns.due({"a": 0.0, "b": 0.0, "c": 0.0}, 10) == "b"


@given(weights=WEIGHTS, lengths=st.lists(st.integers(1, 40), min_size=20, max_size=200), first=st.integers(0, 7))
def test_by_tokens_no_source_is_further_from_its_share_than_the_longest_document(
    weights: list[float], lengths: list[int], first: int
) -> None:
    names = "abcdefgh"[: len(weights)]
    turns = Turns.of(dict(zip(names, weights, strict=True)))
    taken, longest = dict.fromkeys(names, 0), 0
    for row, length in enumerate(lengths):
        behind = {
            name: share * sum(taken.values()) - taken[name] for name, share in zip(names, turns.shares, strict=True)
        }
        taken[turns.due(behind, longest) if row else names[first % len(names)]] += length
        longest = max(longest, length)
        for name, share in zip(names, turns.shares, strict=True):
            assert abs(taken[name] - share * sum(taken.values())) <= longest * (1 + 1e-9)


@pytest.mark.parametrize("lag", [-500.0, 500.0])
def test_by_tokens_sources_that_lag_together_still_take_turns_by_their_shares(lag: float) -> None:
    """Where others ended or wait, all that are left may be behind their share, or ahead of it."""
    turns = Turns.of({"a": 9, "b": 1})
    behind = {"a": 0.9 * lag, "b": 0.1 * lag}
    for row in range(100):
        name = turns.due(behind, 10)
        behind = {"a": behind["a"] + 9 - 10 * (name == "a"), "b": behind["b"] + 1 - 10 * (name == "b")}
        assert abs(behind["b"] - 0.1 * lag) <= 10, row


# ---- plans


@pytest.mark.parametrize("lanes", [1, 2, 3, 7])
def test_a_schedule_changes_at_its_row_of_the_global_order(lanes: int) -> None:
    record = history(AB, schedule={0: {"a": 1, "b": 0}, 10: {"a": 0, "b": 1}, 11: {"a": 1, "b": 0}, 25: AB})
    expected = ["a"] * 10 + ["b"] + ["a"] * 14 + ["ab"] * 5
    for row in range(30):
        lane = Lane(row % lanes, lanes)
        assert "".join(names_at(record, row // lanes, lane)) == expected[row]


@pytest.mark.parametrize("lanes", [1, 3])
def test_turns_hold_until_the_row_that_they_say(lanes: int) -> None:
    record = history(AB, schedule={0: A | {"b": 0}, 10: {"a": 0, "b": 1}, 25: AB})
    for index in range(lanes):
        lane, held = Lane(index, lanes), None
        for row in range(12):
            turns = record.turns_at((0, row), lane, ())
            assert turns is not None
            if held is not None and row < held.until:
                assert turns == held
            held = turns


def test_no_weights_are_equal_weights() -> None:
    assert plan_of({"a": 0, "b": 0}, None) == plan_of({"a": 0, "b": 0}, {"a": 1, "b": 1}) == [[0, {"a": 1.0, "b": 1.0}]]


def test_a_schedule_may_be_written_down_in_any_order() -> None:
    assert plan_of(AB, {9: AB, 0: AB}) == plan_of(AB, {0: AB, 9: AB}) == [[0, AB], [9, AB]]


@pytest.mark.parametrize(
    ("weights", "error", "text"),
    [
        (5, TypeError, "weights must be a dict, but got 5"),
        ([1, 2], TypeError, "weights must be a dict"),
        ({}, TypeError, "weights must be a dict"),
        ({"a": 1}, ValueError, "must name each source ('a', 'b'), but name 'a'"),
        ({"a": 1, "b": 1, "c": 1}, ValueError, "but name 'a', 'b', 'c'"),
        ({"a": 1, "b": -1}, ValueError, "the weight of 'b' must be 0, or from"),
        ({"a": 1, "b": float("nan")}, ValueError, "the weight of 'b'"),
        ({"a": 1, "b": float("inf")}, ValueError, "the weight of 'b'"),
        ({"a": 1, "b": 10**400}, ValueError, "the weight of 'b'"),
        ({"a": 1, "b": 1e-200}, ValueError, "the weight of 'b'"),
        ({"a": 1, "b": "2"}, TypeError, "the weight of 'b' must be a number, but got '2'"),
        ({"a": 1, "b": True}, TypeError, "the weight of 'b' must be a number, but got True"),
        ({"a": 0, "b": 0.0}, ValueError, "at least one weight must be above 0"),
        ({1: AB}, ValueError, "a schedule begins with row 0"),
        ({0: AB, -5: AB}, ValueError, "a schedule begins with row 0"),
        ({0: AB, "a": 1}, ValueError, "must name each source"),
        ({0: AB, 7: 3}, ValueError, "but name 3"),
        ({0: AB, 7: {}}, ValueError, "but name none"),
        ({0: AB, 7: {"a": 0, "b": 0}}, ValueError, "at least one weight"),
    ],
)
def test_wrong_weights_are_named(weights: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        plan_of(AB, weights)
    assert text in str(caught.value)


# ---- history


def test_rows_that_were_made_keep_the_weights_that_they_were_made_by() -> None:
    record = history(B, saved=reached(A, (0, 5)))
    assert [names_at(record, row) for row in (0, 4, 5, 6)] == [["a"], ["a"], ["b"], ["b"]]
    assert record.state_dict()["history"] == [[0, 0, [[0, A]]], [0, 5, [[0, B]]]]


def test_several_changes_are_all_kept() -> None:
    saved = reached(ABC, (0, 9), reached(AB, (0, 7), reached(B, (0, 7), reached(A, (0, 3)))))
    record = history(A, saved)
    assert [names_at(record, row) for row in range(11)] == [["a"]] * 3 + [["b"]] * 4 + [["a", "b", "c"]] * 2 + [
        ["a"]
    ] * 2
    assert [entry[:2] for entry in record.state_dict()["history"]] == [[0, 0], [0, 3], [0, 7], [0, 7], [0, 9]]


def test_the_same_weights_again_are_no_change() -> None:
    saved = reached(AB, (0, 5))
    record = history({"b": 3.0, "a": 1.0}, saved)
    assert names_at(record, 7) == ["a", "b"] and record.state_dict() == saved


def test_weights_that_no_row_was_made_by_leave_no_trace() -> None:
    saved = reached(A, (0, 5))
    assert history(B, saved).state_dict() == saved
    assert reached(B, (0, 0), reached(A, (0, 0)))["history"] == [[0, 0, [[0, B]]]]


def test_what_was_taken_out_at_any_time_since_is_gone() -> None:
    saved = reached(AB, (0, 8), reached(A, (0, 5), reached(AB, (0, 3))))
    turns = [history(AB, saved).turns_at((0, row), ONE, ()) for row in range(9)]
    assert [sorted(turn.gone) for turn in turns if turn] == [["b"]] * 3 + [[]] * 6


def test_an_end_that_was_seen_stays_under_other_weights() -> None:
    record = history(A)
    record.reach((0, 5))
    record.end("", (0, 5))
    assert names_at(record, 5) == ["a"]  # it is asked again, and ends again
    assert names_at(history(AB, record.state_dict()), 5) == []
    assert names_at(history(AB, record.state_dict()), 0, epoch=1) == ["a", "b"]


def test_epochs_without_rows_that_were_read_stay_without_rows() -> None:
    record = history(A)
    for epoch in range(3):
        record.end("", (epoch, 0))
    later = history(AB, record.state_dict())
    assert [names_at(later, 0, epoch=epoch) for epoch in range(4)] == [[], [], [], ["a", "b"]]


def test_of_a_source_that_was_taken_out_the_end_is_known() -> None:
    record = history(AB)
    record.end("b", (0, 3))
    record.reach((0, 9))
    later = history(A, record.state_dict())
    assert [names_at(later, row) for row in (2, 3, 8, 9)] == [["a", "b"], ["a"], ["a"], ["a"]]
    turns = later.turns_at((0, 0), ONE, ())
    assert turns is not None and turns.until == 3


def test_ends_are_kept_for_three_epochs_only() -> None:
    record = history(A)
    for epoch in range(40):
        record.reach((epoch, 2))
        record.end("a", (epoch, 2))
        record.end("", (epoch, 2))
    assert len(record.state_dict()["reached"]["ends"]) == 6
    assert record.made((39, 1)) and record.made((37, 1)) and not record.made((38, 2))
    assert not record.made((36, 1)), "what is not known any more is not claimed"


def test_a_state_does_not_change_once_it_was_taken() -> None:
    record = history(AB)
    states = []
    for row in range(4):
        record.reach((0, row))
        record.end("ab"[row % 2], (0, row))
        states.append((record.state_dict(), json.dumps(record.state_dict())))
    assert [json.dumps(state) for state, _ in states] == [text for _, text in states]


GOOD = {"history": [[0, 0, [[0, AB]]]], "reached": {"epoch": 0, "row": 5, "ends": [[0, 5, "a"]]}}


@pytest.mark.parametrize(
    "part",
    [
        {"history": []},
        {"history": [[0, 0]]},
        {"history": [[0, -1, [[0, AB]]]]},
        {"history": [[0, "0", [[0, AB]]]]},
        {"history": [[0, 0, []]]},
        {"history": [[0, 0, [[1, AB]]]]},
        {"history": [[0, 0, [[0, {"a": "b"}]]]]},
        {"history": [[0, 0, [[0, {"a": -1}]]]]},
        {"history": [[0, 0, [[0, A], [5, B]]]]},
        {"history": [[0, 0, None]]},
        {"history": [[0, 5, [[0, A]]], [0, 0, [[0, B]]]]},
        {"reached": None},
        {"reached": {"epoch": 0, "row": -1, "ends": []}},
        {"reached": {"epoch": 0, "row": 5, "ends": [[0, "a"]]}},
        {"reached": {"epoch": 0, "row": 5, "ends": [[0, None, "a"]]}},
        {"reached": {"epoch": 0, "row": 5}},
        {"more": 1},
    ],
)
def test_a_record_that_is_none_is_refused_and_nothing_of_it_is_used(part: dict[str, Any]) -> None:
    record = history(ABC, GOOD)
    before = record.state_dict()
    with pytest.raises(InvalidState, match="mix"):
        record.load_state_dict(GOOD | part)
    assert record.state_dict() == before
