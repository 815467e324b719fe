"""Cases 23, 26 and 27: positions and checkpoints that do not fit. Whatever is wrong, the loader is as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests import datasets as ds
from tests.distributed.loaders import (
    MAP_ROWS,
    encode,
    is_wanted,
    lanes_in,
    make_loader,
    rows_of,
    text_stream,
    write_corpus,
)
from unbroken import StatefulDataLoader, read_jsonl
from unbroken.errors import IncompleteState, InvalidState, StateMismatch

# torch says so wherever a single process saves or loads, as this one does.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)


def stopped_after(steps: int, loader: StatefulDataLoader) -> dict[str, str]:
    for _ in zip(range(steps), loader, strict=False):
        pass
    return loader.state_dict()


def saved(steps: int = 3, rank: int = 0, world: int = 1, **others: Any) -> dict[str, str]:
    """The position of one rank over eight lanes."""
    return stopped_after(steps, make_loader("lanes", "", rank, world, **others))


def with_header(**changes: Any) -> dict[str, str]:
    state = saved()
    return state | {"unbroken": json.dumps(json.loads(state["unbroken"]) | changes)}


def with_leaf(change: Callable[[str], str]) -> dict[str, str]:
    state = saved()
    return state | {"lane-000005": change(state["lane-000005"])}


def without(*names: str) -> dict[str, str]:
    return {name: leaf for name, leaf in saved().items() if name not in names}


def with_fields(**changes: Any) -> Callable[[str], str]:
    """Other values of fields of the lane."""
    return lambda leaf: json.dumps(json.loads(leaf) | {"lane": json.loads(leaf)["lane"] | changes})


def without_field(name: str) -> Callable[[str], str]:
    """A leaf without a field of its own, or of the lane."""

    def change(leaf: str) -> str:
        fields = json.loads(leaf)
        del (fields if name in fields else fields["lane"])[name]
        return json.dumps(fields)

    return change


FIELDS = ("step", "run", "epochs", "lane")
FIELDS += ("epoch", "turns", "delivered", "ended", "ledger", "last", "sizes", "carry", "anchor")


class Refusal(NamedTuple):
    """A position, the error that it must be refused with, and words of its message."""

    state: Callable[[], Any]
    error: type[Exception]
    words: str


def cut(name: str, change: Callable[[str], str], words: str = "lane-000005.*cut short") -> dict[str, Refusal]:
    return {name: Refusal(lambda: with_leaf(change), InvalidState, words)}


REFUSALS = {
    "different steps": Refusal(
        lambda: saved(3, 0, 2) | saved(4, 1, 2), IncompleteState, "lane-000000 at step 3, lane-000001 at step 4"
    ),
    "different runs": Refusal(lambda: saved(3, 0, 2, seed=8) | saved(3, 1, 2), IncompleteState, "different runs"),
    "one rank of two": Refusal(lambda: saved(3, 0, 2), IncompleteState, "4 of the 8 lanes.*lane-000001"),
    "a lane too few": Refusal(lambda: without("lane-000007"), IncompleteState, "1 of the 8 lanes.*lane-000007"),
    "the header alone": Refusal(
        lambda: {"unbroken": saved()["unbroken"]}, IncompleteState, "8 of the 8 lanes.*lane-000000"
    ),
    "no header": Refusal(lambda: without("unbroken"), InvalidState, "'unbroken' is missing"),
    "other lanes": Refusal(lambda: with_header(lanes=6), StateMismatch, "lanes +saved 6 +now 8.*lanes=6"),
    "another kind": Refusal(lambda: with_header(kind="map"), StateMismatch, "saved map +now iterable"),
    "a later version": Refusal(lambda: with_header(version=2), InvalidState, "version 2,.*up to 1.*Install"),
    "no version": Refusal(lambda: with_header(version=None), InvalidState, "no version"),
    "no fingerprint": Refusal(lambda: with_header(fingerprint=None), InvalidState, "no fingerprint"),
    "a header cut short": Refusal(
        lambda: (state := saved()) | {"unbroken": state["unbroken"][:-9]}, InvalidState, "'unbroken'.*cut short"
    ),
    **cut("a leaf cut short", lambda leaf: leaf[:-9]),
    **cut("an empty leaf", lambda leaf: ""),
    **cut("a leaf of no object", lambda leaf: "[1]", "lane-000005.*list"),
    **cut("a leaf without fields", lambda leaf: "{}", "cut short"),
    **{
        field: refusal
        for name in FIELDS
        for field, refusal in cut(f"a leaf without its {name}", without_field(name), "cut short").items()
    },
    **cut("a count below zero", with_fields(turns=-1)),
    **cut("a count that is text", with_fields(delivered="many")),
    "torchdata's": Refusal(
        lambda: {"_snapshot": {}, "_steps_since_snapshot": 0}, InvalidState, "not a position.*'_snapshot'"
    ),
    "a model's": Refusal(lambda: {"weight": torch.ones(2)}, InvalidState, "not a position.*'weight'"),
    "a list": Refusal(lambda: ["unbroken"], InvalidState, "got a list"),
    "nothing": Refusal(lambda: None, InvalidState, "got a NoneType"),
}  # fmt: skip


def assert_untouched(load: Callable[[StatefulDataLoader], None]) -> None:
    """``load``, which is refused, changes nothing: neither before the first batch nor in the middle."""
    ref = [rows_of(batch) for batch in make_loader("lanes", "")]
    loader = make_loader("lanes", "")
    state = loader.state_dict()
    load(loader)
    assert loader.state_dict() == state
    batches = iter(loader)
    begun = [rows_of(next(batches)) for _ in range(2)]
    state = loader.state_dict()
    load(loader)
    assert loader.state_dict() == state
    assert begun + [rows_of(batch) for batch in batches] == ref


@pytest.mark.parametrize("name", REFUSALS)
def test_a_position_that_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    """Cases 23 and 27: with a named error that says what is wrong."""
    state, (_, error, words) = REFUSALS[name].state(), REFUSALS[name]

    def load(loader: StatefulDataLoader) -> None:
        with pytest.raises(error, match=f"(?s){words}"):
            loader.load_state_dict(state)

    assert_untouched(load)


@pytest.mark.parametrize("name", ["different steps", "different runs", "a later version", "a leaf cut short"])
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    """Cases 23 and 27: the same, from files."""
    state, (_, error, words) = REFUSALS[name].state(), REFUSALS[name]
    dcp.save({"loader": state}, checkpoint_id=tmp_path)

    def load(loader: StatefulDataLoader) -> None:
        with pytest.raises(error, match=f"(?s){words}"):
            dcp.load({"loader": loader}, checkpoint_id=tmp_path)

    assert_untouched(load)


@pytest.mark.parametrize("left", [{"step": 3}, {"unbroken": "{}", "lane-000003": "{}"}])
def test_a_checkpoint_without_the_loader_is_refused(tmp_path: Path, left: Mapping[str, Any]) -> None:
    """Case 26: torch names what is missing, before the loader is asked."""
    dcp.save({"model": {"weight": torch.ones(2)}, "loader": left}, checkpoint_id=tmp_path)

    def load(loader: StatefulDataLoader) -> None:
        with pytest.raises(
            CheckpointException, match=r"Missing key in checkpoint state_dict: loader\.(unbroken|lane-000000)"
        ):
            dcp.load({"loader": loader}, checkpoint_id=tmp_path)

    assert_untouched(load)


# Case 26: another pipeline


class Other(NamedTuple):
    """A loader that is not the one that saved, and each field in which it differs, as saved and now (patterns)."""

    kind: str
    make: Callable[[Path], StatefulDataLoader]
    fields: dict[str, tuple[str, str]]


def other_map(n: int = MAP_ROWS, **others: Any) -> StatefulDataLoader:
    return make_loader("map", "", dataset=ds.Augmented(n, "numpy"), **others)


def other_text(corpus: Path, tokenizer: Any = encode, append: int = 0, seed: int = 7) -> StatefulDataLoader:
    rows = read_jsonl(str(corpus)).shuffle(400, seed=3).filter(is_wanted)
    return make_loader("text", corpus, dataset=rows.tokenize(tokenizer, append=append).pack(64), seed=seed)


def encode_otherwise(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


OTHERS = {
    "another seed": Other("map", lambda _: make_loader("map", "", seed=8), {"seed": ("7", "8")}),
    "another order": Other(
        "map",
        lambda _: make_loader("map", "", shuffle=False),
        {"sampler": ("shuffle with a seed", "SequentialSampler")},
    ),
    "another dataset": Other("map", lambda _: other_map(), {"dataset": ("Numbers", "Augmented")}),
    "everything else": Other(
        "map",
        lambda _: other_map(100, seed=1, seed_by="sample"),
        {
            "dataset": ("Numbers", "Augmented"),
            "seed": ("7", "1"),
            "length": (f"{MAP_ROWS}", "100"),
            "seed_by": ("batch", "sample"),
        },
    ),
    "another window": Other(
        "text",
        lambda corpus: make_loader("text", corpus, dataset=text_stream(corpus, window=50)),
        {"window": ("400", "50")},
    ),
    "another tokenizer": Other(
        "text",
        lambda corpus: other_text(corpus, encode_otherwise),
        {"tokenizer": ("encode:[0-9a-f]{16}", "encode_otherwise:[0-9a-f]{16}")},
    ),
    "another end of documents": Other(
        "text",
        lambda corpus: other_text(corpus, append=1, seed=8),
        {"append": (r"\[0\]", r"\[1\]"), "seed": ("7", "8")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_pipeline_is_refused_unless_the_difference_is_accepted(name: str, tmp_path: Path) -> None:
    """Case 26: every field that differs is listed, as it was saved and as it is now."""
    kind, make, fields = OTHERS[name]
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    state = stopped_after(2, make_loader(kind, corpus))
    dcp.save({"loader": state}, checkpoint_id=tmp_path / "checkpoint")
    loader = make(corpus)
    before = loader.state_dict()
    with pytest.raises(StateMismatch, match=r"(?s)another pipeline.*strict=False") as caught:
        dcp.load({"loader": loader}, checkpoint_id=tmp_path / "checkpoint")
    assert loader.state_dict() == before
    listed = dict(re.findall(r"^  (\S+) +(saved .*)$", str(caught.value), re.MULTILINE))
    assert set(listed) == set(fields)
    for field, (was, now) in fields.items():
        assert re.match(rf"saved {was} +now {now} ", listed[field])
    loader.load_state_dict(state, strict=False)
    leaf = "place" if kind == "map" else "lane-000007"
    assert json.loads(loader.state_dict()[leaf])["step"] == 2
    assert next(iter(loader)) is not None


@pytest.mark.parametrize("strict", [True, False])
def test_other_files_are_accepted_between_epochs_only(tmp_path: Path, strict: bool) -> None:
    """Case 26: in mid-epoch they cannot be without loss, whatever the user says."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    loader = make_loader("text", corpus)
    in_mid_epoch = stopped_after(2, loader)
    between = stopped_after(1000, make_loader("text", corpus))
    with corpus.open("a") as file:
        file.write(json.dumps({"text": "one more", "number": 1}) + "\n")
    loader = make_loader("text", corpus)
    before = loader.state_dict()
    with pytest.raises(StateMismatch, match=r"files +saved .* now "):
        loader.load_state_dict(in_mid_epoch, strict=strict)
    assert loader.state_dict() == before
    if strict:
        with pytest.raises(StateMismatch, match=r"(?s)files +saved .* now .*strict=False"):
            loader.load_state_dict(between)
        assert loader.state_dict() == before
    else:
        loader.load_state_dict(between, strict=False)
        assert lanes_in(loader.state_dict())["lane-000000"]["epoch"] == 1
