"""The order of a map-style dataset, against a naive model and against torch's own loader."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from unbroken import StatefulDataLoader
from unbroken.errors import LaneError
from unbroken.position import MapPosition
from unbroken.sampling import MapOrder, Share, Step
from unbroken.seeding import Permutation, key


class Indices(Dataset[Any]):
    """Sample i is the index i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return index


class Backwards(Sampler[int]):
    """A sampler of the user's, without a state."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n)[::-1])


class GrowingBatches(Sampler[list[int]]):
    """Batches of 1, 2, 3, ... rows."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in itertools.count(1):
            if start >= self.n:
                return
            yield list(range(start, min(start + size, self.n)))
            start += size


def listed(batch: Any) -> Any:
    return batch


def batches(loader: Any) -> list[Any]:
    return list(loader)


def loader_over(n: int, **arguments: Any) -> StatefulDataLoader:
    return StatefulDataLoader(Indices(n), collate_fn=listed, **arguments)


def chunks(rows: list[int], size: int, drop_last: bool) -> list[list[int]]:
    whole = [rows[i : i + size] for i in range(0, len(rows), size)]
    return whole[:-1] if whole and drop_last and len(whole[-1]) < size else whole


# One global order, shared out


def naive(order: list[int], start: int, rank: int, world: int, size: int, drop_last: bool) -> list[list[int]]:
    """Of the rows of the global order from ``start`` on, a rank takes i where i mod world == rank."""
    mine = [order[i] for i in range(start, len(order)) if i % world == rank]
    return chunks(mine, size, drop_last)


GLOBAL_ORDERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "in sequence": lambda n: {},
    "shuffled": lambda n: {"shuffle": True},
    "a sampler of torch's": lambda n: {"sampler": SubsetRandomSampler(range(n))},
    "a sampler of the user's": lambda n: {"sampler": Backwards(n)},
    "a list": lambda n: {"sampler": [(7 * i) % n for i in range(n)]},
}
TOPOLOGIES = st.tuples(st.integers(1, 4), st.integers(1, 5))
ORDERS = pytest.mark.parametrize("order", GLOBAL_ORDERS)


def global_order(order: str, n: int) -> list[int]:
    return batches(loader_over(n, batch_size=None, seed=3, **GLOBAL_ORDERS[order](n)))


@ORDERS
@settings(max_examples=25)
@given(n=st.integers(1, 40), topology=TOPOLOGIES, drop_last=st.booleans())
def test_ranks_take_turns_over_the_rows_of_one_order(
    order: str, n: int, topology: tuple[int, int], drop_last: bool
) -> None:
    (world, size), whole = topology, global_order(order, n)
    for rank in range(min(world, n)):  # a rank without any data is refused
        arguments = GLOBAL_ORDERS[order](n) | {"batch_size": size, "drop_last": drop_last, "seed": 3}
        loader = loader_over(n, dp_rank=rank, dp_world_size=world, **arguments)
        expected = naive(whole, 0, rank, world, size, drop_last)
        assert len(loader) == len(expected)
        assert batches(loader) == expected


