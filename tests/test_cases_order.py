"""Cases 16 to 19: the order of samples and the random numbers in them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from tests import datasets as ds
from tests import strategies as draws
from unbroken import StatefulDataLoader
from unbroken.errors import InexactDataset, UnbrokenError
from unbroken.testing import Point, assert_resumes_exactly

ROOT = Path(__file__).parent.parent


# Case 16

ORDERS: dict[str, Any] = {
    "seed": lambda: {"seed": 7},
    "generator": lambda: {"generator": draws.drawn_generator()},
    "neither": dict,
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_a_shuffled_epoch_goes_on_under_another_global_seed(order: str, num_workers: int) -> None:
    """Case 16: the rest of this epoch and the next ones; every resume finds the global generators seeded otherwise."""

    def make_loader() -> StatefulDataLoader:
        dataset = ds.Numbers(17)
        return StatefulDataLoader(dataset, batch_size=3, shuffle=True, num_workers=num_workers, **ORDERS[order]())

    points = [Point(0, -1), Point(0, 0), Point(0, 2), Point(1, -1), Point(1, 0), Point(1, 4)]
    assert_resumes_exactly(make_loader, restore_points=[*points, [Point(0, 1), Point(1, 1)]], epochs=2)


SCRIPT = """
import json, sys, torch
from unbroken import StatefulDataLoader

order, seed, k, state = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.manual_seed(seed)
generator = torch.Generator().manual_seed(seed) if order == "generator" else None
loader = StatefulDataLoader(range(17), batch_size=3, shuffle=True, generator=generator)
if state:
    loader.load_state_dict(json.loads(state))
batches = []
for epoch in range(3):
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == k:
            print(json.dumps([batches, loader.state_dict()]))
            sys.exit()
print(json.dumps([batches, loader.state_dict()]))
"""


@pytest.mark.parametrize("order", ["generator", "neither"])
def test_another_process_with_another_seed_goes_on(order: str) -> None:
    """Case 16: in processes of their own."""

    def run(seed: int, k: int, state: dict[str, str] | None) -> Any:
        arguments = [order, str(seed), str(k), json.dumps(state) if state else ""]
        command = [sys.executable, "-c", SCRIPT, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    reference, _ = run(1, 0, None)
    before, state = run(1, 8, None)
    after, _ = run(2, 0, state)
    assert before == reference[:8]
    assert after[: len(reference) - 8] == reference[8:]


@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_a_seed_the_first_epoch_has_torchs_order(num_workers: int, generator: bool) -> None:
    """Case 16: for the same global seed, or the same generator."""

    def order(loader_class: type[Any]) -> list[Any]:
        torch.manual_seed(11)
        arguments = {"generator": torch.Generator().manual_seed(5)} if generator else {}
        loader = loader_class(ds.Numbers(20), batch_size=3, shuffle=True, num_workers=num_workers, **arguments)
        return [batch.tolist() for batch in loader]

    assert order(StatefulDataLoader) == order(DataLoader)


@pytest.mark.parametrize("sampler", draws.SAMPLERS)
def test_every_sampler_has_torchs_order_in_the_first_epoch(sampler: str) -> None:
    """Case 16: without a seed, whatever the sampler is."""

    def order(loader_class: type[Any]) -> list[Any]:
        torch.manual_seed(11)
        dataset = ds.Numbers(20)
        return [batch.tolist() for batch in loader_class(dataset, **draws.SAMPLERS[sampler](dataset, 3))]

    assert order(StatefulDataLoader) == order(DataLoader)


def test_several_ranks_in_a_random_order_need_a_seed() -> None:
    """Case 16: without one each rank would draw an order of its own."""
    with pytest.raises((UnbrokenError, ValueError), match="seed"):
        loader = StatefulDataLoader(ds.Numbers(20), batch_size=2, shuffle=True, dp_rank=0, dp_world_size=2)
        next(iter(loader))


def test_a_permutation_of_any_length_needs_no_list() -> None:
    """Case 16: 10^12 rows."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.Numbers(10**12), batch_size=3, shuffle=True, seed=2)

    assert_resumes_exactly(make_loader, stop_after=6)
    assert max(next(iter(make_loader())).tolist()) > 10**9


# Case 17


@pytest.mark.parametrize("source", ds.DRAWS)
@pytest.mark.parametrize("dataset", [ds.Augmented, ds.FetchedTogether, ds.RandomContent])
def test_augmentation_has_the_same_numbers_on_any_number_of_workers(dataset: Any, source: str) -> None:
    """Case 17: drawn from torch, numpy and random in the dataset."""

    def make_loader(num_workers: int) -> StatefulDataLoader:
        lanes = {"lanes": 2} if dataset is ds.RandomContent else {}
        return StatefulDataLoader(dataset(18, source=source), batch_size=3, num_workers=num_workers, **lanes)

    topologies = [{"num_workers": n} for n in (0, 2, 1)]
    assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[[2, 4], [Point(0, 5), Point(1, 1)]])


@pytest.mark.parametrize("seed_by", ["batch", "sample"])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (ds.Augmented, {"batch_size": 3}),
        (ds.Augmented, {"batch_size": 3, "shuffle": True}),
        (ds.Augmented, {"batch_sampler": ds.BatchesWithState(12)}),
        (ds.Augmented, {"batch_sampler": BatchSampler(range(12), 5, False)}),
        (ds.RandomContent, {"batch_size": 3}),
        (ds.RandomContent, {"batch_size": 3, "lanes": 3}),
    ],
)
def test_no_two_samples_have_the_same_noise(
    dataset: Any, arguments: dict[str, Any], seed: int | None, seed_by: str
) -> None:
    """Case 17: over two epochs, in the first batch after the opening and in later ones."""
    loader = StatefulDataLoader(dataset(12, source="random"), seed=seed, seed_by=seed_by, **arguments)
    noise = [round(x % 1, 9) for _ in range(2) for batch in loader for x in batch.tolist()]
    assert len(set(noise)) == len(noise) == 24


