"""``in_order=False`` on worker processes: one that is slow does not hold up the others, and nothing is lost for it."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from tests import datasets as ds
from tests.distributed.peers import Words, on_ranks
from unbroken import StatefulDataLoader, StateMismatch

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
SECONDS = 30


class SlowRow(Dataset):
    """Row 0 comes when the gate is open."""

    def __init__(self, n: int, gate: Any) -> None:
        self.n, self.gate = n, gate

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index == 0:
            self.gate.wait(SECONDS)
        return index


class SlowLane(ds.Uneven):
    """The first row of lane 0 comes when the gate is open."""

    def __init__(self, lengths: list[int], gate: Any) -> None:
        super().__init__(lengths)
        self.gate = gate

    def __iter__(self) -> Iterator[int]:
        for row in super().__iter__():
            if row == 0:
                self.gate.wait(SECONDS)
            yield row


class Gate:
    """Shut until it is opened, in all processes; unlike an Event it does not mind that one who waits is killed."""

    def __init__(self) -> None:
        self.ends = os.pipe()

    def wait(self, seconds: float) -> None:
        select.select([self.ends[0]], [], [], seconds)

    def set(self) -> None:
        os.write(self.ends[1], b".")


@pytest.fixture
def gate() -> Iterator[Gate]:
    yield (gate := Gate())
    for end in gate.ends:
        os.close(end)


def make(dataset: Any, **arguments: Any) -> StatefulDataLoader:
    if arguments.get("num_workers"):
        arguments = {"multiprocessing_context": "fork"} | arguments
    return StatefulDataLoader(dataset, **arguments)


def some(batches: Iterator[Any], number: int) -> list[list[int]]:
    return [next(batches).tolist() for _ in range(number)]


def test_a_slow_row_of_a_map_style_dataset_holds_nobody_up(gate: Any) -> None:
    """Case 40. In the second run another worker has it, or none has."""
    dataset = SlowRow(40, gate)
    loader = make(dataset, batch_size=2, num_workers=2, prefetch_factor=1, in_order=False)
    found = some(iter(loader), 9)
    assert [0, 1] not in found
    state = json.loads(json.dumps(loader.state_dict()))
    leaf = json.loads(state["rank-0000"])
    assert (leaf["rows"], leaf["step"], leaf["beyond"]) == (0, 9, [[1, 9]])
    loader.close()
    gate.set()

    again = make(dataset, batch_size=2, num_workers=1, in_order=False)
    again.load_state_dict(state)
    rest = [batch.tolist() for batch in again]
    assert rest == [[0, 1], *([row, row + 1] for row in range(20, 40, 2))]
    assert sorted(found + rest) == [[row, row + 1] for row in range(0, 40, 2)]
    assert len(list(again)) == 20


@pytest.mark.parametrize("workers", [2, 3])
def test_a_slow_lane_holds_nobody_up_and_takes_no_part_of_the_others(gate: Any, workers: int) -> None:
    dataset = SlowLane([12, 12, 12], gate)
    loader = make(dataset, batch_size=2, num_workers=workers, lanes=3, in_order=False, prefetch_factor=1)
    batches = iter(loader)
    others = some(batches, 12 if workers == 3 else 6)
    assert all(batch[0] >= 100 for batch in others)
    assert len(others) == (12 if workers == 3 else 6)  # all that is not behind the slow one
    state = loader.state_dict()
    gate.set()
    loader.close()
    again = make(dataset, batch_size=2, lanes=3)
    again.load_state_dict(state)
    rows = [row for batch in [*others, *(batch.tolist() for batch in again)] for row in batch]
    assert sorted(rows) == [100 * lane + row for lane in range(3) for row in range(12)]


def test_a_position_with_holes_is_for_the_same_steps(gate: Any) -> None:
    loader = make(SlowRow(40, gate), batch_size=2, num_workers=2, in_order=False)
    some(iter(loader), 3)
    state = loader.state_dict()
    loader.close()
    other = make(ds.Numbers(40), batch_size=4)
    with pytest.raises(StateMismatch):  # another dataset
        other.load_state_dict(state)
    gate.set()
    for arguments, text in (
        ({"batch_size": 4}, "batch_size     saved 2   now 4"),
        ({"batch_size": 2, "dp_rank": 0, "dp_world_size": 1}, "dp arguments   saved not given   now given"),
    ):
        other = make(SlowRow(40, gate), **arguments)
        for strict in (True, False):
            with pytest.raises(StateMismatch, match=text):
                other.load_state_dict(state, strict)
        assert len(list(other)) == 40 // arguments["batch_size"]


def test_without_holes_the_batch_size_may_change(gate: Any) -> None:
    gate.set()
    loader = make(SlowRow(40, gate), batch_size=2, in_order=False)
    some(iter(loader), 3)
    other = make(SlowRow(40, gate), batch_size=4)
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist()[0] for batch in other] == [6, 10, 14, 18, 22, 26, 30, 34, 38]


@pytest.mark.parametrize(
    "arguments",
    [
        {"dp_rank": 0, "dp_world_size": 2},
        {"dp_rank": 0, "dp_world_size": 1},
        {"sampler": DistributedSampler(range(10), 2, 0)},
    ],
)
def test_ranks_that_share_a_place_deliver_in_order(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Leave in_order out, or the arguments that share it out"):
        StatefulDataLoader(ds.Numbers(10), in_order=False, **arguments)


@pytest.mark.parametrize("dataset", [ds.WellBehaved(24), Words([8, 8, 8])], ids=["iterable", "stream"])
def test_in_the_training_process_and_for_streams_the_order_is_that_of_turns(dataset: IterableDataset) -> None:
    workers = 0 if isinstance(dataset, ds.WellBehaved) else 2
    orders = [
        [batch.tolist() for batch in make(dataset, batch_size=3, lanes=3, num_workers=workers, in_order=in_order)]
        for in_order in (True, False)
    ]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("at_end", ["stop", "pad"])
def test_ranks_that_end_together_may_deliver_out_of_order(at_end: str) -> None:
    """Votes count batches, whichever they are."""

    def act(peer: Any) -> list[list[int]]:
        found = []
        loader = make(
            ds.Uneven([7, 3, 6, 5]), batch_size=2, lanes=4, group=peer, at_end=at_end, num_workers=2, in_order=False
        )
        for batch in loader:
            peer.train()
            found.append(batch.tolist())
        return found

    ranks = on_ranks(2, act)
    assert len(ranks[0]) == len(ranks[1])
    rows = [row for batches in ranks for batch in batches for row in batch]
    assert len(rows) == len(set(rows))
    if at_end == "pad":
        assert sorted(rows) == [*range(7), *range(100, 103), *range(200, 206), *range(300, 305)]
