"""One pass over the data: what ``iter(loader)`` returns, from its first batch to its end."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.engine.epoch import Epoch

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
KINDS = pytest.mark.parametrize("dataset", [ds.Numbers, ds.WellBehaved, ds.Stateless, ds.OwnIterator])


def loader_over(dataset: Any, n: int = 8, **arguments: Any) -> StatefulDataLoader:
    return StatefulDataLoader(dataset(n), batch_size=2, **arguments)


def batches(iterator: Any) -> list[Any]:
    return [batch.tolist() for batch in iterator]


def test_iter_gives_an_epoch() -> None:
    epoch = iter(loader_over(ds.Numbers))
    assert isinstance(epoch, Epoch)
    assert iter(epoch) is epoch


@WORKERS
@KINDS
def test_an_epoch_stays_at_its_end_and_the_next_one_is_whole(dataset: Any, num_workers: int) -> None:
    """Case 12."""
    loader = loader_over(dataset, num_workers=num_workers, lanes=None)
    epoch = iter(loader)
    first = batches(epoch)
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(epoch)
    assert len(first) == 4
    assert batches(loader) == first


@WORKERS
@KINDS
def test_a_position_at_the_end_leads_into_the_whole_next_epoch(dataset: Any, num_workers: int) -> None:
    """Case 12: taken after the last batch, before StopIteration or after it; never an empty epoch."""
    reference = loader_over(dataset, num_workers=num_workers)
    expected = [batches(reference) for _ in range(3)]
    loader = loader_over(dataset, num_workers=num_workers)
    epoch = iter(loader)
    for _ in range(4):
        next(epoch)
    states = [loader.state_dict()]
    with pytest.raises(StopIteration):
        next(epoch)
    states.append(loader.state_dict())
    for state in states:
        again = loader_over(dataset, num_workers=num_workers)
        again.load_state_dict(json.loads(json.dumps(state)))
        assert [batches(again) for _ in range(2)] == expected[1:]


def test_epochs_that_are_empty_end_at_once() -> None:
    loader = StatefulDataLoader(ds.Stateless(0), batch_size=2)
    for _ in range(3):
        assert batches(loader) == []
    state = loader.state_dict()
    again = StatefulDataLoader(ds.Stateless(0), batch_size=2)
    again.load_state_dict(state)
    assert batches(again) == []


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_epoch_cannot_be_copied_or_sent_as_in_torch(act: Any) -> None:
    for kind in (DataLoader, StatefulDataLoader):
        with pytest.raises(NotImplementedError, match="cannot be pickled"):
            act(iter(kind(ds.Numbers(3))))


@WORKERS
def test_an_epoch_that_was_closed_goes_on_where_it_was(num_workers: int) -> None:
    loader = loader_over(ds.Numbers, num_workers=num_workers)
    epoch = iter(loader)
    assert next(epoch).tolist() == [0, 1]
    epoch.close()
    assert next(epoch).tolist() == [2, 3]
    epoch.close()
    epoch.close()
    assert batches(epoch) == [[4, 5], [6, 7]]


@pytest.mark.parametrize("failure", [OSError("not now"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("dataset", [ds.WellBehaved, ds.Late, ds.OwnIterator, ds.StateOnBoth])
def test_after_an_error_in_the_very_first_turn_the_lane_begins_again(
    dataset: Any, lanes: int, at: int, failure: BaseException
) -> None:
    """The dataset has moved on, and nothing was delivered that a position could name."""
    expected = [row for batch in batches(StatefulDataLoader(dataset(8), batch_size=2, lanes=lanes)) for row in batch]
    seen: list[Any] = []

    class Failing(dataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return Watched(super().__iter__(), self)

    class Watched:
        def __init__(self, rows: Any, owner: Any) -> None:
            self.rows = rows
            if hasattr(rows, "state_dict") and rows is not owner:
                self.state_dict, self.load_state_dict = rows.state_dict, rows.load_state_dict

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            seen.append(None)
            if len(seen) == at + 1:
                raise failure
            return next(self.rows)

    epoch = iter(StatefulDataLoader(Failing(8), batch_size=2, lanes=lanes))
    found: list[Any] = []
    while True:
        try:
            found += next(epoch).tolist()
        except StopIteration:
            break
        except BaseException as error:
            assert error is failure
    assert found == expected


@WORKERS
def test_a_load_in_mid_epoch_repositions_the_live_one(num_workers: int) -> None:
    """Case 6."""
    loader = loader_over(ds.WellBehaved, 12, num_workers=num_workers)
    epoch = iter(loader)
    next(epoch)
    state = loader.state_dict()
    for _ in range(3):
        next(epoch)
    loader.load_state_dict(state)
    rest = batches(epoch)
    other = loader_over(ds.WellBehaved, 12, num_workers=num_workers)
    other.load_state_dict(state)
    assert rest == batches(other)
    assert len(rest) == 5


def test_a_load_and_a_new_iterator_leave_the_old_one_at_its_end() -> None:
    """Case 6."""
    loader = loader_over(ds.Numbers)
    state = loader.state_dict()
    old = iter(loader)
    next(old)
    loader.load_state_dict(state)
    new = iter(loader)
    assert batches(old) == []
    assert len(batches(new)) == 4


def test_an_epoch_holds_its_loader_and_the_loader_does_not_hold_it() -> None:
    loader = loader_over(ds.Numbers)
    epoch = iter(loader)
    next(epoch)
    watched, kept = weakref.ref(epoch), weakref.ref(loader)
    del epoch
    gc.collect()
    assert watched() is None
    epoch = iter(loader)
    del loader
    gc.collect()
    assert kept() is not None
    assert len(batches(epoch)) == 4


def test_the_length_that_was_told_is_held_against_what_came() -> None:
    class Understated(ds.Stateless):
        def __len__(self) -> int:
            return 1

    loader = StatefulDataLoader(Understated(4), batch_size=2)
    assert len(batches(loader)) == 2  # nobody asked, so nothing is told
    assert len(loader) == 1
    with pytest.warns(UserWarning, match="but 2 samples have been fetched") as caught:
        batches(loader)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_stay_run_every_epoch_and_others_one(persistent: bool) -> None:
    class TellsProcess(ds.Numbers):
        def __getitem__(self, index: int) -> Any:
            import os

            return os.getpid()

    loader = loader_over(TellsProcess, num_workers=2, persistent_workers=persistent)
    seen = [{pid for batch in loader for pid in batch.tolist()} for _ in range(3)]
    loader.close()
    assert len(set().union(*seen)) == (2 if persistent else 6)


def test_a_resumed_pass_over_an_ended_epoch_keeps_its_workers() -> None:
    loader = loader_over(ds.Numbers, num_workers=1, persistent_workers=True)
    batches(loader)
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert batches(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    loader.close()


def test_batches_are_torchs_own_tensors() -> None:
    batch = next(iter(loader_over(ds.Numbers, num_workers=1)))
    assert type(batch) is torch.Tensor
    assert batch.is_contiguous()
    batch += 1
    assert batch.tolist() == [1, 2]