def test_seeded_by_sample_the_numbers_do_not_depend_on_the_batch_size_or_ranks() -> None:
    """Case 17: ``seed_by="sample"``."""

    def rows(**arguments: Any) -> list[float]:
        loader = StatefulDataLoader(ds.Augmented(24), seed=3, seed_by="sample", **arguments)
        return [x for batch in loader for x in batch.tolist()]

    alone = rows(batch_size=4)
    assert rows(batch_size=6) == alone
    ranks = [rows(batch_size=2, dp_rank=rank, dp_world_size=2) for rank in range(2)]
    assert sorted(ranks[0] + ranks[1]) == sorted(alone)
    alone = rows(batch_sampler=ds.BatchesWithoutState(24))
    ranks = [rows(batch_sampler=ds.BatchesWithoutState(24), dp_rank=rank, dp_world_size=2) for rank in range(2)]
    assert sorted(ranks[0] + ranks[1]) == sorted(alone)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_seeded_by_sample_a_dataset_may_be_asked_for_many_rows_at_once(num_workers: int) -> None:
    """Case 17: ``__getitems__``, the only door of some datasets, is used there too."""

    def make_loader() -> StatefulDataLoader:
        dataset = ds.FetchedTogether(12)
        return StatefulDataLoader(dataset, batch_size=3, seed_by="sample", seed=1, num_workers=num_workers)

    assert_resumes_exactly(make_loader, restore_points=[2], epochs=1)


# Case 18


def global_generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (ds.RandomContent, {}),
        (ds.PermutationOnOpening, {}),
        (ds.PermutationOnFirstRow, {"lanes": 2}),
        (ds.Augmented, {}),
        (ds.Augmented, {"shuffle": True}),
        (ds.Augmented, {"sampler": ds.SamplerWithoutState(12)}),
    ],
)
def test_with_a_seed_the_global_generators_are_left_alone(
    dataset: Any, arguments: dict[str, Any], num_workers: int
) -> None:
    """Case 18: by building, iterating, saving and loading."""
    before = global_generators()
    loader = StatefulDataLoader(dataset(12), batch_size=3, seed=4, num_workers=num_workers, **arguments)
    assert global_generators() == before
    for _ in loader:
        assert global_generators() == before
        state = loader.state_dict()
    loader.load_state_dict(state)
    assert len(list(loader)) >= 4
    assert global_generators() == before


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_after_a_load_nothing_is_drawn(shuffle: bool, num_workers: int) -> None:
    """Case 18: by the first ``iter`` after a load and by later epochs, with a seed or without."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.Augmented(12), batch_size=3, shuffle=shuffle, num_workers=num_workers)

    loader = make_loader()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.close()
    resumed = make_loader()
    before = global_generators()
    resumed.load_state_dict(state)
    assert [len(list(resumed)) for _ in range(2)] == [3, 4]
    assert global_generators() == before


# Case 19


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sampler", draws.SAMPLERS)
def test_every_sampler_goes_on_from_its_place(sampler: str, num_workers: int) -> None:
    """Case 19: torch's and custom ones, with state and without; batch samplers with and without."""

    def make_loader() -> StatefulDataLoader:
        dataset = ds.Numbers(20)
        return StatefulDataLoader(dataset, num_workers=num_workers, **draws.SAMPLERS[sampler](dataset, 3))

    few = [Point(0, 0), Point(0, 1), [Point(0, 2), Point(1, 1)], Point(1, -1)]
    assert_resumes_exactly(make_loader, epochs=2, restore_points=few if num_workers else None)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batches", [ds.BatchesWithState, ds.BatchesWithoutState])
def test_a_sampler_of_batches_goes_on_from_its_place(batches: Any, num_workers: int) -> None:
    """Case 19: torch's way to ask a dataset for whole batches, ``batch_size=None`` and a sampler of lists."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.AskedForBatches(20), batch_size=None, sampler=batches(20), num_workers=num_workers)

    assert [len(batch) for batch in make_loader()] == [1, 3, 2, 1, 3, 2, 1, 3, 2, 1, 1]
    assert_resumes_exactly(make_loader, restore_points=[0, 1, 2, [3, 5], 11, 12], epochs=2)


def test_a_sampler_that_cannot_be_made_again_is_refused() -> None:
    """Case 19: its order comes from a source without a seed."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.Numbers(50), batch_size=5, sampler=ds.UnseededSampler(50))

    loader = make_loader()
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    resumed = make_loader()
    resumed.load_state_dict(state)
    with pytest.raises(InexactDataset):
        next(iter(resumed))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_distributed_sampler_is_adopted_and_not_sharded_again(rank: int) -> None:
    """Case 19: it brings its own rank, replicas and seed."""
    dataset = ds.Numbers(20)

    def order(loader_class: type[Any], **arguments: Any) -> list[Any]:
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, seed=9)
        return [batch.tolist() for batch in loader_class(dataset, batch_size=3, sampler=sampler, **arguments)]

    assert order(StatefulDataLoader) == order(DataLoader)
    assert order(StatefulDataLoader, dp_rank=rank, dp_world_size=2) == order(DataLoader)
