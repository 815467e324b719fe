"""Reading token files: what a row is, each token once over any lanes, and what a resume with another length does."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.streams.runs import assert_law, plain, resumed, run, run_lanes, saved
from tests.streams.test_token_files import write_megatron
from unbroken.errors import BadRow
from unbroken.lanes import Lane
from unbroken.streams.reading import files as reading_files
from unbroken.streams.reading import tokens as reading_tokens
from unbroken.streams.reading.tokens import read_tokens
from unbroken.streams.stage import Stage

LENGTH = 8
LENGTHS = (0, 1, LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH, 10 * LENGTH + 3, 100 * LENGTH)
PAD = -7


def write_tokens(path: Path, count: int, first: int = 1, dtype: str = "<u2") -> Path:
    np.arange(first, first + count).astype(dtype).tofile(path)
    return path


def write_corpus(folder: Path, lengths: Sequence[int]) -> list[Path]:
    """Files of so many tokens, each token another one, from 1 on."""
    starts = np.cumsum([1, *lengths])
    return [write_tokens(folder / f"{n}.bin", length, int(starts[n])) for n, length in enumerate(lengths)]


def documents_of(path: Path, lengths: Sequence[int]) -> Path:
    offsets = path.with_suffix(".npy")
    np.save(offsets, np.cumsum([0, *lengths]))
    return offsets


def naive(tokens: list[int], starts: list[int] | None, length: int) -> list[dict[str, Any]]:
    """The rows of one file, token by token."""
    rows = []
    for begin in range(0, len(tokens), length):
        row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "document_ids": []}
        documents = [max(s for s in starts or [0] if s <= at) for at in range(begin, min(begin + length, len(tokens)))]
        for at, start in enumerate(documents, begin):
            ends = at + 1 == len(tokens) or (starts is not None and at + 1 in starts)
            row["input_ids"].append(tokens[at])
            row["labels"].append(-100 if ends else tokens[at + 1])
            row["position_ids"].append(at - start)
            row["document_ids"].append(len(set(documents[: at + 1 - begin])) - 1)
        for name, fill in (("input_ids", PAD), ("labels", -100), ("position_ids", 0), ("document_ids", -1)):
            row[name] += [fill] * (length - len(row[name]))
        named = ("input_ids", "labels") if starts is None else tuple(row)
        rows.append({name: ("int64", row[name]) for name in named})
    return rows


def tokens_in(rows: Sequence[Any]) -> list[int]:
    return [token for row in rows for token in row["input_ids"][1] if token != PAD]


@contextmanager
def small_blocks(tokens: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_tokens, "_LOCAL_BLOCK", 2 * tokens)
        patch.setattr(reading_tokens, "_REMOTE_BLOCK", 2 * tokens)
        yield


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("block", [1, 3 * LENGTH, 1 << 20])
def test_rows_are_the_tokens_one_after_another_with_their_labels(tmp_path: Path, count: int, block: int) -> None:
    path = write_tokens(tmp_path / "a.bin", count)
    with small_blocks(block):
        rows = assert_law(read_tokens(path, LENGTH, dtype="uint16", pad_id=PAD), Lane(0, 1), [1, 0, 2])
    assert rows == naive(list(range(1, count + 1)), None, LENGTH)


@pytest.mark.parametrize("lengths", [[5], [0, 0, 5, 0], [3, 8, 1, 0, 20, 8], [1] * 20, [40]])
@pytest.mark.parametrize("block", [1, 3 * LENGTH, 1 << 20])
def test_where_documents_are_known_rows_are_as_pack_makes_them(tmp_path: Path, lengths: list[int], block: int) -> None:
    path = write_tokens(tmp_path / "a.bin", sum(lengths))
    offsets = documents_of(path, lengths)
    with small_blocks(block):
        given: dict[str, Any] = {"pad_id": PAD, "document_ids": True}
        rows = run(read_tokens(path, LENGTH, dtype="uint16", offsets=offsets, **given))
        whole = run(read_tokens(path, dtype="uint16", offsets=offsets).pack(LENGTH, **given))
    assert rows == whole
    assert rows == naive(list(range(1, sum(lengths) + 1)), np.cumsum([0, *lengths])[:-1].tolist(), LENGTH)


@pytest.mark.parametrize("lanes", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("seq_len", [1, LENGTH, 1000])
def test_each_token_is_in_one_row_whatever_the_lanes(tmp_path: Path, lanes: int, seq_len: int) -> None:
    paths = write_corpus(tmp_path, LENGTHS)
    stream = read_tokens(paths, seq_len, dtype="uint16", pad_id=PAD)
    rows = [row for lane in run_lanes(stream, lanes) for row in lane]
    assert sorted(tokens_in(rows)) == list(range(1, sum(LENGTHS) + 1))
    starts = np.cumsum([1, *LENGTHS])
    whole = [
        row
        for n, count in enumerate(LENGTHS)
        for row in naive(list(range(starts[n], starts[n] + count)), None, seq_len)
    ]
    assert sorted(map(str, rows)) == sorted(map(str, whole))
    mixed = [row for lane in run_lanes(stream.shuffle(50, seed=3), lanes, epoch=2) for row in lane]
    assert sorted(map(str, mixed)) == sorted(map(str, whole))


@pytest.mark.parametrize("lanes", [1, 2, 3, 7, 64])
def test_each_document_is_one_row_whatever_the_lanes(tmp_path: Path, lanes: int) -> None:
    path = write_tokens(tmp_path / "a.bin", sum(LENGTHS))
    stream = read_tokens(path, dtype="uint16", offsets=documents_of(path, LENGTHS))
    starts = np.cumsum([1, *LENGTHS])
    rows = [row for lane in run_lanes(stream, lanes) for row in lane]
    expected = [("uint16", list(range(starts[n], starts[n + 1]))) for n in range(len(LENGTHS))]
    assert sorted(row["input_ids"] for row in rows) == sorted(expected)


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=3),
    st.integers(1, 12),
    st.sampled_from(["plain", "documents in rows", "documents"]),
    st.integers(0, 6),
    st.integers(0, 3),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(1, 40),
)
def test_the_law_holds_for_any_files(
    lengths: list[list[int]], seq_len: int, what: str, window: int, lane: int, chain: list[int], block: int
) -> None:
    """Cases 28 and 29: windows and documents, chunks in order and shuffled, any lane, any epoch."""
    with small_blocks(block), pytest.MonkeyPatch.context() as patch:
        memory = fsspec.filesystem("memory")
        patch.setattr(reading_tokens, "_CHUNK_BYTES", 2 * block)
        for n, sizes in enumerate(lengths):
            memory.pipe(f"/law/{n}.bin", np.arange(sum(sizes), dtype="<u2").tobytes())
            memory.pipe(f"/law/{n}.starts", np.cumsum([0, *sizes], dtype="<i8").tobytes())
        known: dict[str, Any] = {} if what == "plain" else {"offsets": "{}.starts"}
        stream = read_tokens("memory://law/*.bin", None if what == "documents" else seq_len, dtype="uint16", **known)
        memory_rows = stream.shuffle(window, seed=1) if window else stream
        assert_law(memory_rows, Lane(lane % 2, 2, epoch=lane), chain)
        memory.rm("/law", recursive=True)


@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=2, max_size=4),
    st.booleans(),
)
def test_another_length_at_a_resume_goes_on_at_the_token_where_it_stopped(
    count: int, lives: list[tuple[int, int]], known: bool
) -> None:
    """No token is lost and none comes twice, and each has its label, however often the length changes."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/lengths/a.bin", np.arange(1, count + 1, dtype="<u2").tobytes())
    starts = list(range(0, count, 7))
    memory.pipe("/lengths/a.starts", np.array(starts, dtype="<i8").tobytes())
    given: dict[str, Any] = {"offsets": "{}.starts"} if known else {}

    def of(seq_len: int) -> Stage:
        return read_tokens("memory://lengths/a.bin", seq_len, dtype="uint16", pad_id=PAD, **given)

    found: list[tuple[int, int]] = []
    for lane in range(3):
        state = None
        for number, (seq_len, rows) in enumerate(lives):
            it = of(seq_len).open(Lane(lane, 3))
            if state is not None:
                it.load_state_dict(json.loads(state))
            for _ in range(rows if number < len(lives) - 1 else 1000):
                row = next(it, None)
                if row is not None:
                    pairs = zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True)
                    found += [pair for pair in pairs if pair[0] != PAD]
            state = saved(it)
    ends = {count, *(starts if known else [])}
    assert sorted(found) == [(token, -100 if token in ends else token + 1) for token in range(1, count + 1)]
    memory.rm("/lengths", recursive=True)


