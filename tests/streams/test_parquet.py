"""Reading Parquet: row groups dealt to lanes, what a resume reads, and what goes wrong by name."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from tests.streams.columnar import IDS, CountedFiles, numbers, rows_over
from tests.streams.runs import assert_law, resumed, run, run_lanes, saved
from unbroken.errors import BadRow
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.streams.reading import files as reading_files
from unbroken.streams.reading import parquet
from unbroken.streams.reading.parquet import read_parquet

TABLE = pa.table(
    {
        "id": range(40),
        "text": [None if n % 11 == 3 else f"row {n} " * (n % 5) for n in range(40)],
        "ids": pa.array([list(range(n % 4)) for n in range(40)], pa.list_(pa.int32())),
    }
)
CODECS = ["none", "snappy", "gzip", "brotli", "zstd", "lz4"]


@pytest.fixture(autouse=True)
def no_footer_is_known() -> Iterator[None]:
    """As in a process of its own."""
    parquet._footers._found.clear()
    yield
    parquet._footers._found.clear()


def write(path: Path, table: pa.Table = TABLE, group: int = 40, **options: Any) -> Path:
    pq.write_table(table, path, row_group_size=group, **options)
    return path


def packed(table: pa.Table = TABLE, group: int = 40, **options: Any) -> bytes:
    into = io.BytesIO()
    pq.write_table(table, into, row_group_size=group, **options)
    return into.getvalue()


def test_a_row_is_a_dict_of_its_columns(tmp_path: Path) -> None:
    rows = run(read_parquet(write(tmp_path / "a.parquet")))
    assert rows[3] == {"id": 3, "text": None, "ids": ("int32", [0, 1, 2])}
    assert rows[4] == {"id": 4, "text": "row 4 row 4 row 4 row 4 ", "ids": ("int32", [])}
    assert [row["text"] for row in rows] == TABLE["text"].to_pylist()
    assert [row["ids"][1] for row in rows] == TABLE["ids"].to_pylist()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("group", [1, 7, 40])
def test_every_row_comes_once_over_any_number_of_lanes(tmp_path: Path, codec: str, group: int) -> None:
    """Cases 22 and 32: many row groups and a single one."""
    paths = [write(tmp_path / f"{n}.parquet", TABLE.slice(n * 15, 15), group, compression=codec) for n in range(3)]
    for lanes in (1, 2, 3, 8, 40, 64):
        found = run_lanes(read_parquet(paths), lanes)
        assert sorted(numbers([row for rows in found for row in rows])) == IDS
        assert sum(bool(rows) for rows in found) == min(lanes, 40), "a lane has nothing to do"
    assert numbers(run(read_parquet(paths))) == IDS


@pytest.mark.parametrize("group", [6, 40])
@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 3), Lane(5, 64)])
def test_every_restore_point_is_exact(tmp_path: Path, group: int, lane: Lane) -> None:
    """Case 32."""
    path = write(tmp_path / "a.parquet", group=group)
    assert_law(read_parquet([path, path]), lane, [1, 0, 2, 3])
    assert_law(read_parquet([path, path], read_ahead=True), lane, [5, 1])


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_every_restore_point_under_a_shuffle_is_exact(tmp_path: Path, epoch: int) -> None:
    stream = read_parquet(write(tmp_path / "a.parquet", group=6)).shuffle(window=10, seed=3)
    found = [row for index in range(3) for row in assert_law(stream, Lane(index, 3, epoch=epoch), [4, 4])]
    assert sorted(numbers(found)) == IDS
    assert numbers(found) != IDS


def test_row_groups_come_in_another_order_in_every_epoch(tmp_path: Path) -> None:
    stream = read_parquet(write(tmp_path / "a.parquet", group=4)).shuffle(window=1, seed=3)
    orders = [numbers(run(stream, Lane(0, 1, epoch=epoch))) for epoch in range(3)]
    assert len(set(map(tuple, orders))) == 3
    assert all(sorted(order) == IDS for order in orders)


@pytest.mark.parametrize("lanes", [1, 3, 64])
def test_lineage_counts_rows_from_the_start_of_the_file(tmp_path: Path, lanes: int) -> None:
    paths = [write(tmp_path / f"{n}.parquet", TABLE.slice(n * 25, 25), 10) for n in range(2)]
    for index in range(lanes):
        rows = read_parquet(paths).open(Lane(index, lanes), lineage=True)
        for row in rows:
            file, place = divmod(row["id"], 25)
            assert rows.origin() == (Origin("read_parquet", str(paths[file]), place),)
            assert rows.where() == f"{paths[file]}, row {place}"


def test_columns_come_in_the_order_asked_for_and_must_be_in_every_file(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", TABLE.select(["text", "id"]))]
    for row in read_parquet(paths, columns=["text", "id"]).open(Lane(0, 1)):
        assert list(row) == ["text", "id"]
    with pytest.raises(
        ValueError, match=r"read_parquet: '.*b\.parquet' has no column 'ids'. It has 'text', 'id'\."
    ) as caught:
        read_parquet(paths, columns=["ids"])
    assert not isinstance(caught.value, BadRow)
    with pytest.raises(ValueError, match="has no column 'ids'"):
        read_parquet(paths, columns=["ids"], on_error="skip")


def test_files_may_differ_in_what_else_they_have_and_in_types(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"id": [1], "more": ["x"]}))
    write(tmp_path / "b.parquet", pa.table({"id": ["2"]}))
    assert run(read_parquet(tmp_path / "*.parquet")) == [{"id": 1, "more": "x"}, {"id": "2"}]
    assert run(read_parquet(tmp_path / "*.parquet", columns=["id"])) == [{"id": 1}, {"id": "2"}]


def test_a_column_is_not_taken_for_one_whose_name_begins_like_it(tmp_path: Path) -> None:
    table = pa.table({"a": [{"b": 1, "c": [{"d": 2}]}], "a.b": [3], "ab": [4]})
    path = write(tmp_path / "a.parquet", table)
    assert run(read_parquet(path, columns=["a"])) == [{"a": {"b": 1, "c": [{"d": 2}]}}]
    assert run(read_parquet(path, columns=["a.b"])) == [{"a.b": 3}]
    with pytest.raises(ValueError, match=r"has no column 'a\.c'.*\n.*of a nested column, its outermost name"):
        read_parquet(path, columns=["a.c"])


def test_timestamps_of_the_old_type_reach_beyond_nanoseconds(tmp_path: Path) -> None:
    moment = pa.array(["9999-12-31 23:59:59"]).cast(pa.timestamp("s")).cast(pa.timestamp("us"))
    path = write(tmp_path / "a.parquet", pa.table({"at": moment}), use_deprecated_int96_timestamps=True)
    assert run(read_parquet(path)) == [{"at": moment[0].as_py()}]


def test_memory_paths_and_their_patterns_are_read() -> None:
    memory = fsspec.filesystem("memory")
    for number in (1, 0):
        memory.pipe(f"/corpus/{number}.parquet", packed(TABLE.slice(20 * number, 20), 6))
    assert numbers(run(read_parquet("memory://corpus/*.parquet"))) == IDS
    assert sorted(numbers(rows_over(read_parquet("memory://corpus/*"), 64))) == IDS
    assert_law(read_parquet("memory://corpus/*").shuffle(9, seed=1), Lane(0, 2), [3])
    memory.rm("/corpus", recursive=True)


def test_a_resume_reads_its_row_group_and_no_other() -> None:
    text = [f"{pow(7, n, 2**255 - 19):064x}" * 8 for n in range(4000)]
    data = packed(pa.table({"id": range(4000), "text": text}), 500)
    CountedFiles.hold(**{"a.parquet": data})
    metadata = pq.read_metadata(io.BytesIO(data))
    group = metadata.row_group(6)
    size = sum(group.column(n).total_compressed_size for n in range(2))
    rows = read_parquet("counted://a.parquet", read_ahead=False).open(Lane(0, 1))
    for _ in range(6 * 500 + 321):
        next(rows)
    state = saved(rows)
    parquet._footers._found.clear()
    stream = read_parquet("counted://a.parquet", read_ahead=False)
    CountedFiles.reads = []
    assert next(resumed(stream, Lane(0, 1), state))["id"] == 3321
    start = min(group.column(n).dictionary_page_offset or group.column(n).data_page_offset for n in range(2))
    assert CountedFiles.reads == [("a.parquet", start, start + size)], "not one read of one row group"
    parquet._footers._found.clear()
    CountedFiles.reads = []
    assert next(resumed(stream, Lane(0, 1), state))["id"] == 3321
    assert CountedFiles.bytes_read() <= size + (1 << 16), "in a fresh process the footer is read too"


def test_a_projection_reads_its_columns_only() -> None:
    data = packed(pa.table({"id": range(4000), "text": [str(n) * 50 for n in range(4000)]}), 4000)
    CountedFiles.hold(**{"a.parquet": data})
    stream = read_parquet("counted://a.parquet", columns=["id"], read_ahead=False)
    CountedFiles.reads = []
    assert numbers(run(stream)) == list(range(4000))
    assert CountedFiles.bytes_read() == pq.read_metadata(io.BytesIO(data)).row_group(0).column(0).total_compressed_size


def test_a_large_row_group_far_away_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(parquet, "_REMOTE_BUFFER", 1 << 14)
    text = [f"{pow(7, n, 2**255 - 19):064x}" * 8 for n in range(2000)]
    small = {"use_dictionary": False, "data_page_size": 1 << 13, "write_batch_size": 16}
    data = packed(pa.table({"text": text}), 2000, compression="none", **small)
    CountedFiles.hold(**{"a.parquet": data})
    stream = read_parquet("counted://a.parquet", read_ahead=False)
    CountedFiles.reads = []
    assert [row["text"] for row in run(stream)] == text
    assert max(stop - start for _, start, stop in CountedFiles.reads) <= 1 << 16
    rows = stream.open(Lane(0, 1))
    CountedFiles.reads = []
    next(rows)
    assert CountedFiles.bytes_read() < 400_000, "all of it was read for the first row"


def test_footers_are_read_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = read_parquet([write(tmp_path / f"{n}.parquet", group=8) for n in range(3)])
    calls = []
    monkeypatch.setattr(parquet, "_read_footer", lambda *a, real=parquet._read_footer: calls.append(a) or real(*a))
    assert len(rows_over(stream, 5)) == 120
    assert calls == []
    parquet._footers._found.clear()
    assert len(rows_over(stream, 5)) == 120
    assert len(calls) == 3


def test_what_is_kept_of_footers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_MOST_KEPT_BYTES", 3000)
    stream = read_parquet([write(tmp_path / f"{n}.parquet") for n in range(9)])
    assert 1 <= len(parquet._footers._found) < 9
    assert len(run(stream)) == 360


def test_nothing_is_open_between_two_rows(tmp_path: Path) -> None:
    stream = read_parquet(write(tmp_path / "a.parquet", group=8))
    before = os.listdir("/proc/self/fd")
    lanes = [stream.open(Lane(index, 4)) for index in range(4)]
    for rows in lanes:
        next(rows)
    assert os.listdir("/proc/self/fd") == before


def test_a_stream_goes_to_worker_processes(tmp_path: Path) -> None:
    stream = read_parquet(write(tmp_path / "a.parquet", group=8), columns=["id"])
    for context in ("fork", "spawn"):
        loader: Any = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context=context)
        assert sorted(numbers(list(loader))) == IDS
    assert run(pickle.loads(pickle.dumps(stream))) == run(stream)


def test_files_without_rows_are_read(tmp_path: Path) -> None:
    """Case 32."""
    empty = write(tmp_path / "a.parquet", TABLE.slice(0, 0))
    with pq.ParquetWriter(tmp_path / "b.parquet", TABLE.schema):
        pass
    full = write(tmp_path / "c.parquet", group=7)
    none = [empty, tmp_path / "b.parquet"]
    assert run(read_parquet(none)) == []
    for lanes in (1, 2, 64):
        assert sorted(numbers(rows_over(read_parquet([*none, full, *none]), lanes))) == IDS
    assert_law(read_parquet([empty, full, empty]), Lane(0, 2), [7])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "it has 0 bytes"),
        (b"PAR1PAR1", "it has 8 bytes"),
        (b"no Parquet at all", "it ends in b' all', not in b'PAR1'"),
        (b"PAR1" + b"\xff\xff\xff\x7fPAR1", "its footer would have 2147483655 bytes, and it has 12"),
        (b"PAR1" + b"x" * 20 + b"\x14\0\0\0PAR1", "its footer cannot be read ("),
        (packed()[:-20], ", not in b'PAR1'"),
    ],
)
def test_what_is_no_parquet_file_fails_at_construction_or_is_left_out(
    tmp_path: Path, content: bytes, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = tmp_path / "a.parquet", write(tmp_path / "b.parquet")
    bad.write_bytes(content)
    with pytest.raises(BadRow) as caught:
        read_parquet([good, bad])
    assert f"{bad}: is no whole Parquet file: " in str(caught.value) and text in str(caught.value)
    assert caplog.messages == []
    stream = read_parquet([good, bad], on_error="skip")
    assert len(caplog.messages) == 1 and str(bad) in caplog.messages[0] and text in caplog.messages[0]
    assert stream.describe()["files"] == read_parquet([good]).describe()["files"]
    assert len(run(stream)) == 40


def test_a_folder_is_answered_with_a_pattern() -> None:
    with pytest.raises(
        IsADirectoryError, match=r"'\.' is a folder\. Name its files by a pattern, such as '\./\*\.parquet'"
    ):
        read_parquet(".")


def damaged(path: Path, group: int) -> Path:
    """The pages of a row group overwritten."""
    column = pq.read_metadata(path).row_group(group).column(0)
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    return path


def test_a_damaged_row_group_is_named_and_the_position_stays_before_it(tmp_path: Path) -> None:
    """Case 31."""
    path = damaged(write(tmp_path / "a.parquet", group=10), 2)
    rows = read_parquet(path).open(Lane(0, 1))
    assert numbers([next(rows) for _ in range(20)]) == IDS[:20]
    before = saved(rows)
    for _ in range(2):
        with pytest.raises(BadRow, match=r"a\.parquet: row group 2 cannot be decoded: .*\n.*take it out of paths"):
            next(rows)
        assert saved(rows) == before
    with pytest.raises(BadRow):
        next(resumed(read_parquet(path), Lane(0, 1), before))


def test_a_damaged_row_group_is_left_out_and_named_in_the_position(tmp_path: Path) -> None:
    path = damaged(write(tmp_path / "a.parquet", group=10), 2)
    stream = read_parquet(path, on_error="skip")
    assert numbers(assert_law(stream, Lane(0, 1), [15, 10])) == IDS[:20] + IDS[30:]
    rows = stream.open(Lane(0, 1))
    list(rows)
    (record,) = json.loads(saved(rows))["journal"].values()
    assert record["count"] == 1 and record["named"][0][0] == str(path)
    assert "row group 2 cannot be decoded" in record["named"][0][1]


def test_a_changed_bit_is_seen_where_checksums_were_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", compression="none", use_dictionary=False, write_page_checksum=True)
    column = pq.read_metadata(path).row_group(0).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadRow, match=r"row group 0 cannot be decoded: .*CRC"):
        run(read_parquet(path))


def test_a_row_without_a_value_in_python_is_named_or_left_out(tmp_path: Path) -> None:
    """Case 32: invalid UTF-8."""
    text = pa.array([b"a", b"b\xff", b"c"], pa.binary()).view(pa.string())
    path = write(tmp_path / "a.parquet", pa.table({"id": [0, 1, 2], "text": text}), group=2)
    rows = read_parquet(path).open(Lane(0, 1))
    assert next(rows) == {"id": 0, "text": "a"}
    with pytest.raises(
        BadRow, match=r"a\.parquet, row 1 \(row group 0\): the value of column 'text' cannot be read \("
    ):
        next(rows)
    assert numbers(assert_law(read_parquet(path, on_error="skip"), Lane(0, 1), [1])) == [0, 2]
    assert numbers(run(read_parquet(path, columns=["id"]))) == [0, 1, 2]


def test_a_file_that_changed_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", group=10, compression="none")
    stream, data = read_parquet(path), path.read_bytes()
    path.write_bytes(data + b"x")
    with pytest.raises(BadRow, match=rf"has {len(data) + 1} bytes, but had {len(data)} bytes when the stream was made"):
        run(stream)
    other = TABLE.set_column(0, "ID", TABLE["id"])
    write(path, other, group=10, compression="none")
    assert path.stat().st_size == len(data)
    parquet._footers._found.clear()
    with pytest.raises(BadRow, match="has another footer, but had"):
        run(stream)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        run(stream)


def test_a_file_far_away_that_became_shorter_is_named() -> None:
    data = packed(group=10)
    CountedFiles.hold(**{"a.parquet": data})
    stream = read_parquet("counted://a.parquet")
    CountedFiles.hold(**{"a.parquet": data[:100]})
    with pytest.raises(BadRow, match="ends at byte 100, but had"):
        run(stream)


def test_a_read_that_fails_in_passing_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 31: it keeps its type, and the iterator goes on from its place when it is asked again."""
    path = write(tmp_path / "a.parquet", group=6)
    patient, stream = read_parquet(path), read_parquet(path, retries=0)
    calls = []

    def read(*place: Any, real: Any = reading_files._read_local) -> bytes:
        calls.append(place)
        if len(calls) % 5 == 1:
            raise OSError("try again")
        return bytes(real(*place))

    monkeypatch.setattr(reading_files, "_read_local", read)
    rows, found, failures = stream.open(Lane(0, 1)), [], 0
    for _ in range(1000):
        try:
            found.append(next(rows)["id"])
        except OSError as error:
            assert "try again" in str(error)
            failures += 1
        except StopIteration:
            break
    assert found == IDS and failures
    monkeypatch.setattr("unbroken.streams.reading.retrying.time.sleep", lambda seconds: None)
    assert numbers(run(patient)) == IDS


def test_the_fingerprint_has_files_and_columns(tmp_path: Path) -> None:
    stream = read_parquet([write(tmp_path / f"{n}.parquet") for n in range(2)], columns=["id", "text"])
    described = stream.describe()
    assert described["columns"] == ["id", "text"] and described["files"].startswith("2 files, ")
    assert [stream.difference_class(field) for field in ("files", "columns")] == ["data, held", "data"]
    assert read_parquet(tmp_path / "0.parquet").describe()["columns"] is None
    assert f"read_parquet('{tmp_path}/0.parquet' and 1 more, columns=['id', 'text'])   2 files, " in str(stream)
