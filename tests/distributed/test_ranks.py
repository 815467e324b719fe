"""Ranks in this process: those whose data end at different steps, and those that a DistributedSampler brings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from tests import datasets as ds
from tests.distributed.loaders import lanes_in, make_loader, rows_of
from unbroken import StatefulDataLoader
from unbroken.errors import StateMismatch

WORLDS = [1, 2, 3, 4, 8]
EPOCHS = 2
Batches = list[list[Any]]


# Ranks whose data end at different steps: of four, after 6, 10, 13 and 8. Each ends with its own lanes.


def uneven(world: int, state: Mapping[str, str] | None = None, merged: bool = True) -> list[StatefulDataLoader]:
    """Loaders of all ranks at a position: the merged one, or what dcp.load would give to each of them."""
    loaders = [make_loader("uneven", "", rank, world) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            mine = loader.state_dict()
            loader.load_state_dict({name: leaf for name, leaf in state.items() if merged or name in mine})
    return loaders


def epoch_of(loader: StatefulDataLoader) -> int:
    return min(lane["epoch"] for lane in lanes_in(loader.state_dict()).values())


def until_the_end(loader: StatefulDataLoader) -> Iterator[list[Any]]:
    """The batches of one epoch after another, without waiting for another rank."""
    while True:
        for batch in loader:
            if epoch_of(loader) == EPOCHS:
                return
            yield rows_of(batch)


def assert_whole(*parts: Iterable[list[Any]]) -> None:
    """All parts together are both epochs."""
    wanted = Counter(row for batch in until_the_end(uneven(1)[0]) for row in batch)
    assert Counter(row for part in parts for batch in part for row in batch) == wanted


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_that_have_begun_their_next_epoch_lose_and_repeat_nothing(world: int, merged: bool) -> None:
    """Case 21: saved by four ranks after any number of steps, the same on each."""
    for steps in range(13):
        before: Batches = []
        state: dict[str, str] = {}
        for loader in uneven(4):
            before += itertools.islice(until_the_end(loader), steps)
            state |= loader.state_dict()
        after = [batch for loader in uneven(world, state, merged) for batch in until_the_end(loader)]
        assert_whole(before, after)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_that_wait_for_each_other_between_epochs_are_not_at_different_steps(world: int, merged: bool) -> None:
    """Case 21: each rank went through the whole of its epoch 0, then two steps of epoch 1."""
    before: Batches = []
    state: dict[str, str] = {}
    for loader in uneven(4):
        before += [rows_of(batch) for batch in loader]
        before += [rows_of(batch) for batch in itertools.islice(loader, 2)]
        state |= loader.state_dict()
    after = [batch for loader in uneven(world, state, merged) for batch in until_the_end(loader)]
    assert_whole(before, after)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_that_end_their_epoch_together_go_on_in_the_next(world: int, merged: bool) -> None:
    """Case 21: all leave epoch 0 in the step that one of them has no batch for, and take two steps of epoch 1."""
    loaders = uneven(4)
    for step in itertools.zip_longest(*loaders):
        if any(batch is None for batch in step):
            break
    before: Batches = []
    state: dict[str, str] = {}
    for loader in loaders:
        before += [rows_of(batch) for batch in itertools.islice(loader, 2)]
        state |= loader.state_dict()
    assert {lane["epoch"] for lane in lanes_in(state).values()} == {1}
    after = [batch for loader in uneven(world, state, merged) for batch in until_the_end(loader)]
    once = Counter(row for batch in uneven(1)[0] for row in rows_of(batch))
    assert Counter(row for batch in (*before, *after) for row in batch) == once


@pytest.mark.parametrize("worlds", [(2, 1), (2, 4), (1, 2), (2, 2)])
def test_ranks_that_stood_still_may_be_saved_again_on_other_ranks(worlds: tuple[int, int]) -> None:
    """Cases 3 and 21: saved after 8 steps, when one of four ranks stood still since its 6; loaded, and saved again."""
    before: Batches = []
    between: Batches = []
    state: dict[str, str] = {}
    again: dict[str, str] = {}
    for loader in uneven(4):
        before += [rows_of(batch) for batch in itertools.islice(loader, 8)]
        state |= loader.state_dict()
    for loader in uneven(worlds[0], state):
        between += [rows_of(batch) for batch in itertools.islice(loader, 1)]
        again |= loader.state_dict()
    after = [batch for loader in uneven(worlds[1], again) for batch in until_the_end(loader)]
    assert_whole(before, between, after)


# A sampler that knows its rank


def adopted(world: int, state: Mapping[str, str] | None = None, drop_last: bool = False) -> list[StatefulDataLoader]:
    """Loaders of all ranks over 50 rows, which no number of ranks here divides but 1 and 2."""
    dataset = ds.Numbers(50)
    samplers = [DistributedSampler(dataset, world, rank, seed=5, drop_last=drop_last) for rank in range(world)]
    loaders = [StatefulDataLoader(dataset, batch_size=4, sampler=sampler) for sampler in samplers]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def batches_of(loaders: list[StatefulDataLoader], steps: int | None = None) -> tuple[list[Batches], dict[str, str]]:
    """The next batches of each rank, and the merged position after them."""
    batches, merged = [], {}
    for loader in loaders:
        batches.append([rows_of(batch) for batch in itertools.islice(loader, steps)])
        merged |= loader.state_dict()
    return batches, merged


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_adopted_sampler_is_exact_on_the_same_ranks(drop_last: bool) -> None:
    """Cases 19 and 21: on four, padded or cut."""
    ref, _ = batches_of(adopted(4, drop_last=drop_last))
    first, state = batches_of(adopted(4, drop_last=drop_last), 2)
    rest, _ = batches_of(adopted(4, state, drop_last))
    assert [one + other for one, other in zip(first, rest, strict=True)] == ref


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_an_adopted_sampler_is_elastic_on_other_ranks(world: int) -> None:
    """Cases 19 and 21: no row is lost, and none repeated but those that the sampler pads its epoch with."""
    first, state = batches_of(adopted(4), 2)
    rest, _ = batches_of(adopted(world, state))
    counts = Counter(row for batches in (*first, *rest) for batch in batches for row in batch)
    assert set(counts) == set(range(50))
    assert sum(counts.values()) == 50 + -50 % world
    assert max(counts.values()) <= 2


@pytest.mark.parametrize("others", [{"seed": 6}, {"seed": 5, "shuffle": False}])
def test_an_adopted_sampler_of_another_order_is_refused(others: dict[str, Any]) -> None:
    """Case 26: the rows that were delivered are not the first of that order."""
    _, state = batches_of(adopted(1), 2)
    dataset = ds.Numbers(50)
    loader = StatefulDataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, 1, 0, **others))
    before = loader.state_dict()
    with pytest.raises(StateMismatch, match="order-changing"):
        loader.load_state_dict(state)
    assert loader.state_dict() == before
