"""Compressed files from any place on: the text and the rows are the same whichever way leads there, and it is short."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import logging
import os
import random
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

from tests.streams.runs import assert_law, resumed, run, saved, write_jsonl
from unbroken import options
from unbroken.errors import BadRow, InvalidState
from unbroken.lanes import Lane
from unbroken.streams.reading import files as reading_files
from unbroken.streams.reading import points as reading_points
from unbroken.streams.reading.compressed import Unpacked
from unbroken.streams.reading.files import Access, find_files
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.reading.points import Points, cache_folder

SPACING, BLOCK = 50_000, 16_384
# How far apart points can lie: a spacing, and a block of deflate, in text.
FURTHEST = SPACING + 60_000
ACCESS = Access()


def rows_of(count: int, words: int = 300) -> list[dict[str, Any]]:
    """Rows of some 1.5 kB, which compressors halve."""
    drawn = random.Random(count)
    return [{"id": n, "text": " ".join(f"{drawn.randrange(10**5):x}" for _ in range(words))} for n in range(count)]


ROWS = rows_of(300)
LINES = [json.dumps(row).encode() + b"\n" for row in ROWS]
TEXT = b"".join(LINES)


def in_parts(lines: list[bytes]) -> list[bytes]:
    """The text in parts, cut within lines, some of them empty."""
    text, cuts = b"".join(lines), sorted(random.Random(1).choices(range(len(lines) * 1500), k=12))
    return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]


KINDS = {
    "one.jsonl.gz": gzip.compress(TEXT),
    "members.jsonl.gz": b"".join(gzip.compress(part) + b"\0" * (len(part) % 3) for part in in_parts(LINES)),
    "stored.jsonl.gz": gzip.compress(TEXT, 0),
    "one.jsonl.zst": zstandard.ZstdCompressor().compress(TEXT),
    "frames.jsonl.zst": b"".join(zstandard.ZstdCompressor(write_checksum=True).compress(p) for p in in_parts(LINES)),
}


@pytest.fixture(scope="module")
def patch() -> Iterator[MonkeyPatch]:
    with MonkeyPatch.context() as patched:
        yield patched


@pytest.fixture(scope="module", autouse=True)
def folder(patch: MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of each kind; points lie close, and blocks of the files are small."""
    made = tmp_path_factory.mktemp("compressed")
    patch.setenv("UNBROKEN_CACHE", str(made / "cache"))
    patch.setattr(reading_points, "_LEAST_SPACING", SPACING)
    patch.setattr(reading_points, "_MOST_POINTS", 1 << 30)
    patch.setattr(reading_files, "_LOCAL_BLOCK", BLOCK)
    for name, data in KINDS.items():
        (made / name).write_bytes(data)
    return made


