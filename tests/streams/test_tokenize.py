"""Tokenize: the ids of every kind of tokenizer, and a batch that is read again on a resume."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader

from tests.streams.runs import assert_law, plain, run, saved, write_jsonl
from unbroken.errors import BadRow, InvalidState
from unbroken.lanes import Lane
from unbroken.streams import tokenize
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage

TEXTS = ["one two", "", "two", "three one " * 5, "one"] * 9
IDS = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "<eos>": 4, "<bos>": 5}


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def ids_of(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


class WithEncode:
    """As tokenizers of other libraries are: ``encode`` gives a list."""

    def __init__(self, give: Callable[[list[int]], Any] = list) -> None:
        self.give = give

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        return self.give(([5] if add_special_tokens else []) + ids_of(text))

    def get_vocab(self) -> dict[str, int]:
        return IDS


class Bare:
    def encode(self, text: str) -> Any:
        return word_level().encode(text)


@pytest.fixture
def corpus(tmp_path: Path) -> Stage:
    return read_jsonl(write_jsonl(tmp_path / "a.jsonl", [{"text": text, "id": n} for n, text in enumerate(TEXTS)]))


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_BATCH_DOCUMENTS", 4)


def documents(stage: Stage) -> list[list[int]]:
    rows = list(stage.open(Lane(0, 1)))
    assert all(list(row) == ["input_ids"] and row["input_ids"].dtype == np.int32 for row in rows)
    return [row["input_ids"].tolist() for row in rows]


@pytest.mark.parametrize(
    "tokenizer",
    [
        word_level(),
        ids_of,
        Bare(),
        lambda text: np.array(ids_of(text), dtype=np.uint16),
        lambda text: torch.tensor(ids_of(text)),
        lambda text: tuple(ids_of(text)),
        word_level().encode,
    ],
)
def test_every_kind_of_tokenizer_gives_ids(corpus: Stage, tokenizer: Any, small_batches: None) -> None:
    assert documents(corpus.tokenize(tokenizer)) == [ids_of(text) for text in TEXTS]
    assert documents(corpus.tokenize(tokenizer, append=4)) == [[*ids_of(text), 4] for text in TEXTS]


def test_a_tokenizer_may_be_given_by_the_path_of_its_json(corpus: Stage, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    word_level().save(str(path))
    for given in (path, str(path)):
        assert documents(corpus.tokenize(given, append="<eos>")) == [[*ids_of(text), 4] for text in TEXTS]


@pytest.mark.parametrize(("append", "tail"), [(None, []), (4, [4]), ([4, 5], [4, 5]), ("<eos>", [4]), ([], [])])
@pytest.mark.parametrize("tokenizer", [word_level(), WithEncode()])
def test_what_is_appended_ends_each_document(corpus: Stage, tokenizer: Any, append: Any, tail: list[int]) -> None:
    found = documents(corpus.tokenize(tokenizer, append=append, add_special_tokens=False))
    assert found == [ids_of(text) + tail for text in TEXTS]


def test_special_tokens_are_the_tokenizers_own_choice_unless_told(corpus: Stage) -> None:
    tokenizer = word_level()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 5)])
    for given in (tokenizer, WithEncode(), WithEncode(np.array)):
        assert documents(corpus.tokenize(given))[0] == [5, 1, 2]
        assert documents(corpus.tokenize(given, add_special_tokens=False))[0] == [1, 2]


def test_the_text_field_can_be_named(corpus: Stage) -> None:
    stream = corpus.map(lambda row: {"body": row["text"]})
    assert documents(stream.tokenize(word_level(), text="body"))[0] == [1, 2]


@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 3)])
@pytest.mark.parametrize("tokenizer", [word_level(), ids_of])
def test_every_restore_point_of_a_batch_is_exact(
    corpus: Stage, tokenizer: Any, lane: Lane, small_batches: None
) -> None:
    assert_law(corpus.shuffle(6, seed=1).tokenize(tokenizer, append=4), lane, [1, 0, 2, 5])


def test_batches_end_at_a_number_of_characters_too(corpus: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_BATCH_CHARACTERS", 30)
    assert documents(corpus.tokenize(word_level())) == [ids_of(text) for text in TEXTS]
    assert_law(corpus.tokenize(word_level()), Lane(0, 1))


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 7), (64, 1), (1, 64)])
def test_a_position_does_not_depend_on_the_size_of_batches(
    corpus: Stage, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    stream = corpus.tokenize(ids_of)
    ref = run(stream)
    for k in range(0, len(ref) + 1, 5):
        monkeypatch.setattr(tokenize, "_BATCH_DOCUMENTS", before)
        rows = stream.open(Lane(0, 1))
        for _ in range(k):
            next(rows)
        monkeypatch.setattr(tokenize, "_BATCH_DOCUMENTS", after)
        again = stream.open(Lane(0, 1))
        again.load_state_dict(rows.state_dict())
        assert [plain(row) for row in again] == ref[k:]


def test_what_was_taken_is_not_tokenised_again(corpus: Stage, small_batches: None) -> None:
    calls: list[str] = []
    stream = corpus.tokenize(lambda text: calls.append(text) or ids_of(text))
    rows = stream.open(Lane(0, 1))
    for _ in range(6):
        next(rows)
    again = stream.open(Lane(0, 1))
    again.load_state_dict(rows.state_dict())
    calls.clear()
    next(again)
    assert calls == TEXTS[6:8]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"body": "x", "id": 3}, "it has no field 'text' (fields: 'body', 'id')"),
        ({}, "it has no field 'text' (fields: none)"),
        ({"text": 3}, "its field 'text' is a int, not text"),
        ({"text": None}, "its field 'text' is a NoneType, not text"),
        (["x"], "the row is a list, not a dict"),
    ],
)
def test_a_row_without_text_is_named(tmp_path: Path, row: Any, text: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, row])
    with pytest.raises(BadRow) as caught:
        run(read_jsonl(path).tokenize(word_level()))
    assert f"tokenize: {text}, in {path}, byte 16.\n" in str(caught.value)
    assert "tokenize(..., text=...)" in str(caught.value)
    with pytest.raises(BadRow, match=r"a row of the window that was filled up to .*a\.jsonl, byte (0|16)\."):
        run(read_jsonl(path).shuffle(5, seed=1).map(lambda row: row).tokenize(word_level()))


def test_a_source_that_raises_in_the_middle_of_a_batch_loses_nothing(corpus: Stage, small_batches: None) -> None:
    failed: list[int] = []

    def fail_once(row: Any) -> Any:
        if row["id"] % 10 == 6 and row["id"] not in failed:
            failed.append(row["id"])
            raise OSError
        return row

    rows, found = corpus.map(fail_once).tokenize(ids_of).open(Lane(0, 1)), []
    while True:
        try:
            found.append(next(rows)["input_ids"].tolist())
        except OSError:
            continue
        except StopIteration:
            break
    assert failed == [6, 16, 26, 36]
    assert found == [ids_of(text) for n, text in enumerate(TEXTS) if n not in failed]


@pytest.mark.parametrize(
    ("ids", "shown"),
    [([[1]], "[[1]]"), ([1.5], "[1.5]"), ([-1], "[-1]"), ([2**31], "[2147483648]"), ("ab", "ab"), (None, "None")],
)
def test_what_is_no_list_of_ids_is_refused(corpus: Stage, ids: Any, shown: str) -> None:
    with pytest.raises(ValueError, match="flat list of ids from 0 to 2147483647") as caught:
        run(corpus.tokenize(lambda text: ids))
    assert shown in str(caught.value)


def padded() -> Tokenizer:
    tokenizer = word_level()
    tokenizer.enable_padding()
    return tokenizer


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"tokenizer": 3}, TypeError, "a int is no tokenizer"),
        ({"tokenizer": "none.json"}, FileNotFoundError, "there is no tokenizer file 'none.json'"),
        ({"tokenizer": padded()}, ValueError, "Call tokenizer.no_padding()"),
        ({"tokenizer": Tokenizer(models.BPE(dropout=0.1))}, ValueError, "Set tokenizer.model.dropout = None"),
        ({"text": 3}, TypeError, "text must be the name of a field, but got 3"),
        ({"append": "<none>"}, ValueError, "append='<none>' names no token of this tokenizer: it is not in its"),
        ({"tokenizer": ids_of, "append": "<eos>"}, ValueError, "its vocabulary cannot be looked into. Pass its id"),
        ({"append": -1}, ValueError, "append must be a token id, a list of ids or the name of a token, but got -1"),
        ({"append": True}, ValueError, "append must be a token id"),
        ({"append": [1, 2.0]}, ValueError, "append must be a token id"),
    ],
)
def test_wrong_arguments_fail_at_construction(
    corpus: Stage, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        corpus.tokenize(**{"tokenizer": word_level(), **arguments})
    assert text in str(caught.value)


def test_a_file_that_is_no_tokenizer_or_changes_is_named(corpus: Stage, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json' is not the JSON of a tokenizers.Tokenizer"):
        corpus.tokenize(path)
    word_level().save(str(path))
    stream = corpus.tokenize(path)
    path.write_text("{}")
    tokenize._loaded.cache_clear()
    with pytest.raises(ValueError, match=r"tokenizer.json' has changed since the stream was made"):
        run(stream)


def test_the_fingerprint_tells_tokenizers_apart(corpus: Stage, tmp_path: Path) -> None:
    def tokenizer_of(tokenizer: Any) -> str:
        return str(corpus.tokenize(tokenizer).describe()["tokenizer"])

    path = tmp_path / "tokenizer.json"
    word_level().save(str(path), pretty=False)
    other = Tokenizer(models.WordLevel({"one": 1}))
    assert tokenizer_of(word_level()) == tokenizer_of(word_level()) == tokenizer_of(path) != tokenizer_of(other)
    assert tokenizer_of(path).startswith("sha256:")
    assert tokenizer_of(ids_of).startswith("ids_of:")
    assert tokenizer_of(WithEncode()) != tokenizer_of(Bare())
    described = corpus.tokenize(word_level(), append="<eos>", add_special_tokens=False).describe()
    assert (described["text"], described["append"], described["add_special_tokens"]) == ("text", [4], False)


def test_a_pickled_stream_loads_its_tokenizer_where_it_is_used(corpus: Stage, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    word_level().save(str(path))
    stream = corpus.tokenize(path, append="<eos>")
    assert len(pickle.dumps(stream)) < 2000
    code = (
        "import pickle, sys; from unbroken.lanes import Lane; stream = pickle.loads(sys.stdin.buffer.read());"
        "print([row['input_ids'].tolist() for row in stream.open(Lane(0, 1))])"
    )
    for given in (stream, corpus.tokenize(word_level(), append=4)):
        done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(given), capture_output=True, check=True)
        assert done.stdout.decode().strip() == str([[*ids_of(text), 4] for text in TEXTS])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_worker_that_is_forked_after_threads_were_used_tokenises(corpus: Stage) -> None:
    stream = corpus.tokenize(word_level())
    ref = documents(stream)
    loader = DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60)
    assert [row["input_ids"].tolist() for row in loader] == ref


def test_what_is_no_position_is_refused(corpus: Stage) -> None:
    """Case 27."""
    rows = corpus.tokenize(ids_of).open(Lane(0, 1))
    before = saved(rows)
    for change in ({"taken": -1}, {"taken": 1.0}, {"anchor": None}, {"anchor": {"chunk": 1}}, {"more": 1}):
        with pytest.raises(InvalidState, match="position"):
            rows.load_state_dict({**rows.state_dict(), **change})
        assert saved(rows) == before
    rows.load_state_dict({**rows.state_dict(), "taken": 46})
    with pytest.raises(InvalidState, match="46 documents of a batch were delivered, but now there are 45"):
        next(rows)


def test_a_tokenizer_that_raises_stop_iteration_does_not_end_the_stream(corpus: Stage) -> None:
    def ended(text: str) -> list[int]:
        raise StopIteration

    rows = corpus.tokenize(ended).open(Lane(0, 1))
    with pytest.raises(RuntimeError, match="the tokenizer raised StopIteration, for a document of the batch"):
        next(rows)
