"""How a dataset is opened at a state: the order of loading and opening, and what it sees as its worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, get_worker_info

from unbroken.engine.opening import StreamOpening, TorchOpening, lane_info, set_worker_info
from unbroken.errors import UnsealableState
from unbroken.lanes import Lane
from unbroken.state import seal, unseal


class Told:
    """What happened, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []


class OnDataset(Told, IterableDataset[int]):
    def __init__(self) -> None:
        super().__init__()
        self.done = 0

    def __iter__(self) -> Iterator[int]:
        self.events.append("opened")
        return iter(range(self.done, 9))

    def state_dict(self) -> Any:
        return {"done": self.done}

    def load_state_dict(self, state: Any) -> None:
        self.events.append(("dataset loaded", state))
        self.done = state["done"]


class Rows:
    def __init__(self, told: list[Any]) -> None:
        self.events = told
        self.done = 0

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> int:
        self.done += 1
        return self.done - 1

    def state_dict(self) -> Any:
        return {"done": self.done}

    def load_state_dict(self, state: Any) -> None:
        self.events.append(("iterator loaded", state))
        self.done = state["done"]


class OnIterator(Told, IterableDataset[int]):
    def __iter__(self) -> Rows:
        self.events.append("opened")
        return Rows(self.events)


class OnBoth(OnDataset):
    def __iter__(self) -> Any:
        self.events.append("opened")
        return Rows(self.events)


class OwnIterator(OnDataset):
    def __iter__(self) -> Any:
        self.events.append("opened")
        self.done = 0
        return self

    def __next__(self) -> int:
        self.done += 1
        return self.done - 1


