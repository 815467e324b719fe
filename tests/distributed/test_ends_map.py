"""Finite map-style data on several ranks. All know the whole order, so none has to ask another: there is no vote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from tests import datasets as ds
from tests.distributed.peers import alone, merged
from unbroken import StatefulDataLoader
from unbroken.errors import LaneError
from unbroken.seeding import Permutation, key

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

Arguments = dict[str, Any]
ORDERS: dict[str, Callable[[int, int, bool], Arguments]] = {
    "sequential": lambda n, size, drop: {"batch_size": size, "drop_last": drop},
    "shuffled": lambda n, size, drop: {"batch_size": size, "drop_last": drop, "shuffle": True},
    "sampler": lambda n, size, drop: {"batch_size": size, "drop_last": drop, "sampler": ds.SamplerWithState(n)},
    "batch sampler": lambda n, size, drop: {"batch_sampler": BatchSampler(SequentialSampler(range(n)), size, drop)},
    "own batches": lambda n, size, drop: {"batch_sampler": ds.BatchesWithState(n)},
}
NAMES = st.sampled_from(sorted(ORDERS))


def ranks_of(
    name: str, n: int, size: int, world: int, drop_last: bool = False, state: Any = None, **others: Any
) -> list[StatefulDataLoader]:
    """The loaders of all ranks; their group fails where it is asked for a vote."""
    loaders = [
        StatefulDataLoader(
            ds.Numbers(n), **({"seed": 3, "group": alone(rank, world)} | ORDERS[name](n, size, drop_last) | others)
        )
        for rank in range(world)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
    return loaders


def steps_of(loaders: list[StatefulDataLoader], number: int | None = None) -> list[list[list[int]]]:
    """The rows of each rank for the steps of a pass; all ranks have to end it together."""
    iterators, steps = [iter(loader) for loader in loaders], []
    while number is None or len(steps) < number:
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            assert batches == [None] * len(loaders)
            break
        steps.append([batch.tolist() for batch in batches])
    return steps


def state_of(loaders: list[StatefulDataLoader]) -> dict[str, str]:
    """The position, which is the same on every rank."""
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return merged(states)


@given(
    name=NAMES,
    n=st.integers(5, 60),
    size=st.integers(1, 4),
    world=st.integers(1, 4),
    drop_last=st.booleans(),
    at_end=st.sampled_from(["stop", "pad"]),
)
def test_all_ranks_take_as_many_steps_as_their_loaders_say(
    name: str, n: int, size: int, world: int, drop_last: bool, at_end: str
) -> None:
    """Case 15: every row once, but what some rank has no step for."""
    try:
        loaders = ranks_of(name, n, size, world, drop_last, at_end=at_end)
    except LaneError:
        assert at_end == "stop"
        return
    for _ in range(2):
        steps = steps_of(loaders)
        assert {len(loader) for loader in loaders} == {len(steps)}
        rows = [row for step in steps for batch in step for row in batch]
        assert len(rows) == len(set(rows))
        if at_end == "stop":
            assert all(all(step) for step in steps)
        else:
            assert all(any(step) for step in steps)
            assert drop_last or len(rows) == n
        state_of(loaders)


@given(
    name=NAMES,
    n=st.integers(12, 50),
    size=st.integers(1, 3),
    worlds=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    steps=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    at_end=st.sampled_from(["stop", "pad"]),
)
def test_what_is_left_is_delivered_on_other_ranks(
    name: str, n: int, size: int, worlds: list[int], steps: list[int], at_end: str
) -> None:
    """Case 21: nothing lost or repeated; at the end one rank alone has a step for whatever is left."""
    rows: list[int] = []
    state = None
    for world, number in zip(worlds, steps, strict=False):
        loaders = ranks_of(name, n, size, world, state=state, at_end=at_end)
        if len(rows) < n and number:
            found = steps_of(loaders, number)
            if json.loads(loaders[0].state_dict()["place"])["epoch"]:
                return  # no step could be filled, and the next epoch has begun
            rows += [row for step in found for batch in step for row in batch]
        state = state_of(loaders)
    if len(rows) < n:
        rows += [row for step in steps_of(ranks_of(name, n, size, 1, state=state)) for row in step[0]]
    assert sorted(rows) == list(range(n))


def test_a_position_at_the_end_goes_on_elsewhere_and_begins_the_next_epoch_here() -> None:
    """Case 12: of 29 rows four ranks of 3 take 24, and have no step for the last."""
    loaders = ranks_of("sequential", 29, 3, 4)
    assert [len(batch) for step in steps_of(loaders) for batch in step] == [3] * 8 + [2, 1, 1, 1]
    loaders = ranks_of("sequential", 26, 3, 4)
    assert len(steps_of(loaders)) == 2
    state = state_of(loaders)
    here, there = ranks_of("sequential", 26, 3, 4, state=state), ranks_of("sequential", 26, 1, 2, state=state)
    assert steps_of(here) == steps_of(loaders)
    assert steps_of(there) == [[[24], [25]]]
    assert steps_of(there, 2) == [[[0], [1]], [[2], [3]]]


class Rotating(ds.SamplerWithState):
    """Begins one row later in each epoch, which it counts at its end."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        while self.done < self.n:
            self.done += 1
            yield (self.done - 1 + self.epoch) % self.n
        self.done, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.epoch = state["done"], state["epoch"]


