"""Take and skip: rows are counted over all lanes, and nothing is read that is not needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.streams.runs import assert_law, resumed, run, run_lanes, saved, write_jsonl
from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.streams.limits import _share
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage


@pytest.fixture
def corpus(tmp_path: Path) -> Stage:
    return read_jsonl([write_jsonl(tmp_path / f"{n}.jsonl", range(20 * n, 20 * n + 20)) for n in range(3)])


def in_turn(lanes: list[list[Any]], rows: int) -> list[list[Any]]:
    """Of each lane what is among the first ``rows`` turns, where no lane ends before."""
    return [[row for k, row in enumerate(lane) if k * len(lanes) + n < rows] for n, lane in enumerate(lanes)]


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("rows", [0, 1, 2, 13, 59, 60, 61, 1000])
def test_take_and_skip_share_out_the_rows(corpus: Stage, count: int, rows: int) -> None:
    lanes = run_lanes(corpus, count)
    taken, skipped = run_lanes(corpus.take(rows), count), run_lanes(corpus.skip(rows), count)
    assert taken == in_turn(lanes, rows)
    assert [first + others for first, others in zip(taken, skipped, strict=True)] == lanes


@given(rows=st.integers(0, 1 << 62), count=st.integers(1, 1000))
def test_the_lanes_together_take_just_so_many(rows: int, count: int) -> None:
    shares = [_share(rows, Lane(index, count)) for index in range(count)]
    assert sum(shares) == rows
    assert max(shares) - min(shares) <= 1 and sorted(shares, reverse=True) == shares


def test_a_lane_that_has_fewer_leaves_its_share_to_no_other(tmp_path: Path) -> None:
    one_lane = read_jsonl(write_jsonl(tmp_path / "a.jsonl.gz", range(30)))
    assert run_lanes(one_lane.take(10), 2) == [[0, 1, 2, 3, 4], []]
    assert run_lanes(one_lane.skip(10), 2) == [[*range(5, 30)], []]


def test_they_count_what_comes_to_them_in_their_order(corpus: Stage) -> None:
    assert run(corpus.skip(10).take(5)) == [*range(10, 15)]
    assert run(corpus.take(15).skip(10)) == [*range(10, 15)]
    assert run(corpus.take(30).skip(2).take(9).skip(3).take(100)) == [*range(5, 11)]
    assert run(corpus.filter(lambda n: n % 2 == 0).skip(2).take(3)) == [4, 6, 8]
    assert run(corpus.take(3).repeat(2)) == [0, 1, 2, 0, 1, 2]
    assert run(corpus.take(3).repeat(4).skip(4).take(3)) == [1, 2, 0]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_shuffle_behind_them_changes_no_set(corpus: Stage, epoch: int, lanes: int) -> None:
    """So that rows that are held out stay held out."""
    held = [row for rows in run_lanes(corpus.take(9).shuffle(4, seed=1), lanes, epoch=epoch) for row in rows]
    rest = [row for rows in run_lanes(corpus.skip(9).shuffle(40, seed=1), lanes, epoch=epoch) for row in rows]
    assert sorted(held) == sorted(row for rows in run_lanes(corpus.take(9), lanes) for row in rows)
    assert not set(held) & set(rest) and len(held + rest) == len(run(corpus))


@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 4, epoch=2, seed=9)])
@pytest.mark.parametrize(
    "build",
    [
        lambda rows: rows.take(17),
        lambda rows: rows.skip(17),
        lambda rows: rows.take(0),
        lambda rows: rows.skip(1000),
        lambda rows: rows.take(40).skip(5).take(30),
        lambda rows: rows.shuffle(9, seed=1).skip(8).take(40).shuffle(12, seed=2),
        lambda rows: rows.take(9).repeat(3).skip(7),
    ],
)
def test_every_restore_point_is_exact(corpus: Stage, build: Callable[[Stage], Stage], lane: Lane) -> None:
    assert_law(build(corpus), lane, [3, 0, 1, 7])


def test_nothing_is_read_beyond_the_last_row_that_is_taken(corpus: Stage, tmp_path: Path) -> None:
    def noted(row: int) -> int:
        seen.append(row)
        return row

    seen: list[int] = []
    counted = corpus.map(noted)
    rows = counted.take(7).open(Lane(0, 1))
    assert list(rows) == [*range(7)] == seen
    assert next(rows, None) is None
    for path in tmp_path.iterdir():
        path.unlink()
    assert run(counted.take(0)) == []
    assert seen == [*range(7)]


def test_an_error_while_rows_are_skipped_loses_nothing(corpus: Stage) -> None:
    def failing(row: int) -> list[int]:
        if row == 4 and not failed:
            failed.append(row)
            raise KeyboardInterrupt
        return [row]

    failed: list[int] = []
    rows = corpus.flat_map(failing).skip(8).take(4).open(Lane(0, 1))
    with pytest.raises(KeyboardInterrupt):
        next(rows)
    again = resumed(corpus.flat_map(failing).skip(8).take(4), Lane(0, 1), saved(rows))
    assert list(rows) == list(again) == [8, 9, 10, 11]


def test_more_rows_are_taken_at_a_resume_and_no_fewer_than_were(corpus: Stage) -> None:
    rows = corpus.take(10).open(Lane(0, 1))
    for _ in range(10):
        next(rows)
    assert list(resumed(corpus.take(15), Lane(0, 1), saved(rows))) == [*range(10, 15)]
    fewer = corpus.take(9).open(Lane(0, 1))
    with pytest.raises(InvalidState, match=r"take: 10 rows of this lane were taken .* but now its share is 9"):
        fewer.load_state_dict(rows.state_dict())
    assert list(fewer) == [*range(9)]


def test_another_number_to_skip_begins_with_the_next_epoch(corpus: Stage) -> None:
    rows = corpus.skip(10).open(Lane(0, 1))
    assert [next(rows), next(rows)] == [10, 11]
    assert list(resumed(corpus.skip(30), Lane(0, 1), saved(rows))) == [*range(12, 60)]


@pytest.mark.parametrize("method", ["take", "skip"])
def test_they_are_in_the_fingerprint_and_in_print(corpus: Stage, method: str) -> None:
    stream = getattr(getattr(corpus, method)(5), method)(3)
    assert (stream.describe()[method], stream.describe()[f"{method}[1]"]) == (5, 3)
    assert stream.difference_class(f"{method}[1]") == "data"
    assert repr(stream).endswith(f".{method}(5).{method}(3)")


@pytest.mark.parametrize(
    ("rows", "error"), [(-1, ValueError), (1 << 63, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError)]
)
@pytest.mark.parametrize("method", ["take", "skip"])
def test_what_cannot_be_meant_fails_at_construction(
    corpus: Stage, method: str, rows: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"{method}: rows must be "):
        getattr(corpus, method)(rows)


@pytest.mark.parametrize("method", ["take", "skip"])
def test_what_is_no_position_is_refused(corpus: Stage, method: str) -> None:
    """Case 27."""
    rows = getattr(corpus, method)(5).open(Lane(0, 1))
    before, state = saved(rows), rows.state_dict()
    for wrong in ({}, {**state, "source": {}}, {**state, "source": 3}, {**state, [*state][1]: -1}):
        with pytest.raises(InvalidState, match=r"in a position must be|a position has the keys"):
            rows.load_state_dict(json.loads(json.dumps(wrong)))
        assert saved(rows) == before
