"""Reading JSON lines: what a row is, which files, which lane, and what goes wrong by name."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard

from tests.streams.runs import assert_law, packed_as, plain, resumed, run, run_lanes, saved, write_jsonl
from unbroken.errors import BadRow, InvalidState
from unbroken.lanes import Lane
from unbroken.streams.reading import files as reading_files
from unbroken.streams.reading.chunks import chunk_bytes
from unbroken.streams.reading.jsonl import read_jsonl

ROWS = [{"id": n, "text": "x" * (n % 7)} for n in range(40)]


def rows_of(tmp_path: Path, content: bytes, name: str = "a.jsonl") -> list[Any]:
    (tmp_path / name).write_bytes(packed_as(name, content))
    return run(read_jsonl(tmp_path / name))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n\n \r\n", []),
        (b'{"a": 1}', [{"a": 1}]),
        (b'{"a": 1}\n{"a": 2}', [{"a": 1}, {"a": 2}]),
        (b'{"a": 1}\r\n\r\n{"a": 2}\r\n', [{"a": 1}, {"a": 2}]),
        (b'\n\n{"a": 1}\n   \n\t\n{"a": 2}\n\n', [{"a": 1}, {"a": 2}]),
        (b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        (b'\xef\xbb\xbf\n{"a": 2}\n', [{"a": 2}]),
        (b"\xef\xbb\xbf", []),
        (b'[1, 2]\n"x"\n3\nnull\n', [[1, 2], "x", 3, None]),
        (b'{"a":\r1}\n', [{"a": 1}]),
        ('{"a": "é\u2028\u0085日"}\n'.encode(), [{"a": "é\u2028\u0085日"}]),
    ],
)
def test_a_row_is_what_its_line_holds(tmp_path: Path, name: str, content: bytes, expected: list[Any]) -> None:
    """Case 32: empty files, blank lines, CRLF, a byte order mark, no newline at the end."""
    assert rows_of(tmp_path, content, name) == expected


@pytest.mark.parametrize("lanes", [1, 3, 64])
def test_a_line_of_50_mb_is_one_row_in_one_lane(tmp_path: Path, lanes: int) -> None:
    """Case 32."""
    path = write_jsonl(tmp_path / "a.jsonl", ["before", "y" * 50_000_000, "after"])
    found = [row for rows in run_lanes(read_jsonl(path), lanes) for row in rows]
    assert sorted(map(len, found)) == [5, 6, 50_000_000]


@pytest.mark.parametrize("lanes", [1, 2, 3, 5, 8, 64, 1000])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("at_end", [True, False])
def test_lanes_share_out_every_row_once(tmp_path: Path, lanes: int, newline: str, at_end: bool) -> None:
    """Case 22: one file on many owners, and more lanes than rows."""
    path = write_jsonl(tmp_path / "a.jsonl", ROWS, newline, at_end)
    found = [row for rows in run_lanes(read_jsonl(path), lanes) for row in rows]
    assert sorted(row["id"] for row in found) == list(range(40))


def test_seven_files_keep_twelve_lanes_busy(tmp_path: Path) -> None:
    """Case 22."""
    for n in range(7):
        write_jsonl(tmp_path / f"{n}.jsonl", [{"id": 100 * n + i} for i in range(100)])
    lanes = run_lanes(read_jsonl(tmp_path / "*.jsonl"), 12)
    assert min(map(len, lanes)) > 20
    assert sorted(row["id"] for rows in lanes for row in rows) == list(range(700))


def test_one_lane_reads_files_in_order(tmp_path: Path) -> None:
    second = write_jsonl(tmp_path / "b.jsonl", ROWS[20:])
    first = write_jsonl(tmp_path / "a.jsonl.gz", ROWS[:20])
    assert run(read_jsonl([first, str(second)])) == ROWS
    assert run(read_jsonl(str(tmp_path / "*.jsonl*"))) == ROWS
    assert run(read_jsonl([second, first])) == ROWS[20:] + ROWS[:20]
    assert run(read_jsonl([first, first])) == ROWS[:20] * 2


def test_a_chunk_is_small_enough_for_every_lane_and_never_beyond_4_mib() -> None:
    assert [chunk_bytes(total, 64) for total in (0, 1, 51_200, 10 << 30)] == [1, 1, 100, 4 << 20]
    assert chunk_bytes(80_000, 1) == 10_000


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(0, 3), Lane(2, 3), Lane(5, 64)])
def test_every_restore_point_of_a_file_is_exact(tmp_path: Path, name: str, lane: Lane) -> None:
    """Case 32."""
    path = write_jsonl(tmp_path / name, ROWS, "\r\n", at_end=False)
    assert_law(read_jsonl([path, path]), lane, [1, 0, 2, 3])


def test_memory_paths_and_their_patterns_are_read() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("b.jsonl", "a.jsonl", "c.jsonl.gz"):
        memory.pipe(f"/corpus/{name}", packed_as(name, json.dumps({"name": name}).encode()))
    names = [{"name": name} for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz")]
    assert run(read_jsonl("memory://corpus/*.jsonl*")) == names
    assert run(read_jsonl(["memory://corpus/b.jsonl", "memory:///corpus/a.jsonl"])) == [names[1], names[0]]
    assert_law(read_jsonl("memory://corpus/*"), Lane(0, 2), [1])
    memory.rm("/corpus", recursive=True)


def test_chained_and_file_urls_are_read(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/chained/a.jsonl", b'{"a": 1}\n')
    options = {"simplecache": {"cache_storage": str(tmp_path / "cache")}}
    assert run(read_jsonl("simplecache::memory://chained/*.jsonl", storage_options=options)) == [{"a": 1}]
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert run(read_jsonl(f"file://{path}")) == run(read_jsonl(f"file://{tmp_path}/*.jsonl")) == ROWS
    memory.rm("/chained", recursive=True)


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a[1].jsonl", ROWS)
    write_jsonl(tmp_path / "a1.jsonl", [])
    assert run(read_jsonl(path)) == ROWS


def test_compression_can_be_said_where_the_name_does_not_tell(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(packed_as(".gz", b"1\n2\n"))
    assert run(read_jsonl(tmp_path / "a.txt", compression="gzip")) == [1, 2]
    (tmp_path / "b.gz").write_bytes(b"1\n2\n")
    assert run(read_jsonl(tmp_path / "b.gz", compression=None)) == [1, 2]


def test_several_members_and_padding_are_unpacked(tmp_path: Path) -> None:
    """Case 32: as ``cat a.gz b.gz`` and parallel compressors write it."""
    (tmp_path / "a.gz").write_bytes(gzip.compress(b'"a') + gzip.compress(b"") + gzip.compress(b'b"\n1\n') + b"\0" * 512)
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    pieces = [zstandard.ZstdCompressor().compress(piece) for piece in (b'"a', b'b"\n', b"1\n")]
    (tmp_path / "a.zst").write_bytes(pieces[0] + skippable + pieces[1] + pieces[2])
    assert run(read_jsonl(tmp_path / "a.gz")) == run(read_jsonl(tmp_path / "a.zst")) == ["ab", 1]


def test_nothing_is_read_before_the_first_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    stream = read_jsonl(path)
    path.unlink()
    rows = stream.open(Lane(0, 1))
    rows.load_state_dict(rows.state_dict())
    with pytest.raises(FileNotFoundError):
        next(rows)


def test_a_resume_reads_on_from_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": n, "text": "x" * 1000} for n in range(20_000)])
    rows = read_jsonl(path).open(Lane(0, 1))
    for _ in range(18_000):
        next(rows)
    read = []
    monkeypatch.setattr(
        reading_files, "_read_local", lambda *a, real=reading_files._read_local: read.append(a) or real(*a)
    )
    again = resumed(read_jsonl(path), Lane(0, 1), saved(rows))
    assert next(again)["id"] == 18_000
    assert len(read) == 1 and read[0][2] - read[0][1] <= 1 << 18


@pytest.mark.parametrize(
    ("paths", "error", "text"),
    [
        ("none.jsonl", FileNotFoundError, "there is no file 'none.jsonl'"),
        ("memory://none/a.jsonl", FileNotFoundError, "there is no file 'memory://none/a.jsonl'"),
        ("none/*.jsonl", FileNotFoundError, "nothing matches 'none/*.jsonl'"),
        (".", IsADirectoryError, "'.' is a folder. Name its files by a pattern, such as './*.jsonl'"),
        ([], ValueError, "paths is empty"),
        (None, TypeError, "a path or a list of paths, but got a NoneType"),
        (7, TypeError, "a path or a list of paths, but got a int"),
        ([b"a"], TypeError, "a path must be a str or a Path, but got b'a'"),
    ],
)
def test_paths_that_lead_nowhere_fail_at_construction(paths: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        read_jsonl(paths)
    assert text in str(caught.value)


def test_compressions_that_are_not_known_fail_at_construction(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.bz2", ROWS)
    with pytest.raises(ValueError, match=r"compressed in a way that cannot be read \(.bz2\)"):
        read_jsonl(path)
    assert run(read_jsonl(path, compression=None)) == ROWS
    with pytest.raises(ValueError, match="compression must be 'infer', 'gzip', 'zstd' or None, but got 'bz2'"):
        read_jsonl(path, compression="bz2")


@pytest.mark.parametrize(
    "line", [b'{"a": nope}', b'{"a": 1', b"x", b"{'a': 1}", b'{"a": NaN}', b'{"a": "\xff\xfe"}', b"\0"]
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_bad_line_is_named_and_the_position_stays_before_it(tmp_path: Path, line: bytes, name: str) -> None:
    """Cases 31 and 32: invalid JSON and invalid UTF-8."""
    path = tmp_path / name
    path.write_bytes(packed_as(name, b'{"a": 0}\n\n{"a": 1}\n' + line + b'\n{"a": 2}\n'))
    rows = read_jsonl(path).open(Lane(0, 1))
    assert [next(rows), next(rows)] == [{"a": 0}, {"a": 1}]
    before = saved(rows)
    for _ in range(2):
        with pytest.raises(BadRow) as caught:
            next(rows)
        text = str(caught.value)
        assert str(path) in text and "Correct it, take it out" in text
        assert ("line 4 (byte 19 of its text)" if name != "a.jsonl" else "byte 19:") in text
        assert ("no valid UTF-8 (invalid start byte at byte 7" if b"\xff" in line else "no valid JSON (") in text
        assert saved(rows) == before
    with pytest.raises(BadRow):
        next(resumed(read_jsonl(path), Lane(0, 1), before))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_that_cannot_be_unpacked_is_named(tmp_path: Path, name: str) -> None:
    """Case 31: cut short, and damaged inside."""
    path = tmp_path / name
    whole = packed_as(name, b"".join(b'{"a": "%064x"}\n' % pow(7, n, 2**255 - 19) for n in range(2000)))
    path.write_bytes(whole[:-5])
    with pytest.raises(BadRow, match=r"(?s)a\.jsonl.*cannot be unpacked as .*ends in the middle.*Replace the file"):
        run(read_jsonl(path))
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(255 - b for b in whole[middle : middle + 40]) + whole[middle + 40 :])
    with pytest.raises(BadRow):
        run(read_jsonl(path))
    path.write_bytes(b"not compressed at all\n")
    with pytest.raises(BadRow, match="cannot be unpacked") as caught:
        run(read_jsonl(path))
    assert isinstance(caught.value.__cause__, zlib.error | zstandard.ZstdError)


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    stream = read_jsonl(path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadRow, match=rf"ends at byte {size - 20}, but had {size} bytes when the stream was made"):
        run(stream)


def test_a_read_that_fails_once_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 31: the iterator goes on from its place when it is asked again."""
    stream = read_jsonl(write_jsonl(tmp_path / "a.jsonl", ROWS))
    calls = []

    def read(*place: Any, real: Any = reading_files._read_local) -> bytes:
        calls.append(place)
        if len(calls) % 3 == 1:
            raise OSError("try again")
        return real(*place)

    monkeypatch.setattr(reading_files, "_read_local", read)
    rows, found = stream.open(Lane(0, 1)), []
    for _ in range(1000):
        try:
            found.append(next(rows))
        except OSError:
            continue
        except StopIteration:
            break
    assert found == ROWS