@pytest.mark.parametrize("at_end", ["stop", "pad"])
def test_a_sampler_with_a_state_of_its_own_goes_on_over_ends(at_end: str) -> None:
    """Case 19: what it had come to is carried on, whether the run went on or was saved at the end."""

    def ranks(state: Any = None) -> list[StatefulDataLoader]:
        return [rank_of(rank, state) for rank in range(4)]

    def rank_of(rank: int, state: Any) -> StatefulDataLoader:
        loader = StatefulDataLoader(
            ds.Numbers(26), batch_size=2, sampler=Rotating(26), seed=3, group=alone(rank, 4), at_end=at_end
        )
        if state is not None:
            loader.load_state_dict(state)
        return loader

    live = ranks()
    reference = [steps_of(live) for _ in range(3)]
    assert [epoch[0] for epoch in reference] == [
        [[first, first + 4], [first + 1, first + 5], [first + 2, first + 6], [first + 3, first + 7]]
        for first in range(3)
    ]
    loaders = ranks()
    for epoch in range(3):
        assert steps_of(loaders) == reference[epoch]
        loaders = ranks(state_of(loaders))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_rank_that_ran_out_has_batches_of_the_shape_of_the_others(num_workers: int) -> None:
    """It reads a row of another rank for that, of which nothing is delivered."""

    class Rows(ds.Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"x": torch.full((3,), index), "name": str(index)}

    loaders = [
        StatefulDataLoader(Rows(9), batch_size=2, seed=3, group=alone(rank, 4), at_end="pad", num_workers=num_workers)
        for rank in range(4)
    ]
    last = [list(loader)[-1] for loader in loaders]
    assert [batch["name"] for batch in last] == [["8"], [], [], []]
    assert [(batch["x"].dtype, tuple(batch["x"].shape)) for batch in last] == [
        (torch.int64, (rows, 3)) for rows in (1, 0, 0, 0)
    ]


def test_a_rank_without_any_row_pads_and_is_refused_where_ranks_stop() -> None:
    """Case 23."""
    assert steps_of(ranks_of("sequential", 2, 1, 3, at_end="pad")) == [[[0], [1], []]]
    with pytest.raises(LaneError, match="Rank 2 of 3 has no data: an epoch has 2 rows"):
        ranks_of("sequential", 2, 1, 3)


def test_what_is_left_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unbroken.options._said", set())
    loaders = ranks_of("sequential", 26, 3, 4)
    for _ in range(3):
        steps_of(loaders)
    (told,) = [text for text in caplog.messages if "at_end" in text]
    assert "of 26 rows they are the last 2" in told


# Without an end


