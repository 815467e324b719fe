"""The demo with data of the user's: what its trainer is told about it, what is refused, and the whole."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from tests.test_demo import IMITATION
from unbroken.demo import Data, DemoError, Plan, find_trainer, run_demo
from unbroken.demo.corpus import END_OF_TEXT, write_corpus
from unbroken.demo.data import study

TEXTS = [f"Row {number} of a table, which is {number * number}." for number in range(300)]
SMALL = ("--batch-size=4", "--seq-len=64", "--lanes=4", "--window=16", "--width=32", "--layers=1", "--heads=2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder; what is imported of it is forgotten again."""
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def told(data: Data, size: int = 100_000) -> tuple[str, ...]:
    notes: list[str] = []
    options = study(data, Path("tokenizer.json"), size, 300, notes.append)
    assert notes
    return options


def write_rows(name: str, field: str = "text", count: int = 300) -> None:
    Path(name).write_text("".join(json.dumps({field: text}) + "\n" for text in TEXTS[:count]))


def test_for_text_a_tokenizer_is_trained_on_its_first_megabytes(folder: Path) -> None:
    pq.write_table(pa.table({"body": ["abab " * 50] * 40 + ["xyxy " * 50] * 40}), "rows.parquet", row_group_size=8)
    data = Data(("rows.parquet",), text="body")
    assert told(data, 5000) == (
        *("--data", "rows.parquet", "--text=body", "--at-end=repeat"),
        *("--tokenizer=tokenizer.json", f"--eos={END_OF_TEXT}"),
    )
    tokenizer = Tokenizer.from_file("tokenizer.json")
    assert len(tokenizer.encode("abab abab").ids) < len(tokenizer.encode("xyxy xyxy").ids)
    assert tokenizer.get_vocab_size() <= 300


def test_the_size_of_the_tokenizer_can_be_asked_for(folder: Path) -> None:
    write_rows("rows.jsonl")
    told(Data(("rows.jsonl",), vocab_size=270))
    assert Tokenizer.from_file("tokenizer.json").get_vocab_size() == 270


@pytest.mark.parametrize(
    ("largest", "size", "more"),
    [(63, 64, ()), (64, 128, ()), (511, 512, ()), (50256, 65536, ("--seq-len=64",))],
)
def test_of_token_ids_the_number_is_taken_from_the_largest(
    largest: int, size: int, more: tuple[str, ...], folder: Path
) -> None:
    np.full(40_000, largest, np.uint16).tofile("raw.bin")
    np.save("some.npy", np.full(40_000, largest, np.uint16))
    end = ("--at-end=repeat", f"--vocab-size={size}", *more)
    assert told(Data(("raw.bin",), dtype="uint16")) == ("--data", "raw.bin", "--dtype=uint16", *end)
    assert told(Data(("some.npy", "some.npy"))) == ("--data", "some.npy", "some.npy", *end)
    assert "--vocab-size=70000" in told(Data(("some.npy",), vocab_size=70_000))


def test_a_function_may_return_the_stream(folder: Path) -> None:
    write_rows("rows.jsonl", "txt")
    Path("function_of_a_user.py").write_text(
        "import unbroken\n"
        "def text(): return unbroken.read_jsonl('rows.jsonl')\n"
        "def packed(): return text().tokenize('tokenizer.json', text='txt').pack(8)\n"
    )
    assert "--tokenizer=tokenizer.json" in told(Data(("function_of_a_user.py:text",)))
    assert "--vocab-size=512" in told(Data(("function_of_a_user.py:packed",)))


FUNCTIONS = """
import unbroken
def fails(): raise KeyError("a name")
def a_list(): return [1]
def numbers(): return unbroken.from_iterable(lambda lane, lanes: range(9))
def nothing(): return unbroken.from_iterable(lambda lane, lanes: [])
def no_text(): return unbroken.read_jsonl("rows.jsonl").map(lambda row: {"text": None})
"""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(("none.jsonl",)), r"no file 'none\.jsonl'"),
        (Data(("rows.txt",)), "Pass --format one of jsonl"),
        (Data(("rows.jsonl",), format="json"), "format must be one of"),
        (Data(("raw.bin",)), "Pass --dtype 'uint16'"),
        (Data(("rows.jsonl",), text="body"), r"no field 'body' \(fields: 'text'\)\.\nName the field .* with --text"),
        (Data(("rows.jsonl.gz",)), "one of them would have no rows(.|\n)*name several"),
        (Data(("failing_functions.py:fails",)), "KeyError: 'a name'"),
        (Data(("failing_functions.py:a_list",)), "returned a list, not a stream"),
        (Data(("failing_functions.py:numbers",)), "a row is a int, not a dict"),
        (Data(("failing_functions.py:nothing",)), "there are no rows"),
        (Data(("failing_functions.py:no_text",)), "no text in its field 'text', but 'None'"),
        (Data(("failing_functions.py",)), "name one function, as FILE.py:FUNCTION"),
        (Data(("nowhere.py:make",)), "No module named 'nowhere'"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_with_the_way_out(data: Data, message: str, folder: Path) -> None:
    write_rows("rows.jsonl")
    Path("rows.jsonl.gz").write_bytes(gzip.compress(Path("rows.jsonl").read_bytes()))
    Path("raw.bin").write_bytes(bytes(1000))
    Path("failing_functions.py").write_text(FUNCTIONS)
    with pytest.raises(DemoError, match=message):
        told(data)


def test_data_in_the_folder_that_is_emptied_is_left_alone(folder: Path) -> None:
    Path("out").mkdir()
    write_rows("out/rows.jsonl")
    plan = Plan(Path("out"), find_trainer(), data=Data(("out/rows.jsonl",)))
    with pytest.raises(DemoError, match="lies in out, which is emptied first"):
        run_demo(plan, Console(file=io.StringIO()))
    assert Path("out/rows.jsonl").exists()


def test_every_run_is_told_of_the_data_and_no_corpus_is_made(folder: Path) -> None:
    write_rows("rows.jsonl")
    Path("imitation.py").write_text(IMITATION)
    data = Data(("rows.jsonl", "rows.jsonl"))
    plan = Plan(Path("out"), Path("imitation.py"), steps=8, save_every=2, restore=4, kill_at=6, data=data)
    assert run_demo(plan, Console(file=io.StringIO()))
    for run in ("a", "b", "c"):
        options = json.loads(Path("out", run, "options.json").read_text())
        at = options.index("--data")
        assert options[at : at + 3] == ["--data", "rows.jsonl", "rows.jsonl"]
        assert "--tokenizer=out/tokenizer.json" in options
    assert not Path("out/corpus.jsonl").exists()
    assert Path("rows.jsonl").exists()


@pytest.mark.slow
def test_the_real_trainer_goes_on_exactly_with_a_table_of_text(folder: Path) -> None:
    write_corpus(Path("corpus.jsonl"), 400_000)
    texts = [json.loads(line)["text"] for line in Path("corpus.jsonl").read_text("utf-8").splitlines()]
    pq.write_table(pa.table({"body": texts}), "rows.parquet", row_group_size=8)
    plan = Plan(
        Path("out"),
        find_trainer(),
        steps=12,
        save_every=4,
        restore=4,
        data=Data(("rows.parquet",), text="body"),
        vocab_size=512,
        options=SMALL,
    )
    console = Console(file=io.StringIO(), width=200, record=True)
    assert run_demo(plan, console), console.export_text()
    assert "data: rows.parquet" in console.export_text()
