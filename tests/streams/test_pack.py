"""Pack, layout concat: every token once and in order, with its columns; and a buffer that is made again."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from tests.streams.packing import (
    ALL_COLUMNS,
    LASTS,
    LENGTHS,
    OVERFLOWS,
    SEQ_LEN,
    InMemory,
    concat_rows,
    documents_of,
    found_rows,
    gone_on,
    kept_of,
    lengths_in_every_order,
    stream_of,
    tokens_in,
    told,
)
from tests.streams.runs import assert_law, plain, resumed, run, saved, write_jsonl
from unbroken.errors import BadRow, InvalidState
from unbroken.lanes import Lane
from unbroken.streams import pack
from unbroken.streams.mix import mix
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage


@pytest.fixture(params=[1, 16, 4096])
def block_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_BLOCK_TOKENS", request.param)


@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("seq_len", [1, 2, SEQ_LEN, 64, 5000])
def test_rows_hold_every_token_with_its_document(
    tmp_path: Path, seq_len: int, overflow: str, last: str, block_tokens: None
) -> None:
    """Case 29: lengths of 0, 1, seq_len - 1, seq_len, seq_len + 1 and 10 x seq_len, one after the other."""
    documents = documents_of(lengths_in_every_order())
    stream = stream_of(tmp_path, documents).pack(seq_len, overflow=overflow, last=last, pad_id=9, **ALL_COLUMNS)
    assert found_rows(stream) == concat_rows(documents, seq_len, overflow, last, 9)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_rows_of_documents_of_one_length_are_right(tmp_path: Path, length: int, count: int) -> None:
    """Case 29."""
    documents = documents_of([length] * count)
    stream = stream_of(tmp_path, documents)
    assert found_rows(stream.pack(SEQ_LEN, **ALL_COLUMNS)) == concat_rows(documents, SEQ_LEN)


@pytest.mark.parametrize("seq_len", [1, SEQ_LEN, 64])
@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 2)])
def test_every_restore_point_of_the_buffer_is_exact(
    tmp_path: Path, seq_len: int, lane: Lane, block_tokens: None
) -> None:
    """Case 29: the token buffer is in the position, and no token of it."""
    stream = stream_of(tmp_path, documents_of([*LENGTHS, *reversed(LENGTHS), 0, 0, 1, 0]))
    assert_law(stream.pack(seq_len, document_ids=True), lane, [1, 0, 2, 5])


@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 2)])
def test_every_restore_point_is_exact_for_every_rule(tmp_path: Path, overflow: str, last: str, lane: Lane) -> None:
    """Case 28: between two shuffles."""
    stream = InMemory([{"input_ids": document} for document in documents_of(lengths_in_every_order()[:30])])
    packed = stream.shuffle(20, seed=1).pack(SEQ_LEN, overflow=overflow, last=last, **ALL_COLUMNS)
    assert_law(packed, lane, [1, 0, 2, 5])
    assert_law(packed.shuffle(9, seed=2), lane, [4, 1])


@pytest.mark.parametrize("after", [1, 4, SEQ_LEN, 50])
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_another_seq_len_at_a_resume_goes_on_with_the_next_token(
    tmp_path: Path, after: int, overflow: str, block_tokens: None
) -> None:
    """A document that was begun is finished as it was begun; the overflow rule of later ones is by the new seq_len."""
    documents = documents_of(lengths_in_every_order()[:20])
    stream = stream_of(tmp_path, documents)
    tokens = [token for document in told(documents, SEQ_LEN, overflow) for token in document]
    before, later = stream.pack(SEQ_LEN, overflow=overflow), stream.pack(after, overflow=overflow)
    for k in range(len(tokens) // SEQ_LEN + 1):
        rows = before.open(Lane(0, 1))
        for _ in range(k):
            next(rows)
        again = gone_on(later, saved(rows))
        number, token = rows.state_dict()["document"], rows.state_dict()["token"]
        begun = kept_of(documents[number], SEQ_LEN, overflow)[token:] if token else []
        left = [kept_of(document, after, overflow) for document in documents[number + bool(token) :]]
        assert [token.token for token in tokens[: k * SEQ_LEN]] == list(
            tokens_in(row for _, row in zip(range(k), before.open(Lane(0, 1)), strict=False))
        )
        found = []
        for row in again:
            found += list(tokens_in([row]))
            assert len(row["input_ids"]) == after
            assert saved(resumed(later, Lane(0, 1), saved(again))) == saved(again)
        assert found == begun + [token for document in left for token in document]


@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_the_position_counts_what_the_overflow_rule_was_for(tmp_path: Path, overflow: str, block_tokens: None) -> None:
    documents = documents_of(lengths_in_every_order())
    stream = stream_of(tmp_path, documents).pack(SEQ_LEN, overflow=overflow)
    ends = list(accumulate(len(kept_of(document, SEQ_LEN, overflow)) for document in documents))
    rows = stream.open(Lane(0, 1))
    for k in range(len(run(stream)) + 1):
        passed = next((n + (end == k * SEQ_LEN) for n, end in enumerate(ends) if end >= k * SEQ_LEN), len(ends)) * (
            k > 0
        )
        rows = resumed(stream, Lane(0, 1), saved(rows))
        assert rows.state_dict()["overflow"] == sum(len(document) > SEQ_LEN for document in documents[:passed])
        next(rows, None)
    assert next(rows, None) is None
    assert rows.state_dict()["overflow"] == sum(len(document) > SEQ_LEN for document in documents)


@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_another_overflow_rule_at_a_resume_leaves_the_rest_of_a_document_out(overflow: str) -> None:
    stream = InMemory([{"input_ids": document} for document in documents_of([10, 7, 3])])
    rows = stream.pack(4).open(Lane(0, 1))
    for _ in range(2):
        next(rows)
    again = gone_on(stream.pack(4, overflow=overflow), saved(rows))
    assert list(tokens_in(again)) == ([11, 12, 13, 14] if overflow == "truncate" else []) + [18, 19, 20]
    assert again.state_dict()["overflow"] == 2


def test_nothing_is_counted_where_documents_are_split(tmp_path: Path) -> None:
    rows = stream_of(tmp_path, documents_of(LENGTHS)).pack(SEQ_LEN).open(Lane(0, 1))
    for _ in rows:
        assert rows.state_dict()["overflow"] == 0


def test_sequence_bounds_of_a_batch_are_joined_as_the_docstring_says() -> None:
    """Stacked by the default collation, which needs rows of one shape."""
    documents = documents_of(lengths_in_every_order())
    stream = InMemory([{"input_ids": document} for document in documents]).pack(SEQ_LEN, **ALL_COLUMNS)
    batch = default_collate(list(stream.open(Lane(0, 1)))[-5:])
    rows, length = len(batch["cu_seqlens"]), batch["input_ids"].shape[1]
    offsets = length * torch.arange(rows, dtype=torch.int32)[:, None]
    cu_seqlens = (batch["cu_seqlens"] + offsets).flatten().unique_consecutive()
    assert cu_seqlens.dtype == torch.int32
    ids = (batch["document_ids"] + 100 * torch.arange(rows)[:, None]).flatten()
    changes = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
    assert cu_seqlens.tolist() == [0, *changes.tolist(), rows * length]


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("layout", ["concat", "best_fit"])
@pytest.mark.parametrize("window", [0, 40])
def test_lineage_names_the_tokens_of_each_document_in_a_row(
    tmp_path: Path, overflow: str, layout: str, window: int, block_tokens: None
) -> None:
    documents = documents_of(lengths_in_every_order())
    stream = stream_of(tmp_path, documents)
    stream = stream.shuffle(window, seed=1) if window else stream
    path = tmp_path / "a.jsonl"
    rows = stream.pack(SEQ_LEN, layout, overflow=overflow, window=60).open(Lane(0, 1), lineage=True)
    count = 0
    for row in rows:
        found: list[int] = []
        for origin in rows.origin():
            assert (origin.source, origin.file) == ("read_jsonl", str(path))
            line = path.read_bytes()[int(origin.row) :].split(b"\n")[0]
            found += json.loads(line)["input_ids"][origin.start : origin.stop]
            assert origin.start < origin.stop
        assert found == list(tokens_in([row]))
        count += 1
    assert count > 10
    plainly = stream.pack(SEQ_LEN, layout, overflow=overflow, window=60).open(Lane(0, 1))
    next(plainly)
    assert plainly.origin() == ()


def test_lineage_of_a_document_that_was_cut_itself_is_told_in_its_stored_row() -> None:
    cut = InMemory([{"input_ids": [1, 2, 3, 4, 5, 6, 7]}]).pack(5, last="open")
    rows = cut.pack(3).open(Lane(0, 1), lineage=True)
    spans = [[(origin.start, origin.stop) for origin in rows.origin()] for _ in rows]
    assert spans == [[(0, 3)], [(3, 5), (5, 6)], [(6, 7)]]


def two_sources() -> dict[str, Stage]:
    """Documents of tokens from 1 on, and from 1001 on."""
    documents = documents_of(lengths_in_every_order()[:24])
    other = [[1000 + token for token in document] for document in documents]
    return {
        "a": InMemory([{"input_ids": document} for document in documents]),
        "b": InMemory([{"input_ids": document} for document in other]),
    }


def mixed(names: str, **arguments: Any) -> Stage:
    sources = {name: source for name, source in two_sources().items() if name in names}
    return mix(sources, stop="all", seed=1).shuffle(12, seed=1).pack(SEQ_LEN, **arguments)


def test_the_documents_of_a_source_that_was_taken_out_of_a_mix_are_passed_over() -> None:
    """Case 30: at every restore point; the rest of a document that was begun is left out too."""
    wanted = sorted(token for row in run(two_sources()["a"]) for token in row["input_ids"])
    total = len(run(mixed("ab")))
    for k in range(total):
        rows = mixed("ab").open(Lane(0, 1))
        found = [plain(next(rows)) for _ in range(k)]
        rows = gone_on(mixed("a"), saved(rows))
        left, positions = [], []
        for row in rows:
            left.append(plain(row))
            positions.append(saved(rows))
        tokens = list(tokens_in({"input_ids": row["input_ids"][1]} for row in [*found, *left]))
        assert sorted(token for token in tokens if token < 1000) == wanted
        assert not any(token > 1000 for row in left for token in row["input_ids"][1])
        for n in {0, len(left) // 2} & set(range(len(left))):
            assert [plain(row) for row in gone_on(mixed("a"), positions[n])] == left[n + 1 :]


def test_a_source_is_not_taken_out_unnoticed_where_packed_rows_wait_in_a_window() -> None:
    """Case 30: packing the rows of the window again needs its documents."""
    wanted = sorted(token for row in run(two_sources()["a"]) for token in row["input_ids"])
    refused = 0
    for k in range(len(run(mixed("ab")))):
        rows = mixed("ab").shuffle(10, seed=2).open(Lane(0, 1))
        found = [plain(next(rows)) for _ in range(k)]
        changed = mixed("a").shuffle(10, seed=2)
        again, left = gone_on(changed, saved(rows)), []
        position = saved(again)
        try:
            for row in again:
                left.append(plain(row))
                if len(left) < 9:
                    position = saved(again)
        except InvalidState as error:
            refused += 1
            assert "a source was taken out of a mix" in str(error) and "with weight 0" in str(error)
            with pytest.raises(InvalidState, match="a source was taken out of a mix"):
                next(again)
            continue
        tokens = tokens_in({"input_ids": row["input_ids"][1]} for row in [*found, *left])
        assert sorted(token for token in tokens if token < 1000) == wanted
        assert [plain(row) for row in gone_on(changed, position)] == left[min(len(left), 8) :]
    assert 0 < refused < len(run(mixed("ab")))


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
    assert len(saved(rows)) < 230


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
    assert [row["input_ids"] for row in found] == [row["input_ids"] for row in concat_rows(kept, 6)]


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
            {"seq_len": 4, "layout": "first"},
            ValueError,
            "pack: layout must be 'concat' or 'best_fit', but got 'first'",
        ),
        (
            {"seq_len": 4, "overflow": "no"},
            ValueError,
            "overflow must be 'split' or 'truncate' or 'drop', but got 'no'",
        ),
        ({"seq_len": 4, "last": 3}, ValueError, "pack: last must be 'pad' or 'open' or 'drop', but got 3"),
        ({"seq_len": 4, "window": 0}, ValueError, "pack: window must be at least 1, but got 0"),
        ({"seq_len": 4, "cu_seqlens": 1}, TypeError, "pack: cu_seqlens must be True or False, but got 1"),
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
