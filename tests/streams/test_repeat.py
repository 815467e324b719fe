"""Repeat: several passes in one epoch, each with another order, and no row lost at their borders."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.streams.runs import assert_law, resumed, run, run_lanes, saved, write_jsonl
from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.streams import repeat
from unbroken.streams.course import epoch_of_pass
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage


@pytest.fixture
def corpus(tmp_path: Path) -> Stage:
    return read_jsonl([write_jsonl(tmp_path / f"{n}.jsonl", range(10 * n, 10 * n + 10)) for n in range(2)])


def augmented(row: Any) -> Any:
    return [row, random.random()]


def test_the_rows_come_so_many_times(corpus: Stage) -> None:
    assert run(corpus.repeat(3)) == [*range(20)] * 3
    assert run(corpus.repeat(1)) == [*range(20)]
    assert run(corpus.repeat().take(45)) == [*range(20), *range(20), *range(5)]
    assert run(corpus.take(2).repeat(2).take(3).repeat(2)) == [0, 1, 0] * 2


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_every_pass_is_an_epoch_of_its_own(corpus: Stage, epoch: int) -> None:
    """Case 14."""
    once = corpus.shuffle(5).map(augmented)
    for count in (1, 3):
        passes = [run_lanes(once, count, epoch=epoch_of_pass(epoch, k), seed=5) for k in range(3)]
        lanes = [[row for rows in parts for row in rows] for parts in zip(*passes, strict=True)]
        assert run_lanes(once.repeat(3), count, epoch=epoch, seed=5) == lanes
    endless = [row for k in range(3) for row in run(once, Lane(0, 1, epoch=epoch_of_pass(epoch, k)))]
    assert run(once.repeat().take(60), Lane(0, 1, epoch=epoch)) == endless


def test_no_two_passes_of_two_epochs_are_the_same(corpus: Stage) -> None:
    rows = corpus.shuffle(5, seed=1).repeat(2).repeat(2)
    orders = [
        tuple(run(rows, Lane(0, 1, epoch))[start : start + 20]) for epoch in range(3) for start in (0, 20, 40, 60)
    ]
    assert len(set(orders)) == 12
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(20))}


@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 3, epoch=2, seed=9)])
@pytest.mark.parametrize(
    "build",
    [
        lambda rows: rows.repeat(3),
        lambda rows: rows.repeat().take(70),
        lambda rows: rows.shuffle(7).repeat(2).map(augmented).repeat(2),
        lambda rows: rows.repeat(3).shuffle(7, seed=1),
        lambda rows: rows.flat_map(lambda rows: rows[1:], batched=3).repeat(3).flat_map(list, batched=4),
        lambda rows: rows.filter(lambda row: row == 19).repeat(5),
        lambda rows: rows.filter(lambda row: False).repeat(5),
    ],
)
def test_every_restore_point_is_exact(corpus: Stage, build: Callable[[Stage], Stage], lane: Lane) -> None:
    """Case 14: saved in pass 0, 1 and 2, and at their borders."""
    assert_law(build(corpus), lane, [3, 0, 1, 7, 10])


@pytest.mark.parametrize("epochs", [None, 2, 1000, (1 << 31) - 1])
def test_what_has_no_rows_ends(corpus: Stage, epochs: int | None) -> None:
    rows = corpus.filter(lambda row: False).repeat(epochs).open(Lane(0, 1))
    assert next(rows, None) is next(rows, None) is None


def test_a_lane_without_a_row_in_one_pass_has_those_of_the_others(tmp_path: Path) -> None:
    """Case 22: two rows in several chunks, so that in each pass they are on other lanes."""
    few = read_jsonl(write_jsonl(tmp_path / "a.jsonl", ["some text that is longer", "than a chunk"])).shuffle(10)
    lanes = run_lanes(few.repeat().take(8 * 100), 8)
    assert {len(lane) for lane in lanes} == {100}
    lanes = run_lanes(few.repeat(30), 8)
    assert sorted(row for lane in lanes for row in lane) == ["some text that is longer"] * 30 + ["than a chunk"] * 30


def test_long_without_a_row_is_told_once(corpus: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "_PATIENCE", -1.0)
    with pytest.warns(UserWarning, match="the last 2 passes yielded no row on lane 0.\nIf a filter takes all") as told:
        assert run(corpus.filter(lambda row: False).repeat()) == []
    assert len(told) == 1


def test_an_error_loses_nothing_and_ends_nothing(corpus: Stage) -> None:
    def failing(row: int) -> list[int]:
        calls.append(row)
        if len(calls) in (1, 25, 41):
            raise KeyboardInterrupt
        return [row]

    calls: list[int] = []
    found: list[int] = []
    whole = corpus.flat_map(lambda row: [row]).repeat(3)
    rows, errors = corpus.flat_map(failing).repeat(3).open(Lane(0, 1)), 0
    while len(found) < 60:
        try:
            found.append(next(rows))
        except KeyboardInterrupt:
            errors += 1
            assert found + list(resumed(whole, Lane(0, 1), saved(rows))) == [*range(20)] * 3
    assert (found, errors) == ([*range(20)] * 3, 3)
    assert next(rows, None) is None


def test_more_passes_are_accepted_at_a_resume_and_no_fewer_than_were_begun(corpus: Stage) -> None:
    """A pass goes on in the order that it was begun in, in later epochs too."""
    once, lane = corpus.shuffle(7), Lane(0, 1, epoch=1)
    for taken in (0, 5, 20, 39, 40):
        rows = once.repeat(2).open(lane)
        found = [next(rows) for _ in range(taken)]
        for more in (3, None):
            passes = resumed(
                once.repeat(more).take(60 - taken), lane, json.dumps({"source": rows.state_dict(), "rows": 0})
            )
            assert sorted(found + list(passes)) == sorted([*range(20)] * 3)
            assert once.repeat(more).difference_class("epochs") == "held"
    for taken in (20, 21):
        rows = once.repeat(2).open(lane)
        for _ in range(taken):
            next(rows)
        fewer = once.repeat(1).open(lane)
        if taken == 20:
            assert list(resumed(once.repeat(1), lane, saved(rows))) == []
            continue
        with pytest.raises(InvalidState, match=r"repeat: the position lies in pass 2, but now there are 1.\nPass rep"):
            fewer.load_state_dict(rows.state_dict())
        assert sorted(fewer) == [*range(20)]


def test_what_is_left_out_is_counted_in_each_pass(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1\n{\n2\n")
    stream = read_jsonl(tmp_path / "a.jsonl", on_error="skip").repeat(3)
    rows = stream.open(Lane(0, 1, epoch=1))
    assert list(rows) == [1, 2] * 3
    assert rows.state_dict()["journal"]["read_jsonl"]["count"] == 3
    assert assert_law(stream, Lane(0, 1, epoch=1), [1, 2]) == [1, 2] * 3


def test_a_row_comes_from_where_it_was_read_in_its_pass(corpus: Stage, tmp_path: Path) -> None:
    rows = corpus.repeat(2).open(Lane(0, 1), lineage=True)
    for row in rows:
        assert [origin.file for origin in rows.origin()] == [f"{tmp_path}/{row // 10}.jsonl"]
        assert f"{row // 10}.jsonl" in rows.where()


def test_it_is_in_the_fingerprint_and_in_print(corpus: Stage) -> None:
    stream = corpus.repeat(3).repeat()
    assert (stream.describe()["epochs"], stream.describe()["epochs[1]"]) == (3, None)
    assert repr(stream).endswith(".repeat(3).repeat()")


@pytest.mark.parametrize(
    ("epochs", "error"), [(0, ValueError), (-1, ValueError), (1 << 31, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_what_cannot_be_meant_fails_at_construction(corpus: Stage, epochs: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="repeat: epochs must be "):
        corpus.repeat(epochs)


def test_what_is_no_position_is_refused(corpus: Stage) -> None:
    """Case 27."""
    rows = corpus.repeat(3).open(Lane(0, 1))
    before, state = saved(rows), rows.state_dict()
    for wrong in ({}, {**state, "pass": 3}, {**state, "epoch": None}, {**state, "empty": -1}, {**state, "source": {}}):
        with pytest.raises(InvalidState, match=r"in a position must be|a position has the keys|but now there are 3"):
            rows.load_state_dict(json.loads(json.dumps(wrong)))
        assert saved(rows) == before
    assert list(rows) == [*range(20)] * 3
