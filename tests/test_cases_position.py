"""Cases 1 to 11: what a position describes, and that looking at it moves nothing."""

from __future__ import annotations

import json
import multiprocessing
import queue
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from tests import datasets as ds
from tests import strategies as draws
from unbroken import StatefulDataLoader
from unbroken.errors import InexactDataset, UnbrokenError
from unbroken.testing import Point, assert_resumes_exactly

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def rest_of(loader: StatefulDataLoader) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def stopped_after(loader: StatefulDataLoader, k: int) -> dict[str, str]:
    iterator = iter(loader)
    for _ in range(k):
        next(iterator)
    state = loader.state_dict()
    loader.close()
    return state


# Case 1


@pytest.mark.parametrize("num_workers", [0, 1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dataset", [ds.WellBehaved, ds.Numbers])
def test_every_point_of_an_epoch_is_exact(dataset: Any, num_workers: int) -> None:
    """Case 1: save after every k in 0..len, with 0, 1, 2, 4 workers."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(dataset(13), batch_size=3, num_workers=num_workers)

    assert_resumes_exactly(make_loader, epochs=3 if num_workers == 0 else 1)


@pytest.mark.parametrize("num_workers", [0, 1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dataset", [ds.WellBehaved, ds.Numbers])
def test_every_point_is_exact_on_two_ranks(dataset: Any, num_workers: int) -> None:
    """Case 1: the same on each of two ranks."""

    def make_loader(dp_rank: int, dp_world_size: int) -> StatefulDataLoader:
        return StatefulDataLoader(
            dataset(24), batch_size=3, num_workers=num_workers, dp_rank=dp_rank, dp_world_size=dp_world_size, seed=1
        )

    points = [Point(0, 0), Point(0, 1), Point(0, 3), Point(0, 4), Point(1, -1)] if num_workers else None
    assert_resumes_exactly(make_loader, topologies=[{"dp_world_size": 2}], epochs=1, restore_points=points)


# Case 2


@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", ["iterable", "map-style"])
def test_the_bytes_saved_do_not_depend_on_workers_or_prefetch(kind: str, k: int) -> None:
    """Case 2: the place saved between two batches is that of the delivered ones, whatever was prefetched."""

    def saved(**workers: Any) -> dict[str, Any]:
        if kind == "iterable":
            loader = StatefulDataLoader(
                ds.WellBehaved(40), batch_size=3, lanes=4, seed=1, snapshot_every_n_steps=1, **workers
            )
        else:
            loader = StatefulDataLoader(ds.Numbers(40), batch_size=3, shuffle=True, seed=1, **workers)
        state = stopped_after(loader, k)
        return {key: value for key, value in state.items() if key != "unbroken"}

    inline = saved()
    assert inline == saved(num_workers=1)
    assert inline == saved(num_workers=2)
    assert inline == saved(num_workers=2, prefetch_factor=7)


def test_a_position_counts_the_delivered_batches() -> None:
    """Case 2: step and delivered rows of each lane, while the workers are far ahead."""
    loader = StatefulDataLoader(ds.WellBehaved(60), batch_size=3, num_workers=2, prefetch_factor=8, lanes=2, seed=1)
    iterator = iter(loader)
    for n in range(1, 6):
        next(iterator)
        leaves = [json.loads(loader.state_dict()[f"lane-00000{lane}"]) for lane in range(2)]
        assert [leaf["step"] for leaf in leaves] == [n, n]
        assert [leaf["lane"]["delivered"] for leaf in leaves] == [3 * ((n + 1) // 2), 3 * (n // 2)]
    loader.close()


# Cases 3 and 4


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["late", "coarse, set on entering", "live buffer", "without state"])
def test_chains_of_saves_and_loads_in_one_epoch_are_exact(kind: str, num_workers: int) -> None:
    """Case 3: save, load, go on a little, save, load, three times and more in one epoch."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(draws.EXACT[kind](37), batch_size=2, num_workers=num_workers)

    assert_resumes_exactly(make_loader, restore_points=[[1, 3, 4, 6, 9], [2, 2, 5, 5]], epochs=1)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("dataset", [ds.Late, ds.Numbers])
def test_a_position_saved_soon_after_a_load_is_exact(dataset: Any, num_workers: int) -> None:
    """Case 4: saved right after a load, and 0, 1, ... num_workers steps later."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(dataset(30), batch_size=2, num_workers=num_workers)

    for k in (num_workers, num_workers + 1):
        later = [[k, k + more, k + more + 1] for more in range(num_workers + 1)]
        assert_resumes_exactly(make_loader, restore_points=later, epochs=1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["late", "well-behaved"])
def test_a_position_saved_after_a_load_and_iter_is_the_one_loaded(kind: str, num_workers: int) -> None:
    """Case 4: before ``iter``, after it, and after the first batch of the resumed run."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(draws.EXACT[kind](30), batch_size=2, num_workers=num_workers, seed=1)

    reference = rest_of(make_loader())
    state = stopped_after(make_loader(), 3)
    loader = make_loader()
    loader.load_state_dict(state)
    states = [loader.state_dict()]
    iterator = iter(loader)
    states.append(loader.state_dict())
    next(iterator)
    states.append(loader.state_dict())
    loader.close()
    for saved, done in zip(states, [3, 3, 4], strict=True):
        again = make_loader()
        again.load_state_dict(saved)
        assert rest_of(again) == reference[done:]


# Case 5


class FromQueue(IterableDataset):
    """Takes rows out of a queue, where they can be taken once."""

    def __init__(self, rows: int) -> None:
        self.queue: queue.Queue[int] = queue.Queue()
        for row in range(rows):
            self.queue.put(row)

    def __iter__(self) -> Iterator[int]:
        while not self.queue.empty():
            yield self.queue.get()


def global_generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


@pytest.mark.parametrize("arguments", [{}, {"seed": 1}])
def test_the_state_of_a_loader_never_iterated_costs_nothing(arguments: dict[str, Any]) -> None:
    """Case 5: no row consumed, no random number drawn; with a queue that keeps all its items."""
    dataset = FromQueue(5)
    before = global_generators()
    loader = StatefulDataLoader(dataset, **arguments)
    assert loader.state_dict() == loader.state_dict()
    assert dataset.queue.qsize() == 5
    assert global_generators() == before


def test_the_state_of_a_loader_never_iterated_starts_no_process() -> None:
    """Case 5: with workers."""
    loader = StatefulDataLoader(ds.WellBehaved(10), num_workers=2, persistent_workers=True)
    before, children = global_generators(), multiprocessing.active_children()
    loader.state_dict()
    assert multiprocessing.active_children() == children
    assert global_generators() == before


# Case 6


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [ds.WellBehaved, ds.Numbers])
def test_a_load_after_iter_repositions_the_iterator_or_says_that_it_cannot(dataset: Any, num_workers: int) -> None:
    """Case 6: never a silent no-op."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(dataset(20), batch_size=2, num_workers=num_workers, seed=1)

    reference = rest_of(make_loader())
    state = stopped_after(make_loader(), 6)
    loader = make_loader()
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(state)
    try:
        assert [batch.tolist() for batch in iterator] == reference[6:]
    except UnbrokenError:
        assert rest_of(loader) == reference[6:]
    loader.close()


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("dataset", [ds.WellBehaved, ds.OwnIterator, ds.Numbers])
def test_iter_after_a_load_in_mid_epoch_goes_on_from_the_load(dataset: Any, workers: dict[str, Any]) -> None:
    """Case 6: a loader that is running is loaded, forward or back, and iterated anew."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(dataset(20), batch_size=2, seed=1, **workers)

    reference = rest_of(make_loader())
    states = [stopped_after(make_loader(), k) for k in (2, 6)]
    loader = make_loader()
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    del iterator
    loader.load_state_dict(states[1])
    assert rest_of(loader) == reference[6:]
    loader.load_state_dict(states[0])
    assert rest_of(loader) == reference[2:]
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [ds.WellBehaved, ds.Numbers])
def test_the_last_of_several_loads_wins(dataset: Any, num_workers: int) -> None:
    """Case 6: also when the state is asked for between them."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(dataset(20), batch_size=2, num_workers=num_workers, seed=1)

    reference = rest_of(make_loader())
    loader = make_loader()
    for k in (7, 2, 4):
        loader.load_state_dict(stopped_after(make_loader(), k))
        loader.state_dict()
    assert rest_of(loader) == reference[4:]


@pytest.mark.parametrize("dataset", [ds.WellBehaved, ds.Numbers])
def test_an_empty_state_resets(dataset: Any) -> None:
    """Case 6: ``load_state_dict({})``, before ``iter`` and after some batches."""
    loader = StatefulDataLoader(dataset(20), batch_size=2, seed=1)
    reference = rest_of(loader)
    loader.load_state_dict({})
    assert rest_of(loader) == reference
    iterator = iter(loader)
    next(iterator)
    del iterator
    loader.load_state_dict({})
    assert rest_of(loader) == reference


def test_a_position_does_not_change_after_it_was_taken() -> None:
    """Case 6: not by the run that goes on, nor by the loader that loaded it."""
    loader = StatefulDataLoader(ds.LiveState(20), batch_size=2, snapshot_every_n_steps=1, seed=1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    copied = json.loads(json.dumps(state))
    next(iterator)
    other = StatefulDataLoader(ds.LiveState(20), batch_size=2, snapshot_every_n_steps=1, seed=1)
    other.load_state_dict(state)
    rest_of(other)
    assert state == copied


# Cases 7 to 9


@pytest.mark.parametrize("batch_size", [1, None])
def test_a_late_entry_for_each_worker_loses_and_repeats_nothing(batch_size: int | None) -> None:
    """Case 7: 2 workers, 10 samples, stopped after 5: a resume gives 5 to 9, none twice."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.LateEntryPerWorker(10), batch_size=batch_size, num_workers=2)

    loader = make_loader()
    loader.load_state_dict(json.loads(json.dumps(stopped_after(make_loader(), 5))))
    assert [int(row[0] if isinstance(row, list) else row) for row in rest_of(loader)] == [5, 6, 7, 8, 9]
    assert_resumes_exactly(make_loader, epochs=1)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_no_token_of_a_live_buffer_is_lost(num_workers: int) -> None:
    """Case 8: the buffer is handed out by reference and changed in place."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.LiveBuffer(24), batch_size=2, num_workers=num_workers)

    assert_resumes_exactly(make_loader, epochs=1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("every", [None, 1, 3])
@pytest.mark.parametrize("kind", sorted(draws.ITERABLE))
def test_wherever_the_state_lives_a_resume_is_exact_or_refused(kind: str, every: int | None) -> None:
    """Case 9: state on the dataset, its iterator or both, its own iterator, openings counted, and so on."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(draws.ITERABLE[kind](25), batch_size=3, snapshot_every_n_steps=every)

    points = [Point(e, s) for e in range(2) for s in range(-1, 10)]
    for chain in [*([p] for p in points), [Point(0, 2), Point(0, 3), Point(0, 5)], [Point(0, 7), Point(1, 2)]]:
        try:
            assert_resumes_exactly(make_loader, restore_points=[chain], epochs=2)
        except InexactDataset:
            assert kind in draws.REFUSED_OR_EXACT


