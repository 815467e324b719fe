"""Reading tar shards: groups of members, decoders, which lane, where a resume reads, and what goes wrong by name."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from tests.streams.runs import assert_law, packed_as, plain, resumed, run, run_lanes, saved
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.streams.reading import files as reading_files
from unbroken.streams.reading import tar_members
from unbroken.streams.reading.tar import read_tar

Content = Iterable[tuple[str, bytes]]
ONE = Lane(0, 1)
NAMES = ["a.tar", "a.tar.gz", "a.tgz", "a.tar.zst"]
FORTY: list[tuple[str, bytes]] = [
    member
    for n in range(40)
    for member in ((f"d/{n:04}.txt", b"x" * (n * 97 % 1500)), (f"d/{n:04}.cls", str(n).encode()))
]
ENDS = b"\0" * 1024


def archive(members: Content, format: int = tarfile.PAX_FORMAT, **fields: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format, **fields) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def write_tar(path: Path, members: Content | bytes, **fields: Any) -> Path:
    data = members if isinstance(members, bytes) else archive(members, **fields)
    path.write_bytes(gzip.compress(data) if path.suffix == ".tgz" else packed_as(path.name, data))
    return path


def header_of(name: str, content: bytes, **fields: Any) -> bytes:
    """A header, with fields of ``TarInfo`` set to other values, and the content after it."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + content + b"\0" * (-len(content) % 512)


def classes(rows: Iterable[Any]) -> list[int]:
    return [row["cls"] for row in rows]


@pytest.mark.parametrize("name", NAMES)
def test_neighbours_with_the_same_key_are_one_row(tmp_path: Path, name: str) -> None:
    """The key ends at the first dot of the base name: webdataset.tariterators, base_plus_ext and group_by_keys."""
    members = [
        ("a/b.c/0.txt", b"zero"),
        ("a/b.c/0.seg.PNG.bin", b"\1"),
        ("__meta__/info.txt", b"not a row"),
        ("__index__", b"{"),
        ("a/b.c/0.CLS", b" 7\n"),
        ("no extension", b"not a row"),
        ("a/.hidden.txt", b"not a row"),
        ("1.txt", b"one"),
        ("2.txt", b""),
        ("a/1.txt", b"another"),
        ("1.txt", b"one again"),
    ]
    path = write_tar(tmp_path / name, members)
    url = {"__url__": str(path)}
    assert run(read_tar(path)) == [
        {"__key__": "a/b.c/0", **url, "txt": "zero", "seg.png.bin": b"\1", "cls": 7},
        {"__key__": "1", **url, "txt": "one"},
        {"__key__": "2", **url, "txt": ""},
        {"__key__": "a/1", **url, "txt": "another"},
        {"__key__": "1", **url, "txt": "one again"},
    ]


def test_a_group_ends_with_its_shard(tmp_path: Path) -> None:
    paths = [write_tar(tmp_path / f"{n}.tar", [("same.txt", b"%d" % n)]) for n in range(2)]
    assert [row["txt"] for row in run(read_tar(paths))] == ["0", "1"]