@ORDERS
@settings(max_examples=25)
@given(n=st.integers(4, 60), before=TOPOLOGIES, after=TOPOLOGIES, data=st.data())
def test_after_a_resume_other_ranks_go_on_with_the_rows_that_are_left(
    order: str, n: int, before: tuple[int, int], after: tuple[int, int], data: st.DataObject
) -> None:
    """Cases 21, 22 and 24: on any number of ranks and with any batch size."""
    whole, (world, size) = global_order(order, n), before
    steps = data.draw(st.integers(0, n // (world * size)))
    rank = data.draw(st.integers(0, world - 1))  # every rank's state has the place of all of them
    arguments = GLOBAL_ORDERS[order](n) | {"batch_size": size, "seed": 3}
    loader = loader_over(n, dp_rank=rank, dp_world_size=world, **arguments)
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    done, (world, size) = steps * world * size, after
    if done == n:
        return  # the position is at the end: what follows is the next epoch
    drop_last = data.draw(st.booleans())
    for rank in range(world):
        arguments = GLOBAL_ORDERS[order](n) | {"batch_size": size, "drop_last": drop_last, "seed": 3}
        loader = loader_over(n, dp_rank=rank, dp_world_size=world, **arguments)
        loader.load_state_dict(state)
        expected = naive(whole, done, rank, world, size, drop_last)
        if expected:
            assert batches(loader) == expected


@ORDERS
def test_the_position_is_the_same_on_every_rank(order: str) -> None:
    """Ranks write one leaf, ``place``, and whichever is kept is the right one."""
    states = []
    for rank in range(2):
        loader = loader_over(24, batch_size=2, seed=3, dp_rank=rank, dp_world_size=2, **GLOBAL_ORDERS[order](24))
        iterator = iter(loader)
        states.append([loader.state_dict() for _ in zip(range(3), iterator, strict=False)])
    assert states[0] == states[1]


BATCH_SAMPLERS: dict[str, Callable[[int], Any]] = {
    "torch's": lambda n: BatchSampler(SequentialSampler(range(n)), 3, False),
    "torch's, the last dropped": lambda n: BatchSampler(SequentialSampler(range(n)), 3, True),
    "torch's over a sampler of the user's": lambda n: BatchSampler(Backwards(n), 3, False),
    "torch's over a list": lambda n: BatchSampler([(7 * i) % n for i in range(n)], 3, True),
    "the user's": GrowingBatches,
    "a list of lists": lambda n: [[0], [1, 0], [n - 1]],
    "a list of tuples": lambda n: [(0, 0), (n - 1,)],
}


@pytest.mark.parametrize("sampler", BATCH_SAMPLERS)
@settings(max_examples=15)
@given(n=st.integers(2, 30), world=st.integers(1, 4))
def test_ranks_take_turns_over_the_batches_of_a_batch_sampler(sampler: str, n: int, world: int) -> None:
    whole = list(BATCH_SAMPLERS[sampler](n))
    for rank in range(world):
        arguments: dict[str, Any] = {"dp_rank": rank, "dp_world_size": world} if world > 1 else {}
        if rank >= len(whole):
            continue  # a rank without any data is refused
        loader = loader_over(n, batch_sampler=BATCH_SAMPLERS[sampler](n), **arguments)
        assert len(loader) == len(whole[rank::world])
        assert [list(batch) for batch in loader] == [list(batch) for batch in whole[rank::world]]


@given(st.integers(1, 200), st.integers(0, 2**63), st.integers(0, 3))
def test_a_seeded_shuffle_is_the_permutation_of_seed_and_epoch(n: int, seed: int, epoch: int) -> None:
    """Case 16."""
    loader = loader_over(n, batch_size=None, shuffle=True, seed=seed)
    for _ in range(epoch):
        batches(loader)
    assert batches(loader) == Permutation(n, key(seed, "shuffle", epoch)).block(0, n).tolist()


def test_every_epoch_of_every_random_order_is_another() -> None:
    for order in ("shuffled", "a sampler of torch's"):
        for seed in (None, 3):
            loader = loader_over(50, batch_size=None, seed=seed, **GLOBAL_ORDERS[order](50))
            epochs = [batches(loader) for _ in range(3)]
            assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
            assert len(set(map(tuple, epochs))) == 3


# The steps themselves


def steps_of(order: MapOrder, rows: int = 0, epoch: int = 0) -> Iterator[Step]:
    def no_turns(size: int) -> Any:
        raise AssertionError("only a sampler of the user's makes turns")

    return order.steps(MapPosition(epoch=epoch, rows=rows), True, no_turns)


def test_a_step_says_where_its_rows_lie_in_the_global_order() -> None:
    sampler = SequentialSampler(range(11))
    order = MapOrder(sampler, BatchSampler(sampler, 2, False), 2, False, Share(1, 3), None)
    found = [(step.indices, step.place, step.stride, step.rows) for step in steps_of(order)]
    assert found == [([1, 4], 1, 3, 6), ([7, 10], 7, 3, 11)]


def test_all_ranks_have_done_the_same_rows_after_the_same_step() -> None:
    sampler = SequentialSampler(range(23))
    done = []
    for rank in range(3):
        order = MapOrder(sampler, BatchSampler(sampler, 2, False), 2, False, Share(rank, 3), None)
        done.append([step.rows for step in steps_of(order, rows=4)])
    assert done == [[10, 16, 22], [10, 16, 22, 23], [10, 16, 22]]


@pytest.mark.parametrize("shuffled_by", [None, 5])
def test_an_order_of_a_million_million_rows_starts_anywhere_at_once(shuffled_by: int | None) -> None:
    """Case 16: sequential and seeded orders are functions of the index."""
    n = 10**12
    sampler = SequentialSampler(range(n))
    order = MapOrder(sampler, BatchSampler(sampler, 4, False), 4, False, Share(2, 8), shuffled_by)
    step = next(steps_of(order, rows=n - 64))
    expected = list(range(n - 64 + 2, n - 64 + 34, 8))
    if shuffled_by is not None:
        permutation = Permutation(n, key(shuffled_by, "shuffle", 0))
        expected = [permutation[i] for i in expected]
    assert (step.indices, step.place) == (expected, n - 62)


@pytest.mark.parametrize("batch_size", [1, 3, 4095, 4096, 4097, 10_000])
def test_orders_longer_than_what_is_fetched_at_once_have_no_seam(batch_size: int) -> None:
    n = 20_011
    loader = loader_over(n, batch_size=batch_size, dp_rank=1, dp_world_size=2, seed=1, shuffle=True)
    permutation = Permutation(n, key(1, "shuffle", 0)).block(1, n, 2).tolist()
    assert batches(loader) == chunks(permutation, batch_size, drop_last=False)


# Torch's own order, side by side

SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "in order": lambda d: {},
    "shuffle": lambda d: {"shuffle": True},
    "random": lambda d: {"sampler": RandomSampler(d)},
    "random, few": lambda d: {"sampler": RandomSampler(d, num_samples=max(1, len(d) // 2))},
    "random, many": lambda d: {"sampler": RandomSampler(d, num_samples=2 * len(d) + 1)},
    "with replacement": lambda d: {"sampler": RandomSampler(d, replacement=True, num_samples=40)},
    "weighted": lambda d: {"sampler": WeightedRandomSampler([1.0 + i for i in range(len(d))], 7)},
    "weighted, each once": lambda d: {"sampler": WeightedRandomSampler([1.0] * len(d), len(d), replacement=False)},
    "subset": lambda d: {"sampler": SubsetRandomSampler(range(0, len(d), 2))},
    "sequential": lambda d: {"sampler": SequentialSampler(d)},
    "a list": lambda d: {"sampler": list(range(len(d)))[::-1]},
    "the user's": lambda d: {"sampler": Backwards(len(d))},
    "batches": lambda d: {"batch_sampler": BatchSampler(RandomSampler(d), 3, False)},
    "batches of the user's": lambda d: {"batch_sampler": GrowingBatches(len(d))},
    "batches over the user's": lambda d: {"batch_sampler": BatchSampler(Backwards(len(d)), 3, True)},
    "batches as samples": lambda d: {"batch_size": None, "sampler": BatchSampler(SequentialSampler(d), 3, False)},
    "one at a time": lambda d: {"batch_size": None, "shuffle": True},
}


def both(n: int, make: Callable[[Any], dict[str, Any]], seed: int, epochs: int = 1, **arguments: Any) -> list[Any]:
    """What each of the two loaders gives, and the next number from torch's global generator."""
    found = []
    for kind in (DataLoader, StatefulDataLoader):
        torch.manual_seed(seed)
        dataset = Indices(n)
        loader = kind(dataset, collate_fn=listed, **(arguments | make(dataset)))
        found.append([[batches(loader) for _ in range(epochs)], len(loader), int(torch.randint(2**62, ()))])
    return found


@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(max_examples=15)
@given(n=st.integers(1, 30), seed=st.integers(0, 2**32), size=st.integers(1, 5), drop_last=st.booleans())
def test_the_first_epoch_has_torchs_order_and_torchs_draws(
    sampler: str, n: int, seed: int, size: int, drop_last: bool
) -> None:
    """Cases 15, 16 and 19: without seed and generator, for the same global seed."""
    batched = {"batch_sampler", "batch_size"}.isdisjoint(SAMPLERS[sampler](Indices(n)))
    arguments = {"batch_size": size, "drop_last": drop_last} if batched else {}
    theirs, ours = both(n, SAMPLERS[sampler], seed, **arguments)
    assert ours == theirs


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


WITH_GENERATOR: dict[str, Callable[[Any], dict[str, Any]]] = {
    "shuffle": lambda d: {"shuffle": True, "generator": generator()},
    "shuffle, one at a time": lambda d: {"shuffle": True, "generator": generator(), "batch_size": None},
    "random": lambda d: {"sampler": RandomSampler(d, generator=generator())},
    "random, many": lambda d: {"sampler": RandomSampler(d, num_samples=2 * len(d) + 1, generator=generator())},
    "with replacement": lambda d: {"sampler": RandomSampler(d, True, 40, generator=generator())},
    "weighted": lambda d: {"sampler": WeightedRandomSampler([1.0] * len(d), 9, generator=generator())},
    "subset": lambda d: {"sampler": SubsetRandomSampler(range(len(d)), generator=generator())},
    "batches": lambda d: {"batch_sampler": BatchSampler(RandomSampler(d, generator=generator()), 3, False)},
    "two generators": lambda d: {"sampler": RandomSampler(d, generator=generator()), "generator": generator()},
}


def one_generator(dataset: Any) -> dict[str, Any]:
    shared = generator()
    return {"sampler": RandomSampler(dataset, generator=shared), "generator": shared}


@pytest.mark.parametrize("sampler", [*WITH_GENERATOR, "one generator"])
@settings(max_examples=15)
@given(n=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_with_a_generator_every_epoch_has_torchs_order(sampler: str, n: int, seed: int) -> None:
    """Case 16: ``generator`` given."""
    make = one_generator if sampler == "one generator" else WITH_GENERATOR[sampler]
    theirs, ours = both(n, make, seed, epochs=4)
    assert ours[:2] == theirs[:2]


@pytest.mark.parametrize("sampler", WITH_GENERATOR)
@settings(max_examples=15)
@given(n=st.integers(2, 30), epoch=st.integers(0, 2), data=st.data())
def test_a_generator_goes_on_after_a_resume_as_if_nothing_had_been(
    sampler: str, n: int, epoch: int, data: st.DataObject
) -> None:
    """Case 16: the rest of the epoch and the epochs that follow, from a generator that stood elsewhere."""

    def make(seed: int) -> StatefulDataLoader:
        dataset = Indices(n)
        arguments = WITH_GENERATOR[sampler](dataset)
        for holder in (arguments, vars(arguments.get("sampler", object)), vars(arguments.get("batch_sampler", object))):
            for owner in (holder, vars(holder.get("sampler", object))):
                if isinstance(owner.get("generator"), torch.Generator):
                    owner["generator"].manual_seed(seed)
        return StatefulDataLoader(dataset, collate_fn=listed, **arguments)

    reference = make(1)
    expected = [batches(reference) for _ in range(4)]
    first = make(1)
    for _ in range(epoch):
        batches(first)
    iterator, done = iter(first), data.draw(st.integers(0, len(expected[epoch]) - 1))
    for _ in range(done):
        next(iterator)
    second = make(2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [batches(second) for _ in range(4 - epoch)] == [expected[epoch][done:], *expected[epoch + 1 :]]


def test_torchs_random_samplers_leave_a_small_position_whatever_the_length() -> None:
    for make in (lambda d: {"shuffle": True}, lambda d: {"sampler": SubsetRandomSampler(range(100_000))}):
        loader = StatefulDataLoader(Indices(100_000), batch_size=10, **make(None))
        next(iter(loader))
        assert sum(map(len, loader.state_dict().values())) < 9_000


# A DistributedSampler brings its own rank, replicas and seed


@pytest.mark.parametrize("by_batch", [False, True])
@given(
    n=st.integers(4, 30),
    world=st.integers(1, 4),
    size=st.integers(1, 3),
    options=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    epochs=st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_an_adopted_sampler_gives_each_rank_torchs_order(
    by_batch: bool, n: int, world: int, size: int, options: tuple[bool, bool, bool], epochs: list[int]
) -> None:
    """Case 19: ``DistributedSampler``, as it is and in a batch sampler, with ``set_epoch``."""
    shuffle, cut, drop_last = options
    for rank in range(world):
        found = []
        for kind in (DataLoader, StatefulDataLoader):
            sampler = DistributedSampler(Indices(n), world, rank, shuffle=shuffle, seed=4, drop_last=cut)
            arguments = {"sampler": sampler, "batch_size": size, "drop_last": drop_last}
            if by_batch:
                arguments = {"batch_sampler": BatchSampler(sampler, size, drop_last)}
            loader = kind(Indices(n), collate_fn=listed, **arguments)
            seen = []
            for epoch in epochs:
                sampler.set_epoch(epoch)
                seen.append(batches(loader))
            found.append((seen, len(loader)))
        assert found[1] == found[0]


class BackwardsDistributed(DistributedSampler):
    """Shares the rows out itself, in an order of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1])


@pytest.mark.parametrize("by_batch", [False, True])
def test_a_sampler_that_shares_the_rows_out_itself_is_not_shared_out_again(by_batch: bool) -> None:
    """Case 19: a subclass of ``DistributedSampler`` with an ``__iter__`` of its own."""
    for rank in range(2):
        found = []
        for kind in (DataLoader, StatefulDataLoader):
            sampler = BackwardsDistributed(Indices(12), 2, rank, shuffle=False)
            arguments: dict[str, Any] = {"sampler": sampler, "batch_size": 2}
            if by_batch:
                arguments = {"batch_sampler": BatchSampler(sampler, 2, False)}
            loader = kind(Indices(12), collate_fn=listed, **arguments)
            found.append((batches(loader), len(loader)))
        assert found[1] == found[0]


@pytest.mark.parametrize("by_batch", [False, True])
def test_an_adopted_sampler_can_be_resumed_on_another_number_of_replicas(by_batch: bool) -> None:
    """Case 21: nothing is lost and nothing comes twice, where no padding is needed."""

    def make(world: int, rank: int) -> StatefulDataLoader:
        sampler = DistributedSampler(Indices(24), world, rank, seed=4)
        if by_batch:
            return loader_over(24, batch_sampler=BatchSampler(sampler, 2, False))
        return loader_over(24, sampler=sampler, batch_size=2)

    seen: list[int] = []
    for rank in range(2):
        loader = make(2, rank)
        seen += itertools.chain(*itertools.islice(iter(loader), 3))
        state = loader.state_dict()
    for rank in range(3):
        loader = make(3, rank)
        loader.load_state_dict(state)
        seen += itertools.chain(*loader)
    assert sorted(seen) == list(range(24))


# What cannot be


def test_several_ranks_without_a_seed_may_not_draw_their_orders() -> None:
    """Case 16."""
    for arguments in ({"shuffle": True}, {"sampler": RandomSampler(range(4))}):
        with pytest.raises(ValueError, match=r"2 ranks would each draw an order of their own.*needs\s+seed="):
            loader_over(4, dp_rank=0, dp_world_size=2, **arguments)


@pytest.mark.parametrize("order", ["in sequence", "shuffled", "a list"])
def test_a_rank_without_any_data_is_refused_with_what_to_set(order: str) -> None:
    """Case 22."""
    loader_over(3, seed=1, dp_rank=2, dp_world_size=4, **GLOBAL_ORDERS[order](3))
    with pytest.raises(LaneError, match=r"Rank 3 of 4 has no data: an epoch has 3 rows.\nUse at most 3 ranks"):
        loader_over(3, seed=1, dp_rank=3, dp_world_size=4, **GLOBAL_ORDERS[order](3))


class Unsized(Sampler[int]):
    def __init__(self) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter([2, 0, 1])


def test_a_sampler_without_a_length_gives_its_order_and_the_loader_has_no_length() -> None:
    """Case 19."""
    loader = loader_over(3, sampler=Unsized(), batch_size=2)
    assert batches(loader) == [[2, 0], [1]]
    with pytest.raises(TypeError, match="len"):
        len(loader)


def test_an_order_is_described_by_its_sampler() -> None:
    def describe(sampler: Any, shuffled_by: int | None = None) -> Any:
        order = MapOrder(sampler, BatchSampler(sampler, 2, False), 2, False, Share(), shuffled_by)
        return order.describe()["sampler"]

    names = [describe(SequentialSampler(range(3))), describe(Backwards(3)), describe(RandomSampler(range(3)), 1)]
    assert names == ["SequentialSampler", "Backwards", "shuffle with a seed"]
