"""The loader's door: torch's signature, torch's errors for torch's arguments, and what a trainer reads of it."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import multiprocessing
import pickle
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

import unbroken
from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.errors import LaneError, UncopyableDataset

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

BOTH = [DataLoader, StatefulDataLoader]


def outcome(act: Callable[[type[Any]], Any], kind: type[Any]) -> tuple[str, Any]:
    """What an action comes to with one of the loaders: its value, or the type and text of its error."""
    try:
        return "value", act(kind)
    except Exception as error:
        return type(error).__name__, str(error).replace(kind.__name__, "DataLoader")


# The signature


def test_the_arguments_are_torchs_in_torchs_order_with_torchs_defaults() -> None:
    theirs = inspect.signature(DataLoader).parameters
    ours = inspect.signature(StatefulDataLoader).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name


def test_every_argument_of_its_own_has_to_be_named() -> None:
    own = list(inspect.signature(StatefulDataLoader).parameters.values())[
        len(inspect.signature(DataLoader).parameters) :
    ]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in own)


def test_it_is_a_torch_loader_and_nobody_s_base() -> None:
    assert isinstance(StatefulDataLoader(ds.Numbers(3)), DataLoader)
    assert StatefulDataLoader.__final__  # type: ignore[attr-defined]
    assert unbroken.StatefulDataLoader is StatefulDataLoader


def test_arguments_may_be_given_by_place() -> None:
    for kind in BOTH:
        loader = kind(ds.Numbers(7), 2, False, None, None, 0, None, False, True)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


# Wrong arguments

WRONG: dict[str, Callable[[type[Any]], Any]] = {
    "negative workers": lambda k: k(ds.Numbers(3), num_workers=-1),
    "negative timeout": lambda k: k(ds.Numbers(3), timeout=-1),
    "prefetch without workers": lambda k: k(ds.Numbers(3), prefetch_factor=2),
    "negative prefetch": lambda k: k(ds.Numbers(3), num_workers=1, prefetch_factor=-1),
    "persistent without workers": lambda k: k(ds.Numbers(3), persistent_workers=True),
    "shuffle and sampler": lambda k: k(ds.Numbers(3), shuffle=True, sampler=SequentialSampler(range(3))),
    "batch sampler and batch size": lambda k: k(ds.Numbers(3), batch_size=2, batch_sampler=[[0]]),
    "batch sampler and shuffle": lambda k: k(ds.Numbers(3), batch_sampler=[[0]], shuffle=True),
    "batch sampler and sampler": lambda k: k(ds.Numbers(3), batch_sampler=[[0]], sampler=[0]),
    "batch sampler and drop_last": lambda k: k(ds.Numbers(3), batch_sampler=[[0]], drop_last=True),
    "unbatched and drop_last": lambda k: k(ds.Numbers(3), batch_size=None, drop_last=True),
    "batch size 0": lambda k: k(ds.Numbers(3), batch_size=0),
    "negative batch size": lambda k: k(ds.Numbers(3), batch_size=-3),
    "batch size that is no number": lambda k: k(ds.Numbers(3), batch_size="2"),
    "drop_last that is no bool": lambda k: k(ds.Numbers(3), drop_last="yes"),
    "shuffled and empty": lambda k: k(ds.Numbers(0), shuffle=True),
    "iterable and shuffle": lambda k: k(ds.WellBehaved(3), shuffle=True),
    "iterable and sampler": lambda k: k(ds.WellBehaved(3), sampler=[0]),
    "iterable and batch sampler": lambda k: k(ds.WellBehaved(3), batch_sampler=[[0]]),
    "context without workers": lambda k: k(ds.Numbers(3), multiprocessing_context="spawn"),
    "unknown context": lambda k: k(ds.Numbers(3), num_workers=1, multiprocessing_context="no such"),
    "context that is none": lambda k: k(ds.Numbers(3), num_workers=1, multiprocessing_context=7),
    "unknown argument": lambda k: k(ds.Numbers(3), workers=2),
    "no dataset": lambda k: k(),
    "batch size set later": lambda k: setattr(k(ds.Numbers(3)), "batch_size", 2),
    "sampler set later": lambda k: setattr(k(ds.Numbers(3)), "sampler", None),
    "dataset set later": lambda k: setattr(k(ds.Numbers(3)), "dataset", ds.Numbers(3)),
    "length of an iterable": lambda k: len(k(ds.Stateless(3))),
    "sampler without a length": lambda k: len(k(ds.Numbers(3), sampler=iter([0]))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_of_torchs_is_torchs_error(name: str) -> None:
    theirs, ours = (outcome(WRONG[name], kind) for kind in BOTH)
    assert theirs[0] != "value"
    assert ours == theirs


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"lanes": 2}, ValueError, "lanes=2 was given with a map-style dataset, which has no lanes"),
        ({"shuffle": True, "dp_rank": 0, "dp_world_size": 2}, ValueError, "needs\\s+seed="),
        ({"seed": 1, "generator": torch.Generator()}, ValueError, "pass one of them"),
        ({"resume": "maybe"}, ValueError, "'checked', 'trust', 'replay'"),
    ],
)
def test_a_wrong_argument_of_its_own_is_refused_at_construction(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        StatefulDataLoader(ds.Numbers(4), **arguments)


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ({"lanes": 1, "num_workers": 2}, ("1 lanes", "2 owners")),
        ({"lanes": 3, "dp_world_size": 4}, ("3 lanes", "4 owners")),
    ],
)
def test_fewer_lanes_than_owners_is_refused_at_construction(
    arguments: dict[str, Any], numbers: tuple[str, str]
) -> None:
    """Case 23."""
    rank = {"dp_rank": 0} if "dp_world_size" in arguments else {}
    with pytest.raises(LaneError, match=f"{numbers[0]} cannot keep {numbers[1]} busy"):
        StatefulDataLoader(ds.WellBehaved(8), **rank, **arguments)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, -(2**63) - 1, 2**70])
def test_a_seed_of_any_size_is_refused_at_once_or_can_be_saved(seed: int) -> None:
    try:
        loader = StatefulDataLoader(ds.Numbers(9), shuffle=True, seed=seed)
    except (TypeError, ValueError):
        return
    iterator = iter(loader)
    first = int(next(iterator))
    other = StatefulDataLoader(ds.Numbers(9), shuffle=True, seed=seed)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert sorted([first, *map(int, other)]) == list(range(9))


# What a trainer reads

ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "defaults": dict,
    "batches": lambda: {"batch_size": 3, "drop_last": True},
    "shuffle": lambda: {"batch_size": 3, "shuffle": True, "generator": torch.Generator()},
    "sampler": lambda: {"sampler": RandomSampler(range(7))},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(SequentialSampler(range(7)), 2, False)},
    "out of order": lambda: {"in_order": False},
    "unbatched": lambda: {"batch_size": None, "collate_fn": list},
    "workers": lambda: {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True, "timeout": 9.5},
    "context": lambda: {"num_workers": 1, "multiprocessing_context": "spawn", "worker_init_fn": print},
}
ATTRIBUTES = [
    "batch_size", "drop_last", "num_workers", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn",
    "prefetch_factor", "persistent_workers", "in_order", "collate_fn",
]  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_attributes_are_torchs(name: str) -> None:
    arguments, dataset = ARGUMENTS[name](), ds.Numbers(7)
    theirs, ours = (kind(dataset, **arguments) for kind in BOTH)
    for attribute in ATTRIBUTES:
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    assert ours.dataset is dataset
    assert ours.generator is theirs.generator
    assert type(ours.sampler) is type(theirs.sampler)
    assert isinstance(ours.batch_sampler, type(theirs.batch_sampler))
    assert type(ours.multiprocessing_context) is type(theirs.multiprocessing_context)
    if theirs.batch_sampler is not None:
        assert len(ours.batch_sampler) == len(theirs.batch_sampler)
        assert ours.batch_sampler.batch_size == theirs.batch_sampler.batch_size


def test_the_collate_fn_that_was_not_given_is_torchs() -> None:
    assert StatefulDataLoader(ds.Numbers(3)).collate_fn is default_collate
    assert StatefulDataLoader(ds.Numbers(3), batch_size=None).collate_fn is default_convert


def rebuilt(loader: StatefulDataLoader) -> DataLoader[Any]:
    """What a trainer makes of a loader that is a torch loader: another, of torch's class."""
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)


