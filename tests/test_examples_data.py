"""What examples/train.py makes of ``--data``: rows to train on, of every format, and errors that tell the way out."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import struct
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from tokenizers import Tokenizer

import unbroken
from examples.training_data import add_data_options, check_ids, load_data
from unbroken.demo.corpus import END_OF_TEXT, train_tokenizer_on

SEQ_LEN = 64
TEXTS = [f"Row {number} of a table: {'yes, ' * (number % 9)}{number * number}." for number in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer_on(TEXTS, path, 300)
    return path


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is imported of the user's is forgotten again."""
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


def loaded(*options: str | Path) -> tuple[unbroken.Stage, int]:
    parser = argparse.ArgumentParser()
    add_data_options(parser)
    parser.add_argument("--seed", default=0)
    return load_data(parser.parse_args([*map(str, options), f"--seq-len={SEQ_LEN}", "--window=16"]))


def rows_of(stream: unbroken.Stage, lanes: int = 3) -> list[dict[str, Any]]:
    """The rows of all lanes; each must be what the trainer takes."""
    rows = []
    for lane in range(lanes):
        with stream.open(unbroken.Lane(lane, lanes)) as opened:
            rows += list(opened)
    assert rows
    for row in rows:
        for field in ("input_ids", "labels", "position_ids"):
            assert row[field].shape == (SEQ_LEN,)
            assert row[field].dtype == np.int64
    return rows


def ids_in(rows: list[dict[str, Any]]) -> Counter[int]:
    """All ids but 0, which ends documents and fills rows up."""
    return Counter(int(token) for row in rows for token in row["input_ids"] if token)


def expected(tokenizer: Path) -> Counter[int]:
    known = Tokenizer.from_file(str(tokenizer))
    return Counter(token for text in TEXTS for token in known.encode(text).ids)


# --- Text --------------------------------------------------------------------------------------------------------


def lines(field: str = "text") -> bytes:
    return b"".join(json.dumps({field: text}).encode() + b"\n" for text in TEXTS)


def write_arrow(path: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number, text in enumerate(TEXTS):
            member = tarfile.TarInfo(f"{number:04d}.txt")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "rows.jsonl": lambda path: path.write_bytes(lines()),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines())),
    "rows.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(lines())),
    "rows.parquet": lambda path: pq.write_table(pa.table({"text": TEXTS, "more": TEXTS}), path, row_group_size=7),
    "rows.arrow": write_arrow,
    "rows.tar": write_tar,
}


