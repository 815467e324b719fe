"""The layouts of token files: headers, offsets and Megatron's index, and what does not fit together."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from tests.streams.runs import run
from unbroken.errors import BadRow
from unbroken.streams.reading.tokens import read_tokens

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_megatron(
    path: Path,
    sequences: Sequence[Sequence[int]],
    documents: Sequence[int] | None = None,
    dtype: str = "uint16",
    **changed: Any,
) -> Path:
    """A ``.bin`` and the ``.idx`` beside it, field by field as the format is described."""
    sizes = [len(sequence) for sequence in sequences]
    parts = {
        "magic": b"MMIDIDX\x00\x00",
        "version": struct.pack("<Q", 1),
        "code": struct.pack("<B", CODES[dtype]),
        "count": struct.pack("<Q", len(sequences)),
        "indices": struct.pack("<Q", len(sequences) + 1 if documents is None else len(documents)),
        "sizes": np.array(sizes, np.int32).tobytes(),
        "pointers": (np.cumsum([0, *sizes])[:-1] * np.dtype(dtype).itemsize).astype(np.int64).tobytes(),
        "documents": np.array(range(len(sequences) + 1) if documents is None else documents, np.int64).tobytes(),
    }
    path.write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))
    path.with_suffix(".idx").write_bytes(b"".join({**parts, **changed}.values()))
    return path


def write_llm_c(path: Path, tokens: Sequence[int], magic: int, version: int, dtype: str, count: int = -1) -> Path:
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens) if count < 0 else count
    path.write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())
    return path


def documents(path: Path, **given: Any) -> list[tuple[str, list[int]]]:
    return [row["input_ids"] for row in run(read_tokens(path, **given))]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_a_megatron_pair_needs_nothing_said(tmp_path: Path, dtype: str) -> None:
    sequences = [[1, 2, 3], [], [4], [5, 6]]
    path = write_megatron(tmp_path / "a.bin", sequences, dtype=dtype)
    assert documents(path) == [(dtype, sequence) for sequence in sequences]
    (row,) = run(read_tokens(path, 8))
    assert row["input_ids"] == ("int64", [1, 2, 3, 4, 5, 6, 0, 0])
    assert row["labels"] == ("int64", [2, 3, -100, -100, 6, -100, -100, -100])
    assert row["position_ids"] == ("int64", [0, 1, 2, 0, 0, 1, 0, 0])


def test_a_document_of_megatron_may_have_several_sequences(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a.bin", [[1, 2], [3], [4], [5, 6], []], documents=[0, 2, 2, 5])
    assert documents(path) == [("uint16", [1, 2, 3]), ("uint16", []), ("uint16", [4, 5, 6])]
    assert run(read_tokens(path, 6))[0]["position_ids"] == ("int64", [0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("named", [[], [0]])
def test_where_an_index_names_no_documents_each_sequence_is_one(tmp_path: Path, named: list[int]) -> None:
    path = write_megatron(tmp_path / "a.bin", [[1, 2], [3]], documents=named)
    assert documents(path) == [("uint16", [1, 2]), ("uint16", [3])]
    assert run(read_tokens(path, 4))[0]["labels"] == ("int64", [2, -100, -100, -100])


def test_an_index_may_name_the_modes_of_its_sequences_too(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a.bin", [[1, 2], [3]], modes=b"\0\1")
    assert documents(path) == [("uint16", [1, 2]), ("uint16", [3])]


def test_an_empty_pair_has_no_rows(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a.bin", [])
    assert documents(path) == run(read_tokens(path, 8)) == []


def test_the_dtype_said_reads_a_bin_without_its_index(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a.bin", [[1, 2], [3]])
    assert run(read_tokens(path, 3, dtype="uint16")) == [
        {"input_ids": ("int64", [1, 2, 3]), "labels": ("int64", [2, 3, -100])}
    ]
    assert run(read_tokens(path, 3, offsets=tmp_path / "a.idx"))[0]["labels"] == ("int64", [2, -100, -100])


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_a_header_of_llm_c_tells_the_dtype(tmp_path: Path, magic: int, version: int, dtype: str) -> None:
    path = write_llm_c(tmp_path / "a.bin", [7, 8, 9], magic, version, dtype)
    assert run(read_tokens(path, 2)) == run(read_tokens(path, 2, dtype=dtype))
    assert [row["input_ids"][1] for row in run(read_tokens(path, 2))] == [[7, 8], [9, 0]]
    offsets = tmp_path / "starts"
    np.array([0, 2], "<i8").tofile(offsets)
    assert documents(path, offsets=offsets) == [(dtype, [7, 8]), (dtype, [9])]


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_tokens_in_npy_tell_their_dtype(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 3], dtype))
    assert [row["input_ids"][1] for row in run(read_tokens(tmp_path / "a.npy", 2))] == [[1, 2], [3, 0]]


@pytest.mark.parametrize("ending", [[], [6]])
@pytest.mark.parametrize("dtype", ["<i4", "<u4", "<i8", "raw"])
def test_offsets_are_told_in_several_ways(tmp_path: Path, ending: list[int], dtype: str) -> None:
    for name in ("a", "b"):
        np.arange(6, dtype="<u2").tofile(tmp_path / f"{name}.bin")
        starts = np.array([0, 2, 2, 5, *ending], "<i8" if dtype == "raw" else dtype)
        if dtype == "raw":
            starts.tofile(tmp_path / f"{name}.docs")
        else:
            np.save(tmp_path / f"{name}.npy", starts)
    suffix = "docs" if dtype == "raw" else "npy"
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for offsets in (
        f"{{}}.{suffix}",
        [tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"],
        lambda path: path.replace("bin", suffix),
    ):
        rows = run(read_tokens(paths, dtype="uint16", offsets=offsets))
        assert [row["input_ids"][1] for row in rows] == [[0, 1], [], [2, 3, 4], [5]] * 2
    one = run(read_tokens(paths[0], 6, dtype="uint16", offsets=str(tmp_path / f"a.{suffix}")))
    assert one[0]["position_ids"] == ("int64", [0, 1, 0, 1, 2, 0])


@pytest.mark.parametrize("changed", ["numbers", "order", "beyond"])
def test_documents_that_do_not_follow_one_another_are_named(tmp_path: Path, changed: str) -> None:
    """What only a reading of all offsets would show comes when its place is read."""
    np.arange(100, dtype="<u2").tofile(tmp_path / "a.bin")
    starts = {"numbers": [0, -5, 50, 90], "order": [0, 60, 50, 90], "beyond": [0, 60, 500, 90]}[changed]
    np.array(starts, "<i8").tofile(tmp_path / "starts")
    for seq_len in (64, None):
        with pytest.raises(BadRow, match=r"starts: documents \d to \d do not begin one after another in 100 tokens"):
            run(read_tokens(tmp_path / "a.bin", seq_len, dtype="uint16", offsets=tmp_path / "starts"))


@pytest.mark.parametrize(
    "changed",
    [
        {"pointers": np.array([0, 4, 6], "<i8").tobytes()},
        {"sizes": np.array([2, 2, 2], "<i4").tobytes()},
        {"sizes": np.array([-1, 3, 2], "<i4").tobytes()},
        {"documents": [0, 2, 1, 3]},
        {"documents": [0, 9, 2, 3]},
        {"documents": [-1, 1, 2, 3]},
    ],
)
def test_an_index_whose_parts_do_not_fit_together_is_named(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = write_megatron(tmp_path / "a.bin", [[1, 2, 3], [], [4, 5]], **changed)
    for seq_len in (64, None):
        with pytest.raises(BadRow, match=r"a\.idx"):
            run(read_tokens(path, seq_len))


def test_offsets_that_were_cut_short_since_are_named(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5]])
    stream = read_tokens(path, 2)
    path.with_suffix(".idx").write_bytes(path.with_suffix(".idx").read_bytes()[:-1])
    with pytest.raises(BadRow, match=r"a\.idx: has 81 bytes, but had 82 when the stream was made"):
        run(stream)


def index_error(tmp_path: Path, **changed: Any) -> str:
    path = write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5]], **changed)
    with pytest.raises(ValueError) as caught:
        read_tokens(path, 2)
    return str(caught.value)


def test_an_index_that_does_not_fit_fails_at_construction(tmp_path: Path) -> None:
    assert "is no index of Megatron: it begins with b'MMIDIDY" in index_error(tmp_path, magic=b"MMIDIDY\0\0")
    assert "has version 2 and tokens of uint16; version 1" in index_error(tmp_path, version=struct.pack("<Q", 2))
    assert "has version 1 and tokens of float64" in index_error(tmp_path, code=b"\6")
    assert "has version 1 and tokens of 99" in index_error(tmp_path, code=b"\x63")
    assert "but 9 sequences and 3 document indices take 166" in index_error(tmp_path, count=struct.pack("<Q", 9))
    assert "its last document ends with sequence 1 of 2" in index_error(tmp_path, documents=[0, 1])
    sizes = np.array([3, 4], "<i4").tobytes()
    assert "a.idx: ends at byte 14 of" in index_error(tmp_path, sizes=sizes)
    assert "which has 10 bytes" in index_error(tmp_path, sizes=sizes)
    path = write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5]])
    path.with_suffix(".idx").write_bytes(b"MMIDIDX")
    with pytest.raises(ValueError, match="is no index of Megatron: it begins with b'MMIDIDX'"):
        read_tokens(path, 2)
    write_megatron(path, [[1, 2, 3], [4, 5]])
    with pytest.raises(ValueError, match=r"a\.idx: is an index. Name the \.bin that belongs to it"):
        read_tokens(path.with_suffix(".idx"), 2)


def test_headers_that_do_not_fit_fail_at_construction(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for error, given in (
        ("has a header of version 2, and version 1 can be read", (20240520, 2, "uint16")),
        ("has 1030 bytes, but its header tells of 1032", (20240520, 1, "uint16", 4)),
    ):
        write_llm_c(path, [1, 2, 3], *given)
        with pytest.raises(ValueError, match=error):
            read_tokens(path, 2)
    write_llm_c(path, [1, 2, 3], 20240520, 1, "uint16")
    with pytest.raises(ValueError, match="has tokens of uint16, as its header or index says, but dtype='uint32' was"):
        read_tokens(path, 2, dtype="uint32")
    for array, error in (
        (np.zeros((2, 2), np.uint16), r"has the shape \[2, 2\] and the type uint16"),
        (np.zeros(2, np.float32), r"has the shape \[2\] and the type float32"),
        (np.zeros(2, ">u2"), r"has the shape \[2\] and the type >u2"),
        (np.zeros(2, np.uint64), r"has the shape \[2\] and the type uint64"),
    ):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(ValueError, match=error):
            read_tokens(tmp_path / "a.npy", 2)
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': 'no'")
    with pytest.raises(ValueError, match=r"the header of this \.npy cannot be read"):
        read_tokens(tmp_path / "b.npy", 2)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({}, ValueError, "has no header that tells the type of its tokens, and no .idx beside it"),
        ({"dtype": "uint32"}, ValueError, "has 2 tokens of uint32, and 2 bytes more that are no whole one"),
        ({"dtype": "what"}, TypeError, "dtype must be such as 'uint16' or 'uint32', but got 'what'"),
        ({"dtype": "float32"}, ValueError, "dtype must be of whole numbers that fit int64, little-endian"),
        ({"dtype": "uint64"}, ValueError, "dtype must be of whole numbers that fit int64, little-endian"),
        ({"dtype": ">u2"}, ValueError, "dtype must be of whole numbers that fit int64, little-endian"),
        ({"dtype": "uint16", "offsets": "none"}, FileNotFoundError, "there is no file 'none'"),
        ({"dtype": "uint16", "offsets": 7}, TypeError, "offsets must be a path, a list of paths, a pattern with {}"),
        ({"dtype": "uint16", "offsets": ["a", "b"]}, ValueError, "offsets names 2 files for 1 files of tokens"),
        ({"dtype": "uint16", "offsets": [1, 5]}, ValueError, "documents begin at token 1 to 5, but must begin at 0"),
        ({"dtype": "uint16", "offsets": [0, 6]}, ValueError, "within the 5 tokens of their file"),
        ({"dtype": "uint16", "offsets": []}, ValueError, "documents begin at token 5 to 5"),
    ],
)
def test_what_cannot_be_known_or_does_not_fit_fails_at_construction(
    tmp_path: Path, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    np.arange(5, dtype="<u2").tofile(tmp_path / "a.bin")
    if isinstance(offsets := given.get("offsets"), list) and offsets != ["a", "b"]:
        np.array(offsets, "<i8").tofile(tmp_path / "starts")
        given = {**given, "offsets": tmp_path / "starts"}
    with pytest.raises(error) as caught:
        read_tokens(tmp_path / "a.bin", 2, **given)
    assert text in str(caught.value)


def test_offsets_cut_short_fail_at_construction(tmp_path: Path) -> None:
    np.arange(5, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "starts").write_bytes(bytes(12))
    with pytest.raises(ValueError, match="has 12 bytes, but its header tells of 8"):
        read_tokens(tmp_path / "a.bin", 2, dtype="uint16", offsets=tmp_path / "starts")


def test_many_files_from_afar_are_looked_at_together() -> None:
    memory = fsspec.filesystem("memory")
    for number in range(40):
        memory.pipe(f"/many/{number:02}.bin", np.arange(number, dtype="<u2").tobytes())
    assert [row["input_ids"][1][0] for row in run(read_tokens("memory://many/*.bin", 100, dtype="uint16"))] == [0] * 39
    memory.rm("/many", recursive=True)
    with pytest.raises(FileNotFoundError):
        read_tokens("memory://many/*.bin", 100, dtype="uint16")