def test_a_loader_that_is_rebuilt_as_another_class_warns() -> None:
    loader = StatefulDataLoader(ds.Numbers(4), batch_size=2)
    with pytest.warns(UserWarning, match="has a trainer rebuilt the\\s+loader as another class"):
        assert [batch.tolist() for batch in rebuilt(loader)] == [[0, 1], [2, 3]]


def test_reading_the_batch_sampler_and_iterating_the_loader_do_not_warn() -> None:
    loader = StatefulDataLoader(ds.Numbers(4), batch_size=2, shuffle=True)
    assert len(loader.batch_sampler) == 2
    assert loader.batch_sampler.sampler is loader.sampler
    assert len(list(loader)) == 2


def test_a_copied_loader_has_the_position_and_moves_on_its_own() -> None:
    loader = StatefulDataLoader(ds.Numbers(8), batch_size=2, shuffle=True, seed=1)
    iterator = iter(loader)
    next(iterator)
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.state_dict() == loader.state_dict()
        list(other)
        assert other.state_dict() != loader.state_dict()
    assert len(list(iterator)) == 3


# Length


@settings(max_examples=40)
@given(
    n=st.integers(0, 20),
    size=st.integers(1, 5) | st.none(),
    drop_last=st.booleans(),
    iterable=st.booleans(),
    data=st.data(),
)
def test_the_length_is_torchs_and_what_arrives(
    n: int, size: int | None, drop_last: bool, iterable: bool, data: st.DataObject
) -> None:
    """Case 15."""
    arguments = {"batch_size": size, "drop_last": drop_last and size is not None}
    if not iterable and n and data.draw(st.booleans()):
        arguments["sampler"] = list(range(data.draw(st.integers(1, 2 * n))))
        dataset: Any = ds.Numbers(2 * n)
    else:
        dataset = ds.WithLength(n) if iterable else ds.Numbers(n)
    theirs, ours = (kind(dataset, **arguments) for kind in BOTH)
    assert len(ours) == len(theirs)
    assert len(list(ours)) == len(ours)


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
def test_the_length_does_not_depend_on_workers(num_workers: int) -> None:
    """Case 15."""
    loader = StatefulDataLoader(ds.Numbers(17), batch_size=3, num_workers=num_workers)
    assert len(loader) == 6
    assert len(list(loader)) == 6


