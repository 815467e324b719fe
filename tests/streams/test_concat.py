"""Concat: the rows of one stream after those of another, on every lane."""

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
from unbroken.streams.concat import concat
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage


@pytest.fixture
def streams(tmp_path: Path) -> list[Stage]:
    """Rows 0 to 9, none, 10 to 29, 30 to 39."""
    bounds = [(0, 10), (10, 10), (10, 30), (30, 40)]
    return [read_jsonl(write_jsonl(tmp_path / f"{n}.jsonl", range(*rows))) for n, rows in enumerate(bounds)]


def always(row: Any) -> bool:
    return True


def augmented(row: Any) -> Any:
    return [row, random.random()]


def test_the_streams_come_one_after_another(streams: list[Stage]) -> None:
    assert run(concat(streams)) == [*range(40)]
    assert run(concat(streams[::-1])) == [*range(30, 40), *range(10, 30), *range(10)]
    assert run(concat((streams[0], streams[0]))) == [*range(10)] * 2
    assert run(concat([concat(streams[:2]), streams[3]])) == [*range(10), *range(30, 40)]
    assert run(concat(streams[1:2])) == run(concat([streams[1], streams[1]])) == []


@pytest.mark.parametrize("count", [2, 3, 64])
def test_every_lane_goes_through_all_of_them(streams: list[Stage], count: int) -> None:
    of_each = [run_lanes(stream, count) for stream in streams]
    lanes = [[row for rows in parts for row in rows] for parts in zip(*of_each, strict=True)]
    assert run_lanes(concat(streams), count) == lanes


@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 3, epoch=2, seed=9)])
@pytest.mark.parametrize(
    "build",
    [
        concat,
        lambda streams: concat([concat(streams), *streams]).shuffle(50, seed=1),
        lambda streams: concat([rows.shuffle(5, seed=1).map(augmented) for rows in streams]).take(20),
        lambda streams: concat([rows.flat_map(lambda rows: rows, batched=4) for rows in streams]).repeat(2),
    ],
)
def test_every_restore_point_is_exact(streams: list[Stage], build: Callable[[list[Stage]], Stage], lane: Lane) -> None:
    assert_law(build(streams), lane, [3, 0, 1, 7, 10])


def test_a_shuffle_behind_it_orders_the_chunks_of_each(streams: list[Stage]) -> None:
    found = run(concat(streams).shuffle(1, seed=1))
    assert found != [*range(40)]
    assert [sorted(found[:10]), sorted(found[10:30]), sorted(found[30:])] == [
        [*range(10)],
        [*range(10, 30)],
        [*range(30, 40)],
    ]
    across = run(concat(streams).shuffle(40, seed=1))
    assert sorted(across) == [*range(40)] and set(across[:10]) != {*range(10)}


def test_random_numbers_differ_between_equal_streams(streams: list[Stage]) -> None:
    one = streams[0].map(augmented)
    drawn = [number for _, number in run(concat([one, one]))]
    assert len(set(drawn)) == 20


def test_streams_after_the_current_one_are_not_read(streams: list[Stage], tmp_path: Path) -> None:
    rows = concat(streams).open(Lane(0, 1))
    (tmp_path / "3.jsonl").unlink()
    assert [next(rows) for _ in range(30)] == [*range(30)]
    before = saved(rows)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            next(rows)
    write_jsonl(tmp_path / "3.jsonl", range(30, 40))
    assert list(rows) == list(resumed(concat(streams), Lane(0, 1), before)) == [*range(30, 40)]


def test_a_row_comes_from_the_stream_that_it_was_read_from(streams: list[Stage], tmp_path: Path) -> None:
    rows = concat(streams).open(Lane(0, 1), lineage=True)
    for row in rows:
        (origin,) = rows.origin()
        file = 0 if row < 10 else 2 if row < 30 else 3
        assert (origin.source, origin.file) == (str(file), f"{tmp_path}/{file}.jsonl")
        assert f"{file}.jsonl" in rows.where()


def test_what_each_leaves_out_is_kept_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("1\n{\n2\n")
    stream = concat([read_jsonl(tmp_path / f"{name}.jsonl", on_error="skip") for name in ("a", "b", "a")])
    rows = stream.open(Lane(0, 1))
    assert list(rows) == [1, 2] * 3
    journal = rows.state_dict()["journal"]
    assert {name: record["count"] for name, record in journal.items()} == {
        f"{number}/read_jsonl": 1 for number in range(3)
    }
    assert assert_law(stream, Lane(0, 1), [1, 2]) == [1, 2] * 3


def test_the_fingerprint_numbers_the_fields_of_each(streams: list[Stage]) -> None:
    stream = concat([streams[0].filter(always), streams[2].filter(always).take(3)]).shuffle(9)
    described = stream.describe()
    assert described["stages"] == "[read_jsonl > filter, read_jsonl > filter > take] > concat > shuffle"
    assert [*described] == ["stages", "files", "filter[0]", "files[1]", "filter[1]", "take", "window", "shuffle_seed"]
    assert described["files"] != described["files[1]"]
    assert stream.difference_class("files[1]") == "data, held"


def test_print_shows_the_branches(streams: list[Stage]) -> None:
    stream = concat([streams[0], streams[3].take(2)]).shuffle(9)
    assert repr(stream) == f"concat([{streams[0]!r}, {streams[3]!r}.take(2)]).shuffle(window=9)"
    lines = str(stream).splitlines()
    assert [line.partition("read_jsonl")[0] for line in lines] == [
        "shuffle(window=9)",
        "└─ concat(2 streams)",
        "   ├─ ",
        "   └─ take(2)",
        "      └─ ",
    ]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ([], ValueError, "at least one stream, but it is empty"),
        (3, TypeError, "must be a list of streams, but got a int"),
        ("ab", TypeError, "item 0 of streams must be a stream, but is a str"),
        ({"a": 1}, TypeError, "must be a list of streams, but got a dict"),
    ],
)
def test_what_is_no_list_of_streams_fails_at_construction(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"concat: .*{text}"):
        concat(given)


def test_a_stream_is_no_list_of_streams(streams: list[Stage]) -> None:
    with pytest.raises(TypeError, match=r"must be a list of streams, but got a Source.\nPass concat\(\[a, b\]\)"):
        concat(streams[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="item 1 of streams must be a stream, but is a list"):
        concat([streams[0], [streams[1]]])  # type: ignore[list-item]


def test_what_is_no_position_is_refused(streams: list[Stage]) -> None:
    """Case 27."""
    rows = concat(streams).open(Lane(0, 1))
    before, state = saved(rows), rows.state_dict()
    for wrong in ({}, {**state, "stream": 4}, {**state, "stream": -1}, {"stream": 1, "source": {}}):
        with pytest.raises(
            InvalidState, match=r"in a position must be|a position has the keys|but there are 4 streams"
        ):
            rows.load_state_dict(json.loads(json.dumps(wrong)))
        assert saved(rows) == before
    assert list(rows) == [*range(40)]