def test_close_may_come_at_any_time_and_twice(tmp_path: Path) -> None:
    rows = read_jsonl(write_jsonl(tmp_path / "a.jsonl.gz", ROWS)).open(Lane(0, 1))
    next(rows)
    before = saved(rows)
    rows.close()
    rows.close()
    assert saved(rows) == before


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (None, "a position is a dict, but got a NoneType"),
        ({}, "has the keys chunk, place, grain, order, but this one has nothing"),
        (
            {"chunk": 0, "place": -1, "grain": 9, "order": None},
            "place in a position must be a whole number of at",
        ),
        ({"chunk": 0, "place": 0, "grain": 0, "order": None}, "grain in a position must be at least 1"),
        ({"chunk": True, "place": 0, "grain": 9, "order": 1}, "chunk in a position must be"),
        ({"chunk": 0, "place": 0, "grain": 9, "order": "x"}, "order in a position must be a whole number of at"),
    ],
)
def test_what_is_no_position_is_refused(tmp_path: Path, state: Any, text: str) -> None:
    """Case 27."""
    rows = read_jsonl(write_jsonl(tmp_path / "a.jsonl", ROWS)).open(Lane(0, 1))
    before = saved(rows)
    with pytest.raises(InvalidState) as caught:
        rows.load_state_dict(state)
    assert text in str(caught.value)
    assert saved(rows) == before


