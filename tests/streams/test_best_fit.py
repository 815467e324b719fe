"""Pack, layout best_fit: documents whole in full rows, and a window that is read and packed again on a resume."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.streams.packing import (
    ALL_COLUMNS,
    LASTS,
    OVERFLOWS,
    SEQ_LEN,
    InMemory,
    best_fit_rows,
    documents_of,
    found_rows,
    gone_on,
    lengths_in_every_order,
    stream_of,
    tokens_in,
    told,
    web_documents,
    windows_of,
)
from tests.streams.runs import assert_law, plain, resumed, run, saved
from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.streams import best_fit
from unbroken.streams.mix import mix
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage

WINDOWS = [1, SEQ_LEN, 5 * SEQ_LEN + 1, 10_000]


@pytest.fixture(params=[1, 16, 4096])
def block_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_fit, "_BLOCK_TOKENS", request.param)


def in_memory(documents: list[Any]) -> Stage:
    return InMemory([{"input_ids": document} for document in documents])


def fill_of(rows: list[Any]) -> float:
    """The share of the tokens in rows that are of documents; padding is 0."""
    return sum(int((row["input_ids"] != 0).sum()) for row in rows) / sum(row["input_ids"].size for row in rows)


@given(lengths=st.lists(st.integers(1, 20), max_size=40), seq_len=st.integers(20, 60))
def test_best_fit_decreasing_places_each_piece_once_where_least_room_is_left(lengths: list[int], seq_len: int) -> None:
    rows = best_fit.best_fit(lengths, seq_len)
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    assert all(sum(lengths[piece] for piece in row) <= seq_len for row in rows)
    assert all(row == sorted(row) for row in rows)
    expected = best_fit_rows(documents_of(lengths), seq_len, 10_000)
    assert sorted(sorted(lengths[piece] for piece in row) for row in rows) == sorted(
        sorted(row["document_ids"].count(number) for number in set(row["document_ids"]) - {-1}) for row in expected
    )


@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seq_len", [1, SEQ_LEN, 64, 5000])
def test_rows_are_those_of_best_fit_decreasing_window_by_window(
    tmp_path: Path, seq_len: int, window: int, overflow: str, last: str, block_tokens: None
) -> None:
    """Case 29: lengths of 0, 1, seq_len - 1, seq_len, seq_len + 1 and 10 x seq_len, told token by token."""
    documents = documents_of(lengths_in_every_order())
    stream = stream_of(tmp_path, documents).pack(
        seq_len, "best_fit", window=window, overflow=overflow, last=last, pad_id=-9, **ALL_COLUMNS
    )
    assert found_rows(stream) == best_fit_rows(documents, seq_len, window, overflow, last, -9)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_document_that_fits_in_a_row_is_whole_in_one(window: int) -> None:
    documents = documents_of(lengths_in_every_order())
    rows = run(in_memory(documents).pack(SEQ_LEN, "best_fit", window=window))
    for document in filter(None, documents):
        holding = [row["input_ids"][1] for row in rows if set(document) & set(row["input_ids"][1])]
        assert len(holding) == -(-len(document) // SEQ_LEN)
        for at in range(0, len(document), SEQ_LEN):
            piece = document[at : at + SEQ_LEN]
            assert any(row[n : n + len(piece)] == piece for row in holding for n in range(SEQ_LEN))


@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("window", WINDOWS[1:])
@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 2)])
def test_every_restore_point_of_a_window_is_exact(window: int, overflow: str, last: str, lane: Lane) -> None:
    """Case 28: between two shuffles."""
    packed = in_memory(documents_of(lengths_in_every_order()[:30])).shuffle(20, seed=1)
    packed = packed.pack(SEQ_LEN, "best_fit", window=window, overflow=overflow, last=last, **ALL_COLUMNS)
    assert_law(packed, lane, [1, 0, 2, 5])
    assert_law(packed.shuffle(9, seed=2), lane, [4, 1])


@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 5, 6, 7, 19]), max_size=30),
    rules=st.tuples(st.sampled_from(OVERFLOWS), st.sampled_from(LASTS), st.integers(1, 8), st.integers(1, 50)),
    place=st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 2)),
    windows=st.tuples(st.sampled_from([0, 1, 7, 100]), st.sampled_from([0, 1, 5])),
    block=st.sampled_from([1, 10, 4096]),
    stops=st.lists(st.integers(0, 9), max_size=4),
)
def test_every_restore_point_of_every_nesting_is_exact(
    lengths: list[int], rules: Any, place: Any, windows: tuple[int, int], block: int, stops: list[int]
) -> None:
    """Cases 3, 28 and 29: files, a shuffle before and after, any lane and epoch."""
    overflow, last, seq_len, window = rules
    index, count, epoch = place
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_fit, "_BLOCK_TOKENS", block)
        stream = stream_of(Path(folder), documents_of(lengths))
        stream = stream.shuffle(windows[0], seed=1) if windows[0] else stream
        stream = stream.pack(seq_len, "best_fit", window=window, overflow=overflow, last=last, **ALL_COLUMNS)
        stream = stream.shuffle(windows[1], seed=2) if windows[1] else stream
        assert_law(stream, Lane(index % count, count, epoch), stops)


@pytest.mark.parametrize("seq_len", [2048, 8192])
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_rows_of_web_like_documents_are_99_percent_full(seq_len: int, overflow: str) -> None:
    """With the default window, over two lanes, their last windows included."""
    documents = [{"input_ids": document + 1} for document in web_documents(8000, seed=3)]
    packed = InMemory(documents).pack(seq_len, "best_fit", overflow=overflow)
    rows = [row for lane in range(2) for row in packed.open(Lane(lane, 2))]
    assert sum(row["input_ids"].size for row in rows) > 2 << 20
    assert fill_of(rows) >= 0.99


def test_the_fill_hardly_depends_on_seq_len() -> None:
    documents = [{"input_ids": document + 1} for document in web_documents(6000, seed=4)]
    for seq_len in (512, 1024, 4096, 16_384, 32_768, 131_072):
        rows = InMemory(documents).pack(seq_len, "best_fit", last="drop").open(Lane(0, 1))
        assert fill_of(list(rows)) >= 0.99


def test_neither_lengths_nor_the_number_of_documents_change_over_a_window() -> None:
    documents = [{"input_ids": document + 1} for document in web_documents(3000, seed=5)]
    rows = list(InMemory(documents).pack(2048, "best_fit", window=1 << 30, document_ids=True).open(Lane(0, 1)))[:-1]
    counts = np.array([row["document_ids"].max() + 1 for row in rows])
    longest = np.array([np.bincount(row["document_ids"][row["document_ids"] >= 0]).max() for row in rows])
    for values in (counts, longest):
        halves = values[: len(values) // 2].mean(), values[len(values) // 2 :].mean()
        assert abs(halves[0] - halves[1]) < 0.2 * values.mean()


@pytest.mark.parametrize("after", [1, 4, SEQ_LEN, 7, 50])
@pytest.mark.parametrize("window", [SEQ_LEN, 40, 10_000])
@pytest.mark.parametrize("last", ["pad", "open"])
def test_another_seq_len_at_a_resume_loses_and_repeats_no_token(after: int, window: int, last: str) -> None:
    """At every restore point, and changed again some rows later: what is left of the window is packed anew."""
    documents = documents_of(lengths_in_every_order()[:30])
    stream = in_memory(documents)
    tokens = sorted(token for document in documents for token in document)

    def packed(seq_len: int) -> Stage:
        return stream.pack(seq_len, "best_fit", window=window, last=last)

    for k in range(len(run(packed(SEQ_LEN)))):
        rows, found = packed(SEQ_LEN).open(Lane(0, 1)), list[Any]()
        for seq_len, count in ((SEQ_LEN, k), (after, 3), (SEQ_LEN, 2), (3, 1), (after, 10_000)):
            rows = gone_on(packed(seq_len), saved(rows))
            taken = [row for _, row in zip(range(count), rows, strict=False)]
            assert {len(row["input_ids"]) for row in taken[:-1]} <= {seq_len}
            assert all(list(tokens_in([row])) == sorted(tokens_in([row])) for row in taken)  # in the order of reading
            assert saved(resumed(packed(seq_len), Lane(0, 1), saved(rows))) == saved(rows)
            found += taken
        assert sorted(tokens_in(found)) == tokens


def test_positions_after_another_seq_len_are_exact() -> None:
    stream = in_memory(documents_of(lengths_in_every_order()[:30]))
    for k in (1, 5, 20):
        rows = stream.pack(SEQ_LEN, "best_fit", window=100).open(Lane(0, 1))
        for _ in range(k):
            next(rows)
        state, later = saved(rows), stream.pack(4, "best_fit", window=100)
        ref = [plain(row) for row in gone_on(later, state)]
        rows = gone_on(later, state)
        for n in range(len(ref)):
            assert [plain(row) for row in resumed(later, Lane(0, 1), saved(rows))] == ref[n:]
            assert plain(next(rows)) == ref[n]


@pytest.mark.parametrize("after", [1, 7, 30, 10_000])
def test_another_window_holds_from_the_next_one_on(after: int) -> None:
    documents = documents_of(lengths_in_every_order())
    stream = in_memory(documents)
    for k in range(0, len(run(stream.pack(SEQ_LEN, "best_fit", window=60))), 7):
        rows = stream.pack(SEQ_LEN, "best_fit", window=60).open(Lane(0, 1))
        found = [next(rows) for _ in range(k)]
        again = gone_on(stream.pack(SEQ_LEN, "best_fit", window=after), saved(rows))
        first = next(again)
        if rows.state_dict()["cuts"] != [[SEQ_LEN, 0]]:
            assert plain(first) == plain(next(rows))
        assert sorted(tokens_in([*found, first, *again])) == sorted(tokens_in({"input_ids": d} for d in documents))


@pytest.mark.parametrize("overflow", ["truncate", "drop"])
@pytest.mark.parametrize("window", [SEQ_LEN, 40, 10_000])
def test_the_position_counts_what_the_overflow_rule_was_for(overflow: str, window: int) -> None:
    """All documents before the next window, once a row of this one was taken; exact after every resume."""
    documents = documents_of([*lengths_in_every_order(), 60, 60])
    stream = in_memory(documents).pack(SEQ_LEN, "best_fit", window=window, overflow=overflow)
    windows = windows_of(told(documents, SEQ_LEN, overflow), SEQ_LEN, window)
    begins = [held[0][0].document for held in windows[1:]] + [len(documents)]
    expected = [sum(len(document) > SEQ_LEN for document in documents[:begin]) for begin in begins]
    rows, seen = stream.open(Lane(0, 1)), [0]
    while next(rows, None) is not None:
        seen.append(rows.state_dict()["overflow"])
        rows = resumed(stream, Lane(0, 1), saved(rows))
    assert list(dict.fromkeys(seen[1:])) == list(dict.fromkeys(expected))
    assert rows.state_dict()["overflow"] == expected[-1] == sum(len(document) > SEQ_LEN for document in documents)


def test_documents_without_tokens_are_passed_over_and_counted_at_the_end() -> None:
    """Also after one that is longer than a window, whose last row is then still the last."""
    stream = in_memory(documents_of([60, 60])).pack(SEQ_LEN, "best_fit", overflow="drop")
    rows = stream.open(Lane(0, 1))
    assert next(rows, None) is None
    assert rows.state_dict()["overflow"] == 2
    rows = resumed(stream, Lane(0, 1), saved(rows))
    assert next(rows, None) is None
    assert rows.state_dict()["overflow"] == 2
    for last in LASTS:
        documents = documents_of([61, 0, 0])
        stream = in_memory(documents).pack(SEQ_LEN, "best_fit", window=6, last=last, **ALL_COLUMNS)
        assert found_rows(stream) == best_fit_rows(documents, SEQ_LEN, 6, last=last)


def test_documents_that_become_too_long_by_another_seq_len_are_counted_once() -> None:
    stream = in_memory(documents_of([5, 5, 5, 3, 9, 2]))
    rows = stream.pack(SEQ_LEN, "best_fit", overflow="truncate").open(Lane(0, 1))
    next(rows)
    assert rows.state_dict()["overflow"] == 1
    rows = gone_on(stream.pack(4, "best_fit", overflow="truncate"), saved(rows))
    assert rows.state_dict()["overflow"] == 1
    next(rows)
    assert rows.state_dict()["cuts"] == [[6, 1], [4, 1]]
    assert rows.state_dict()["overflow"] == 3  # two of length 5, and that of length 9 is not counted again
    rows = gone_on(stream.pack(4, "best_fit", overflow="truncate"), saved(rows))
    next(rows)
    assert rows.state_dict()["overflow"] == 3


def test_a_position_is_small_and_holds_no_token() -> None:
    rows = in_memory([np.full(7, 987_654_321) for _ in range(3000)]).pack(50, "best_fit", window=5000).open(Lane(0, 1))
    for _ in range(150):
        next(rows)
    assert len(saved(rows)) < 130
    assert "987654321" not in saved(rows)


def test_a_source_that_raises_in_the_middle_of_a_window_loses_nothing() -> None:
    documents = documents_of([4] * 40)
    failed: list[int] = []

    def fail_once(row: Any) -> Any:
        first = row["input_ids"][0]
        if first % 16 == 5 and first not in failed:
            failed.append(first)
            raise OSError
        return row

    rows, found = in_memory(documents).map(fail_once).pack(6, "best_fit", window=30).open(Lane(0, 1)), list[Any]()
    while True:
        try:
            found.append(next(rows))
        except OSError:
            continue
        except StopIteration:
            break
    kept = [document for document in documents if document[0] not in failed]
    assert len(failed) == 10
    assert sorted(tokens_in(found)) == sorted(token for document in kept for token in document)


@pytest.mark.parametrize("left", [4, 8])
def test_a_window_that_cannot_be_filled_again_is_refused(tmp_path: Path, left: int) -> None:
    stream = stream_of(tmp_path, documents_of([5] * 10)).pack(6, "best_fit")
    rows = stream.open(Lane(0, 1))
    for _ in range(8):
        next(rows)
    stream_of(tmp_path, documents_of([5] * left))
    again = gone_on(read_jsonl(tmp_path / "a.jsonl").pack(6, "best_fit"), saved(rows))
    with pytest.raises(InvalidState, match=f"8 rows of 6 tokens of a window .* delivered, but now it has {left}: what"):
        next(again)


def test_a_source_that_was_taken_out_of_a_mix_is_missed_in_a_window_that_was_begun() -> None:
    """Case 30: at every restore point it is refused there, and exact elsewhere."""
    documents = documents_of(lengths_in_every_order()[:24])
    sources = {"a": in_memory(documents), "b": in_memory([[1000 + token for token in d] for d in documents])}
    wanted = sorted(token for document in documents for token in document)

    def mixed(names: str) -> Stage:
        held = mix({name: sources[name] for name in names}, stop="all", seed=1)
        return held.shuffle(12, seed=1).pack(SEQ_LEN, "best_fit", window=50)

    refused = []
    for k in range(len(run(mixed("ab")))):
        rows = mixed("ab").open(Lane(0, 1))
        found = [next(rows) for _ in range(k)]
        again = gone_on(mixed("a"), saved(rows))
        try:
            found += list(again)
        except InvalidState as error:
            refused.append(k)
            assert "a source was taken out of a mix" in str(error) and "with weight 0" in str(error)
            assert rows.state_dict()["rows"]["cuts"] != [[SEQ_LEN, 0]]
            continue
        assert sorted(token for token in tokens_in(found) if token < 1000) == wanted
    assert refused and len(refused) < len(run(mixed("ab"))) - 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cuts": []}, "cuts in a position must be pairs of a seq_len and the rows taken with it, but are []"),
        ({"cuts": [[0, 1]]}, "cuts in a position must be pairs"),
        ({"cuts": [[6, -1]]}, "cuts in a position must be pairs"),
        ({"cuts": [[6, 1], [5, 0]]}, "cuts in a position must be pairs"),
        ({"cuts": [[6, 1.0]]}, "cuts in a position must be pairs"),
        ({"cuts": [6, 1]}, "cuts in a position must be pairs"),
        ({"cuts": 6}, "pack: cuts in a position must be a list"),
        ({"document": -1}, "pack: document in a position must be a whole number"),
        ({"anchor": {}}, "read_jsonl: a position has the keys"),
        ({"more": 1}, "pack: a position has the keys"),
    ],
)
def test_what_is_no_position_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    """Case 27: refused, and nothing of it is used."""
    rows = stream_of(tmp_path, documents_of([5, 5])).pack(6, "best_fit").open(Lane(0, 1))
    before = saved(rows)
    with pytest.raises(InvalidState) as caught:
        rows.load_state_dict({**rows.state_dict(), **change})
    assert text in str(caught.value)
    assert saved(rows) == before


@pytest.mark.parametrize(("layout", "other"), [("concat", "best_fit"), ("best_fit", "concat")])
def test_the_layout_cannot_change_in_the_middle_of_an_epoch(layout: str, other: str) -> None:
    stream = in_memory(documents_of([5, 5]))
    rows = stream.pack(6, layout).open(Lane(0, 1))
    next(rows)
    with pytest.raises(InvalidState, match=f"one of layout '{layout}', and cannot be gone on with as '{other}'"):
        gone_on(stream.pack(6, other), saved(rows))


def test_a_print_shows_what_was_given() -> None:
    stream = in_memory([])
    assert repr(stream.pack(8)).endswith(".pack(8)")
    assert repr(stream.pack(8, "best_fit", last="drop")).endswith(
        ".pack(8, layout='best_fit', last='drop', window=262144)"
    )
    assert repr(stream.pack(8, pad_id=1, **ALL_COLUMNS)).endswith(
        ".pack(8, pad_id=1, document_ids=True, cu_seqlens=True)"
    )
