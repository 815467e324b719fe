"""What hosts lanes, or makes batches of a map-style dataset: the same in every process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from tests import datasets as ds
from unbroken.engine.cursor import Rules
from unbroken.engine.host import Host, MapTask, Plan, RowsTask, TurnTask
from unbroken.engine.wire import decode
from unbroken.errors import UncopyableDataset
from unbroken.lane_position import LanePosition
from unbroken.seeding import isolated


@pytest.fixture(autouse=True)
def generators_put_back() -> Iterator[None]:
    """A host seeds the global generators; whoever calls it puts them back."""
    with isolated(0):
        yield


def plan_of(dataset: Any, kind: str = "map", run: int = 3, seed_by: str = "batch", **fields: Any) -> Plan:
    defaults = {"lanes": 1, "hosts": 0, "batched": True, "collate_fn": None, "worker_init_fn": None}
    return Plan(dataset=dataset, kind=kind, rules=Rules(run=run, seed_by=seed_by), **(defaults | fields))


def host_over(dataset: Any, kind: str = "map", number: int = 0, **fields: Any) -> Host:
    return Host(plan_of(dataset, kind, **fields), number, lambda *report: None)


class Noise(ds.Numbers):
    """A number of each global generator."""

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(())), np.random.rand(), random.random()


def noise(host: Host, task: MapTask) -> list[Any]:
    return [sample[1:] for sample in host.fetch(task)]


# Map-style


def test_a_batch_has_its_samples_in_the_order_of_its_indices() -> None:
    host = host_over(ds.Numbers(9))
    assert [int(sample) for sample in host.fetch(MapTask(0, 0, 1, [7, 2, 2]))] == [7, 2, 2]


def test_unbatched_the_one_sample_is_fetched_as_it_is() -> None:
    class Echo(ds.Numbers):
        def __getitem__(self, index: Any) -> Any:
            return index

    host = host_over(Echo(9), batched=False)
    assert host.fetch(MapTask(0, 0, 1, 7)) == 7
    assert host.fetch(MapTask(0, 0, 1, [7, 2])) == [7, 2]  # a batch sampler as a sampler


def test_random_numbers_are_those_of_epoch_and_place_and_of_no_process() -> None:
    """Cases 17 and 20."""
    first = noise(host_over(Noise(9)), MapTask(0, 4, 1, [1, 2]))
    for same in (
        noise(host_over(Noise(9), hosts=2, number=1), MapTask(0, 4, 1, [1, 2])),
        noise(host_over(Noise(9)), MapTask(0, 4, 1, [5, 6])),  # the indices have no part in it
    ):
        assert same == first
    for other in (
        noise(host_over(Noise(9)), MapTask(1, 4, 1, [1, 2])),
        noise(host_over(Noise(9)), MapTask(0, 2, 1, [1, 2])),
        noise(host_over(Noise(9), run=4), MapTask(0, 4, 1, [1, 2])),
    ):
        assert not set(itertools.chain(*other)) & set(itertools.chain(*first))


def test_seeded_by_sample_the_place_of_a_sample_is_all_that_counts() -> None:
    """Of a rank among two, samples lie two places apart."""
    host = host_over(Noise(20), seed_by="sample")
    one = noise(host, MapTask(0, 0, 1, [0, 1, 2, 3, 4, 5]))
    assert noise(host, MapTask(0, 2, 1, [2, 3])) == one[2:4]
    assert noise(host, MapTask(0, 1, 2, [1, 3, 5])) == one[1::2]
    assert len({str(numbers) for numbers in one}) == 6


@pytest.mark.parametrize("seed_by", ["batch", "sample"])
def test_a_dataset_that_fetches_rows_together_is_asked_that_way(seed_by: str) -> None:
    host = host_over(ds.FetchedTogether(9, source="none"), seed_by=seed_by)
    assert host.fetch(MapTask(0, 0, 1, [4, 5])) == [4, 5]


def test_a_map_style_dataset_sees_its_process_as_the_worker_and_none_inline() -> None:
    class Looks(ds.Numbers):
        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            return None if info is None else (info.id, info.num_workers, info.dataset is self)

    assert host_over(Looks(3)).fetch(MapTask(0, 0, 1, [0])) == [None]
    assert host_over(Looks(3), hosts=3, number=2).fetch(MapTask(0, 0, 1, [0])) == [(2, 3, True)]
    assert get_worker_info() is None


def test_worker_info_is_gone_again_after_an_error() -> None:
    host = host_over(ds.Numbers(3), hosts=1)
    with pytest.raises(IndexError):
        host.fetch(MapTask(0, 0, 1, [9]))
    assert get_worker_info() is None


def test_no_worker_is_seen_while_a_batch_is_collated() -> None:
    """torch would make a file in /dev/shm for every batch."""
    seen: list[Any] = []

    def collate(samples: list[Any]) -> int:
        seen.append(get_worker_info())
        return len(samples)

    host = host_over(ds.Numbers(3), hosts=1, collate_fn=collate)
    assert host.collate(host.fetch(MapTask(0, 0, 1, [0, 1]))) == 2
    assert seen == [None]


def test_the_epoch_of_a_map_style_dataset_is_set_in_the_process_that_reads_it() -> None:
    class Epochs(ds.Numbers):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> Any:
            return self.epoch, index

    host = host_over(Epochs(4), hosts=1)
    host.open(5, 2, {})
    assert host.fetch(MapTask(5, 0, 1, [1])) == [(2, 1)]


# Collation


@pytest.mark.parametrize("collate_fn", [None, list])
@pytest.mark.parametrize("put_off", [True, False])
def test_what_is_encoded_arrives_as_what_is_collated(collate_fn: Any, put_off: bool) -> None:
    host = host_over(ds.Numbers(9), collate_fn=collate_fn)
    samples = host.fetch(MapTask(0, 0, 1, [3, 1]))
    encoded = host.encode(samples, put_off=put_off)
    memory = np.zeros(encoded.nbytes, np.uint8)
    encoded.write(memory)
    again, batch = decode(encoded.data, memory), host.collate(samples)
    assert type(again) is type(batch)
    assert [int(value) for value in again] == [int(value) for value in batch] == [3, 1]


def test_unbatched_samples_are_converted_as_torch_does() -> None:
    host = host_over(ds.Numbers(9), batched=False)
    assert isinstance(host.collate(np.arange(3)), torch.Tensor)
    assert host.collate("text") == "text"


# Lanes


def test_each_lane_of_one_process_has_a_copy_and_a_single_one_the_object_itself() -> None:
    seen: list[Any] = []

    class Noted(ds.WellBehaved):
        def __iter__(self) -> Iterator[Any]:
            seen.append(self)
            return super().__iter__()

    dataset = Noted(6)
    host = host_over(dataset, "iterable")
    host.open(0, None, {0: LanePosition()})
    host.turn(TurnTask(0, 2))
    assert seen == [dataset]
    seen.clear()
    host = host_over(dataset, "iterable", lanes=2)
    host.open(0, None, {0: LanePosition(), 1: LanePosition()})
    for lane in (0, 1):
        host.turn(TurnTask(lane, 2))
    assert len({id(copy) for copy in (*seen, dataset)}) == 3


def test_a_lane_keeps_its_copy_over_epochs() -> None:
    host = host_over(ds.EpochCounting(6), "iterable", lanes=2)
    orders: dict[int, list[Any]] = {0: [], 1: []}
    starts = {0: LanePosition(), 1: LanePosition()}
    for epoch in range(2):
        host.open(epoch, None, starts)
        for lane in (0, 1):
            made = host.turn(TurnTask(lane, 9))
            orders[lane].append(sorted(made.samples))
            starts[lane].end(host.turn(TurnTask(lane, 9)))
            starts[lane].next_epoch(None)
    assert orders == {0: [[0, 2, 4]] * 2, 1: [[1, 3, 5]] * 2}


def test_a_dataset_that_cannot_be_copied_is_refused_where_several_lanes_would_share_it() -> None:
    class Open(ds.WellBehaved):
        def __init__(self, n: int) -> None:
            super().__init__(n)
            self.rows = (i for i in range(n))

    host_over(Open(3), "iterable", hosts=2, lanes=2).open(0, None, {1: LanePosition()})
    with pytest.raises(UncopyableDataset, match=r"Several lanes of .*Open share one process"):
        host_over(Open(3), "iterable", lanes=2).open(0, None, {0: LanePosition(), 1: LanePosition()})


def test_worker_init_is_called_once_for_each_lane_or_process_with_its_own_random_numbers() -> None:
    called: list[Any] = []

    def init(number: int) -> None:
        info = get_worker_info()
        called.append((number, info.id, float(torch.rand(()))))

    host = host_over(ds.WellBehaved(6), "iterable", hosts=1, lanes=4, worker_init_fn=init)
    for epoch in range(2):
        host.open(epoch, None, {1: LanePosition(), 3: LanePosition()})
    host_over(ds.Numbers(6), hosts=2, number=1, worker_init_fn=init)
    assert [call[:2] for call in called] == [(1, 1), (3, 3), (1, 1)]
    assert called[0][2] != called[1][2]


def test_inline_a_map_style_dataset_has_no_worker_to_initialise() -> None:
    def init(number: int) -> None:
        raise AssertionError("torch does not call it either")

    host_over(ds.Numbers(6), worker_init_fn=init).fetch(MapTask(0, 0, 1, [1]))


# Words for messages


def test_a_task_is_named_by_what_it_was_about() -> None:
    host = host_over(ds.WellBehaved(9), "iterable", lanes=2)
    host.open(0, None, {1: LanePosition()})
    host.turn(TurnTask(1, 2))
    assert host.where(TurnTask(1, 2)) == "lane 1, sample 2"
    assert host.where(TurnTask(0, 2)) == "a batch of lane 0"
    assert host.where(MapTask(2, 6, 1, [7, 8])) == "indices [7, 8] (from place 6 of epoch 2)"
    assert "lanes [0, 3]" in host.where(RowsTask(((0, 0), (3, 1)), 2, None))


def test_a_long_list_of_indices_is_cut_and_counted() -> None:
    text = str(MapTask(0, 0, 1, list(range(1000))))
    assert len(text) < 120
    assert "(1000 of them)" in text
