"""The same program with torch's loader and with ours: what samples become, and how they arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data._utils.collate as torch_collate
from torch.utils.data import DataLoader, Dataset

from tests.beside import (
    Difference,
    Outcome,
    assert_the_same,
    assert_they_differ_as_told,
    cases_of,
    failed,
    outcome,
    outcomes,
)
from tests.beside_rows import Kind, Who, as_list
from tests.odd import SENDABLE, Plain
from unbroken import StatefulDataLoader


class Made(Dataset):
    """Rows are made by a function of their number."""

    def __init__(self, make: Any, n: int = 3) -> None:
        self.make = make
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


WAYS: dict[str, dict[str, Any]] = {
    "collated": {"batch_size": 2},
    "as they are": {"batch_size": 2, "collate_fn": as_list},
    "unbatched": {"batch_size": None},
    "one by one": {"batch_size": None, "collate_fn": as_list},
}
KINDS = [name for name in SENDABLE if name != "quantized"]
# With workers, torch changes or refuses these, and ours give what torch gives without.
NOT_FROM_WORKERS = {
    "conjugated": "the conjugation is lost",
    "negated lazily": "the sign is lost",
    "big-endian array": "the bytes are swapped, and the dtype with them",
}


class ByName(Dataset):
    """A row is asked for by the name of a kind of sample, and a number."""

    def __len__(self) -> int:
        return 2 * len(KINDS)

    def __getitem__(self, index: tuple[str, int]) -> Any:
        name, number = index
        return SENDABLE[name](number)


def all_kinds(way: str) -> Any:
    """One batch of each, or its error, which is passed over."""

    def load(kind: Kind, who: Who) -> Any:
        rows = [(name, number) for name in KINDS for number in (0, 1)]
        batches = [rows[place : place + 2] for place in range(0, len(rows), 2)]
        order = {"sampler": rows} if WAYS[way]["batch_size"] is None else {"batch_sampler": batches}
        rest = {name: value for name, value in WAYS[way].items() if name != "batch_size" or value is None}
        iterator = iter(kind(ByName(), **order, **rest, **who))
        for _ in rows if "sampler" in order else batches:
            try:
                yield next(iterator)
            except Exception as error:
                yield failed(error)

    return load


def by_name(found: Outcome, way: str) -> dict[str, Any]:
    each = 2 if WAYS[way]["batch_size"] is None else 1
    return {name: found.batches[place * each : (place + 1) * each] for place, name in enumerate(KINDS)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SENDABLE)
def test_samples_become_the_same_batches(name: str, way: str) -> None:
    assert_the_same(lambda kind, who: kind(Made(SENDABLE[name]), **WAYS[way], **who))


@pytest.mark.parametrize("way", WAYS)
def test_samples_arrive_from_workers_as_the_same_batches(way: str) -> None:
    theirs, ours = (by_name(found, way) for found in outcomes(all_kinds(way), 2))
    inline = by_name(outcome(DataLoader, all_kinds(way)), way)
    swapped_bytes = way in ("as they are", "one by one")  # by the other ways they are tensors when they are sent
    for name in KINDS:
        if name == "parameter" and way == "collated":  # part of a graph, which neither sends (see the errors)
            assert "requires grad" in str(theirs[name])
            assert "requires_grad" in str(ours[name])
        elif name in NOT_FROM_WORKERS and (name != "big-endian array" or swapped_bytes):
            assert ours[name] == inline[name] != theirs[name], f"{name}: {NOT_FROM_WORKERS[name]}"
        else:
            assert ours[name] == theirs[name], name


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch rebuilds a quantized tensor
@pytest.mark.parametrize("way", WAYS)
def test_quantized_tensors_arrive_where_torch_cannot_rebuild_them(way: str) -> None:
    def load(kind: Kind, who: Who) -> Any:
        return kind(Made(SENDABLE["quantized"], 2), **WAYS[way], **who)

    theirs, ours = outcomes(load, 2)
    assert theirs.error is not None
    assert ours.batches == outcome(DataLoader, load).batches


# ---- structures and functions of the program's


def with_own_collation(kind: Kind, who: Who) -> Any:
    """A kind of sample that torch's collation was taught."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(torch_collate.default_collate_fn_map, Plain, lambda batch, *, collate_fn_map: len(batch))
        patch.setitem(torch_collate.default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map: batch[0])
        yield from kind(Made(lambda i: {"a": Plain(i), "b": (torch.ones(2) + i, np.ones(2) + i)}), batch_size=2, **who)


