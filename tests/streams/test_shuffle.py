"""Shuffle: every row once, another order in each epoch, and a window that is read again on a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.streams.runs import assert_law, plain, run, run_lanes, saved, write_jsonl
from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.streams import shuffle
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage


@pytest.fixture
def corpus(tmp_path: Path) -> Stage:
    return read_jsonl([write_jsonl(tmp_path / f"{n}.jsonl", range(40 * n, 40 * n + 40)) for n in range(3)])


@pytest.mark.parametrize("window", [1, 2, 50, 10_000])
@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 4, epoch=2, seed=9)])
def test_every_restore_point_of_a_window_is_exact(corpus: Stage, window: int, lane: Lane) -> None:
    """Case 28: windows of 1, 50 and 10 000."""
    assert_law(corpus.shuffle(window, seed=1), lane, [3, 0, 1, 7])


@pytest.mark.parametrize("window", [1, 7, 10_000])
@pytest.mark.parametrize("lanes", [1, 3, 64])
def test_lanes_share_out_every_row_once_in_every_epoch(corpus: Stage, window: int, lanes: int) -> None:
    """Case 14: the order of an epoch is a function of (seed, epoch)."""
    stream = corpus.shuffle(window, seed=3)
    epochs = [run_lanes(stream, lanes, epoch=epoch) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(row for rows in epoch for row in rows) == list(range(120))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert run_lanes(stream, lanes, epoch=1) == epochs[1]


def test_chunks_are_permuted_and_rows_mixed_within_the_window(corpus: Stage) -> None:
    by_chunk = run(corpus.shuffle(1, seed=1))
    assert sorted(by_chunk) == list(range(120)) != by_chunk
    assert sum(b == a + 1 for a, b in pairwise(by_chunk)) > 80
    for start in range(0, 120, 10):
        mixed = run(corpus.shuffle(10, seed=1))[start : start + 10]
        assert sorted(mixed) == sorted(by_chunk[start : start + 10])
    assert run(corpus.shuffle(10, seed=1)) != by_chunk
    assert run(corpus) == list(range(120))


def test_the_window_is_shared_by_the_lanes(corpus: Stage) -> None:
    assert saved(corpus.shuffle(100, seed=1).open(Lane(0, 8))).count('"size": 13')


def test_without_a_seed_the_loaders_is_taken(corpus: Stage) -> None:
    def order(seed: int | None, of_loader: int) -> Any:
        return run(corpus.shuffle(10, seed), Lane(0, 2, seed=of_loader))

    assert order(None, 5) == order(5, 0) == order(5, 1) != order(None, 6)


def test_the_shuffle_next_to_the_files_orders_their_chunks(corpus: Stage) -> None:
    inner = corpus.shuffle(1, seed=1)
    assert run(inner.shuffle(1, seed=2)) == run(inner)
    assert sorted(run(corpus.map(_same).shuffle(10, seed=1).shuffle(30, seed=2))) == list(range(120))
    assert_law(corpus.shuffle(7, seed=1).shuffle(20, seed=2), Lane(1, 2), [5, 4])


def _same(row: Any) -> Any:
    return row


def test_the_order_is_the_same_in_every_version() -> None:
    """It is in saved positions, so it may never change."""
    assert shuffle._permutation(8, 12345) == [7, 0, 1, 5, 4, 6, 3, 2]
    assert shuffle._permutation(1, 5) == [0]


@pytest.mark.parametrize(
    "change", [lambda s: s.shuffle(500, seed=1), lambda s: s.shuffle(3, seed=1), lambda s: s.shuffle(30, seed=2)]
)
@pytest.mark.parametrize("taken", [0, 1, 29, 30, 31, 100])
def test_another_window_or_seed_at_a_resume_loses_and_repeats_nothing(
    corpus: Stage, change: Callable[[Stage], Stage], taken: int
) -> None:
    """A window is finished as it was begun, an epoch keeps the seed it was begun with."""
    rows = corpus.shuffle(30, seed=1).open(Lane(0, 1))
    found = [next(rows) for _ in range(taken)]
    after = change(corpus).open(Lane(0, 1))
    after.load_state_dict(json.loads(saved(rows)))
    assert sorted(found + [plain(row) for row in after]) == list(range(120))


def test_a_source_that_raises_in_the_middle_of_a_window_loses_nothing(corpus: Stage) -> None:
    failed = []

    def fail_once(row: int) -> int:
        if row % 50 == 20 and row not in failed:
            failed.append(row)
            raise OSError(f"row {row}")
        return row

    rows, found = corpus.map(fail_once).shuffle(25, seed=1).open(Lane(0, 1)), []
    while len(found) < 118:
        try:
            found.append(next(rows))
        except OSError:
            continue
    assert sorted([*found, *failed, *rows]) == list(range(120))


def test_a_window_that_cannot_be_filled_again_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", range(10))
    rows = read_jsonl(path).shuffle(10, seed=1).open(Lane(0, 1))
    for _ in range(8):
        next(rows)
    write_jsonl(path, range(5))
    again = read_jsonl(path).shuffle(10, seed=1).open(Lane(0, 1))
    again.load_state_dict(rows.state_dict())
    with pytest.raises(InvalidState, match=r"8 rows of window 0 of lane 0 were delivered, but now it has \d rows"):
        next(again)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0, 1), ValueError, "shuffle: window must be at least 1, but got 0"),
        ((1.5, 1), TypeError, "shuffle: window must be a whole number, but got 1.5 (float)"),
        ((True, 1), TypeError, "window must be a whole number"),
        ((9, -1), ValueError, "shuffle: seed must be at least 0, but got -1"),
        ((9, 1 << 64), ValueError, "shuffle: seed must be at most 18446744073709551615"),
        ((9, "x"), TypeError, "seed must be a whole number"),
    ],
)
def test_wrong_arguments_fail_at_construction(
    corpus: Stage, arguments: tuple[Any, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        corpus.shuffle(*arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"taken": 10}, "10 rows into a window of 10 cannot be"),
        ({"window": -1}, "window in a position must be a whole number"),
        ({"anchor": 3}, "anchor in a position must be a dict"),
        ({"anchor": {}}, "read_jsonl: a position has the keys"),
        ({"more": 3}, "shuffle: a position has the keys"),
    ],
)
def test_what_is_no_position_is_refused(corpus: Stage, change: dict[str, Any], text: str) -> None:
    """Case 27: refused, and nothing of it is used."""
    rows = corpus.shuffle(10, seed=1).open(Lane(0, 1))
    before = saved(rows)
    with pytest.raises(InvalidState) as caught:
        rows.load_state_dict({**rows.state_dict(), **change})
    assert text in str(caught.value)
    assert saved(rows) == before
