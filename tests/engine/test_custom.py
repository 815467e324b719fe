"""A sampler of the user's, run through the same cursor as a dataset."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.engine.cursor import Rules
from unbroken.engine.custom import SamplerTurns
from unbroken.errors import InexactDataset
from unbroken.position import MapPosition
from unbroken.seeding import read_globals, write_globals


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    before = read_globals()
    yield
    write_globals(before)


def numbers() -> dict[str, int]:
    """What tells the states of the global generators from others."""
    torch_state, random_state, numpy_state = read_globals()
    return {
        "torch": hash(torch_state.numpy().tobytes()),
        "random": hash(random_state),
        "numpy": hash((numpy_state[1].tobytes(), *numpy_state[2:])),
    }


class Drawn(Sampler[int]):
    """An order drawn from a global generator when it is opened."""

    def __init__(self, n: int, source: str = "torch") -> None:
        self.n, self.source = n, source

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(ds.DRAWS[self.source](self.n))


class DrawnOnTheWay(Drawn):
    """Every index is drawn when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            yield ds.DRAWS[self.source](100)[0]


def turns_of(sampler: Any, position: MapPosition | None = None, *, seeded: bool = False, **rules: Any) -> SamplerTurns:
    return SamplerTurns(sampler, position or MapPosition(), Rules(**{"run": 3, "word": "sampler", **rules}), seeded)


def indices(turns: SamplerTurns, size: int = 2) -> list[int]:
    found: list[int] = []
    while not (made := turns.make(size)).ended:
        found += made.samples
    return found


def loader_over(sampler: Any, kind: Any = StatefulDataLoader, **arguments: Any) -> Any:
    return kind(ds.Numbers(100), batch_size=2, sampler=sampler, **arguments)


def batches(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def test_a_sampler_gives_its_indices_in_its_order() -> None:
    assert indices(turns_of(range(7)), 3) == list(range(7))


@pytest.mark.parametrize("source", ds.DRAWS)
def test_without_a_seed_an_order_drawn_at_the_opening_is_torchs(source: str) -> None:
    """Case 19: the first epoch has the order, and leaves the generators, that torch has."""
    found = []
    for kind in (DataLoader, StatefulDataLoader):
        torch.manual_seed(4)
        np.random.seed(4)
        random.seed(4)
        found.append((batches(loader_over(Drawn(9, source), kind)), numbers()))
    assert found[1] == found[0]


@pytest.mark.parametrize("seed_by", ["batch", "sample"])
@pytest.mark.parametrize("sampler", [[5, 3, 1, 2, 0], Drawn(5), ds.SamplerWithState(5)], ids=["list", "drawn", "state"])
def test_the_global_generators_are_left_as_torch_leaves_them(sampler: Any, seed_by: str) -> None:
    """Case 18: what is seeded for the indices is put back."""
    found = []
    for kind, arguments in ((DataLoader, {}), (StatefulDataLoader, {"seed_by": seed_by})):
        torch.manual_seed(4)
        np.random.seed(4)
        random.seed(4)
        batches(loader_over(sampler, kind, **arguments))
        found.append(numbers())
    assert found[1] == found[0]


@pytest.mark.parametrize("source", ds.DRAWS)
@pytest.mark.parametrize("kind", [Drawn, DrawnOnTheWay])
def test_with_a_seed_nothing_is_drawn_from_the_global_generators(kind: Any, source: str) -> None:
    """Case 18: and the order is a function of seed and epoch."""
    before = numbers()
    loaders = [loader_over(kind(9, source), seed=seed) for seed in (1, 1, 2)]
    orders = [[batches(loader) for _ in range(2)] for loader in loaders]
    assert numbers() == before
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0][0] != orders[0][1]


@pytest.mark.parametrize("source", ds.DRAWS)
@pytest.mark.parametrize("kind", [Drawn, DrawnOnTheWay])
@pytest.mark.parametrize("seed", [None, 5])
def test_the_rest_of_a_drawn_order_comes_in_another_process(kind: Any, source: str, seed: int | None) -> None:
    """Cases 16 and 19: whose generators stand elsewhere."""
    reference = loader_over(kind(9, source), seed=seed)
    torch.manual_seed(4)
    np.random.seed(4)
    random.seed(4)
    expected = [batches(reference) for _ in range(3)]
    for epoch, done in ((0, 0), (0, 2), (0, 4), (1, 1), (2, 3)):
        torch.manual_seed(4)
        np.random.seed(4)
        random.seed(4)
        first = loader_over(kind(9, source), seed=seed)
        for _ in range(epoch):
            batches(first)
        iterator = iter(first)
        for _ in range(done):
            next(iterator)
        second = loader_over(kind(9, source), seed=seed)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        torch.manual_seed(5)
        before = numbers()
        assert [batches(second) for _ in range(3 - epoch)] == [expected[epoch][done:], *expected[epoch + 1 :]]
        assert numbers() == before  # after a load nothing is drawn


def test_generator_states_are_kept_only_where_the_sampler_drew_from_them() -> None:
    for sampler, kept in ((ds.SamplerWithState(6), False), (Drawn(6), True)):
        position = MapPosition()
        turns_of(sampler, position).make(2)
        assert (position.sampler is not None) == kept


def test_a_sampler_with_a_state_is_not_made_again_from_the_start() -> None:
    asked: list[int] = []

    class Noted(ds.SamplerWithState):
        def __iter__(self) -> Iterator[int]:
            for index in super().__iter__():
                asked.append(index)
                yield index

    loader = loader_over(Noted(60), snapshot_every_n_steps=1)
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    other = loader_over(Noted(60), snapshot_every_n_steps=1)
    other.load_state_dict(loader.state_dict())
    asked.clear()
    assert next(iter(other)).tolist() == [19, 18]
    assert len(asked) < 20


def test_a_sampler_that_is_another_every_time_is_refused() -> None:
    """Case 19."""
    loader = loader_over(ds.UnseededSampler(40))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    other = loader_over(ds.UnseededSampler(40))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(InexactDataset, match="UnseededSampler did not make again"):
        next(iter(other))


def test_errors_of_a_sampler_are_raised_as_they_are() -> None:
    class Broken(Drawn):
        def __iter__(self) -> Iterator[int]:
            yield from (0, 1)
            raise KeyError("index 2")

    loader = loader_over(Broken(3))
    got = []
    with pytest.raises(KeyError, match="index 2"):
        for batch in loader:
            got.append(batch.tolist())
    assert got in ([[0, 1]], [])  # torch asks for it ahead of time, with workers