class Stateless(Told, IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        self.events.append("opened")
        return iter(range(9))


class SavesOnly(Stateless):
    """Has ``state_dict`` and no way to load one."""

    def state_dict(self) -> Any:
        return {"done": 1}


def opening_of(dataset: Any, *, use_state: bool = True) -> TorchOpening:
    return TorchOpening(dataset, use_state=use_state, what="its state")


ORDER = {
    OnDataset: [("dataset loaded", {"done": 3}), "opened"],
    OnIterator: ["opened", ("iterator loaded", {"done": 3})],
    OnBoth: [("dataset loaded", {"done": 7}), "opened", ("iterator loaded", {"done": 3})],
    OwnIterator: ["opened", ("dataset loaded", {"done": 3})],
    Stateless: ["opened"],
    SavesOnly: ["opened"],
}


@pytest.mark.parametrize("kind", ORDER)
def test_states_are_loaded_in_the_order_that_each_kind_needs(kind: type[Any]) -> None:
    """Case 9: state on the dataset: load, then open; on the iterator, itself included: open, then load; both."""
    before = kind()
    opening = opening_of(before)
    iterator = opening.enter(None)
    if kind in (OnDataset, OnBoth):
        before.done = 7 if kind is OnBoth else 3
    if kind is not OnDataset:
        for _ in range(3):
            next(iterator)
    state = opening.capture()
    after = kind()
    again = opening_of(after).enter(state)
    assert after.events == ORDER[kind]
    assert next(again) == (3 if state is not None else 0)


@pytest.mark.parametrize("kind", ORDER)
def test_what_is_stateful_is_known_once_it_is_open(kind: type[Any]) -> None:
    opening = opening_of(kind())
    opening.enter(None)
    assert opening.stateful == (kind not in (Stateless, SavesOnly))
    assert (opening.capture() is not None) == opening.stateful


@pytest.mark.parametrize("kind", ORDER)
def test_without_its_state_a_dataset_is_only_opened(kind: type[Any]) -> None:
    """``resume="replay"``."""
    dataset = kind()
    opening = opening_of(dataset, use_state=False)
    opening.enter(None)
    assert (opening.stateful, opening.capture(), opening.carry()) == (False, None, None)
    assert dataset.events == ["opened"]


def test_a_dataset_that_is_its_own_iterator_has_one_state() -> None:
    opening = opening_of(OwnIterator())
    opening.enter(None)
    assert list(unseal(opening.capture() or "")) == ["iterator"]


def test_what_is_carried_into_the_next_epoch_is_the_dataset_s_state_and_not_the_iterator_s() -> None:
    for kind, expected in (
        (OnDataset, {"dataset": {"done": 0}}),
        (OnBoth, {"dataset": {"done": 0}}),
        (OwnIterator, {"iterator": {"done": 2}}),
    ):
        opening = opening_of(kind())
        iterator = opening.enter(None)
        next(iterator)
        next(iterator)
        assert unseal(opening.carry() or "") == expected
    for kind in (OnIterator, Stateless, SavesOnly):
        opening = opening_of(kind())
        opening.enter(None)
        assert opening.carry() is None


def test_a_capture_does_not_follow_later_changes() -> None:
    """Case 8."""
    dataset = OnDataset()
    buffer = [1]
    dataset.state_dict = lambda: {"buffer": buffer}  # type: ignore[method-assign]
    opening = opening_of(dataset)
    opening.enter(None)
    state = opening.capture()
    buffer.append(2)
    assert unseal(state or "") == {"dataset": {"buffer": [1]}}


def test_a_state_that_cannot_be_carried_is_named_by_the_words_that_were_given() -> None:
    dataset = OnDataset()
    dataset.state_dict = lambda: {"f": print}  # type: ignore[method-assign]
    opening = opening_of(dataset)
    opening.enter(None)
    with pytest.raises(UnsealableState, match=r"^its state\['dataset'\]\['f'\] is a builtins\."):
        opening.capture()


class Epochs(OnDataset):
    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.events.append(("epoch set", epoch))
        self.epoch = epoch


def test_the_epoch_is_set_after_the_state_and_before_the_opening() -> None:
    dataset = Epochs()
    opening = opening_of(dataset)
    opening.set_epoch(2)
    opening.enter(seal({"dataset": {"done": 1}}))
    assert dataset.events == [("dataset loaded", {"done": 1}), ("epoch set", 2), "opened"]


def test_an_epoch_that_is_set_already_is_not_set_again() -> None:
    dataset = Epochs()
    opening = opening_of(dataset)
    opening.set_epoch(0)
    opening.enter(None)
    assert dataset.events == ["opened"]


# Streams


class Stream:
    default_lanes = 2

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.events: list[Any] = []

    def open(self, lane: Lane) -> Rows:
        self.lanes.append(lane)
        return Rows(self.events)


def test_a_stream_is_opened_at_its_lane_and_its_state_is_exact() -> None:
    stream, lane = Stream(), Lane(1, 2, epoch=3, seed=9)
    opening = StreamOpening(stream, lane)  # type: ignore[arg-type]
    iterator = opening.enter(None)
    next(iterator)
    assert (opening.exact, opening.stateful, opening.carry()) == (True, True, None)
    assert stream.lanes == [lane]
    assert next(opening.enter(opening.capture())) == 1
    assert stream.events == [("iterator loaded", {"done": 1})]


# Worker info


def test_get_worker_info_answers_what_was_set_and_is_put_back() -> None:
    """The one private name of torch that is touched: this fails where torch has moved it."""
    assert get_worker_info() is None
    dataset = Stateless()
    info = lane_info(2, 5, 2**64 - 1, dataset)
    outer = set_worker_info(info)
    try:
        seen = get_worker_info()
        assert seen is info
        assert (seen.id, seen.num_workers, seen.dataset) == (2, 5, dataset)
        assert 0 <= seen.seed < 2**63
        inner = set_worker_info(lane_info(0, 1, 0, dataset))
        assert inner is info
        assert get_worker_info().id == 0
        set_worker_info(inner)
        assert get_worker_info().id == 2
    finally:
        set_worker_info(outer)
    assert get_worker_info() is None


def test_worker_info_is_torchs_class_and_as_frozen() -> None:
    info = lane_info(0, 2, 7, Stateless())
    assert isinstance(info, torch_worker.WorkerInfo)
    with pytest.raises((AttributeError, RuntimeError)):
        info.id = 3
    assert "id=0" in repr(info)


@pytest.mark.parametrize("name", ["id", "num_workers", "seed"])
def test_it_is_known_whether_anybody_looked(name: str) -> None:
    """Case 11."""
    info = lane_info(0, 2, 7, Stateless())
    assert info.dataset is not None
    assert not info.looked_at
    getattr(info, name)
    assert info.looked_at