@pytest.mark.parametrize("name", WRITERS)
def test_text_of_every_format_is_tokenised_and_packed(name: str, tokenizer: Path, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    stream, vocab_size = loaded("--data", tmp_path / name, "--tokenizer", tokenizer)
    assert ids_in(rows_of(stream)) == expected(tokenizer)
    assert vocab_size == Tokenizer.from_file(str(tokenizer)).get_vocab_size()


def test_several_paths_and_patterns_are_read_together(tokenizer: Path, tmp_path: Path) -> None:
    rows = lines().splitlines(keepends=True)
    for number, name in enumerate(("a-1.jsonl", "a-2.jsonl", "b.jsonl")):
        (tmp_path / name).write_bytes(b"".join(rows[number::3]))
    stream, _ = loaded("--data", tmp_path / "a-*.jsonl", tmp_path / "b.jsonl", "--tokenizer", tokenizer)
    assert ids_in(rows_of(stream)) == expected(tokenizer)


def test_the_field_and_the_format_can_be_named(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.log").write_bytes(lines("body"))
    given = ("--data", tmp_path / "rows.log", "--format=jsonl", "--text=body", "--tokenizer", tokenizer)
    stream, vocab_size = loaded(*given, "--vocab-size=512")
    assert ids_in(rows_of(stream)) == expected(tokenizer)
    assert vocab_size == 512


# --- Token ids ---------------------------------------------------------------------------------------------------


def test_token_files_without_documents_give_rows_in_which_positions_are_counted(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(1, 500, 40 * SEQ_LEN + 1)
    tokens.astype(np.uint16).tofile(tmp_path / "raw.bin")
    np.save(tmp_path / "some.npy", tokens.astype(np.uint16))
    for options in (["raw.bin", "--dtype=uint16"], ["some.npy"]):
        stream, vocab_size = loaded("--data", tmp_path / options[0], *options[1:], "--vocab-size=500")
        rows = rows_of(stream)
        assert vocab_size == 500
        assert ids_in(rows) == Counter(tokens.tolist())
        assert all((row["position_ids"] == np.arange(SEQ_LEN)).all() for row in rows)


def test_token_files_with_documents_are_packed(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 99, 50)
    tokens = np.arange(1, lengths.sum() + 1, dtype=np.uint16)
    tokens.tofile(tmp_path / "two.bin")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1)
    starts = 2 * (np.cumsum(lengths) - lengths)
    parts = (lengths.astype("<i4"), starts.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8"))
    (tmp_path / "two.idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    stream, _ = loaded("--data", tmp_path / "two.bin", "--vocab-size=5000")
    rows = rows_of(stream)
    assert ids_in(rows) == Counter(tokens.tolist())
    begins = [row["input_ids"][place] for row in rows for place in np.flatnonzero(row["position_ids"] == 0)]
    assert sorted(filter(None, begins)) == (starts // 2 + 1).tolist()


def test_rows_of_token_ids_need_no_tokenizer_in_any_format(tokenizer: Path, tmp_path: Path) -> None:
    known = Tokenizer.from_file(str(tokenizer))
    ids = [known.encode(text).ids for text in TEXTS]
    pq.write_table(pa.table({"input_ids": ids}), tmp_path / "ids.parquet")
    for options in (["--vocab-size=300"], ["--tokenizer", tokenizer]):
        stream, _ = loaded("--data", tmp_path / "ids.parquet", *options)
        assert ids_in(rows_of(stream)) == expected(tokenizer)


def test_an_id_beyond_the_vocabulary_is_named_with_the_option_that_helps() -> None:
    ids, labels = torch.tensor([[3, 7]]), torch.tensor([[9, -100]])
    check_ids({"input_ids": ids, "labels": labels}, 10)
    with pytest.raises(SystemExit, match="token id 9: say --vocab-size 10, or more"):
        check_ids({"input_ids": ids, "labels": labels}, 9)


# --- A function --------------------------------------------------------------------------------------------------

FUNCTIONS = """
import json, pathlib
import unbroken

HERE = pathlib.Path(__file__).parent

class Sentences:
    def __init__(self, texts): self.texts = texts
    def __len__(self): return len(self.texts)
    def __getitem__(self, index): return {"text": self.texts[index]}

def joined():
    texts = [json.loads(line)["text"] for line in (HERE / "rows.jsonl").read_text().splitlines()]
    return unbroken.concat([unbroken.from_map(Sentences(texts[:30])), unbroken.read_jsonl(HERE / "rest.jsonl")])

def packed(): return unbroken.from_map(Sentences(["a b c"] * 9)).tokenize(str(HERE / "tokenizer.json")).pack(64)
def numbers(): return unbroken.from_iterable(lambda lane, lanes: range(9))
def nothing(): return unbroken.from_map(Sentences([]))
def a_list(): return [1]
"""


@pytest.fixture
def functions(tmp_path: Path, tokenizer: Path, modules: None) -> Path:
    (tmp_path / "rows.jsonl").write_bytes(lines())
    (tmp_path / "rest.jsonl").write_bytes(b"".join(lines().splitlines(keepends=True)[30:]))
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    path = tmp_path / "functions_of_a_user.py"
    path.write_text(FUNCTIONS)
    return path


def test_a_function_may_return_any_stream_of_text(functions: Path, tokenizer: Path) -> None:
    stream, _ = loaded("--data", f"{functions}:joined", "--tokenizer", tokenizer)
    assert ids_in(rows_of(stream)) == expected(tokenizer)


def test_rows_that_are_packed_already_are_taken_as_they_are(functions: Path) -> None:
    stream, _ = loaded("--data", f"{functions}:packed", "--vocab-size=300")
    assert repr(stream).endswith(".pack(64)")
    rows_of(stream)


# --- Refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["rows.jsonl"], "are text: name a tokenizer with --tokenizer"),
        (
            ["rows.jsonl", "--text=body"],
            r"no field 'body' \(fields: 'text'\)\.\nName the field of the text with --text",
        ),
        (["rows.jsonl", "--tokenizer=none.json"], r"none\.json: cannot be read"),
        (["rows.jsonl", "--tokenizer=tokenizer.json", "--eos=</s>"], "no token '</s>': name the one it has with --eos"),
        (["rows.jsonl", "--tokenizer=tokenizer.json", "--vocab-size=9"], "--vocab-size 9 is too small"),
        (["rows.jsonl", "--dtype=uint16"], "--dtype is about files of tokens"),
        (["none.jsonl"], r"there is no file 'none\.jsonl'"),
        (["bad.jsonl"], r"--data: .*bad\.jsonl"),
        (["empty.jsonl"], "there are no rows"),
        (["rows.txt"], "does not tell a format(.|\n)*Pass --format one of jsonl"),
        (["rows.jsonl", "rows.parquet"], "several formats"),
        (["raw.bin"], "Pass --dtype 'uint16'"),
        (["raw.bin", "--dtype=uint16"], "Say it with --vocab-size(.|\n)*with --tokenizer"),
        (["functions_of_a_user.py"], "name one function, as FILE.py:FUNCTION"),
        (["functions_of_a_user.py:joined", "rows.jsonl"], "name one function"),
        (["functions_of_a_user.py:more"], "there is no function 'more'"),
        (["functions_of_a_user.py:a_list"], "returned a list, not a stream"),
        (["functions_of_a_user.py:numbers"], "a row is a int"),
        (["functions_of_a_user.py:nothing"], "there are no rows"),
        (["nowhere.py:make"], r"there is no file nowhere\.py"),
        (["json.py:make"], "another module has the name 'json'"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_the_way_out(
    options: list[str], message: str, functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(functions.parent)
    Path("raw.bin").write_bytes(bytes(1000))
    Path("bad.jsonl").write_text("no JSON\n")
    for name in ("empty.jsonl", "json.py"):
        Path(name).touch()
    with pytest.raises(SystemExit, match=message):
        loaded("--data", *options)


def test_the_default_end_of_documents_is_the_one_of_the_demo() -> None:
    parser = argparse.ArgumentParser()
    add_data_options(parser)
    assert parser.parse_args(["--data", "x"]).eos == END_OF_TEXT