@pytest.mark.parametrize("kind", ["hidden buffer", "draws in flight"])
def test_a_state_that_does_not_lead_back_is_refused_and_the_ways_out_are_named(kind: str) -> None:
    """Case 9: refused where its own state is used, exact where everything is made again."""

    def make_loader(resume: str) -> StatefulDataLoader:
        return StatefulDataLoader(draws.ITERABLE[kind](40), batch_size=3, resume=resume, snapshot_every_n_steps=1)

    loader = make_loader("checked")
    loader.load_state_dict(stopped_after(make_loader("checked"), 8))
    with pytest.raises(InexactDataset, match=r'(?s)resume="replay".*resume="trust"'):
        next(iter(loader))
    assert_resumes_exactly(lambda: make_loader("replay"), epochs=1)


def test_samples_that_differ_when_made_again_are_refused_and_may_be_trusted() -> None:
    """Case 9: a generator of its own without a seed; the place is right and the content cannot be checked."""

    def make_loader(resume: str) -> StatefulDataLoader:
        return StatefulDataLoader(ds.UnseededNoise(40), batch_size=3, resume=resume, snapshot_every_n_steps=1)

    state = stopped_after(make_loader("checked"), 8)
    loader = make_loader("checked")
    loader.load_state_dict(state)
    with pytest.raises(InexactDataset, match='resume="trust"'):
        next(iter(loader))

    loader = make_loader("trust")
    loader.load_state_dict(stopped_after(make_loader("trust"), 8))
    assert [number for numbers, _ in loader for number in numbers.tolist()] == list(range(24, 40))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_may_be_trusted(num_workers: int) -> None:
    """Case 9: the place after the sample, as torchdata takes it; exact where the dataset means that."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.WellBehaved(25), batch_size=3, num_workers=num_workers, resume="trust")

    assert_resumes_exactly(make_loader, epochs=1)


# Cases 10 and 11


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_without_state_is_exact_by_dropping(num_workers: int) -> None:
    """Case 10."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.Stateless(25), batch_size=3, num_workers=num_workers)

    assert_resumes_exactly(make_loader, epochs=1)


def test_dropping_is_told_once_at_most() -> None:
    """Case 10: however many lanes drop."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.Stateless(4000), batch_size=2, lanes=4)

    loader = make_loader()
    loader.load_state_dict(stopped_after(make_loader(), 1500))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        next(iter(loader))
    assert len(told) <= 1
    assert all("state_dict" in str(warning.message) for warning in told)


def test_a_dataset_that_knows_nothing_of_workers_is_repeated_with_a_warning() -> None:
    """Case 11: torch repeats it for every worker, and so do we; the warning names the remedy."""
    loader = StatefulDataLoader(ds.UnawareOfWorkers(6), batch_size=2, num_workers=2)
    with pytest.warns(UserWarning, match="get_worker_info"):
        batches = rest_of(loader)
    assert batches == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]


def test_a_dataset_that_shards_itself_is_not_warned_about() -> None:
    """Case 11: warnings are errors in these tests."""
    assert len(rest_of(StatefulDataLoader(ds.Stateless(6), batch_size=2, num_workers=2))) == 4