def endless(n: int, shuffled: bool) -> Any:
    epoch = 0
    while True:
        yield from Permutation(n, key(3, "shuffle", epoch)).block(0, n).tolist() if shuffled else range(n)
        epoch += 1


@given(
    n=st.integers(4, 40),
    shuffled=st.booleans(),
    stretches=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(0, 9)), min_size=1, max_size=4),
)
def test_epochs_that_repeat_are_one_order_for_any_number_of_ranks(
    n: int, shuffled: bool, stretches: list[tuple[int, int]]
) -> None:
    """Cases 14 and 21: each step holds the next 12 rows, over the border of epochs too."""
    order, state = endless(n, shuffled), None
    for world, number in stretches:
        loaders = ranks_of(
            "shuffled" if shuffled else "sequential", n, 12 // world, world, state=state, at_end="repeat"
        )
        for step in steps_of(loaders, number):
            assert sorted(row for batch in step for row in batch) == sorted(next(order) for _ in range(12))
            assert {len(batch) for batch in step} == {12 // world}
        state = state_of(loaders)


@given(n=st.integers(3, 20), world=st.sampled_from([1, 2, 3]), number=st.integers(1, 9))
def test_random_numbers_of_a_sample_are_those_of_its_place_over_the_border_too(n: int, world: int, number: int) -> None:
    """Case 17: with ``seed_by="sample"`` they depend on neither ranks nor batches."""

    class Noise(ds.Numbers):
        def __getitem__(self, index: int) -> tuple[int, float]:
            return index, float(np.random.random())

    def drawn(world: int, size: int, steps: int) -> list[tuple[int, float]]:
        loaders = [
            StatefulDataLoader(
                Noise(n), batch_size=size, seed=3, seed_by="sample", at_end="repeat", dp_rank=rank, dp_world_size=world
            )
            for rank in range(world)
        ]
        iterators = [iter(loader) for loader in loaders]
        batches = [next(iterator) for _ in range(steps) for iterator in iterators]
        return sorted((int(row), float(noise)) for batch in batches for row, noise in zip(*batch, strict=True))

    assert drawn(world, 6 // world, number) == drawn(1, 1, 6 * number)


@pytest.mark.parametrize("kind", ["plain", "random sampler"])
def test_without_a_seed_or_ranks_epochs_repeat_too(kind: str) -> None:
    sampler = {"sampler": RandomSampler(range(5))} if kind == "random sampler" else {"shuffle": True}
    loader = StatefulDataLoader(ds.Numbers(5), batch_size=2, at_end="repeat", **sampler)
    iterator = iter(loader)
    rows = [row for _ in range(3) for row in next(iterator).tolist()]
    state = loader.state_dict()
    rows += [row for _ in range(7) for row in next(iterator).tolist()]
    for epoch in range(4):
        assert sorted(rows[5 * epoch : 5 * epoch + 5]) == list(range(5))
    other = StatefulDataLoader(ds.Numbers(5), batch_size=2, at_end="repeat", **sampler)
    other.load_state_dict(state)
    again = iter(other)
    assert [row for _ in range(7) for row in next(again).tolist()] == rows[6:]


def test_a_new_pass_over_epochs_that_repeat_goes_on() -> None:
    loader = StatefulDataLoader(ds.Numbers(5), batch_size=2, at_end="repeat")
    found = []
    for _ in range(3):
        for batch in loader:
            found += batch.tolist()
            if len(found) % 4 == 0:
                break
    assert found == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert len(loader) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        {"sampler": ds.SamplerWithState(8)},
        {"batch_sampler": BatchSampler(SequentialSampler(range(8)), 2, False), "batch_size": 1},
        {"shuffle": True, "generator": torch.Generator()},
    ],
    ids=["sampler", "batch sampler", "generator"],
)
def test_an_order_that_follows_from_the_last_one_cannot_repeat(arguments: Arguments) -> None:
    with pytest.raises(ValueError, match=r'at_end="repeat" needs an order(?s:.*)at_end="stop" or "pad"'):
        StatefulDataLoader(ds.Numbers(8), at_end="repeat", **arguments)