class SameBuffer:
    """A ``collate_fn`` that fills one buffer again and again."""

    def __init__(self) -> None:
        self.buffer = {"a": torch.zeros(2), "b": np.zeros(2)}

    def __call__(self, samples: Any) -> Any:
        for place, sample in enumerate(samples):
            self.buffer["a"][place] = sample
            self.buffer["b"][place] = sample
        return self.buffer


def with_one_buffer(kind: Kind, who: Who) -> Any:
    for batch in kind(Made(float, 8), batch_size=2, collate_fn=SameBuffer(), **who):
        yield {name: values.tolist() for name, values in batch.items()}


def with_one_buffer_held(kind: Kind, who: Who) -> Any:
    return list(kind(Made(float, 8), batch_size=2, collate_fn=SameBuffer(), **who))


def with_a_changed_sample(kind: Kind, who: Who) -> Any:
    """The dataset changes a row that it has handed out."""
    return kind(Changes(), batch_size=None, collate_fn=as_list, **who)


class Changes(Dataset):
    row = torch.zeros(2)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.row.fill_(index)


SAME = {
    "torch's collation, taught more": with_own_collation,
    "one buffer for all batches, inline": lambda kind, who: with_one_buffer(kind, {}),
    "one buffer for all batches, held inline": lambda kind, who: with_one_buffer_held(kind, {}),
    "one buffer for all rows, inline": lambda kind, who: with_a_changed_sample(kind, {}),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SAME)
def test_a_program_gives_the_same(name: str, num_workers: int) -> None:
    assert_the_same(SAME[name], num_workers)


# ---- memory


def layouts(batches: Any) -> list[Any]:
    return [(batch.stride(), batch.is_contiguous(), batch.is_shared()) for batch in batches]


def with_gaps(kind: Kind, who: Who) -> Any:
    """Views that are not dense, as they arrive."""
    rows = [torch.arange(12)[::3], torch.ones(1).expand(4), torch.arange(12).reshape(3, 4)[:, 1]]
    yield layouts(kind(rows, batch_size=None, **who))


def dense(theirs: Outcome) -> Outcome:
    """What the same program gives for copies of the rows, in memory that is not torch's."""
    rows = [torch.arange(12)[::3].clone(), torch.ones(4), torch.arange(3)]
    found = outcome(DataLoader, lambda kind, who: [layouts(kind(rows, batch_size=None))])
    return theirs._replace(batches=found.batches)


def with_one_storage(kind: Kind, who: Who) -> Any:
    """Whether two views of one tensor are so after the journey."""
    whole = torch.arange(4)
    for first, second in kind([(whole, whole[1:])], batch_size=None, **who):
        second[0] = 9
        yield first


def not_together(theirs: Outcome) -> Outcome:
    return theirs._replace(batches=outcome(DataLoader, lambda kind, who: [torch.arange(4)]).batches)


def from_a_file(kind: Kind, who: Who) -> Any:
    rows = np.memmap(Path(__file__), np.uint8, "r", shape=(2, 3))
    yield [type(row).__name__ for row in kind(rows, batch_size=None, collate_fn=as_list, **who)]


DIFFERENT = {
    "views with gaps": Difference(
        "they are sent without the gaps, and not in torch's shared memory", with_gaps, dense, (2,)
    ),
    "views of one tensor": Difference("each is sent by itself", with_one_storage, not_together, (2,)),
    "arrays from a file": Difference(
        "they arrive as the arrays that they are by then",
        from_a_file,
        lambda theirs: theirs._replace(batches=outcome(DataLoader, lambda kind, who: [["ndarray", "ndarray"]]).batches),
        (2,),
    ),
}


@pytest.mark.parametrize(("name", "num_workers"), cases_of(DIFFERENT))
def test_what_differs_differs_as_told(name: str, num_workers: int) -> None:
    assert_they_differ_as_told(DIFFERENT[name], num_workers)


@pytest.mark.parametrize("scenario", [with_one_buffer_held, with_a_changed_sample])
def test_what_a_worker_fills_again_does_not_change_what_has_arrived(scenario: Any) -> None:
    """torch's workers share the buffer itself, so that batches which are held become those that were made later."""
    ours = outcome(StatefulDataLoader, scenario, 2)
    assert len({str(batch) for batch in ours.batches}) == len(ours.batches)
