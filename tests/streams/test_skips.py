"""What cannot be read and is to be left out: counted, named, and left out again wherever rows are made again."""

from __future__ import annotations

import errno
import gzip
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.streams.far import Call, Store, far_away
from tests.streams.runs import assert_law, plain, resumed, run, run_lanes, saved
from unbroken.errors import BadRow, InvalidState
from unbroken.lanes import Lane
from unbroken.loader import StatefulDataLoader
from unbroken.streams.reading import retrying
from unbroken.streams.reading import skips as reading_skips
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage, StageIterator

LANE = Lane(0, 1)


def line(number: int) -> bytes:
    return b'{"text": "%d"}\n' % number


def reader(paths: Any, **options: Any) -> Stage:
    return read_jsonl(paths, on_error="skip", **options)


def left_out(rows: StageIterator, name: str = "read_jsonl") -> dict[str, Any]:
    """The record of what was left out, as the position has it."""
    record: dict[str, Any] = rows.state_dict()["journal"][name]
    return record


def opened(stream: Stage) -> StageIterator:
    """The only lane of an unshuffled reader, with one chunk a file."""
    rows = stream.open(LANE)
    state = rows.state_dict()
    rows.load_state_dict({**state, "rows": {**state["rows"], "grain": 1 << 20}})
    return rows


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """``far://a.jsonl`` to ``d.jsonl`` of ten rows each. A read is tried three times, and pauses take no time."""
    monkeypatch.setattr(retrying, "time", SimpleNamespace(sleep=lambda seconds: None))
    with far_away() as store:
        for n, name in enumerate("abcd"):
            store.files[f"{name}.jsonl"] = b"".join(map(line, range(10 * n, 10 * n + 10)))
        yield store


def texts(rows: Any) -> list[int]:
    return [int(row["text"]) for row in rows]