@given(n=st.integers(4, 30), size=st.integers(1, 4), world=st.integers(1, 4))
def test_drop_last_drops_at_most_one_batch_a_rank(n: int, size: int, world: int) -> None:
    """Case 15."""
    for rank in range(world):
        ranks = {"dp_rank": rank, "dp_world_size": world}
        kept, dropped = (
            StatefulDataLoader(ds.Numbers(n), batch_size=size, drop_last=drop_last, **ranks)
            for drop_last in (False, True)
        )
        assert 0 <= len(kept) - len(dropped) <= 1
        assert all(len(batch) == size for batch in dropped)


@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_more_samples_than_an_iterable_dataset_told_warns_as_torch_does(batch_size: int | None) -> None:
    class Understated(ds.Stateless):
        def __len__(self) -> int:
            return 2

    found = []
    for kind in BOTH:
        loader = kind(Understated(8), batch_size=batch_size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            len(loader)
            list(loader)
        found.append([str(warning.message).replace(" ", "") for warning in caught])  # torch's lacks a space
    assert found[0]
    assert found[1] == found[0]


# Iterators


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dataset", [ds.Numbers, ds.Stateless])
def test_two_iterators_each_give_a_whole_epoch(kind: type[Any], dataset: Any) -> None:
    loader = kind(dataset(6), batch_size=2)
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert pairs == [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4, 5], [4, 5])]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("dataset", [ds.Numbers, ds.WellBehaved])
def test_an_older_iterator_over_persistent_workers_goes_on_or_is_refused(dataset: Any) -> None:
    """And is no hang: the workers have begun the next epoch."""
    loader = StatefulDataLoader(dataset(40), batch_size=2, num_workers=1, persistent_workers=True)
    older = iter(loader)
    assert next(older).tolist() == [0, 1]
    newer = iter(loader)
    seen = [next(newer).tolist()]
    try:
        assert next(older).tolist() in ([2, 3], [4, 5])  # torch gives one and the same iterator twice
    except RuntimeError as error:
        assert "iter" in str(error)
    seen += [batch.tolist() for batch in newer]
    assert [0, 1] in seen
    loader.close()


