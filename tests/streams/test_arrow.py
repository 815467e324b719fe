"""Reading Arrow IPC: files, streams and saved datasets, what a resume reads, and what goes wrong by name."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

from tests.streams.columnar import IDS, CountedFiles, numbers, rows_over
from tests.streams.runs import assert_law, resumed, run, run_lanes, saved
from unbroken.errors import BadRow
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.streams.reading import files as reading_files
from unbroken.streams.reading.arrow import read_arrow

TABLE = pa.table(
    {
        "id": range(40),
        "text": [None if n % 11 == 3 else f"row {n} " * (n % 5) for n in range(40)],
        "ids": pa.array([list(range(n % 4)) for n in range(40)], pa.list_(pa.int32())),
        "kind": pa.array(["ab"[n % 2] for n in range(40)]).dictionary_encode(),
    }
)
FORMATS = ["file", "stream"]


def packed(kind: str, table: pa.Table = TABLE, batch: int = 40, **options: Any) -> bytes:
    into = io.BytesIO()
    make = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind]
    with make(into, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=batch)
    return into.getvalue()


def write(path: Path, kind: str, table: pa.Table = TABLE, batch: int = 40, **options: Any) -> Path:
    path.write_bytes(packed(kind, table, batch, **options))
    return path


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_is_a_dict_of_its_columns(tmp_path: Path, kind: str) -> None:
    rows = run(read_arrow(write(tmp_path / "a.arrow", kind, batch=7)))
    assert rows[3] == {"id": 3, "text": None, "ids": ("int32", [0, 1, 2]), "kind": "b"}
    for name in ("id", "text", "kind"):
        assert [row[name] for row in rows] == TABLE[name].to_pylist()
    assert [row["ids"][1] for row in rows] == TABLE["ids"].to_pylist()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
@pytest.mark.parametrize("batch", [1, 7, 40])
def test_every_row_comes_once_over_any_number_of_lanes(
    tmp_path: Path, kind: str, codec: str | None, batch: int
) -> None:
    """Case 22: many record batches and a single one."""
    parts = [TABLE.slice(n * 15, 15) for n in range(3)]
    paths = [write(tmp_path / f"{n}.arrow", kind, part, batch, compression=codec) for n, part in enumerate(parts)]
    for lanes in (1, 2, 3, 8, 40, 64):
        found = run_lanes(read_arrow(paths), lanes)
        assert sorted(numbers([row for rows in found for row in rows])) == IDS
        assert sum(bool(rows) for rows in found) == min(lanes, 40), "a lane has nothing to do"
    assert numbers(run(read_arrow(paths))) == IDS


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 3), Lane(5, 64)])
def test_every_restore_point_is_exact(tmp_path: Path, kind: str, lane: Lane) -> None:
    path = write(tmp_path / "a.arrow", kind, batch=6)
    assert_law(read_arrow([path, path]), lane, [1, 0, 2, 3])
    assert_law(read_arrow(path, read_ahead=True), lane, [5, 1])


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_restore_point_under_a_shuffle_is_exact(tmp_path: Path, epoch: int) -> None:
    stream = read_arrow(write(tmp_path / "a.arrow", "stream", batch=6)).shuffle(window=10, seed=3)
    found = [row for index in range(3) for row in assert_law(stream, Lane(index, 3, epoch=epoch), [4, 4])]
    assert sorted(numbers(found)) == IDS != numbers(found)


@pytest.mark.parametrize("lanes", [1, 3, 64])
def test_lineage_counts_rows_from_the_start_of_the_file(tmp_path: Path, lanes: int) -> None:
    paths = [write(tmp_path / f"{n}.arrow", FORMATS[n], TABLE.slice(n * 25, 25), 10) for n in range(2)]
    for index in range(lanes):
        rows = read_arrow(paths).open(Lane(index, lanes), lineage=True)
        for row in rows:
            file, place = divmod(row["id"], 25)
            assert rows.origin() == (Origin("read_arrow", str(paths[file]), place),)
            assert rows.where() == f"{paths[file]}, row {place}"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_columns_come_in_the_order_asked_for_and_must_be_in_every_file(
    tmp_path: Path, kind: str, codec: str | None
) -> None:
    path = write(tmp_path / "a.arrow", kind, batch=9, compression=codec)
    for columns in (["text", "id"], ["kind"], ["ids", "kind", "id"]):
        rows = list(read_arrow(path, columns=columns).open(Lane(0, 1)))
        assert {tuple(row) for row in rows} == {tuple(columns)}
        assert [[row[name] for name in columns if name != "ids"] for row in rows] == [
            [row[name] for name in columns if name != "ids"] for row in TABLE.to_pylist()
        ]
    other = write(tmp_path / "b.arrow", kind, TABLE.select(["id"]))
    with pytest.raises(ValueError, match=r"read_arrow: '.*b\.arrow' has no column 'text'\. It has 'id'\.") as caught:
        read_arrow([path, other], columns=["text"], on_error="skip")
    assert not isinstance(caught.value, BadRow)


def test_dictionaries_that_grow_or_are_replaced_hold_from_where_they_stand(tmp_path: Path) -> None:
    kind = pa.dictionary(pa.int8(), pa.string())
    words = [["a", "b"], ["a", "b", "c"], ["x"], ["x", "y"], ["z"]]
    schema = pa.schema([("id", pa.int64()), ("one", kind), ("two", kind)])
    batches = [
        pa.record_batch(
            [[n], pa.DictionaryArray.from_arrays(pa.array([len(v) - 1], pa.int8()), v), pa.array(["w"], kind)], schema
        )
        for n, v in enumerate(words)
    ]
    with pa.ipc.new_stream(
        tmp_path / "a.arrow", schema, options=pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    ) as to:
        for batch in batches:
            to.write_batch(batch)
    stream = read_arrow(tmp_path / "a.arrow")
    assert [row["one"] for row in run(stream)] == ["b", "c", "x", "y", "z"]
    assert [[row["one"] for row in run(stream, Lane(n, 5))] for n in range(5)] == [["b"], ["c"], ["x"], ["y"], ["z"]]
    assert {row["two"] for row in run(stream)} == {"w"}


def test_streams_of_before_version_0_15_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", "stream", batch=7, use_legacy_format=True)
    assert struct.unpack("<i", path.read_bytes()[:4])[0] > 0, "this pyarrow writes them in the new way"
    assert numbers(run(read_arrow(path))) == IDS


def test_a_stream_may_end_without_its_end_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", "stream", batch=7)
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    assert data[-8:] == b"\xff\xff\xff\xff\0\0\0\0" and numbers(run(read_arrow(path))) == IDS


def test_memory_paths_and_their_patterns_are_read() -> None:
    memory = fsspec.filesystem("memory")
    for number in (1, 0):
        memory.pipe(f"/corpus/{number}.arrow", packed(FORMATS[number], TABLE.slice(20 * number, 20), 6))
    assert numbers(run(read_arrow("memory://corpus/*.arrow"))) == IDS
    assert sorted(numbers(rows_over(read_arrow("memory://corpus/*"), 64))) == IDS
    assert_law(read_arrow("memory://corpus/*").shuffle(9, seed=1), Lane(0, 2), [3])
    memory.rm("/corpus", recursive=True)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_resume_reads_its_record_batch_and_no_other(kind: str) -> None:
    table = pa.table({"id": range(4000), "text": [str(n) * 200 for n in range(4000)]})
    data = packed(kind, table, 500)
    CountedFiles.hold(**{"a.arrow": data})
    stream = read_arrow("counted://a.arrow", read_ahead=False)
    assert CountedFiles.bytes_read() < len(data) / 4, "more than headers was read"
    rows = stream.open(Lane(0, 1))
    for _ in range(6 * 500 + 321):
        next(rows)
    CountedFiles.reads = []
    assert next(resumed(stream, Lane(0, 1), saved(rows)))["id"] == 3321
    assert len(CountedFiles.reads) == 1 and CountedFiles.bytes_read() < len(data) / 7


def test_nothing_is_open_between_two_rows(tmp_path: Path) -> None:
    stream = read_arrow(write(tmp_path / "a.arrow", "file", batch=8))
    before = os.listdir("/proc/self/fd")
    lanes = [stream.open(Lane(index, 4)) for index in range(4)]
    for rows in lanes:
        next(rows)
    assert os.listdir("/proc/self/fd") == before


def test_a_stream_goes_to_worker_processes(tmp_path: Path) -> None:
    stream = read_arrow(write(tmp_path / "a.arrow", "stream", batch=8), columns=["id"])
    loader: Any = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(numbers(list(loader))) == IDS
    assert run(pickle.loads(pickle.dumps(stream))) == run(stream)


@pytest.mark.parametrize("kind", FORMATS)
def test_files_without_rows_or_columns_are_read(tmp_path: Path, kind: str) -> None:
    """Case 32."""
    empty = write(tmp_path / "a.arrow", kind, TABLE.slice(0, 0))
    full = write(tmp_path / "b.arrow", kind, batch=7)
    assert run(read_arrow([empty])) == []
    assert sorted(numbers(rows_over(read_arrow([empty, full, empty]), 64))) == IDS
    assert_law(read_arrow([empty, full, empty]), Lane(0, 2), [7])
    assert run(read_arrow(write(tmp_path / "c.arrow", kind, TABLE.slice(0, 3).select([])))) == [{}, {}, {}]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "it has 0 bytes"),
        (b"no Arrow at all", "bytes 4 to "),
        (b"ARROW1\0\0", "bytes 8 to 12 should be in it, and it has 8"),
        (packed("file")[:-7], "it begins with ARROW1 and does not end in it"),
        (packed("stream")[:-100], "it is cut short in the message at byte "),
        (packed("stream")[:-9], "it is cut short in the message at byte "),
        (packed("stream")[800:], "it "),
        (packed("stream").replace(b"text", b"te\xfft"), "its schema cannot be read ("),
    ],
)
def test_what_is_no_arrow_file_fails_at_construction_or_is_left_out(
    tmp_path: Path, content: bytes, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = tmp_path / "a.arrow", write(tmp_path / "b.arrow", "file")
    bad.write_bytes(content)
    with pytest.raises(BadRow) as caught:
        read_arrow([good, bad])
    assert f"{bad}: is no whole Arrow IPC file: " in str(caught.value) and text in str(caught.value)
    stream = read_arrow([good, bad], on_error="skip")
    assert len(caplog.messages) == 1 and str(bad) in caplog.messages[0] and text in caplog.messages[0]
    assert stream.describe()["files"] == read_arrow([good]).describe()["files"]
    assert len(run(stream)) == 40


def body_of(data: bytes, batch: int, size: int = 8) -> int:
    """Where the numbers of the first column of a record batch of ``size`` rows lie."""
    return data.index(struct.pack(f"<{size}q", *range(batch * size, (batch + 1) * size)))


def test_a_damaged_record_batch_is_named_or_left_out(tmp_path: Path) -> None:
    """Case 31."""
    path = write(tmp_path / "a.arrow", "stream", TABLE.select(["id"]), 8)
    stream, skipping, data = read_arrow(path), read_arrow(path, on_error="skip"), bytearray(path.read_bytes())
    header = body_of(bytes(data), 2) - 64
    data[header : header + 40] = b"\xff" * 40
    path.write_bytes(data)
    rows = stream.open(Lane(0, 1))
    assert numbers([next(rows) for _ in range(16)]) == IDS[:16]
    before = saved(rows)
    for _ in range(2):
        with pytest.raises(BadRow, match=r"a\.arrow: record batch 2 cannot be decoded: .*\n.*take it out of paths"):
            next(rows)
        assert saved(rows) == before
    assert numbers(assert_law(skipping, Lane(0, 1), [10, 10])) == IDS[:16] + IDS[24:]


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_damaged_row_is_named_or_left_out(tmp_path: Path, lanes: int) -> None:
    """Offsets that point out of the text would crash whoever follows them."""
    path = write(tmp_path / "a.arrow", "file", pa.table({"text": ["aa", "bb", "cc", "dd"]}))
    data = path.read_bytes()
    offsets = struct.pack("<5i", 0, 2, 4, 6, 8)
    path.write_bytes(data.replace(offsets, struct.pack("<5i", 0, 2, 1 << 30, 6, 8)))
    with pytest.raises(
        BadRow, match=r"a\.arrow, row 1 \(record batch 0\): the value of column 'text' cannot be read \("
    ):
        rows_over(read_arrow(path), lanes)
    stream = read_arrow(path, on_error="skip")
    assert sorted(row["text"] for row in rows_over(stream, lanes)) == ["aa", "dd"]
    path.write_bytes(data.replace(b"aabbcc", b"aab\xffcc"))
    assert sorted(row["text"] for row in rows_over(stream, lanes)) == ["aa", "cc", "dd"]


def test_a_file_that_changed_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", "file", batch=10)
    stream, data = read_arrow(path), path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(BadRow, match=rf"has {len(data) - 1} bytes, but had {len(data)} bytes when the stream was made"):
        run(stream)
    CountedFiles.hold(**{"a.arrow": data})
    stream = read_arrow("counted://a.arrow")
    CountedFiles.hold(**{"a.arrow": data[:1200]})
    with pytest.raises(BadRow, match="ends at byte 1200, but had"):
        run(stream)


def test_a_read_that_fails_in_passing_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    CountedFiles.hold(**{"a.arrow": packed("file", batch=10)})
    rows = read_arrow("counted://a.arrow", retries=0, read_ahead=False).open(Lane(0, 1))
    calls: list[Any] = []

    def read(*place: Any, real: Any = reading_files._read_remote) -> bytes:
        calls.append(place)
        if len(calls) % 3 == 1:
            raise OSError("try again")
        return bytes(real(*place))

    monkeypatch.setattr(reading_files, "_read_remote", read)
    found = []
    for _ in range(1000):
        try:
            found.append(next(rows)["id"])
        except OSError as error:
            assert "try again" in str(error)
        except StopIteration:
            break
    assert found == IDS and len(calls) > 8


@pytest.fixture
def saved_dataset(tmp_path: Path) -> Path:
    rows = {"id": IDS, "text": TABLE["text"].to_pylist(), "grid": [[[n, 1], [2, 3]] for n in IDS]}
    kinds = datasets.Features(
        {"id": datasets.Value("int64"), "text": datasets.Value("string"), "grid": datasets.Array2D((2, 2), "int16")}
    )
    datasets.Dataset.from_dict(rows, kinds).save_to_disk(tmp_path / "saved", num_shards=3)
    return tmp_path / "saved"


def test_a_saved_dataset_is_its_files_in_their_order(saved_dataset: Path) -> None:
    stream = read_arrow(saved_dataset)
    rows = list(stream.open(Lane(0, 1)))
    assert [(row["id"], row["text"]) for row in rows] == list(zip(IDS, TABLE["text"].to_pylist(), strict=True))
    assert [[line.tolist() for line in row["grid"]] for row in rows] == [[[n, 1], [2, 3]] for n in IDS]
    assert rows[0]["grid"][0].dtype == "int16"
    assert str(stream).startswith(f"read_arrow('{saved_dataset}/data-00000-of-00003.arrow' and 2 more)   3 files, ")
    assert run(read_arrow([str(saved_dataset) + "/"], columns=["id"])) == run(
        read_arrow(sorted(saved_dataset.glob("*.arrow")), columns=["id"])
    )
    memory = fsspec.filesystem("memory")
    memory.put(str(saved_dataset), "/saved", recursive=True)
    assert numbers(run(read_arrow("memory://saved", columns=["id"]))) == IDS
    memory.rm("/saved", recursive=True)


def test_a_dict_of_datasets_asks_for_one_split(tmp_path: Path) -> None:
    one = datasets.Dataset.from_dict({"id": [1]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    with pytest.raises(
        ValueError, match=r"(?s)is a DatasetDict with the splits 'train', 'test'.*/both/train'"
    ) as caught:
        read_arrow(tmp_path / "both")
    assert not isinstance(caught.value, BadRow)
    assert run(read_arrow(tmp_path / "both" / "test")) == [{"id": 1}]


def test_a_dataset_with_indices_is_refused_with_the_way_out(saved_dataset: Path, tmp_path: Path) -> None:
    chosen = datasets.load_from_disk(saved_dataset).shuffle(
        seed=0, indices_cache_file_name=str(tmp_path / "indices.arrow")
    )
    with pytest.raises(ValueError, match=r"(?s)is a file of indices into a dataset.*flatten_indices\(\).*from_hf\(\)"):
        read_arrow(tmp_path / "indices.arrow")
    state = json.loads((saved_dataset / "state.json").read_text())
    (saved_dataset / "state.json").write_text(json.dumps(state | {"_indices_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(
        ValueError, match=r"(?s)was saved with indices that choose and order its rows.*flatten_indices\(\)"
    ):
        read_arrow(saved_dataset)
    chosen.flatten_indices().save_to_disk(tmp_path / "flat")
    assert numbers(run(read_arrow(tmp_path / "flat", columns=["id"]))) == list(chosen["id"])


@pytest.mark.parametrize("text", ["[]", "{}", "no JSON", '{"_data_files": [1]}'])
def test_a_state_that_datasets_did_not_write_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state\.json in .* is none that save_to_disk\(\) wrote"):
        read_arrow(tmp_path)


@pytest.mark.parametrize(
    ("paths", "error", "text"),
    [
        ("none.arrow", FileNotFoundError, "there is no file 'none.arrow'"),
        (".", IsADirectoryError, "'.' is a folder. Name its files by a pattern, such as './*.arrow'"),
        ([], ValueError, "paths is empty"),
        (7, TypeError, "read_arrow: paths must be a path or a list of paths"),
        ([7], TypeError, "read_arrow: a path must be a str or a Path"),
    ],
)
def test_paths_that_lead_nowhere_fail_at_construction(paths: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        read_arrow(paths)
    assert text in str(caught.value)