def test_a_position_is_loaded_before_the_first_row_only(tmp_path: Path) -> None:
    rows = read_jsonl(write_jsonl(tmp_path / "a.jsonl", ROWS)).open(Lane(0, 1))
    state = rows.state_dict()
    next(rows)
    with pytest.raises(InvalidState, match="Load a position right after open"):
        rows.load_state_dict(state)


def test_an_epoch_goes_on_with_the_chunks_it_was_begun_with(tmp_path: Path) -> None:
    """The size of chunks is in the position, so that another rule for it in a later version loses nothing."""
    stream = read_jsonl(write_jsonl(tmp_path / "a.jsonl", ROWS))
    ref = run_lanes(stream, 2)
    rows = stream.open(Lane(0, 2))
    rows.load_state_dict({**rows.state_dict(), "grain": 77})
    other = stream.open(Lane(1, 2))
    other.load_state_dict({**other.state_dict(), "grain": 77})
    found = [[plain(row) for row in lane] for lane in (rows, other)]
    assert found != ref
    assert sorted(row["id"] for lane in found for row in lane) == list(range(40))


def test_the_fingerprint_survives_a_move_and_sees_every_other_change(tmp_path: Path) -> None:
    def files_of(folder: str, sizes: dict[str, int]) -> str:
        for name, size in sizes.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"1" * size)
        described = read_jsonl([tmp_path / folder / name for name in sizes]).describe()
        return str(described["files"])

    ref = files_of("one", {"x/a": 1, "y/a": 2})
    assert ref.startswith("2 files, 3 bytes, sha256:")
    assert files_of("two", {"x/a": 1, "y/a": 2}) == ref
    others = [{"y/a": 2, "x/a": 1}, {"x/a": 1, "y/b": 2}, {"x/a": 1, "y/a": 3}, {"x/a": 2, "y/a": 1}]
    assert ref not in {files_of(f"other{n}", sizes) for n, sizes in enumerate(others)}