def test_the_last_row_of_a_file_may_be_left_out(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, [LENGTH - 1, LENGTH, LENGTH + 1, 3 * LENGTH])
    rows = assert_law(read_tokens(paths, LENGTH, dtype="uint16", pad_id=PAD, drop_last=True), Lane(0, 1), [2])
    assert [row["input_ids"][1][0] for row in rows] == [8, 16, 25, 33, 41]
    assert all(len(tokens_in([row])) == LENGTH for row in rows)
    assert [row["labels"][1][-1] for row in rows] == [-100, 24, 33, 41, -100]


def test_no_row_shares_memory_with_another(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", 100)
    ref = run(read_tokens(path, LENGTH, dtype="uint16"))
    rows = read_tokens(path, LENGTH, dtype="uint16").open(Lane(0, 1))
    for row, expected in zip(rows, ref, strict=True):
        assert plain(row) == expected
        row["labels"][:] = -100
        assert plain(row)["input_ids"] == expected["input_ids"]
        row["input_ids"][:] = 0
    whole = read_tokens(path, dtype="uint16", offsets=documents_of(path, [50, 50])).open(Lane(0, 1))
    next(whole)["input_ids"][:] = 0
    assert next(whole)["input_ids"].tolist() == list(range(51, 101))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_every_dtype_becomes_int64(tmp_path: Path, dtype: str) -> None:
    most = min(np.iinfo(dtype).max, (1 << 62) + 1)
    np.array([0, most, 1], dtype).tofile(tmp_path / "a.bin")
    (row,) = read_tokens(tmp_path / "a.bin", 3, dtype=dtype).open(Lane(0, 1))
    assert plain(row) == {"input_ids": ("int64", [0, most, 1]), "labels": ("int64", [most, 1, -100])}


def test_a_resume_reads_one_block_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tokens(tmp_path / "a.bin", 1 << 22, dtype="<u4")
    stream = read_tokens(path, 1024, dtype="uint32")
    rows = stream.open(Lane(0, 1))
    for _ in range(3001):
        next(rows)
    read: list[tuple[int, int]] = []

    def watched(path: str, start: int, stop: int, real: Any = reading_files._read_local) -> Any:
        read.append((start, stop))
        return real(path, start, stop)

    monkeypatch.setattr(reading_files, "_read_local", watched)
    assert int(next(resumed(stream, Lane(0, 1), saved(rows)))["input_ids"][0]) == 3001 * 1024 + 1
    assert read == [(3001 * 4096, 3001 * 4096 + (1 << 17) + 4)]


def test_a_stream_that_has_read_travels_to_another_process(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", 100)
    stream = read_tokens(path, LENGTH, dtype="uint16", offsets=documents_of(path, [3, 90, 7]))
    ref = run(stream)
    assert run(pickle.loads(pickle.dumps(stream))) == ref


def test_files_from_afar_are_read_as_local_ones_are(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name, lengths in (("a", [5, 20, 0, 9]), ("b", [1, 1, 40])):
        write_megatron(tmp_path / f"{name}.bin", [[n + 1] * length for n, length in enumerate(lengths)])
        for suffix in ("bin", "idx"):
            memory.pipe(f"/tokens/{name}.{suffix}", (tmp_path / f"{name}.{suffix}").read_bytes())
    for seq_len in (LENGTH, None):
        local, afar = (read_tokens(f"{folder}/*.bin", seq_len) for folder in (tmp_path, "memory://tokens"))
        assert local.describe() == afar.describe()
        assert assert_law(afar, Lane(0, 2), [2, 1]) == run(local, Lane(0, 2))
        shuffled = assert_law(afar.shuffle(3), Lane(1, 2), [2, 1])
        ahead = read_tokens(f"{tmp_path}/*.bin", seq_len, read_ahead=True)
        assert assert_law(ahead.shuffle(3), Lane(1, 2), [1]) == shuffled
    memory.rm("/tokens", recursive=True)


def test_a_row_tells_the_token_that_it_begins_with(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, [20, 9])
    for stream, tokens in (
        (read_tokens(paths, LENGTH, dtype="uint16"), [0, 8, 16, 0, 8]),
        (
            read_tokens(
                paths, dtype="uint16", offsets=[documents_of(paths[0], [5, 15]), documents_of(paths[1], [2, 7])]
            ),
            [0, 5, 0, 2],
        ),
    ):
        rows = stream.open(Lane(0, 1), lineage=True)
        origins = [rows.origin() for _ in rows]
        assert [(origin.file, origin.row) for (origin,) in origins] == [
            (str(paths[n >= tokens.index(0, 1)]), token) for n, token in enumerate(tokens)
        ]
        assert {origin.source for (origin,) in origins} == {"read_tokens"}
        assert rows.where() == f"{paths[1]}, token {tokens[-1]}"


@pytest.mark.parametrize("size", [0, 50, 198, 202])
@pytest.mark.parametrize("seq_len", [LENGTH, None])
def test_a_file_that_changed_its_size_is_named(tmp_path: Path, size: int, seq_len: int | None) -> None:
    path = write_tokens(tmp_path / "a.bin", 100)
    stream = read_tokens(path, seq_len, dtype="uint16", offsets=documents_of(path, [50, 50]))
    path.write_bytes(b"\0" * size)
    rows = stream.open(Lane(0, 1))
    before = saved(rows)
    for _ in range(2):
        with pytest.raises(
            BadRow, match=rf"a\.bin: has {size} bytes, but had 200 when the stream was made.\nPut the file"
        ):
            next(rows)
        assert saved(rows) == before


def test_a_remote_file_that_became_shorter_is_named() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/short/a.bin", bytes(200))
    stream = read_tokens("memory://short/a.bin", 20, dtype="uint16")
    memory.pipe("/short/a.bin", bytes(50))
    with pytest.raises(BadRow, match="has 50 bytes, but had 200 when the stream was made"):
        run(stream)
    memory.rm("/short", recursive=True)


@pytest.mark.parametrize("known", [False, True])
def test_a_negative_id_is_named_or_left_out_with_its_row(tmp_path: Path, known: bool) -> None:
    """Case 31."""
    path = tmp_path / "a.bin"
    np.array([1, 2, 3, 4, 5, -6, 7, 8], "<i4").tofile(path)
    given: dict[str, Any] = {"offsets": documents_of(path, [2, 2, 2, 2])} if known else {"seq_len": 2}
    rows = read_tokens(path, dtype="int32", **given).open(Lane(0, 1))
    assert [next(rows)["input_ids"].tolist() for _ in range(2)] == [[1, 2], [3, 4]]
    before = saved(rows)
    place = "document 2" if known else "token 4"
    with pytest.raises(BadRow, match=rf"a\.bin, {place}: token 5 is -6, and ids count from 0.\nThe file may have been"):
        next(rows)
    assert saved(rows) == before
    skipping = read_tokens(path, dtype="int32", on_error="skip", **given)
    assert [row["input_ids"][1] for row in assert_law(skipping, Lane(0, 1), [1, 1])] == [[1, 2], [3, 4], [7, 8]]


@pytest.mark.parametrize("seq_len", [LENGTH, None])
def test_a_file_that_is_gone_is_named_or_left_out(tmp_path: Path, seq_len: int | None) -> None:
    paths = write_corpus(tmp_path, [20, 20])
    offsets = [documents_of(path, [10, 10]) for path in paths]
    stream = read_tokens(paths, seq_len, dtype="uint16", offsets=offsets, pad_id=PAD, on_error="skip")
    strict = read_tokens(paths, seq_len, dtype="uint16", offsets=offsets)
    paths[0].unlink()
    if seq_len is None:
        offsets[0].unlink()
    with pytest.raises(FileNotFoundError):
        run(strict)
    assert tokens_in(run(stream)) == list(range(21, 41))


def test_a_pipeline_says_what_it_reads(tmp_path: Path) -> None:
    paths = write_corpus(tmp_path, [100, 60])
    stream = read_tokens(paths, LENGTH, dtype="uint16", pad_id=3)
    assert repr(stream) == f"read_tokens('{paths[0]}' and 1 more, 8, pad_id=3)"
    assert str(stream).endswith("   2 files, 320 bytes, 160 tokens, 21 chunks on 64 lanes")
    offsets = [documents_of(path, [50]) for path in paths]
    assert "160 tokens, 4 documents, 4 chunks" in str(read_tokens(paths, dtype="uint16", offsets=offsets))


def test_the_fingerprint_sees_what_changes_rows_and_takes_another_length(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", 100)
    offsets = documents_of(path, [50, 50])
    ref = read_tokens(path, LENGTH, dtype="uint16")

    def changed(stream: Stage) -> dict[str, str]:
        now, before = stream.describe(), ref.describe()
        return {f: stream.difference_class(f) for f in now.keys() | before.keys() if now.get(f) != before.get(f)}

    assert changed(read_tokens(path, LENGTH, dtype="uint16")) == {}
    assert changed(read_tokens(path, 2 * LENGTH, dtype="uint16")) == {"seq_len": "held"}
    assert changed(read_tokens(path, LENGTH, dtype="uint32")) == {"files": "data, held"}
    assert changed(read_tokens(path, LENGTH, dtype="uint16", offsets=offsets)) == {"offsets": "data, held"}
    assert changed(read_tokens(path, LENGTH, dtype="uint16", pad_id=1)) == {"pad_id": "data"}
    assert changed(read_tokens(path, dtype="uint16", offsets=offsets))["files"] == "data, held"
    assert ref.describe()["files"].startswith("tokens of uint16: 1 file, 200 bytes, sha256:")


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"seq_len": 0}, ValueError, "seq_len must be at least 1, but got 0"),
        ({"seq_len": 2.0}, TypeError, "seq_len must be a whole number, but got 2.0"),
        ({"seq_len": 8, "pad_id": None}, TypeError, "pad_id must be a whole number"),
        ({"seq_len": 8, "drop_last": 1}, TypeError, "drop_last must be True or False"),
        ({"seq_len": 8, "document_ids": 1}, TypeError, "document_ids must be True or False"),
        ({"seq_len": 8, "document_ids": True}, ValueError, "document_ids need to know where the documents of"),
        ({}, ValueError, "rows of one document need to know where the documents of"),
        ({"seq_len": 8, "on_error": "no"}, ValueError, "on_error must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    tmp_path: Path, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        read_tokens(write_tokens(tmp_path / "a.bin", 100), dtype="uint16", **given)
    assert text in str(caught.value)
