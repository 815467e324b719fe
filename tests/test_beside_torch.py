"""The same program with torch's loader and with ours: arguments, kinds of dataset, samplers, lengths, epochs.

Each scenario is a function of the loader class. What comes of it is compared in full: batches with the types of their
containers, the class and text of an error, warnings. Where the two differ on purpose, ``DIFFERENT`` says why and how.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    random_split,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from tests.beside import (
    BOTH,
    Difference,
    Outcome,
    Scenario,
    assert_the_same,
    assert_they_differ_as_told,
    cases_of,
    told,
)
from tests.beside_rows import (
    Asked,
    Duck,
    Endless,
    Evens,
    Forever,
    Grows,
    NotTogether,
    OldStyle,
    OnlyOne,
    OwnIterator,
    Repeats,
    Rows,
    Scaled,
    Stream,
    Together,
    Told,
    Uneven,
    as_list,
    named,
    once,
    simply,
    with_made,
)
from unbroken import StatefulDataLoader

WORKERS = [0, 2]
SAME: dict[str, Scenario] = {
    # arguments
    "defaults": simply(lambda: Rows(5)),
    "batch size": simply(lambda: Rows(7), batch_size=3),
    "batch size beyond the rows": simply(lambda: Rows(3), batch_size=9),
    "drop_last": simply(lambda: Rows(7), batch_size=3, drop_last=True),
    "drop_last drops all": simply(lambda: Rows(2), batch_size=3, drop_last=True),
    "unbatched": simply(lambda: Rows(4), batch_size=None),
    "unbatched, shuffled": once(lambda: Rows(6), lambda: {"batch_size": None, "shuffle": True}),
    "shuffle": once(lambda: Rows(9), lambda: {"batch_size": 2, "shuffle": True}),
    "not shuffled": simply(lambda: Rows(5), batch_size=2, shuffle=False),
    "no rows": simply(lambda: Rows(0), batch_size=2),
    "collate_fn": simply(lambda: Rows(5), batch_size=2, collate_fn=as_list),
    "collate_fn, unbatched": simply(lambda: Rows(5), batch_size=None, collate_fn=named),
    "default_collate, given": simply(lambda: Rows(5), batch_size=2, collate_fn=default_collate),
    "default_convert, batched": simply(lambda: Rows(5), batch_size=2, collate_fn=default_convert),
    "default_collate, unbatched": simply(lambda: [[1, 2], [3, 4]], batch_size=None, collate_fn=default_collate),
    "a partial function": simply(lambda: Rows(5), batch_size=2, collate_fn=functools.partial(map, str)),
    # kinds of dataset
    "a list": simply(lambda: [3, 1, 2], batch_size=2),
    "text": simply(lambda: "abc", batch_size=2),
    "a range": simply(lambda: range(5), batch_size=2),
    "a tensor": simply(lambda: torch.arange(10).reshape(5, 2), batch_size=2),
    "an array": simply(lambda: np.arange(10).reshape(5, 2), batch_size=2),
    "a dict": simply(lambda: {0: "a", 1: "b", 2: "c"}, batch_size=2),
    "no Dataset": simply(Duck, batch_size=2),
    "TensorDataset": simply(lambda: TensorDataset(torch.arange(5), torch.rand(5, 2)), batch_size=2),
    "Subset": simply(lambda: Subset(Rows(9), [8, 1, 4]), batch_size=2),
    "random_split": once(lambda: random_split(Rows(9), [6, 3])[0], lambda: {"batch_size": 2}),
    "ConcatDataset": simply(lambda: ConcatDataset([Rows(3), [7, 8]]), batch_size=2),
    "StackDataset": simply(lambda: StackDataset(a=Rows(3), b=[7, 8, 9]), batch_size=2),
    "StackDataset of rows together": simply(lambda: StackDataset(Together(3), Rows(3)), batch_size=2),
    "rows together": simply(lambda: Together(5), batch_size=2),
    "rows together, unbatched": simply(lambda: Together(5), batch_size=None),
    "rows not together": simply(lambda: NotTogether(5), batch_size=2),
    "iterable": simply(lambda: Stream(7), batch_size=2),
    "iterable, drop_last": simply(lambda: Stream(7), batch_size=2, drop_last=True),
    "iterable, unbatched": simply(lambda: Stream(5), batch_size=None),
    "iterable, not shuffled": simply(lambda: Stream(5), shuffle=False),
    "iterable with a length": simply(lambda: Told(8), batch_size=2),
    "iterable without rows": simply(lambda: Stream(0), batch_size=2),
    "iterable, uneven": simply(lambda: Uneven(12), batch_size=2),
    "iterable, all with one worker": simply(lambda: OnlyOne(5), batch_size=2),
    "iterable, by __getitem__": simply(OldStyle, batch_size=2),
    "ChainDataset": simply(lambda: ChainDataset([Stream(3), Stream(4)]), batch_size=2),
    "datapipe, sharded": simply(lambda: IterableWrapper(range(9)).sharding_filter().map(str), batch_size=2),
    "datapipe, map-style": simply(lambda: SequenceWrapper(list(range(5))).map(str), batch_size=2),
    # samplers
    "a list of indices": simply(lambda: Rows(9), batch_size=2, sampler=[3, 1, 1]),
    "a range of indices": simply(lambda: Rows(9), batch_size=2, sampler=range(1, 9, 3)),
    "a tensor of indices": simply(lambda: Asked(9), batch_size=2, sampler=torch.tensor([2, 0, 1]), collate_fn=as_list),
    "an array of indices": simply(lambda: Asked(9), batch_size=2, sampler=np.array([2, 0, 1]), collate_fn=as_list),
    "an iterator of indices": lambda kind, who: kind(Rows(9), sampler=iter([4, 2]), **who),
    "names": simply(Scaled, batch_size=2, sampler=["b", "a"]),
    "pairs": simply(lambda: Asked(9), batch_size=2, sampler=[(1, 2), (3, 4)], collate_fn=as_list),
    "a sampler of the user's": simply(lambda: Rows(9), batch_size=2, sampler=Evens(9)),
    "a sampler of the user's, drop_last": simply(lambda: Rows(9), batch_size=2, sampler=Evens(9), drop_last=True),
    "a sampler of the user's, unbatched": simply(lambda: Rows(9), batch_size=None, sampler=Evens(9)),
    "a sampler without an end": lambda kind, who: itertools.islice(kind(Rows(9), sampler=Endless(), **who), 5),
    "SequentialSampler": simply(lambda: Rows(9), sampler=SequentialSampler(range(4))),
    "SequentialSampler, what it asks with": simply(lambda: Asked(9), sampler=SequentialSampler(range(3))),
    "RandomSampler": once(lambda: Rows(9), lambda: {"sampler": RandomSampler(range(9))}),
    "RandomSampler, more": once(lambda: Rows(3), lambda: {"sampler": RandomSampler(range(3), num_samples=8)}),
    "RandomSampler, replacing": once(lambda: Rows(9), lambda: {"sampler": RandomSampler(range(9), True, 40)}),
    "RandomSampler, what it asks with": once(lambda: Asked(9), lambda: {"sampler": RandomSampler(range(9))}),
    "RandomSampler, its own generator": with_made(
        lambda: Rows(9), lambda: {"sampler": RandomSampler(range(9), generator=torch.Generator().manual_seed(3))}
    ),
    "SubsetRandomSampler": once(lambda: Rows(9), lambda: {"sampler": SubsetRandomSampler([8, 1, 5, 2])}),
    "SubsetRandomSampler of names": once(Scaled, lambda: {"sampler": SubsetRandomSampler(["a", "b", "c"])}),
    "SubsetRandomSampler of pairs": once(
        lambda: Asked(9), lambda: {"sampler": SubsetRandomSampler([(1, 2), (3, 4), (5, 6)]), "collate_fn": as_list}
    ),
    "SubsetRandomSampler of tensors": once(
        lambda: Asked(9), lambda: {"sampler": SubsetRandomSampler(torch.tensor([3, 4, 5])), "collate_fn": as_list}
    ),
    "WeightedRandomSampler": once(lambda: Rows(4), lambda: {"sampler": WeightedRandomSampler([1, 5, 1, 2], 12)}),
    "DistributedSampler": with_made(
        lambda: Rows(9), lambda: {"batch_size": 2, "sampler": DistributedSampler(Rows(9), 2, 1)}
    ),
    "DistributedSampler, drop_last": with_made(
        lambda: Rows(9), lambda: {"batch_size": 2, "sampler": DistributedSampler(Rows(9), 2, 0, drop_last=True)}
    ),
    "DistributedSampler in a batch sampler": with_made(
        lambda: Rows(9), lambda: {"batch_sampler": BatchSampler(DistributedSampler(Rows(9), 2, 1), 2, True)}
    ),
    "batch sampler": simply(lambda: Rows(9), batch_sampler=BatchSampler(SequentialSampler(range(5)), 2, False)),
    "batch sampler, shuffled": once(
        lambda: Rows(9), lambda: {"batch_sampler": BatchSampler(RandomSampler(range(9)), 2, True)}
    ),
    "batch sampler over a sampler of the user's": simply(
        lambda: Rows(9), batch_sampler=BatchSampler(Evens(9), 2, False)
    ),
    "batches in a list": simply(lambda: Rows(9), batch_sampler=[[0, 1], [5], [8, 7, 6]]),
    "batches in tuples": simply(lambda: Together(9), batch_sampler=[(0, 1), (5,)], collate_fn=as_list),
    "batches in tensors": simply(lambda: Asked(9), batch_sampler=[torch.tensor([0, 1])], collate_fn=as_list),
    "a batch sampler of the user's": simply(lambda: Rows(9), batch_sampler=Grows()),
    "bulk loading": simply(
        lambda: Asked(9), batch_size=None, sampler=BatchSampler(SequentialSampler(range(5)), 2, False)
    ),
    "bulk loading, shuffled": once(
        lambda: torch.arange(9),
        lambda: {"batch_size": None, "sampler": BatchSampler(RandomSampler(range(9)), 4, False)},
    ),
    "bulk loading of a list of lists": simply(lambda: Asked(9), batch_size=None, sampler=[[1, 2], [3]]),
}


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("name", SAME)
def test_a_program_gives_the_same(name: str, num_workers: int) -> None:
    assert_the_same(SAME[name], num_workers)


REPEATS = (
    "UserWarning",
    (
        "Lanes 0 and 1 yield the same samples: the dataset does not look at its worker info, so each of its lanes "
        "repeats all of it (as it does in torch's loader).\nShard it in __iter__ by "
        "torch.utils.data.get_worker_info(), whose id is the lane and num_workers the number of lanes; or pass lanes=1."
    ),
)


def told_of_repeats(theirs: Outcome) -> Outcome:
    """Once in each epoch."""
    epochs = 1 + theirs.batches.count(told("again"))
    return theirs._replace(warnings=[*theirs.warnings, *[REPEATS] * epochs])


def not_ended(theirs: Outcome) -> Outcome:
    """Without the error."""
    return theirs._replace(error=None, batches=[told(batch) for batch in (torch.tensor([0]), torch.tensor([1]))])


DIFFERENT = {
    "repeats": Difference(
        "a dataset that every worker repeats is told of (case 11)", simply(Repeats, batch_size=2), told_of_repeats, (2,)
    ),
    "its own iterator": Difference("the same", simply(OwnIterator, batch_size=2), told_of_repeats, (2,)),
    "endless": Difference(
        "the same",
        lambda kind, who: itertools.islice(kind(Forever(), batch_size=2, **who), 3),
        told_of_repeats,
        (2,),
    ),
    "datapipe": Difference(
        "the same", simply(lambda: IterableWrapper(range(6)).map(str), batch_size=2), told_of_repeats, (2,)
    ),
    "timeout without workers": Difference(
        "it waits for no one, so that num_workers can be set to 0 for debugging",
        lambda kind, who: kind(Rows(2), timeout=5),
        not_ended,
        (0,),
    ),
}


@pytest.mark.parametrize(("name", "num_workers"), cases_of(DIFFERENT))
def test_what_differs_differs_as_told(name: str, num_workers: int) -> None:
    assert_they_differ_as_told(DIFFERENT[name], num_workers)


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("shuffled_last", [False, True])
def test_a_shuffled_datapipe_is_shared_out_without_loss(shuffled_last: bool, num_workers: int) -> None:
    """All rows once in each epoch, in another order in the next, as torch has it; and exact after a resume."""

    def pipe() -> Any:
        rows = IterableWrapper(range(20))
        return rows.sharding_filter().shuffle() if shuffled_last else rows.shuffle().sharding_filter()

    def batches(loader: Any) -> list[Any]:
        return [batch.tolist() for batch in loader]

    who = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    for kind in BOTH:
        loader = kind(pipe(), batch_size=2, **who)
        first, second = batches(loader), batches(loader)
        assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(20))
        assert first != second
    loader, rest = (StatefulDataLoader(pipe(), batch_size=2, lanes=2, seed=1, **who) for _ in range(2))
    iterator = iter(loader)
    seen = batches(itertools.islice(iterator, 3))
    rest.load_state_dict(loader.state_dict())
    assert batches(rest) == batches(iterator)
    assert len(seen) == 3


def test_a_datapipe_among_ranks_that_are_not_named_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's loader would share it out among them."""
    monkeypatch.setattr("unbroken.ordering.distributed_rank", lambda: (1, 2))
    with pytest.raises(ValueError, match="pass dp_rank and dp_world_size, group=, or mesh="):
        StatefulDataLoader(IterableWrapper(range(6)))
    loader = StatefulDataLoader(IterableWrapper(range(6)).sharding_filter(), dp_rank=1, dp_world_size=2)
    assert [int(row) for row in loader] == [1, 3, 5]
