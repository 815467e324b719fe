"""Pack: every token once and in order, with labels, positions and documents; and a buffer that is made again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.streams.runs import assert_law, plain, run, saved, write_jsonl
from unbroken.errors import BadRow, InvalidState
from unbroken.lanes import Lane
from unbroken.streams import pack
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage

SEQ_LEN = 6
LENGTHS = [0, 1, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1, 10 * SEQ_LEN]


def lengths_in_every_order() -> list[int]:
    """Each of the awkward lengths before and after each, itself included."""
    return [length for first in LENGTHS for second in LENGTHS for length in (first, second)]


def documents_of(lengths: Iterable[int]) -> list[list[int]]:
    """Tokens that are all different, from 1 on."""
    documents: list[list[int]] = []
    first = 1
    for length in lengths:
        documents.append(list(range(first, first + length)))
        first += length
    return documents


def stream_of(folder: Path, documents: list[list[int]]) -> Stage:
    return read_jsonl(write_jsonl(folder / "a.jsonl", [{"input_ids": document} for document in documents]))


def expected_rows(documents: list[list[int]], seq_len: int, pad_id: int = 0) -> list[dict[str, list[int]]]:
    """The rows, told token by token."""
    tokens = [
        (token, document[place + 1] if place + 1 < len(document) else -100, place, number)
        for number, document in enumerate(documents)
        for place, token in enumerate(document)
    ]
    rows = []
    for start in range(0, len(tokens), seq_len):
        part = tokens[start : start + seq_len]
        order = list(dict.fromkeys(number for *_, number in part))
        missing = seq_len - len(part)
        rows.append(
            {
                "input_ids": [token for token, *_ in part] + [pad_id] * missing,
                "labels": [label for _, label, *_ in part] + [-100] * missing,
                "position_ids": [place for *_, place, _ in part] + [0] * missing,
                "document_ids": [order.index(number) for *_, number in part] + [-1] * missing,
            }
        )
    return rows


def found_rows(stage: Stage) -> list[dict[str, list[int]]]:
    rows = list(stage.open(Lane(0, 1)))
    assert {value.dtype for row in rows for value in row.values()} <= {np.dtype(np.int64)}
    return [{name: value.tolist() for name, value in row.items()} for row in rows]


@pytest.fixture(params=[1, 16, 4096])
def block_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_BLOCK_TOKENS", request.param)


@pytest.mark.parametrize("seq_len", [1, 2, SEQ_LEN, 64, 5000])
def test_rows_hold_every_token_with_its_document(tmp_path: Path, seq_len: int, block_tokens: None) -> None:
    """Case 29: lengths of 0, 1, seq_len - 1, seq_len, seq_len + 1 and 10 x seq_len, one after the other."""
    documents = documents_of(lengths_in_every_order())
    stream = stream_of(tmp_path, documents)
    assert found_rows(stream.pack(seq_len, pad_id=9, document_ids=True)) == expected_rows(documents, seq_len, 9)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_rows_of_documents_of_one_length_are_right(tmp_path: Path, length: int, count: int) -> None:
    """Case 29."""
    documents = documents_of([length] * count)
    stream = stream_of(tmp_path, documents)
    assert found_rows(stream.pack(SEQ_LEN, document_ids=True)) == expected_rows(documents, SEQ_LEN)


@pytest.mark.parametrize("seq_len", [1, SEQ_LEN, 64])
@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 2)])
def test_every_restore_point_of_the_buffer_is_exact(
    tmp_path: Path, seq_len: int, lane: Lane, block_tokens: None
) -> None:
    """Case 29: the token buffer is in the position, and no token of it."""
    stream = stream_of(tmp_path, documents_of([*LENGTHS, *reversed(LENGTHS), 0, 0, 1, 0]))
    assert_law(stream.pack(seq_len, document_ids=True), lane, [1, 0, 2, 5])


@pytest.mark.parametrize("after", [1, 4, SEQ_LEN, 50])
def test_another_seq_len_at_a_resume_goes_on_with_the_next_token(
    tmp_path: Path, after: int, block_tokens: None
) -> None:
    documents = documents_of(lengths_in_every_order()[:20])
    stream = stream_of(tmp_path, documents)
    tokens = [token for document in documents for token in document]
    for k in range(len(tokens) // SEQ_LEN + 1):
        rows = stream.pack(SEQ_LEN).open(Lane(0, 1))
        for _ in range(k):
            next(rows)
        again = stream.pack(after).open(Lane(0, 1))
        again.load_state_dict(json.loads(saved(rows)))
        found = [token for row in again for token in row["input_ids"].tolist() if token]
        assert found == tokens[k * SEQ_LEN :]


def test_the_label_of_the_last_token_of_a_row_is_the_first_of_the_next(tmp_path: Path) -> None:
    rows = found_rows(stream_of(tmp_path, documents_of([8, 4])).pack(4))
    assert [row["labels"] for row in rows] == [[2, 3, 4, 5], [6, 7, 8, -100], [10, 11, 12, -100]]
    assert [row["position_ids"] for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert list(rows[0]) == ["input_ids", "labels", "position_ids"]


def test_documents_may_be_lists_arrays_or_tensors_of_any_whole_type(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, documents_of([3, 0, 5, 4]))
    ref = found_rows(stream.pack(4))
    for make in (
        tuple,
        np.array,
        torch.tensor,
        lambda ids: np.array(ids, np.uint16),
        lambda ids: np.array(ids, np.int32),
    ):
        given = stream.map(lambda row, make=make: {"input_ids": make(row["input_ids"]), "more": 1})
        assert found_rows(given.pack(4)) == ref


def test_a_row_is_its_own_memory(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, documents_of([5, 7, 9])).pack(4)
    ref = run(stream)
    rows, found = stream.open(Lane(0, 1)), []
    for row in rows:
        found.append(plain(row))
        for values in row.values():
            assert values.flags.writeable and values.base is None
            values[:] = 77
    assert found == ref


def test_packed_rows_can_be_shuffled_and_mapped(tmp_path: Path) -> None:
    """Case 28: pack below other stages."""
    stream = stream_of(tmp_path, documents_of([7] * 30)).pack(5).map(lambda row: {"first": int(row["input_ids"][0])})
    ref = run(stream)
    shuffled = assert_law(stream.shuffle(8, seed=1), Lane(0, 1), [3, 1])
    assert len(shuffled) == len(ref) and shuffled != ref


def test_a_resume_makes_few_documents_again(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, documents_of([3] * 3000))
    rows = stream.pack(50).open(Lane(0, 1))
    for _ in range(100):
        next(rows)
    state = rows.state_dict()
    assert state["document"] == 100 * 50 // 3
    assert state["since"] < 8
    assert len(saved(rows)) < 200


def test_a_source_that_raises_in_the_middle_of_a_row_loses_nothing(tmp_path: Path) -> None:
    documents = documents_of([4] * 20)
    failed: list[int] = []

    def fail_once(row: Any) -> Any:
        first = row["input_ids"][0]
        if first % 16 == 5 and first not in failed:
            failed.append(first)
            raise OSError
        return row

    rows, found = stream_of(tmp_path, documents).map(fail_once).pack(6).open(Lane(0, 1)), []
    while True:
        try:
            found.append({name: value.tolist() for name, value in next(rows).items()})
        except OSError:
            continue
        except StopIteration:
            break
    kept = [document for document in documents if document[0] not in failed]
    assert len(failed) == 5
    assert [row["input_ids"] for row in found] == [row["input_ids"] for row in expected_rows(kept, 6)]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "x"}, "a row has no 'input_ids' (fields: 'text')"),
        ({}, "a row has no 'input_ids' (fields: none)"),
        ([1, 2], "a row is a list, not a dict"),
        ({"input_ids": [[1]]}, "'input_ids' has the shape [1, 1] and the type int64"),
        ({"input_ids": [1.5]}, "'input_ids' has the shape [1] and the type float64"),
        ({"input_ids": 3}, "'input_ids' has the shape [] and the type int64"),
        ({"input_ids": ["a"]}, "'input_ids' has the shape [1] and the type <U1"),
    ],
)
def test_a_row_that_is_no_document_is_named(tmp_path: Path, row: Any, text: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1]}, row])
    with pytest.raises(BadRow) as caught:
        run(read_jsonl(path).pack(4))
    assert f"pack: {text}, in {path}, byte 19.\n" in str(caught.value)
    assert "put tokenize() before pack()" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"seq_len": 0}, ValueError, "pack: seq_len must be at least 1, but got 0"),
        ({"seq_len": 2.0}, TypeError, "pack: seq_len must be a whole number, but got 2.0 (float)"),
        (
            {"seq_len": 4, "layout": "best_fit"},
            ValueError,
            "layout must be 'concat', the one there is, but got 'best_fit'",
        ),
        ({"seq_len": 4, "pad_id": "x"}, TypeError, "pack: pad_id must be a whole number"),
        ({"seq_len": 4, "document_ids": "yes"}, TypeError, "pack: document_ids must be True or False, but got 'yes'"),
    ],
)
def test_wrong_arguments_fail_at_construction(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        stream_of(tmp_path, []).pack(**arguments)
    assert text in str(caught.value)


def test_what_is_no_position_is_refused(tmp_path: Path) -> None:
    """Case 27."""
    rows = stream_of(tmp_path, documents_of([5, 5])).pack(4).open(Lane(0, 1))
    before = saved(rows)
    changes = ({"since": 1}, {"token": -1}, {"document": None}, {"anchor": []}, {"anchor": {}}, {"more": 1})
    for change in changes:
        with pytest.raises(InvalidState, match="position"):
            rows.load_state_dict({**rows.state_dict(), **change})
        assert saved(rows) == before


@pytest.mark.parametrize("change", [{"token": 6}, {"since": 3, "document": 3}])
def test_a_position_in_documents_that_are_not_there_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    rows = stream_of(tmp_path, documents_of([5, 5])).pack(4).open(Lane(0, 1))
    rows.load_state_dict({**rows.state_dict(), **change})
    with pytest.raises(InvalidState, match=r"document \d of a lane was begun .* what it is made from has changed"):
        next(rows)
