"""Lineage: the stored rows behind every row of a batch, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from unbroken import Lineage, Origin, Stage, StatefulDataLoader, mix, read_jsonl
from unbroken.engine.empty import emptied
from unbroken.engine.pinning import pin
from unbroken.lineage import with_lineage


def ids_of(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Stage]:
    for name, rows in (("a", 60), ("b", 25)):
        lines = (json.dumps({"text": f"{name}{number} " * (number % 9)}) for number in range(rows))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return {name: read_jsonl(tmp_path / f"{name}.jsonl") for name in ("a", "b")}


def tokens_behind(origins: tuple[Origin, ...]) -> list[int]:
    """What the files hold where lineage says a row is from."""
    found: list[int] = []
    for origin in origins:
        assert Path(origin.file).stem == origin.source
        with open(origin.file, "rb") as file:
            file.seek(int(origin.row))
            text = json.loads(file.readline())["text"]
        found += ids_of(text)[origin.start : origin.stop]
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", ["concat", "best_fit"])
def test_the_rows_behind_a_packed_row_hold_its_tokens(corpus: dict[str, Stage], layout: str, workers: int) -> None:
    sources = {name: source.shuffle(7) for name, source in corpus.items()}
    stream = mix(sources, stop="all").shuffle(9).tokenize(ids_of).pack(16, layout, pad_id=-1)
    loader = StatefulDataLoader(stream, 4, num_workers=workers, lanes=4, seed=0, lineage=True)
    seen = 0
    for batch in loader:
        assert isinstance(batch["lineage"], Lineage) and len(batch["lineage"]) == len(batch["input_ids"])
        for row, origins in zip(batch["input_ids"].tolist(), batch["lineage"], strict=True):
            tokens = [token for token in row if token >= 0]
            assert tokens_behind(origins) == tokens
            seen += len(tokens)
    rows = [row["text"] for source in corpus.values() for row in source]
    assert seen == sum(len(ids_of(text)) for text in rows)


def test_lineage_is_the_same_after_a_resume_and_changes_no_row(corpus: dict[str, Stage]) -> None:
    stream = corpus["a"].shuffle(7).tokenize(ids_of).pack(16)

    def loader(**options: Any) -> StatefulDataLoader:
        return StatefulDataLoader(stream, 4, lanes=4, seed=0, **options)

    plain, ref = list(loader()), list(loader(lineage=True))
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(plain, ref, strict=True))
    assert all("lineage" not in batch for batch in plain)
    for k in range(len(ref)):
        first = loader(lineage=True)
        batches = iter(first)
        for _ in range(k):
            next(batches)
        again = loader(lineage=True, num_workers=k % 3)
        again.load_state_dict(first.state_dict())
        assert [batch["lineage"] for batch in again] == [batch["lineage"] for batch in ref[k:]]


def test_a_position_does_not_depend_on_lineage(corpus: dict[str, Stage]) -> None:
    stream = corpus["a"].shuffle(7).tokenize(ids_of).pack(16)
    states = []
    for lineage in (False, True):
        loader = StatefulDataLoader(stream, 4, lanes=4, seed=0, lineage=lineage)
        next(iter(loader))
        states.append(loader.state_dict())
    assert states[0] == states[1]


def test_a_batch_that_is_no_dict_comes_with_its_lineage_beside_it(corpus: dict[str, Stage]) -> None:
    rows, lineage = next(iter(StatefulDataLoader(corpus["a"], 2, collate_fn=list, lanes=1, lineage=True)))
    assert [row["text"] for row in rows] == ["", "a1 "]
    assert [(origin.source, origin.row, origin.start) for (origin,) in lineage] == [
        ("read_jsonl", 0, -1),
        ("read_jsonl", 13, -1),
    ]


def test_a_single_row_has_a_lineage_of_one(corpus: dict[str, Stage]) -> None:
    row = next(iter(StatefulDataLoader(corpus["a"], None, lanes=1, lineage=True)))
    assert row["text"] == "" and len(row["lineage"]) == 1


def test_lineage_is_neither_pinned_nor_taken_for_rows() -> None:
    lineage = Lineage([(Origin("web", "a.jsonl", 0),), ()])
    assert pin({"lineage": lineage})["lineage"] is lineage
    empty = emptied({"input_ids": torch.ones(2, 3), "lineage": lineage})
    assert empty["input_ids"].shape == (0, 3) and empty["lineage"] == Lineage()


def test_a_field_of_that_name_is_not_overwritten() -> None:
    with pytest.raises(ValueError, match="adds a field 'lineage' to each batch, and the rows have one"):
        with_lineage({"lineage": 1}, Lineage())


@pytest.mark.parametrize("dataset", [[1, 2, 3], torch.utils.data.TensorDataset(torch.ones(3))])
def test_lineage_of_what_is_no_stream_is_refused(dataset: Any) -> None:
    with pytest.raises(ValueError, match=r"lineage=True is for streams(?s:.*)from_map or from_iterable"):
        StatefulDataLoader(dataset, lineage=True)


def test_lineage_is_true_or_false(corpus: dict[str, Stage]) -> None:
    with pytest.raises(TypeError, match="lineage must be True or False, but got lineage=1"):
        StatefulDataLoader(corpus["a"], lineage=1)  # type: ignore[arg-type]


def test_a_stream_in_this_process_leaves_the_global_generators_alone(corpus: dict[str, Stage]) -> None:
    """Case 18: also where no stage draws, and over a resume; opening a lane seeds them too."""
    loader = StatefulDataLoader(corpus["a"].tokenize(ids_of).pack(16), 4, lanes=4, seed=0)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    next(batches)
    assert torch.equal(torch.get_rng_state(), before)