def test_an_iterator_is_its_own_iterator_and_stays_at_its_end() -> None:
    iterator = iter(StatefulDataLoader(ds.Numbers(2)))
    assert iter(iterator) is iterator
    assert len(list(iterator)) == 2
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


def test_an_iterator_that_was_dropped_leaves_the_loader_where_it_stood() -> None:
    loader = StatefulDataLoader(ds.Numbers(8), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    del iterator
    gc.collect()
    state = loader.state_dict()
    other = StatefulDataLoader(ds.Numbers(8), batch_size=2)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == [[2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_goes_on_where_a_load_puts_it(num_workers: int) -> None:
    """Case 6."""
    loader = StatefulDataLoader(ds.Numbers(12), batch_size=2, num_workers=num_workers)
    iterator = iter(loader)
    states = [loader.state_dict()]
    for _ in range(4):
        next(iterator)
        states.append(loader.state_dict())
    for step in (1, 4, 0, 3):
        loader.load_state_dict(states[step])
        assert next(iterator).tolist() == [2 * step, 2 * step + 1]
    loader.load_state_dict({})
    assert [batch.tolist() for batch in iterator] == [[2 * i, 2 * i + 1] for i in range(6)]
    loader.close()


# Ends


def workers() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_the_workers_and_may_be_done_again(num_workers: int, persistent: bool) -> None:
    """Case 41."""
    before = workers()
    arguments = {"persistent_workers": True} if persistent and num_workers else {}
    loader = StatefulDataLoader(ds.Numbers(8), batch_size=2, num_workers=num_workers, **arguments)
    loader.close()
    iterator = iter(loader)
    held = next(iterator)
    assert len(workers() - before) == num_workers
    state = loader.state_dict()
    loader.close()
    loader.close()
    assert workers() == before
    assert held.tolist() == [0, 1]
    assert loader.state_dict() == state


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_closed_loader_can_be_iterated_again(num_workers: int) -> None:
    loader = StatefulDataLoader(ds.Numbers(6), batch_size=2, num_workers=num_workers)
    next(iter(loader))
    loader.close()
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


class Blocked(ds.Numbers):
    """Row 2 never comes."""

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            threading.Event().wait()
        return super().__getitem__(index)


@pytest.mark.timeout(30)
def test_workers_blocked_in_a_read_are_ended() -> None:
    """Case 41: within two seconds, on a machine that has them."""
    before = workers()
    loader = StatefulDataLoader(Blocked(8), num_workers=2)
    iterator = iter(loader)
    next(iterator)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 10
    assert workers() == before


# States


class Reads(IterableDataset[int]):
    """Counts what is read from it, as a queue would."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        while self.taken < 10:
            self.taken += 1
            yield self.taken


def test_a_state_of_a_loader_never_iterated_consumes_and_starts_nothing() -> None:
    """Case 5."""
    before, dataset = workers(), Reads()
    numbers = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    loader = StatefulDataLoader(dataset, batch_size=2, num_workers=2)
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert (dataset.taken, workers()) == (0, before)
    assert [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()] == numbers


def test_what_is_no_position_is_refused_and_an_empty_one_resets() -> None:
    """Case 6."""
    loader = StatefulDataLoader(ds.Numbers(4), batch_size=2)
    fresh = loader.state_dict()
    next(iter(loader))
    for state in (None, [], "text"):
        with pytest.raises(unbroken.InvalidState):
            loader.load_state_dict(state)  # type: ignore[arg-type]
    loader.load_state_dict({})
    assert loader.state_dict() == fresh


def test_a_dataset_that_cannot_be_copied_says_which_number_of_workers_avoids_it() -> None:
    class Locked(ds.WellBehaved):
        def __init__(self, n: int) -> None:
            super().__init__(n)
            self.lock = threading.Lock()

    loader = StatefulDataLoader(Locked(6), lanes=2)
    with pytest.raises(UncopyableDataset, match=r"Several lanes of .*Locked share one process.*\n.*num_workers"):
        next(iter(loader))
    assert len(list(StatefulDataLoader(Locked(6)))) == 6


def test_nothing_warns_when_a_loader_is_left_in_mid_epoch() -> None:
    """Case 41."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = StatefulDataLoader(ds.Numbers(8), num_workers=1)
        iterator = iter(loader)
        next(iterator)
        del loader, iterator
        gc.collect()
