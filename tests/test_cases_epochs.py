"""Cases 12 to 15: where one epoch ends and the next begins."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from tests import datasets as ds
from tests import strategies as draws
from unbroken import StatefulDataLoader
from unbroken.errors import UnbrokenError
from unbroken.testing import Point, assert_resumes_exactly

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

AT_AN_END = [
    Point(0, 5),  # the last batch, inside the loop
    Point(1, -1),  # after StopIteration
    Point(1, 0),  # after the iter() that follows
    [Point(0, 5), Point(0, 5), Point(1, -1), Point(1, 0), Point(1, 5), Point(2, -1)],
    [Point(1, 2), Point(2, 2)],
    Point(2, 5),
]


@pytest.mark.parametrize("kind", ["well-behaved", "late", "stays at the end", "own iterator", "state on both"])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_after_the_last_batch_comes_the_whole_next_epoch(kind: str, workers: dict[str, Any]) -> None:
    """Case 12: iterable; inside the loop and after it, and epochs after a resumed one too."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(draws.EXACT[kind](10), batch_size=2, lanes=1 if not workers else 2, **workers)

    points = [[p] if isinstance(p, Point) else p for p in AT_AN_END]
    if workers:  # two lanes of five rows: six batches
        points = [[Point(p.epoch, 6 if p.step == 5 else p.step) for p in chain] for chain in points]
    assert_resumes_exactly(make_loader, restore_points=points)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_after_the_last_batch_comes_the_whole_next_epoch_in_its_order(
    workers: dict[str, Any], seed: int | None, shuffle: bool
) -> None:
    """Case 12: map-style."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.Numbers(10), batch_size=2, shuffle=shuffle, seed=seed, **workers)

    assert_resumes_exactly(make_loader, restore_points=AT_AN_END)


def test_a_shuffled_epoch_is_followed_by_another_order() -> None:
    """Case 12."""
    loader = StatefulDataLoader(ds.Numbers(50), batch_size=50, shuffle=True, seed=1)
    first, second = (next(iter(loader)).tolist() for _ in range(2))
    assert first != second and sorted(first) == sorted(second) == list(range(50))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("dataset", [ds.EpochCounting, ds.StateOnBoth])
def test_what_a_dataset_counts_is_carried_into_the_next_epoch(dataset: Any, workers: dict[str, Any]) -> None:
    """Case 12: an order that depends on the dataset's own epoch moves on, in every topology."""
    loader = StatefulDataLoader(dataset(12), batch_size=6, lanes=2, seed=1, **workers)
    epochs = [[row for batch in loader for row in batch.tolist()] for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_stays_at_its_end_starts_over(num_workers: int) -> None:
    """Case 12: never an epoch without a batch."""
    loader = StatefulDataLoader(ds.StaysAtEnd(10), batch_size=2, num_workers=num_workers, persistent_workers=False)
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first == second and first


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("kind", ["well-behaved", "late", "own iterator", "without state", "state on both", "numbers"])
def test_an_epoch_that_was_left_early_is_followed_by_the_next(kind: str, workers: dict[str, Any]) -> None:
    """Case 12: a loop with ``break`` in it, as many write it; saved in the epoch after, also by a resumed run."""

    def make_loader() -> StatefulDataLoader:
        dataset = ds.Numbers(20) if kind == "numbers" else draws.EXACT[kind](20)
        order = {"shuffle": True} if kind == "numbers" else {"lanes": 2}
        return StatefulDataLoader(dataset, batch_size=2, seed=1, **order, **workers)

    def take(loader: StatefulDataLoader, most: int) -> list[Any]:
        return [batch.tolist() for _, batch in zip(range(most), loader, strict=False)]

    loader = make_loader()
    reference = [take(loader, most) for most in (3, 99, 99)]
    loader.close()
    assert [len(epoch) for epoch in reference] == [3, 10, 10]

    stopped = make_loader()
    take(stopped, 3)
    assert take(stopped, 4) == reference[1][:4]
    state = json.loads(json.dumps(stopped.state_dict()))
    stopped.close()
    resumed = make_loader()
    resumed.load_state_dict(state)
    assert [take(resumed, 99), take(resumed, 99)] == [reference[1][4:], reference[2]]
    resumed.close()


# Case 13


@pytest.mark.parametrize("num_workers", [0, 2])
def test_forgetting_set_epoch_after_a_load_changes_nothing(num_workers: int) -> None:
    """Case 13: a sampler's epoch is in the position."""

    def make() -> tuple[StatefulDataLoader, DistributedSampler[Any]]:
        dataset = ds.Numbers(23)
        sampler = DistributedSampler(dataset, num_replicas=2, rank=1, seed=4)
        return StatefulDataLoader(dataset, batch_size=2, sampler=sampler, num_workers=num_workers), sampler

    def epoch_of(made: tuple[StatefulDataLoader, DistributedSampler[Any]], epoch: int) -> list[Any]:
        made[1].set_epoch(epoch)
        return [batch.tolist() for batch in made[0]]

    reference = make()
    expected = [epoch_of(reference, epoch) for epoch in range(4)]

    stopped = make()
    epoch_of(stopped, 0)
    stopped[1].set_epoch(1)
    iterator = iter(stopped[0])
    before = [next(iterator).tolist() for _ in range(2)]
    state = json.loads(json.dumps(stopped[0].state_dict()))
    stopped[0].close()

    resumed = make()
    resumed[0].load_state_dict(state)
    assert before + [batch.tolist() for batch in resumed[0]] == expected[1]
    assert epoch_of(resumed, 2) == expected[2]

    remembered = make()
    remembered[0].load_state_dict(state)
    assert before + epoch_of(remembered, 1) == expected[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_with_an_epoch_that_is_set_gets_it_back(num_workers: int) -> None:
    """Case 13: the dataset's."""

    def make() -> tuple[StatefulDataLoader, ds.EpochSet]:
        dataset = ds.EpochSet(12)
        return StatefulDataLoader(dataset, batch_size=2, num_workers=num_workers), dataset

    loader, dataset = make()
    dataset.set_epoch(5)
    reference = [batch.tolist() for batch in loader]
    assert min(row for batch in reference for row in batch) == 5000

    loader, dataset = make()
    dataset.set_epoch(5)
    iterator = iter(loader)
    before = [next(iterator).tolist() for _ in range(2)]
    state = loader.state_dict()
    loader.close()

    loader, dataset = make()
    loader.load_state_dict(state)
    assert before + [batch.tolist() for batch in loader] == reference


def test_another_epoch_set_in_the_middle_of_one_is_an_error() -> None:
    """Case 13: neither the order that was asked for nor the one that was begun can be right."""
    dataset = ds.Numbers(20)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0, seed=4)
    loader = StatefulDataLoader(dataset, batch_size=2, sampler=sampler)
    sampler.set_epoch(1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.close()

    sampler = DistributedSampler(dataset, num_replicas=2, rank=0, seed=4)
    loader = StatefulDataLoader(dataset, batch_size=2, sampler=sampler)
    loader.load_state_dict(state)
    sampler.set_epoch(7)
    with pytest.raises((UnbrokenError, RuntimeError, ValueError), match=r"(?s)epoch.*(1.*7|7.*1)"):
        next(iter(loader))


# Case 14


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_loops_is_exact_in_every_loop(num_workers: int) -> None:
    """Case 14: ten rows a lane, saved in loops 0, 1 and 2."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.Looping(20), batch_size=3, lanes=2, num_workers=num_workers)

    chains = [[2], [6], [7], [9], [13], [15], [2, 7, 14]]
    assert_resumes_exactly(make_loader, restore_points=chains, stop_after=20)


# Case 15


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [1, 7, 8, 9])
def test_len_is_what_arrives(n: int, drop_last: bool, num_workers: int) -> None:
    """Case 15: map-style; with ``drop_last`` less than one batch is dropped."""
    loader = StatefulDataLoader(ds.Numbers(n), batch_size=4, drop_last=drop_last, num_workers=num_workers)
    rows = [batch.tolist() for batch in loader]
    assert len(loader) == len(rows)
    assert n - sum(map(len, rows)) < (4 if drop_last else 1)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_len_is_what_arrives_on_each_rank(drop_last: bool, world: int) -> None:
    """Case 15: at most one batch a rank is dropped."""
    rows = []
    for rank in range(world):
        loader = StatefulDataLoader(
            ds.Numbers(31), batch_size=4, drop_last=drop_last, dp_rank=rank, dp_world_size=world
        )
        batches = [batch.tolist() for batch in loader]
        assert len(loader) == len(batches)
        rows += [row for batch in batches for row in batch]
    assert len(rows) == len(set(rows))
    assert 31 - len(rows) <= (3 * world if drop_last else 0)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_len_of_an_iterable_dataset_is_what_arrives_where_it_deals_evenly(num_workers: int) -> None:
    """Case 15: torch believes the dataset's length."""
    loader = StatefulDataLoader(ds.WithLength(16), batch_size=4, num_workers=num_workers)
    assert len(loader) == len(list(loader)) == 4
    with pytest.raises(TypeError):
        len(StatefulDataLoader(ds.WellBehaved(16), batch_size=4))


def test_len_is_that_of_the_epoch_also_after_a_load() -> None:
    """Case 15: what is left of the first epoch does not change it."""
    loader = StatefulDataLoader(ds.Numbers(10), batch_size=3)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader = StatefulDataLoader(ds.Numbers(10), batch_size=3)
    loader.load_state_dict(state)
    assert len(loader) == 4
    assert [len(list(loader)), len(list(loader))] == [3, 4]
