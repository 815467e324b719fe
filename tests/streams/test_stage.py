"""Stage: frozen, picklable, printable, and a dataset for any loader."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.streams.runs import run, run_lanes, write_jsonl
from unbroken import StatefulDataLoader, StateMismatch, mix
from unbroken.lanes import Lane, LaneStream
from unbroken.streams.identity import identity_of
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["text"][:3]}


def kept(row: dict[str, Any]) -> bool:
    return row["text"] not in {"x", "y", "z", "aa", "bb"}


def ids_of(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture
def stream(tmp_path: Path) -> Stage:
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name * n} for n in range(20)])
    rows = read_jsonl(tmp_path / "*.jsonl").map(shortened).filter(kept).shuffle(5, seed=7)
    return rows.tokenize(ids_of, append=0).pack(8, pad_id=1)


def test_a_stream_is_what_the_loader_and_torch_ask_for(stream: Stage) -> None:
    assert isinstance(stream, LaneStream) and isinstance(stream, IterableDataset)
    assert stream.default_lanes == 64


def test_a_stage_is_frozen(stream: Stage) -> None:
    for stage in stream._all():
        field = dataclasses.fields(stage)[0].name  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(stage, field, None)


def test_opening_twice_gives_two_places(stream: Stage) -> None:
    first, second = stream.open(Lane(0, 1)), stream.open(Lane(0, 1))
    next(first)
    assert first.state_dict() != second.state_dict()


def test_print_shows_the_chain(stream: Stage, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    expected = (
        f"read_jsonl('{tmp_path}/a.jsonl' and 1 more).map(shortened).filter(kept)"
        ".shuffle(window=5, seed=7).tokenize(ids_of, append=0).pack(8, pad_id=1)"
    )
    assert repr(stream) == expected
    extent = f"2 files, {size} bytes, {size} chunks on 64 lanes"
    assert str(stream).splitlines() == [
        "pack(8, pad_id=1)",
        "└─ tokenize(ids_of, append=0)",
        "   └─ shuffle(window=5, seed=7)",
        "      └─ filter(kept)",
        "         └─ map(shortened)",
        f"            └─ read_jsonl('{tmp_path}/a.jsonl' and 1 more)   {extent}",
    ]
    short = read_jsonl(tmp_path / "a.jsonl").shuffle(5).tokenize(ids_of, "body").pack(8, document_ids=True)
    assert repr(short) == (
        f"read_jsonl('{tmp_path}/a.jsonl').shuffle(window=5).tokenize(ids_of, text='body').pack(8, document_ids=True)"
    )


def test_what_opens_a_store_is_not_printed_and_not_in_the_fingerprint(tmp_path: Path) -> None:
    stream = read_jsonl(write_jsonl(tmp_path / "a.jsonl", [1]), storage_options={"auto_mkdir": False})
    assert "auto_mkdir" not in repr(stream) + json.dumps(stream.describe())


def test_the_fingerprint_is_flat_and_names_every_field(stream: Stage) -> None:
    described = stream.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["stages"] == "read_jsonl > map > filter > shuffle > tokenize > pack"
    assert list(described) == [
        *("stages", "files", "map[0]", "filter[0]", "window", "shuffle_seed"),
        *(
            "tokenizer",
            "text",
            "append",
            "add_special_tokens",
            "seq_len",
            "layout",
            "overflow",
            "last",
            "pack_window",
            "pad_id",
            "document_ids",
            "cu_seqlens",
        ),
    ]
    twice = stream.shuffle(9, seed=3).map(shortened).describe()
    assert (twice["window"], twice["window[1]"], twice["shuffle_seed[1]"]) == (5, 9, 3)
    assert twice["map[0]"] == twice["map[1]"] == described["map[0]"]


def test_every_field_has_a_class_of_difference(stream: Stage) -> None:
    more = stream.shuffle(9, seed=3).map(shortened)
    classes = {field: more.difference_class(field) for field in more.describe()}
    assert {field for field, kind in classes.items() if kind == "safe"} == {"document_ids", "cu_seqlens"}
    assert {field for field, kind in classes.items() if kind == "held"} == {"seq_len", "last", "pack_window"}
    assert {field for field, kind in classes.items() if kind == "order"} == {"window", "window[1]"}
    held = {field for field, kind in classes.items() if kind == "order, held"}
    assert held == {"shuffle_seed", "shuffle_seed[1]", "layout"}
    assert {field for field, kind in classes.items() if kind == "data, held"} == {"files", "stages"}
    assert {"tokenizer", "map[1]", "filter[0]"} <= {field for field, kind in classes.items() if kind == "data"}
    assert more.difference_class("never heard of") == "data"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda stream: stream, "safe"),
        (lambda stream: stream.map(shortened).take(3).repeat(2), "safe"),
        (lambda stream: mix({"a": stream}).filter(kept), "safe"),
        (lambda stream: stream.shuffle(2), "held"),
        (lambda stream: stream.map(list, batched=2), "held"),
        (lambda stream: stream.filter(list, batched=2).take(3), "held"),
        (lambda stream: stream.flat_map(list), "held"),
        (lambda stream: mix({"a": stream.map(shortened).shuffle(2)}), "held"),
        (lambda stream: mix({"b": stream, "a": stream}).shuffle(2), "held"),
    ],
)
def test_rows_that_a_later_stage_counts_keep_their_length(stream: Stage, change: Any, kind: str) -> None:
    """A window that is filled again with rows of another length would lose tokens, and repeat others."""
    changed = change(stream)
    assert {changed.difference_class(field) for field in changed.describe() if "seq_len" in field} == {kind}


@pytest.mark.parametrize("shuffled", [False, True])
def test_another_seq_len_in_mid_epoch_is_refused_where_rows_are_shuffled_after(tmp_path: Path, shuffled: bool) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "abcdefg" * 9}] * 20)

    def loader(seq_len: int) -> StatefulDataLoader:
        packed = read_jsonl(path).tokenize(ids_of).pack(seq_len)
        return StatefulDataLoader(packed.shuffle(10) if shuffled else packed, 2, lanes=2, seed=0)

    first = loader(8)
    next(iter(first))
    if shuffled:
        for strict in (True, False):
            with pytest.raises(StateMismatch, match=r"seq_len +saved 8 +now 16 +\(cuts rows otherwise\)"):
                loader(16).load_state_dict(first.state_dict(), strict=strict)
    else:
        loader(16).load_state_dict(first.state_dict())
    fresh = loader(8)
    loader(16).load_state_dict(fresh.state_dict())  # nothing was counted yet


def test_a_copy_and_a_pickle_are_the_same_stream(stream: Stage) -> None:
    for other in (copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))):
        assert repr(other) == repr(stream)
        assert other.describe() == stream.describe()
        assert run_lanes(other, 3) == run_lanes(stream, 3)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_torchs_loader_takes_each_worker_for_a_lane(stream: Stage, context: str) -> None:
    workers = 2 if context == "fork" else 1
    loader = DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=context)
    found = [row["input_ids"].tolist() for row in loader]
    lanes = [[row["input_ids"][1] for row in rows] for rows in run_lanes(stream, workers)]
    assert sorted(found) == sorted(row for rows in lanes for row in rows)
    assert found[::workers][: len(lanes[-1])] == lanes[0][: len(lanes[-1])]


def test_torchs_loader_batches_rows_in_this_process(stream: Stage) -> None:
    batch = next(iter(DataLoader(stream, batch_size=3)))
    found = {name: (tuple(values.shape), values.dtype) for name, values in batch.items()}
    assert found == dict.fromkeys(("input_ids", "labels", "position_ids"), ((3, 8), torch.int64))


def test_an_iterator_closes_what_it_reads_from(stream: Stage) -> None:
    with stream.open(Lane(0, 1)) as rows:
        ref = next(rows)["input_ids"].tolist()
    rows.close()
    assert run(stream)[0]["input_ids"][1] == ref


def over(least: int) -> Any:
    return lambda row: row > least


def test_the_identity_of_a_function_is_its_code_and_what_it_holds() -> None:
    def one(x: int, add: int = 1) -> int:
        return x + add

    def two(x: int, add: int = 2) -> int:
        return x + add

    def itself(x: int) -> int:
        return itself(x - 1) if x else 0

    class Adder:
        def __call__(self, x: int) -> int:
            return x + 1

        def method(self, x: int) -> int:
            return x

    functions = [one, two, itself, Adder(), Adder().method, over(1), over(2), over(True), len, max, str.lower]
    functions += [functools.partial(one, add=3), functools.partial(one, add=4), lambda x: x + 1, lambda x: x + 2]
    functions += [over("1"), functools.lru_cache(one), functools.partial(one, {1: "a"})]
    identities = [identity_of(fn) for fn in functions]
    assert len(set(identities)) == len(identities)
    assert all(" at 0x" not in identity for identity in identities)
    assert identity_of(over(1)) == identities[5]
    assert identities[0].startswith("test_the_identity_of_a_function_is_its_code_and_what_it_holds.<locals>.one:")


def test_the_identity_of_a_function_sees_through_a_decorator() -> None:
    def decorated(fn: Any) -> Any:
        @functools.wraps(fn)
        def wrapper(row: Any) -> Any:
            return fn(row)

        return wrapper

    one, two = decorated(lambda row: row + 1), decorated(lambda row: row + 2)
    assert identity_of(one) != identity_of(two)


def test_the_identity_of_a_function_is_the_same_in_every_process(tmp_path: Path) -> None:
    code = Path(__file__).read_text()
    (tmp_path / "functions.py").write_text(
        "from typing import Any\n" + code[code.index("def shortened") : code.index("@pytest")]
    )
    program = (
        "import functions, functools; from unbroken.streams.identity import identity_of as i;"
        "print(i(functions.kept), i(functions.shortened), i(functools.partial(functions.kept, {'a', 'b', 'c'})))"
    )
    found = set()
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        found.add(done.stdout.decode())
    assert len(found) == 1
    assert found.pop().startswith("kept:")
