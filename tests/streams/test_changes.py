"""What may change in a stream at a resume: exact, or refused; through the loader, with all its lanes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unbroken import BadRow, Stage, StatefulDataLoader, StateMismatch, mix, read_jsonl, read_tokens

Build = Callable[[int], Stage]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("\n".join(map(str, range(200))))
    return tmp_path / "a.jsonl"


def loader_of(stream: Stage, lanes: int = 8) -> StatefulDataLoader:
    return StatefulDataLoader(stream, 5, lanes=lanes, seed=0, collate_fn=list)


def rows_of(loader: StatefulDataLoader) -> list[Any]:
    return [row for batch in loader for row in batch]


def taken(loader: StatefulDataLoader, batches: int) -> list[Any]:
    """The first rows; the position lies after them."""
    under_way = iter(loader)
    return [row for _ in range(batches) for row in next(under_way)]


CHANGES: dict[str, Callable[[Path], Build]] = {
    "shuffle seed": lambda path: lambda n: read_jsonl(path).shuffle(20, seed=n),
    "mix seed": lambda path: lambda n: mix({"a": read_jsonl(path)}, seed=n).shuffle(50),
    "mix by": lambda path: lambda n: mix({"a": read_jsonl(path)}, by=("rows", "tokens")[n - 1]),
    "mix stop": lambda path: lambda n: mix({"a": read_jsonl(path)}, stop=("first", "all")[n - 1]).shuffle(50),
    "shuffle seed in a mix": lambda path: lambda n: mix({"a": read_jsonl(path).shuffle(20, seed=n)}),
    "passes": lambda path: lambda n: read_jsonl(path).shuffle(20).repeat(n + 1),
    "passes that are shuffled": lambda path: lambda n: read_jsonl(path).repeat(n + 1).shuffle(300),
    "passes in batches": lambda path: lambda n: read_jsonl(path).repeat(n + 1).map(list, batched=64),
    "layout": lambda path: lambda n: read_jsonl(path).map(as_document).pack(8, ("concat", "best_fit")[n - 1]),
    "another stage": lambda path: lambda n: read_jsonl(path) if n == 1 else read_jsonl(path).map(str),
}


def as_document(number: int) -> dict[str, Any]:
    return {"input_ids": np.full(number % 5 + 1, number)}


@pytest.mark.parametrize("what", CHANGES)
def test_what_lanes_have_to_agree_on_is_refused_within_an_epoch_and_taken_between_epochs(what: str, path: Path) -> None:
    """Lanes that have not begun would deal chunks, or fill windows, otherwise than those that have."""
    build = CHANGES[what](path)
    first = loader_of(build(1), lanes=64)
    taken(first, 2)
    for strict in (True, False):
        with pytest.raises(StateMismatch, match=r"In the middle of an epoch .* cannot change .* change it between"):
            loader_of(build(2), lanes=64).load_state_dict(first.state_dict(), strict=strict)
    fresh = loader_of(build(1), lanes=64).state_dict()
    loader_of(build(2), lanes=64).load_state_dict(fresh, strict=False)


def test_token_rows_take_another_length_between_epochs_only(tmp_path: Path) -> None:
    np.arange(1, 5001, dtype=np.uint16).tofile(tmp_path / "a.bin")

    def loader(seq_len: int) -> StatefulDataLoader:
        return StatefulDataLoader(read_tokens(tmp_path / "a.bin", seq_len, dtype="uint16"), 4, seed=0)

    first = loader(8)
    batches = iter(first)
    next(batches)
    with pytest.raises(StateMismatch, match=r"seq_len +saved 8 +now 32 +\(cuts rows otherwise\)"):
        loader(32).load_state_dict(first.state_dict(), strict=False)
    assert sum(1 for _ in batches)
    then = loader(32)
    then.load_state_dict(first.state_dict())  # of the next epoch
    tokens = [token for batch in then for token in batch["input_ids"].flatten().tolist() if token]
    assert sorted(tokens) == [*range(1, 5001)]


def test_a_source_that_comes_back_is_held_against_what_it_was(tmp_path: Path, path: Path) -> None:
    """Also where it was out of the mix when the position was saved last."""
    (tmp_path / "b.jsonl").write_text("\n".join(map(str, range(1000, 1200))))

    def loader(seed: int | None) -> StatefulDataLoader:
        sources = {"a": read_jsonl(path).shuffle(10, seed=1)}
        if seed is not None:
            sources["b"] = read_jsonl(tmp_path / "b.jsonl").shuffle(10, seed=seed)
        return loader_of(mix(sources, stop="all"), lanes=4)

    first = loader(1)
    rows = taken(first, 12)
    state = first.state_dict()
    for _ in range(2):
        without = loader(None)
        without.load_state_dict(state)
        rows += taken(without, 3)
        state = without.state_dict()
    with pytest.raises(StateMismatch, match=r"b: shuffle_seed +saved 1 +now 2"):
        loader(2).load_state_dict(state)
    again = loader(1)
    again.load_state_dict(state)
    rows += rows_of(again)
    assert Counter(Counter(rows).values()) == {1: 400}


def test_a_source_that_is_gone_is_forgotten_with_the_epoch(tmp_path: Path, path: Path) -> None:
    both = mix({"a": read_jsonl(path), "b": read_jsonl(path).shuffle(10, seed=1)})
    first = loader_of(both, lanes=1)
    taken(first, 3)
    without = loader_of(mix({"a": read_jsonl(path)}), lanes=1)
    without.load_state_dict(first.state_dict())
    assert "b: shuffle_seed" in json.loads(without.state_dict()["unbroken"])["fingerprint"]
    rows_of(without)
    assert "b: shuffle_seed" not in json.loads(without.state_dict()["unbroken"])["fingerprint"]
    other = loader_of(mix({"a": read_jsonl(path), "b": read_jsonl(path).shuffle(10, seed=2)}), lanes=1)
    other.load_state_dict(without.state_dict())


@pytest.mark.parametrize("bad", [3, 300])
def test_a_row_that_was_read_and_is_bad_now_is_an_error_and_not_other_rows(tmp_path: Path, bad: int) -> None:
    lines = [json.dumps({"i": f"{i:05d}"}) if i % 3 or i >= 3 * bad else "[" + "x" * 12 for i in range(1200)]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines))

    def loader() -> StatefulDataLoader:
        return loader_of(read_jsonl(file, on_error="skip").shuffle(1200, seed=1), lanes=1)

    ref = rows_of(loader())
    first = loader()
    rows = taken(first, 20)
    state = first.state_dict()
    again = loader()
    again.load_state_dict(state)
    assert rows + rows_of(again) == ref
    number = int(rows[0]["i"])
    file.write_text("\n".join([*lines[:number], lines[number].replace(":", ";"), *lines[number + 1 :]]))
    worse = loader()
    worse.load_state_dict(state)
    with pytest.raises(BadRow, match="other rows of it can be read now than when the position was saved"):
        next(iter(worse))


def test_of_very_many_bad_rows_one_that_is_mended_and_forgotten_is_an_error(tmp_path: Path) -> None:
    lines = [json.dumps({"i": f"{i:05d}"}) if i % 3 else '{"i": "00000";' for i in range(1200)]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines))
    first = loader_of(read_jsonl(file, on_error="skip").shuffle(1200, seed=1), lanes=1)
    taken(first, 5)
    file.write_text("\n".join(line.replace(";", "}") for line in lines))
    then = loader_of(read_jsonl(file, on_error="skip").shuffle(1200, seed=1), lanes=1)
    then.load_state_dict(first.state_dict())
    with pytest.raises(BadRow, match="other rows of it can be read now"):
        next(iter(then))


def test_an_iterator_that_a_newer_one_replaced_moves_nothing(path: Path) -> None:
    first = loader_of(read_jsonl(path).take(10), lanes=1)
    taken(first, 2)  # all of epoch 0
    loader = loader_of(read_jsonl(path).take(10), lanes=1)
    loader.load_state_dict(first.state_dict())
    old, new = iter(loader), iter(loader)
    assert list(old) == []
    before = loader.state_dict()
    assert [row for batch in new for row in batch] == rows_of(loader_of(read_jsonl(path).take(10), lanes=1))
    assert json.loads(before["unbroken"])["at"][0] == 1
