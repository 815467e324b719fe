"""Loaders of any make: where their state is found, and how it is put back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import grain.python as grain
import pytest
import torch
from datasets import Dataset
from torchdata.nodes import Batcher, Loader, SamplerWrapper

from tests import datasets
from tests.audit import victims
from unbroken.audit.subject import Subject
from unbroken.errors import AuditError


def grain_dataset() -> Any:
    return grain.MapDataset.range(40).shuffle(seed=1).batch(4).to_iter_dataset()


def nodes() -> Any:
    return Loader(Batcher(SamplerWrapper(torch.utils.data.SequentialSampler(range(40))), batch_size=4))


def single() -> Any:
    return Batcher(SamplerWrapper(torch.utils.data.SequentialSampler(range(40))), batch_size=4)


def huggingface() -> Any:
    return Dataset.from_dict({"row": list(range(40))}).to_iterable_dataset().batch(4)


def plain_torch() -> Any:
    return torch.utils.data.DataLoader(datasets.WellBehaved(40), batch_size=4)


MAKES = [grain_dataset, nodes, single, huggingface, plain_torch, victims.well_behaved, victims.exact]


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_each_kind_of_loader_is_resumed_by_its_own_state(make: Callable[[], Any]) -> None:
    subject = Subject(make())
    for _ in range(3):
        subject.fetch()
    state = subject.state()
    expected = [str(subject.fetch()) for _ in range(4)]
    again = Subject(make(), epoch=subject.epoch)
    again.load(state)
    assert [str(again.fetch()) for _ in range(4)] == expected
    subject.close()
    again.close()


def test_epochs_follow_one_another_and_are_counted() -> None:
    subject = Subject(victims.exact())
    batches = [(subject.fetch(), subject.epoch) for _ in range(25)]
    assert [epoch for _, epoch in batches] == [0] * 10 + [1] * 10 + [2] * 5


def test_a_node_by_itself_is_reset_between_epochs() -> None:
    subject = Subject(single())
    assert len([subject.fetch() for _ in range(25)]) == 25
    assert subject.epoch == 2


def test_a_loader_that_stays_at_its_end_has_ended() -> None:
    subject = Subject(victims.short())
    assert len(list(itertools.islice(iter(subject.fetch, None), 5))) == 5
    with pytest.raises(StopIteration):
        subject.fetch()


def test_what_is_no_loader_or_has_no_state_is_refused_with_what_to_do() -> None:
    with pytest.raises(AuditError, match="The factory returned an object of type int, which is no loader"):
        Subject(7)
    with pytest.raises(AuditError, match="has no state: there is no state_dict and load_state_dict") as caught:
        Subject(victims.stateless()).fetch()
    assert "tests.audit.victims.Stateless" in str(caught.value)