def test_folders_links_devices_and_unknown_members_are_passed_over(tmp_path: Path) -> None:
    kinds = [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
    others = b"".join(header_of("a.other", b"", type=kind, linkname="a.txt") for kind in kinds)
    unknown = header_of("a.unknown", b"V" * 700, type=b"V")
    old = header_of("folder.x/", b"", type=tarfile.AREGTYPE)
    data = header_of("a.txt", b"text") + others + unknown + old + header_of("a.cls", b"3") + ENDS
    (row,) = run(read_tar(write_tar(tmp_path / "a.tar", data)))
    assert set(row) == {"__key__", "__url__", "txt", "cls"}


def png(pixels: np.ndarray[Any, Any], format: str = "PNG", **options: Any) -> bytes:
    image: Any = pytest.importorskip("PIL.Image", reason="images need pillow")
    out = io.BytesIO()
    image.fromarray(pixels).save(out, format, **options)
    return out.getvalue()


def test_members_are_decoded_by_their_extension(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (3, 5, 3), np.uint8)
    array = io.BytesIO()
    np.save(array, np.arange(6, dtype=np.float16).reshape(2, 3))
    members = [
        ("0.txt", "é".encode()),
        ("0.text", b"text"),
        ("0.json", b'{"a": [1]}'),
        ("0.cls", b"1"),
        ("0.index", b"-2"),
        ("0.id", b"3"),
        ("0.png", png(pixels)),
        ("0.seg.png", png(pixels[:, :, 0])),
        ("0.webp", png(pixels, "WEBP", lossless=True)),
        ("0.jpg", png(np.full((8, 8, 3), 200, np.uint8), "JPEG")),
        ("0.jpeg", png(np.full((8, 8), 200, np.uint8), "JPEG")),
        ("0.npy", array.getvalue()),
        ("0.other", b"\0\1"),
    ]
    (row,) = read_tar(write_tar(tmp_path / "a.tar", members)).open(ONE)
    values = {"txt": "é", "text": "text", "json": {"a": [1]}, "cls": 1, "index": -2, "id": 3, "other": b"\0\1"}
    assert {name: row[name] for name in values} == values
    for name, expected in {"png": pixels, "webp": pixels, "seg.png": np.repeat(pixels[:, :, :1], 3, axis=2)}.items():
        assert row[name].dtype == np.uint8 and np.array_equal(row[name], expected) and row[name].flags.writeable
    assert row["jpg"].shape == row["jpeg"].shape == (8, 8, 3) and abs(int(row["jpg"][0, 0, 0]) - 200) < 5
    assert plain(row["npy"]) == ("float16", [[0, 1, 2], [3, 4, 5]])


def test_decoders_can_be_added_replaced_and_left_out(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.cls", b"1"), ("0.seg.cls", b"2"), ("0.txt", b"t"), ("0.x", b"3")])

    def rows_by(decode: Any) -> dict[str, Any]:
        (row,) = run(read_tar(path, decode=decode))
        return {name: value for name, value in row.items() if not name.startswith("__")}

    bare = {"cls": b"1", "seg.cls": b"2", "txt": b"t", "x": b"3"}
    assert rows_by(False) == rows_by(None) == bare
    assert rows_by(True) == rows_by({}) == {"cls": 1, "seg.cls": 2, "txt": "t", "x": b"3"}
    assert rows_by({"x": int, "seg.cls": None, "txt": len}) == {"cls": 1, "seg.cls": b"2", "txt": 1, "x": 3}
    described = [read_tar(path, decode=decode).describe()["decode"] for decode in (True, False, {"x": int})]
    assert described[:2] == ["default", "none"] and described[2].startswith("default, x=int:")
    assert read_tar(path).difference_class("decode") == "data"


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("length", [5, 99, 100, 101, 150, 254, 400])
def test_names_of_any_length_are_read_in_every_format(tmp_path: Path, format: int, length: int) -> None:
    length = min(length, 150) if format == tarfile.USTAR_FORMAT else length  # it has room for no more
    folder = "/".join(["f" * 60] * (length // 60))
    names = [f"{folder}/{n}{'é' if format != tarfile.USTAR_FORMAT else 'e'}".rjust(length, "x") for n in range(3)]
    members = [(f"{name}.{extension}", b"x") for name in names for extension in ("txt", "bin")]
    path = write_tar(tmp_path / "a.tar", members, format=format)
    rows = assert_law(read_tar(path), ONE, [1])
    assert [row["__key__"] for row in rows] == [name.removesuffix(".txt") for name, _ in members[::2]]


def test_sizes_in_base_256_and_in_pax_headers_are_read(tmp_path: Path) -> None:
    plain_header = bytearray(header_of("big.txt", b""))
    plain_header[124:136] = b"\x80" + (5).to_bytes(11, "big")
    plain_header[148:156] = b"%06o\0 " % (sum(plain_header) - sum(plain_header[148:156]) + 8 * 32)
    pax = header_of("pax", b"9 size=3\n19 path=other.name\n", type=tarfile.XHDTYPE)
    global_pax = header_of("pax", b"17 comment=hello\n", type=tarfile.XGLTYPE)
    member = header_of("short.txt", b"abc", size=0)
    data = bytes(plain_header) + b"hello".ljust(512, b"\0") + global_pax + pax + member + ENDS
    rows = run(read_tar(write_tar(tmp_path / "a.tar", data), decode=False))
    assert [(row["__key__"], row.get("txt", row.get("name"))) for row in rows] == [("big", b"hello"), ("other", b"abc")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lane", [ONE, Lane(0, 3), Lane(2, 3, epoch=1), Lane(5, 64)])
def test_every_restore_point_is_exact_with_and_without_a_window(tmp_path: Path, name: str, lane: Lane) -> None:
    path = write_tar(tmp_path / name, FORTY)
    assert_law(read_tar([path, path]), lane, [1, 0, 2, 3])
    assert_law(read_tar([path, path]).shuffle(8, seed=1), lane, [1, 0, 2, 3])


@given(
    sizes=st.lists(st.lists(st.integers(0, 1300), min_size=1, max_size=3), max_size=25),
    format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    long=st.integers(0, 120),
    lanes=st.sampled_from([1, 2, 7, 64]),
    grain=st.sampled_from([1, 512, 700, 4096]),
)
def test_a_group_belongs_to_the_range_where_it_begins(
    sizes: list[list[int]], format: int, long: int, lanes: int, grain: int
) -> None:
    """Every row once, whatever the ranges; members that are archives themselves are not taken for more members."""
    inner = archive([("inner.txt", b"not a row")] * 3)
    members = [
        (f"{'n' * long}{number}.{part}", inner[:size] if size % 3 else b"\0" * size)
        for number, parts in enumerate(sizes)
        for part, size in enumerate(parts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        stream = read_tar(write_tar(Path(folder) / "a.tar", members, format=format), decode=False)
        found = []
        for index in range(lanes):
            rows = stream.open(Lane(index, lanes))
            rows.load_state_dict({**rows.state_dict(), "grain": grain})
            found += list(rows)
    assert sorted(int(row["__key__"].lstrip("n")) for row in found) == list(range(len(sizes)))
    for row in found:
        assert [len(row[str(part)]) for part in range(len(row) - 2)] == sizes[int(row["__key__"].lstrip("n"))]


def test_one_shard_keeps_twelve_lanes_busy_and_many_stay_whole(tmp_path: Path) -> None:
    """Case 22."""
    paths = [
        write_tar(tmp_path / f"{n}.tar", [(f"{n:02}-{m:03}.cls", b"%d" % m) for m in range(200)]) for n in range(12)
    ]
    lanes = run_lanes(read_tar(paths[0]), 12)
    assert min(map(len, lanes)) > 5
    assert sorted(classes(row for rows in lanes for row in rows)) == list(range(200))
    assert [{row["__key__"][:2] for row in rows} for rows in run_lanes(read_tar(paths), 12)] == [
        {f"{n:02}"} for n in range(12)
    ]


class Counting(MemoryFileSystem):
    """Notes each range that is read."""

    protocol = "tallied"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    read: ClassVar[list[tuple[int, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("tallied://")))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        Counting.read.append((start, end))
        return bytes(super().cat_file(path, start, end, **options))


def test_a_resume_at_90_percent_reads_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("tallied", Counting, clobber=True)
    data = archive([(f"{n:04}.bin", bytes([n % 256]) * 20_000) for n in range(1000)])
    Counting().pipe("/a.tar", data)
    stream = read_tar("tallied://a.tar", read_ahead=False)
    rows = stream.open(ONE)
    for _ in range(900):
        next(rows)
    Counting.read.clear()
    again = resumed(stream, ONE, saved(rows))
    assert next(again)["__key__"] == "0900"
    assert min(start for start, _ in Counting.read) == 900 * (512 + 20_480)
    assert [row["__key__"] for row in again] == [f"{n:04}" for n in range(901, 1000)]
    assert sum(min(end, len(data)) - start for start, end in Counting.read) < len(data) / 8


def test_headers_are_walked_once_and_contents_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{n}.bin", b"x" * 1_000_000) for n in range(40)])
    monkeypatch.setattr(tar_members, "_LOCAL_SPAN", 512)
    read: list[int] = []
    real = tar_members.read_range
    monkeypatch.setattr(
        tar_members,
        "read_range",
        lambda path, start, stop, access: read.append(stop - start) or real(path, start, stop, access),
    )
    lanes = run_lanes(read_tar(path), 8)
    assert sorted(int(row["__key__"]) for rows in lanes for row in rows) == list(range(40))
    assert sum(read) < 100 * 512
    before = len(read)
    run_lanes(read_tar(path), 8)
    assert len(read) == before


def test_a_walk_that_fails_once_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 31."""
    stream = read_tar(write_tar(tmp_path / "a.tar", FORTY), retries=0)
    ref, calls = run(stream, Lane(2, 3)), []
    tar_members._walked.clear()

    def read(*place: Any, real: Any = reading_files._read_local) -> bytes:
        calls.append(place)
        if len(calls) % 7 == 1:
            raise OSError("try again")
        return bytes(real(*place))

    monkeypatch.setattr(reading_files, "_read_local", read)
    monkeypatch.setattr(tar_members, "_LOCAL_SPAN", 512)
    rows, found = stream.open(Lane(2, 3)), []
    for _ in range(2000):
        try:
            found.append(plain(next(rows)))
        except OSError:
            continue
        except StopIteration:
            break
    assert found == ref != []


@pytest.mark.parametrize("content", [b"", ENDS, b"\0" * 10240, header_of("folder/", b"", type=tarfile.DIRTYPE) + ENDS])
def test_a_shard_without_members_is_fine(tmp_path: Path, content: bytes) -> None:
    paths = [write_tar(tmp_path / "a.tar", content), write_tar(tmp_path / "b.tar", [("0.cls", b"1")])]
    for lanes in (1, 2, 64):
        assert classes(row for rows in run_lanes(read_tar(paths), lanes) for row in rows) == [1]


def test_memory_paths_are_read() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a.tar", "b.tar"):
        memory.pipe(f"/shards/{name}", archive(FORTY))
    for lanes in (1, 2, 5):
        found = [row for rows in run_lanes(read_tar("memory://shards/*.tar"), lanes) for row in rows]
        assert sorted(classes(found)) == sorted([*range(40), *range(40)])
    memory.rm("/shards", recursive=True)


def test_lineage_names_the_shard_and_the_key(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", FORTY)
    for stream, lane in ((read_tar(path), Lane(1, 3)), (read_tar(path).shuffle(9, seed=1), ONE)):
        rows = stream.open(lane, lineage=True)
        for row in rows:
            assert rows.origin() == (Origin("read_tar", str(path), row["__key__"]),)
    rows = read_tar(path).open(ONE)
    next(rows)
    assert rows.where() == f"{path}, group d/0000"
    assert json.loads(saved(rows))["place"] == 1536


def test_without_pillow_an_image_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = read_tar(write_tar(tmp_path / "a.tar", [("0.png", b"x")]), on_error="skip")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        run(stream)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"decode": 3}, TypeError, "decode must be True, False, None or a dict of functions, but got 3"),
        ({"decode": {"png": 3}}, TypeError, "decode['png'] must be a function of bytes, but got 3"),
        ({"decode": {".PNG": len}}, ValueError, "decode names an extension '.PNG'. Write it in lower case"),
        ({"on_error": "ignore"}, ValueError, "on_error must be 'raise' or 'skip'"),
        ({"paths": "none.tar"}, FileNotFoundError, "there is no file 'none.tar'"),
    ],
)
def test_wrong_arguments_fail_at_construction(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    path = write_tar(tmp_path / "a.tar", FORTY)
    with pytest.raises(error) as caught:
        read_tar(**{"paths": path, **options})
    assert text in str(caught.value)
    (tmp_path / "a.tar.xz").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"(?s)compressed in a way that cannot be read.*Convert it to .tar, .tar.gz or"
    ):
        read_tar(tmp_path / "a.tar.xz")