def test_bad_lines_are_left_out_counted_and_named(tmp_path: Path) -> None:
    """Case 31."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(line(0) + b"not JSON\n" + line(1) + b'"\xff"\n{"a": NaN}\n' + line(2))
    rows = reader(path).open(LANE)
    assert texts(rows) == [0, 1, 2]
    record = left_out(rows)
    assert record["count"] == 3
    assert [where for where, _ in record["named"]] == [f"{path}, byte {n}" for n in (14, 37, 41)]
    assert ["JSON" in reason or "UTF-8" in reason for _, reason in record["named"]] == [True] * 3
    with pytest.raises(BadRow, match="byte 14"):
        run(read_jsonl(path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@given(
    parts=st.lists(st.sampled_from(["good", "bad", "blank"]), max_size=30),
    window=st.sampled_from([0, 1, 4, 100]),
    count=st.integers(1, 3),
    chain=st.lists(st.integers(0, 6), max_size=3),
)
def test_every_restore_point_among_bad_lines_is_exact(
    tmp_path_factory: pytest.TempPathFactory, name: str, parts: list[str], window: int, count: int, chain: list[int]
) -> None:
    """Rows, positions and counts, through a shuffle and packing, over all lanes."""
    content = {"bad": b"{bad\n", "blank": b"\n"}
    text = b"".join(content.get(part) or line(n) for n, part in enumerate(parts))
    path = tmp_path_factory.mktemp("skips") / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    stream = reader(path)
    shuffled = stream.shuffle(window, seed=1) if window else stream
    packed = shuffled.tokenize(lambda text: list(text.encode())).pack(4)
    found = [assert_law(shuffled, Lane(index, count), chain) for index in range(count)]
    for index in range(count):
        assert_law(packed, Lane(index, count), chain)
    good = [n for n, part in enumerate(parts) if part == "good"]
    assert sorted(texts(row for rows in found for row in rows)) == good
    lanes = [shuffled.open(Lane(index, count)) for index in range(count)]
    assert sum(len(list(rows)) for rows in lanes) == len(good)
    assert sum(left_out(rows)["count"] for rows in lanes) == parts.count("bad")


def test_of_a_file_cut_in_its_middle_the_rest_is_left_out(tmp_path: Path) -> None:
    """Case 31: and the next file is read."""
    numbers = [pow(7, 1000 + n, 2**1279 - 1) for n in range(120)]
    whole = gzip.compress(b"".join(map(line, numbers)))
    cut, after = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"
    cut.write_bytes(whole[: len(whole) // 2])
    after.write_bytes(line(-1))
    stream = reader([cut, after])
    rows = stream.open(LANE)
    found = texts(rows)
    assert 20 < len(found) < 100
    assert found == [*numbers[: len(found) - 1], -1]
    record = left_out(rows)
    assert record["count"] == 1 and record["named"][0][0] == str(cut)
    assert "ends in the middle of its data" in record["named"][0][1]
    assert_law(stream.shuffle(40, seed=0), LANE, [20, 30])


def test_a_file_that_vanished_is_left_out(far: Store) -> None:
    stream = reader("far://?.jsonl")
    del far.files["b.jsonl"]
    rows = opened(stream)
    assert texts(rows) == [*range(10), *range(20, 40)]
    assert left_out(rows)["named"] == [["far://b.jsonl", "b.jsonl"]]


_EXAMPLES = itertools.count()


@pytest.mark.parametrize("read_ahead", [False, True])
@settings(max_examples=15)
@given(
    lost=st.sets(st.integers(0, 19), min_size=1),
    window=st.sampled_from([0, 1, 7, 25, 100]),
    packs=st.booleans(),
)
def test_what_was_left_out_is_left_out_again_though_it_can_be_read_now(
    read_ahead: bool, lost: set[int], window: int, packs: bool
) -> None:
    """Failures that outlast the retries and pass later: rows, positions and counts are those of the first run."""
    # A thread may still read ahead for what was left of the example before: files of each have names of their own.
    example = next(_EXAMPLES)

    def is_lost(path: str) -> bool:
        return path.startswith(f"{example}/") and int(path[-8:-6]) in lost

    with far_away() as far:
        far.files |= {f"{example}/{n:02}.jsonl": b"".join(map(line, range(3 * n, 3 * n + 3))) for n in range(20)}
        stream = reader(f"far://{example}/*.jsonl", retries=0, read_ahead=read_ahead)
        stream = stream.shuffle(window, seed=1) if window else stream
        if packs:
            stream = stream.tokenize(lambda text: list(text.encode())).pack(5)
        met = _fails(far, is_lost)
        rows = stream.open(LANE)
        ref, positions = [], [saved(rows)]
        for row in rows:
            ref.append(plain(row))
            positions.append(saved(rows))
        for k, state in enumerate(positions):
            again = resumed(stream, LANE, state)
            readable = set(met[: left_out(again)["count"]])
            _fails(far, lambda path: is_lost(path) and path not in readable)  # noqa: B023
            for n in range(k, len(ref)):
                assert plain(next(again)) == ref[n]
                assert saved(again) == positions[n + 1]
            assert next(again, None) is None
        assert left_out(rows)["count"] == len(lost)


def _fails(far: Store, lost: Callable[[str], bool]) -> list[str]:
    """Lets the reads of some files fail. Returns these files in the order in which they do."""
    met: list[str] = []

    def before(call: Call) -> None:
        if call.what == "cat" and lost(call.path):
            if call.path not in met:
                met.append(call.path)
            raise OSError(errno.EIO, "lost")

    far.before = before
    return met


def test_a_failure_is_counted_once_however_often_it_is_met(far: Store) -> None:
    stream = reader("far://?.jsonl", retries=2, read_ahead=False)
    _fails(far, "b.jsonl".__eq__)
    rows = opened(stream)
    assert texts(rows) == [*range(10), *range(20, 40)]
    assert len(far.read("b.jsonl")) == 3
    record = left_out(rows)
    assert record["count"] == 1
    ((where, reason),) = record["named"]
    assert where == "far://b.jsonl" and "lost" in reason
    again = resumed(stream, LANE, saved(rows))
    assert next(again, None) is None and left_out(again) == record


def test_a_bad_line_at_the_very_end_is_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line(0) + line(1) + b"bad\n")
    stream = reader(path).shuffle(10, seed=0)
    rows = stream.open(LANE)
    next(rows)
    state = saved(rows)
    assert left_out(rows)["count"] == 1
    for _ in range(3):
        rows = resumed(stream, LANE, state)
        assert len(list(rows)) == 1 and left_out(rows)["count"] == 1


def test_a_line_that_was_bad_and_left_out_is_left_out_again_though_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    mended = b"".join(map(line, range(10, 20)))
    path.write_bytes(mended.replace(b'"15"', b'"15 '))
    stream = reader(path).shuffle(10, seed=1)
    rows = stream.open(LANE)
    found, state = [next(rows)], saved(rows)
    path.write_bytes(mended)
    again = resumed(stream, LANE, state)
    assert sorted(texts([*found, *again])) == [n for n in range(10, 20) if n != 15]
    assert left_out(again)["count"] == 1


def test_rows_that_were_delivered_and_cannot_be_read_again_are_no_skip(far: Store) -> None:
    """Else other rows would come in silence."""
    stream = reader("far://?.jsonl", retries=1).shuffle(25, seed=1)
    rows = stream.open(LANE)
    found = [next(rows) for _ in range(10)]  # of a window of rows 0 to 24
    state = saved(rows)
    _fails(far, "b.jsonl".__eq__)
    again = resumed(stream, LANE, state)
    for _ in range(2):
        with pytest.raises(
            BadRow, match=r"far://b\.jsonl: cannot be read from byte 0 of a chunk on, and could be when"
        ):
            next(again)
    far.before = lambda call: None
    assert texts([*found, *again]) == texts(stream.open(LANE))


def test_what_was_not_yet_read_at_the_save_may_be_left_out_after_it(far: Store) -> None:
    stream = reader("far://?.jsonl", retries=1, read_ahead=False)
    rows = opened(stream)
    found = [next(rows) for _ in range(10)]
    _fails(far, "c.jsonl".__eq__)
    again = resumed(stream, LANE, saved(rows))
    assert texts([*found, *again]) == [*range(20), *range(30, 40)]
    assert left_out(again)["count"] == 1


def test_a_bug_is_not_left_out(far: Store) -> None:
    stream = reader("far://?.jsonl", read_ahead=False)
    far.fail(1, lambda: ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        run(stream)


@pytest.mark.parametrize("bad", [300, 2000])
def test_of_many_bad_lines_the_position_keeps_a_bounded_number(tmp_path: Path, bad: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(line(n) + b"bad\n" for n in range(bad)))
    stream = reader(path).shuffle(bad, seed=1)
    rows = stream.open(LANE)
    first = next(rows)
    state = saved(rows)
    assert left_out(rows)["count"] == bad and len(left_out(rows)["named"]) == 4
    assert len(state) < 10_000
    again = resumed(stream, LANE, state)
    assert sorted(texts([first, *again])) == list(range(bad))
    assert left_out(again)["count"] == bad


def test_more_failures_than_a_position_keeps_are_an_error_where_they_matter(
    far: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what can be read now would come in place of what came then."""
    monkeypatch.setattr(reading_skips, "_MOST_PLACES", 5)
    for n in range(20):
        far.files[f"{n:02}.jsonl"] = line(n)
    stream = reader("far://??.jsonl", retries=0, read_ahead=False)

    _fails(far, lambda path: 3 <= int(path[:2]) < 15)
    rows, shuffled = stream.open(LANE), stream.shuffle(100, seed=1).open(LANE)
    found = [*(next(rows) for _ in range(5)), next(shuffled)]
    assert left_out(rows)["count"] == left_out(shuffled)["count"] == 12
    assert len(left_out(rows)["places"]) == 5
    far.before = lambda call: None
    assert texts([*found[:5], *resumed(stream, LANE, saved(rows))]) == [*range(3), *range(15, 20)]
    with pytest.raises(BadRow, match="not all of it is known any more"):
        next(resumed(stream.shuffle(100, seed=1), LANE, saved(shuffled)))


