"""Batches in page-locked memory, on a machine that has none to lock for."""

from __future__ import annotations

import collections
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.engine.pinning import pin, should_pin


class Pair(NamedTuple):
    a: Any
    b: Any


class OwnPin:
    """Knows itself how it is pinned."""

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned

    def pin_memory(self) -> OwnPin:
        return OwnPin(True)


class FrozenMapping(Mapping):
    def __init__(self, inner: dict[str, Any]) -> None:
        self.inner = inner

    def __getitem__(self, name: str) -> Any:
        return self.inner[name]

    def __iter__(self) -> Any:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class FrozenSequence(Sequence):
    def __init__(self, inner: Any) -> None:
        self.inner = list(inner)

    def __getitem__(self, index: Any) -> Any:
        return self.inner[index]

    def __len__(self) -> int:
        return len(self.inner)


class OwnDict(dict):
    name = "own"


class Unmakeable(FrozenMapping):
    """Takes no mapping."""

    def __init__(self, **inner: Any) -> None:
        super().__init__(inner)


class Pinned(torch.Tensor):
    """What the accelerator of these tests gives: a copy that can be told apart."""


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self.clone().as_subclass(Pinned))


def is_pinned(value: Any) -> bool:
    return type(value) is Pinned


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(
    ("make", "find"),
    [
        (lambda t: t, lambda b: b),
        (lambda t: {"a": t, "b": 1}, lambda b: b["a"]),
        (lambda t: {"a": {"b": [t]}}, lambda b: b["a"]["b"][0]),
        (lambda t: (1, t), lambda b: b[1]),
        (lambda t: [t, "text"], lambda b: b[0]),
        (lambda t: Pair(t, None), lambda b: b.a),
        (lambda t: OwnDict(a=t), lambda b: b["a"]),
        (lambda t: collections.OrderedDict(a=t), lambda b: b["a"]),
        (lambda t: collections.defaultdict(list, a=t), lambda b: b["a"]),
        (lambda t: collections.UserDict(a=t), lambda b: b["a"]),
        (lambda t: collections.UserList([t]), lambda b: b[0]),
        (lambda t: FrozenMapping({"a": t}), lambda b: b["a"]),
        (lambda t: FrozenSequence([t]), lambda b: b[0]),
    ],
)
def test_every_tensor_in_a_batch_is_pinned_wherever_it_is(make: Any, find: Any) -> None:
    batch = make(torch.arange(3))
    pinned = pin(batch)
    assert is_pinned(find(pinned))
    assert find(pinned).tolist() == [0, 1, 2]
    assert not is_pinned(find(batch)), "the batch that came is left as it was"


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(
    "make",
    [
        lambda t: {"a": t},
        lambda t: (t,),
        lambda t: [t],
        lambda t: Pair(t, 1),
        lambda t: OwnDict(a=t),
        lambda t: collections.OrderedDict(a=t),
        lambda t: collections.defaultdict(list, a=t),
        lambda t: collections.UserList([t]),
        lambda t: FrozenMapping({"a": t}),
        lambda t: FrozenSequence([t]),
    ],
)
def test_containers_keep_their_type(make: Any) -> None:
    batch = make(torch.ones(1))
    assert type(pin(batch)) is type(batch)
    assert getattr(pin(batch), "default_factory", None) is getattr(batch, "default_factory", None)


@pytest.mark.usefixtures("accelerator")
def test_what_cannot_be_made_again_of_its_parts_is_a_plain_container() -> None:
    """As with torch."""
    assert pin(range(2)) == [0, 1]
    assert type(pin(types.MappingProxyType({"a": 1}))) is types.MappingProxyType
    assert pin(Unmakeable(a=1)) == {"a": 1}
    assert type(pin(Unmakeable(a=1))) is dict


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("value", ["text", b"bytes", 3, None, {1, 2}, 2.5])
def test_what_has_no_memory_to_pin_passes(value: Any) -> None:
    assert pin(value) == value
    assert pin([value]) == [value]


@pytest.mark.usefixtures("accelerator")
def test_what_knows_itself_how_it_is_pinned_is_asked() -> None:
    assert pin({"a": [OwnPin()]})["a"][0].pinned


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_hands_out_pinned_batches(num_workers: int) -> None:
    loader = StatefulDataLoader(ds.Numbers(6), batch_size=2, pin_memory=True, num_workers=num_workers)
    batches = list(loader)
    assert all(is_pinned(batch) for batch in batches)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    loader = StatefulDataLoader(ds.Numbers(6), batch_size=2, num_workers=num_workers)
    assert not any(is_pinned(batch) for batch in loader)


def test_without_an_accelerator_it_is_told_as_torch_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    told = []
    for kind in (DataLoader, StatefulDataLoader):
        with pytest.warns(UserWarning) as caught:
            assert [batch.tolist() for batch in kind(ds.Numbers(2), pin_memory=True)] == [[0], [1]]
        told.append(sorted({str(warning.message) for warning in caught}))
    assert told[1] == told[0]
    assert not should_pin(False)