@pytest.fixture
def cache(monkeypatch: MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for points of this test alone; what is said once is said anew."""
    monkeypatch.setenv("UNBROKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(options, "_said", set())
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch: MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges of bytes that are read."""
    made: list[tuple[int, int]] = []

    def read(path: str, start: int, stop: int, real: Any = reading_files._read_local) -> bytes:
        made.append((start, stop))
        return bytes(real(path, start, stop))

    monkeypatch.setattr(reading_files, "_read_local", read)
    return made


def texts_of(folder: Path) -> list[int]:
    """Where in the text of the file with one member there are points."""
    (file,) = find_files("test", folder / "one.jsonl.gz", "infer", {})
    return sorted(point.text for point in Points(file).before(len(TEXT)))


def positions(path: Path) -> list[str]:
    """The position before each row, and at the end."""
    rows = read_jsonl(path).open(Lane(0, 1))
    return [saved(rows), *(saved(rows) for _ in rows)]


@pytest.mark.parametrize("name", KINDS)
@given(place=st.integers(0, len(TEXT) + 1))
def test_the_text_from_any_place_on_is_what_is_there(folder: Path, name: str, place: int) -> None:
    (file,) = find_files("test", folder / name, "infer", {})
    whole = Unpacked(file, 0, [], ACCESS)
    assert b"".join(whole) == TEXT
    mark = Unpacked(file, 0, [], ACCESS)
    assert mark.mark(0) is None
    b"".join(mark)
    assert b"".join(Unpacked(file, place, mark.mark(place) or [], ACCESS)) == TEXT[place:]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("read_ahead", [False, True])
def test_every_restore_point_is_exact(folder: Path, name: str, read_ahead: bool) -> None:
    """Case 32. The first run keeps points, and the resumed ones go by them."""
    small = folder / f"small.{name}"
    if not small.exists():
        lines = LINES[:80]
        packed = gzip.compress if name.endswith("gz") else zstandard.ZstdCompressor().compress
        parts = in_parts(lines) if name.startswith(("members", "frames")) else [b"".join(lines)]
        small.write_bytes(b"".join(map(packed, parts)))
    assert assert_law(read_jsonl(small, read_ahead=read_ahead), Lane(0, 1), [20, 50]) == ROWS[:80]
    assert read_ahead or len(assert_law(read_jsonl(small).shuffle(30, seed=1), Lane(0, 1), [20, 50])) == 80


@pytest.mark.parametrize("name", ["members.jsonl.gz", "frames.jsonl.zst"])
def test_the_position_names_the_member_so_that_a_resume_needs_no_folder(
    folder: Path, name: str, cache: Path, reads: list[tuple[int, int]]
) -> None:
    states = positions(folder / name)
    place = len(ROWS) * 9 // 10
    text, offset, before = json.loads(states[place])["place"]
    assert before < text == len(b"".join(LINES[:place]))
    reads.clear()
    assert next(resumed(read_jsonl(folder / name), Lane(0, 1), states[place])) == ROWS[place]
    assert reads[0][0] == offset > len(KINDS[name]) // 2
    assert sum(stop - start for start, stop in reads) <= (text - before) + 2 * BLOCK
    assert not cache.exists()


def test_a_resume_in_a_file_of_one_member_goes_by_a_point(
    tmp_path: Path, cache: Path, reads: list[tuple[int, int]]
) -> None:
    """At 90 % of the file, what is read is the way from a point, a block at the most, and what comes next."""
    rows = rows_of(1300)
    path = write_jsonl(tmp_path / "a.jsonl.gz", rows)
    states = positions(path)
    for place in (650, 1170, 1299):
        reads.clear()
        assert next(resumed(read_jsonl(path), Lane(0, 1), states[place])) == rows[place]
        assert reads[0][0] > 0 and reads == sorted(set(reads))
        assert reads[-1][1] - reads[0][0] <= FURTHEST * 0.6 + BLOCK < path.stat().st_size / 10


def test_points_are_added_where_there_are_none_and_nowhere_else(folder: Path, cache: Path) -> None:
    stream = read_jsonl(folder / "one.jsonl.gz")
    rows = stream.open(Lane(0, 1))
    for _ in range(150):
        next(rows)
    half, state = texts_of(folder), saved(rows)
    assert 0 < len(half) < 6
    assert len(list(resumed(stream, Lane(0, 1), state))) == 150
    whole = texts_of(folder)
    assert whole[: len(half)] == half
    assert all(SPACING <= after - before <= FURTHEST for before, after in itertools.pairwise(whole))
    run(stream)
    assert texts_of(folder) == whole


def test_without_points_a_resume_is_exact_and_says_once_what_helps(
    folder: Path, cache: Path, monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a file").touch()
    monkeypatch.setenv("UNBROKEN_CACHE", str(folder / "a file" / "below"))  # which cannot be
    states = positions(folder / "one.jsonl.gz")
    with caplog.at_level(logging.WARNING, "unbroken"):
        for place in (150, 200):
            assert list(resumed(read_jsonl(folder / "one.jsonl.gz"), Lane(0, 1), states[place])) == ROWS[place:]
    (record,) = caplog.records
    assert str(folder / "a file" / "below") in record.getMessage()
    assert "UNBROKEN_CACHE" in record.getMessage()


def test_a_file_of_one_frame_is_read_from_its_start_and_says_once_what_helps(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = positions(folder / "one.jsonl.zst")
    with caplog.at_level(logging.WARNING, "unbroken"):
        for place in (150, 200):
            assert list(resumed(read_jsonl(folder / "one.jsonl.zst"), Lane(0, 1), states[place])) == ROWS[place:]
    assert ["pzstd" in record.getMessage() for record in caplog.records] == [True]


@given(
    damage=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), max_size=20), cut=st.integers(0, 1 << 20)
)
def test_whatever_becomes_of_the_points_the_rows_are_the_same(
    folder: Path, damage: list[tuple[int, int]], cut: int
) -> None:
    stream = read_jsonl(folder / "one.jsonl.gz")
    (file,) = find_files("test", folder / "one.jsonl.gz", "infer", {})
    path = Path(Points(file).path)
    if not path.exists():
        run(stream)
    whole = path.read_bytes()
    data = bytearray(whole)
    for place, value in damage:
        data[place % len(data)] = value
    path.write_bytes(data[: len(data) - cut % len(data)] + whole[:3000])
    rows = stream.open(Lane(0, 1))
    rows.load_state_dict({"chunk": 0, "place": len(b"".join(LINES[:275])), "grain": 1, "order": None})
    assert list(rows) == ROWS[275:]
    path.write_bytes(whole)


def test_points_of_another_file_are_passed_over(folder: Path, cache: Path, tmp_path: Path) -> None:
    """One of the same path, size and time, as tests and copies make them."""
    path, other = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    path.write_bytes(KINDS["one.jsonl.gz"])
    other.write_bytes(gzip.compress(b"".join(LINES[::-1])))
    files = [find_files("test", each, "infer", {})[0] for each in (path, other)]
    run(read_jsonl(path))
    points = [Path(Points(file).path) for file in files]
    points[1].write_bytes(points[0].read_bytes())
    place = len(TEXT) * 9 // 10
    assert b"".join(Unpacked(files[1], place, [], ACCESS)) == b"".join(LINES[::-1])[place:]


def test_a_file_that_was_written_anew_has_points_of_its_own(folder: Path, cache: Path, tmp_path: Path) -> None:
    path, names = tmp_path / "a.jsonl.gz", set()
    for when in (1, 2):
        path.write_bytes(KINDS["one.jsonl.gz"])
        os.utime(path, (when, when))
        names.add(Points(find_files("test", path, "infer", {})[0]).path)
    assert len(names) == 2


def test_several_at_once_keep_whole_points(folder: Path, cache: Path) -> None:
    (file,) = find_files("test", folder / "one.jsonl.gz", "infer", {})
    threads = [threading.Thread(target=run, args=(read_jsonl(folder / "one.jsonl.gz"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data, found, at = Path(Points(file).path).read_bytes(), 0, 0
    while at < len(data):
        point, at = reading_points._unpacked(data, at)
        assert point is not None
        found += 1
    assert found >= len(texts_of(folder)) > 0  # how many depends on who was where when


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("where", ["middle", "end"])
def test_of_a_damaged_file_the_same_rows_come_from_wherever_it_is_resumed(
    folder: Path, tmp_path: Path, name: str, where: str
) -> None:
    """Case 31: the rows before the damage, then the same error, with points and without."""
    data = bytearray(KINDS[name])
    place = len(data) * 6 // 10 if where == "middle" else len(data) - 6 - len(data) % 3
    data[place] ^= 0x55
    path = tmp_path / name
    path.write_bytes(data)
    stream = read_jsonl(path)

    def outcome(rows: Any) -> tuple[list[Any], str]:
        found = []
        try:
            for row in rows:
                found.append(row)
        except (BadRow, ValueError) as error:
            return found, str(error).partition(" of its text")[0]
        return found, ""

    rows = stream.open(Lane(0, 1))
    states = [saved(rows)]
    with contextlib.suppress(BadRow):
        for _ in rows:
            states.append(saved(rows))
    ref, error = outcome(stream.open(Lane(0, 1)))
    assert error or name == "one.jsonl.zst"
    assert len(ref) == len(states) - 1
    for k in range(0, len(states), 23):
        assert outcome(resumed(stream, Lane(0, 1), states[k])) == (ref[k:], error)


def test_the_folder_is_the_one_that_is_named(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_CACHE", "/shared/points")
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/xdg")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == "/shared/points"
    monkeypatch.delenv("UNBROKEN_CACHE")
    assert cache_folder() == "/tmp/xdg/unbroken"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == "/home/me/.cache/unbroken"


def test_points_of_a_large_file_stay_few() -> None:
    (small, large) = (reading_files.SourceFile("a", size, "gzip") for size in (1 << 20, 64 << 30))
    with MonkeyPatch.context() as patch:
        patch.setattr(reading_points, "_LEAST_SPACING", 4 << 20)
        patch.setattr(reading_points, "_MOST_POINTS", 32)
        assert reading_points.spacing_of(small) == 4 << 20
        assert reading_points.spacing_of(large) == 2 << 30


@pytest.mark.parametrize("place", [[], [5, -1, 0], [5, "x", 0], [1.5, 0, 0], [True, 0, 0], [5, None]])
def test_a_mark_that_is_none_is_refused(folder: Path, place: Any) -> None:
    rows = read_jsonl(folder / "members.jsonl.gz").open(Lane(0, 1))
    before = saved(rows)
    with pytest.raises(InvalidState, match="a place in a position has whole numbers"):
        rows.load_state_dict({"chunk": 0, "place": place, "grain": 9, "order": None})
    assert saved(rows) == before


def test_a_mark_beyond_its_place_is_not_gone_by(folder: Path) -> None:
    rows = read_jsonl(folder / "members.jsonl.gz").open(Lane(0, 1))
    rows.load_state_dict({"chunk": 0, "place": [len(LINES[0]), 10, 99_999], "grain": 9, "order": None})
    assert next(rows) == ROWS[1]
    assert zlib.crc32(TEXT) == zlib.crc32(b"".join(LINES))