def test_lanes_in_workers_leave_out_and_go_on(tmp_path: Path) -> None:
    """Case 20."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(line(n) if n % 7 else b"bad\n" for n in range(200)))
    stream = reader(path).shuffle(30, seed=1)
    ref = [texts(rows) for rows in run_lanes(stream, 4)]
    loader = StatefulDataLoader(stream, batch_size=None, num_workers=2, lanes=4)
    found = [int(row["text"]) for _, row in zip(range(60), loader, strict=False)]
    state = loader.state_dict()
    loader.close()
    loader = StatefulDataLoader(stream, batch_size=None, num_workers=0, lanes=4)
    loader.load_state_dict(state)
    found += [int(row["text"]) for row in loader]
    assert sorted(found) == sorted(n for lane in ref for n in lane) == [n for n in range(200) if n % 7]


@pytest.mark.parametrize(
    "record",
    [
        {"reached": [0, 0], "forgotten": [-1, 0, 0], "count": 0, "places": [], "named": []},
        {"reached": [0, 0, 0], "forgotten": "x", "count": 0, "places": [], "named": []},
        {"reached": [0, 0, 0], "forgotten": [-1, 0, 0], "count": 0, "places": [["a", 0, 0, "row"]], "named": []},
        {"reached": [0, 0, 0], "forgotten": [-1, 0, 0], "count": -1, "places": [], "named": []},
        {"count": 0},
    ],
)
def test_a_record_that_is_none_is_refused(tmp_path: Path, record: dict[str, Any]) -> None:
    """Case 27."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(line(0))
    rows = reader(path).open(LANE)
    state = rows.state_dict()
    with pytest.raises(InvalidState, match="skipped rows"):
        rows.load_state_dict({**state, "journal": {"read_jsonl": record}})
