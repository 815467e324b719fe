"""``save_prefetched=True`` over queues: everything that was put is delivered once, whatever comes between."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests import datasets as ds
from tests.distributed.peers import Words, alone, merged
from tests.engine.test_any_order import any_may_answer
from tests.queues import FromQueue, Once, drop, lanes_of, make, queue_of, resumed, rows_in
from unbroken import InvalidState, StatefulDataLoader, StateMismatch, UncopyableDataset, UnsealableState

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

# Chains of saves

DEEDS = ["save", "save and load", "leave", "go on"]


def run_chain(source: Any, data: st.DataObject, most: int) -> list[int]:
    """Read to the end; now and then save, go on in another loader, or leave the iterator for another."""
    found: list[int] = []
    lanes, size = data.draw(st.sampled_from([None, 3])), data.draw(st.integers(1, 4))

    def another() -> StatefulDataLoader:
        topology: dict[str, Any] = {"num_workers": data.draw(st.integers(0, most))}
        if topology["num_workers"]:
            topology |= {
                "persistent_workers": data.draw(st.booleans()),
                "prefetch_factor": data.draw(st.integers(1, 3)),
            }
        return make(source, batch_size=size, lanes=lanes, in_order=data.draw(st.booleans()), **topology)

    loader = another()
    batches = iter(loader)
    while True:
        for _ in range(data.draw(st.sampled_from([6, 1, 2, 3, 0]))):
            batch = next(batches, None)
            if batch is None:
                loader.close()
                return found
            found += rows_in([batch])
        deed = data.draw(st.sampled_from(DEEDS))
        if deed.startswith("save"):
            state = json.loads(json.dumps(loader.state_dict()))
            assert state == loader.state_dict()
        if deed == "save and load":
            loader.close()
            loader = another()
            loader.load_state_dict(state)
        if deed in ("save and load", "leave"):
            batches = iter(loader)


@settings(max_examples=150)
@given(rows=st.integers(0, 30), data=st.data())
def test_a_chain_of_saves_delivers_everything_once(rows: int, data: st.DataObject) -> None:
    """Whoever answers first, on any number of hosts."""
    with any_may_answer(lambda number: data.draw(st.integers(0, number - 1))):
        assert sorted(run_chain(Once(rows), data, 3)) == list(range(rows))


@settings(max_examples=20, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(rows=st.integers(0, 40), data=st.data())
def test_a_chain_of_saves_over_a_real_queue_delivers_everything_once(rows: int, data: st.DataObject) -> None:
    source = queue_of(rows, ends=10)
    try:
        assert sorted(run_chain(source, data, 3)) == list(range(rows))
    finally:
        drop(source)


def test_workers_that_are_spawned_take_over_the_queue() -> None:
    source = queue_of(30, 4, "spawn")
    loader = make(source, batch_size=4, num_workers=2, multiprocessing_context="spawn")
    found = rows_in(loader, 3)
    state = loader.state_dict()
    loader.close()
    found += rows_in(resumed(state, source, batch_size=4, num_workers=1, multiprocessing_context="spawn"))
    assert sorted(found) == list(range(30))
    drop(source)


def test_what_is_in_the_position_comes_first_and_in_its_order() -> None:
    source = queue_of(40, 0)
    loader = make(source, batch_size=2, num_workers=1, prefetch_factor=4)
    batches = iter(loader)
    assert rows_in(batches, 3) == list(range(6))
    state = loader.state_dict()
    (lane,) = json.loads(state["rank-0000"])["lanes"]
    held = [turn["batch"] for turn in lane["prefetched"]]
    assert (lane["delivered"], len(held)) == (6, 4)
    loader.close()

    loader = resumed(state, source, batch_size=2, num_workers=1)
    assert json.loads(loader.state_dict()["rank-0000"])["lanes"] == [lane]  # before any iterator there is
    batches = iter(loader)
    assert rows_in(batches, 3) == list(range(6, 12))
    state = loader.state_dict()
    (lane,) = json.loads(state["rank-0000"])["lanes"]
    assert lane["delivered"] == 12
    assert lane["prefetched"][0]["batch"] == held[3]
    assert len(lane["prefetched"]) >= 2
    loader.close()
    inline = iter(resumed(state, source, batch_size=2))
    assert rows_in(inline, 14) == list(range(12, 40))
    drop(source)


def test_many_saves_in_a_row_do_not_make_the_position_grow() -> None:
    loader = make(Once(10_000), batch_size=1, lanes=4, num_workers=2, prefetch_factor=3)
    with any_may_answer(lambda number: 0):
        batches = iter(loader)
        sizes = set()
        for _ in range(100):
            next(batches)
            sizes.add(sum(len(json.loads(leaf)["lane"]["prefetched"]) for leaf in lanes_of(loader.state_dict())))
    assert max(sizes) <= 6


# What batches may hold


def kinds_of(rows: list[int]) -> dict[str, Any]:
    return {
        "ids": torch.tensor(rows, dtype=torch.bfloat16),
        "image": torch.arange(6).reshape(2, 3).T,
        "array": np.arange(3, dtype=">i2"),
        "text": [f"row {row}" for row in rows],
        "pair": (rows[0], {"deep": b"\x00\xff", 1: None}),
        "nan": float("nan"),
        "none": torch.zeros((0, 4)),
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_all_kinds_come_back_as_they_were(workers: int) -> None:
    source = Once(12) if not workers else queue_of(12, 4)
    loader = make(source, batch_size=3, num_workers=workers, collate_fn=kinds_of, lanes=2)
    found = {repr(batch) for batch in itertools.islice(loader, 1)}
    again = resumed(loader.state_dict(), source, batch_size=3, collate_fn=kinds_of, lanes=2)
    types = []
    for batch in again:
        found.add(repr(batch))
        types.append({name: (type(value), getattr(value, "dtype", None)) for name, value in batch.items()})
    assert found == {repr(kinds_of([row, row + 1, row + 2])) for row in (0, 3, 6, 9)} or workers
    assert len(found) == 4
    assert all(kinds == types[0] for kinds in types)
    if workers:
        drop(source)


class Unknown:
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows


def as_unknown(rows: list[int]) -> dict[str, Any]:
    return {"rows": [rows[0], Unknown(rows)] if rows[0] == 2 else rows}


def test_a_batch_that_cannot_be_saved_is_named_and_is_not_lost() -> None:
    source = queue_of(8, 1)
    loader = make(source, batch_size=2, num_workers=1, collate_fn=as_unknown)
    batches = iter(loader)
    assert next(batches) == {"rows": [0, 1]}
    with pytest.raises(UnsealableState, match=r"batch 1 of lane 0\['rows'\]\[1\] is a tests.test_prefetched.Unknown"):
        loader.state_dict()
    assert next(batches)["rows"][1].rows == [2, 3]
    state = loader.state_dict()
    loader.close()
    assert list(resumed(state, source, batch_size=2, collate_fn=as_unknown)) == [{"rows": [4, 5]}, {"rows": [6, 7]}]
    drop(source)


# Lanes that share a process, and a source


class WithState(FromQueue):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_source_that_cannot_be_copied_is_shared_by_the_lanes_of_a_process() -> None:
    source = queue_of(20, 3)
    loader = make(source, batch_size=2, lanes=3)
    found = rows_in(loader, 4)
    found += rows_in(resumed(loader.state_dict(), source, batch_size=2, lanes=3))
    assert sorted(found) == list(range(20))
    with pytest.raises(UncopyableDataset):
        next(iter(make(WithState(source), lanes=2)))
    drop(source)


@settings(max_examples=30)
@given(worlds=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_what_was_made_ahead_moves_with_its_lane_to_other_ranks(worlds: list[int], data: st.DataObject) -> None:
    source, state, found = Once(200), dict[str, str](), list[int]()
    with any_may_answer(lambda number: 0):
        for world in (*worlds, 1):
            ranks = [
                make(source, batch_size=2, lanes=4, num_workers=1, seed=1, dp_rank=rank, dp_world_size=world)
                for rank in range(world)
            ]
            iterators = []
            for loader in ranks:
                loader.load_state_dict(state)
                iterators.append(iter(loader))
            for _ in range(data.draw(st.integers(0, 3))):
                found += rows_in(map(next, iterators))
            state = merged([loader.state_dict() for loader in ranks])
        found += rows_in(iterators[0])
    assert sorted(found) == list(range(200))


@settings(max_examples=20)
@given(rows=st.integers(1, 40), workers=st.integers(0, 2), data=st.data())
def test_ranks_that_end_together_deliver_everything(rows: int, workers: int, data: st.DataObject) -> None:
    source = Once(rows)
    state: dict[str, str] = {}
    found: list[int] = []
    with any_may_answer(lambda number: 0):
        for _ in range(50):
            loader = make(source, batch_size=2, lanes=2, num_workers=workers, group=alone(), at_end="pad", seed=1)
            loader.load_state_dict(state)
            steps = data.draw(st.sampled_from([3, 1, 2]))
            new = rows_in(loader, steps)
            found += new
            state = loader.state_dict()
            if not new:
                break
    assert sorted(found) == list(range(rows))


# What does not go together


@pytest.mark.parametrize(
    ("dataset", "arguments", "text"),
    [
        (ds.Numbers(4), {}, "A Numbers is map-style: what was made ahead is made again"),
        (Words([4]), {}, "A Words is a stream: what was made ahead is made again after a load, and need not be"),
        (ds.WellBehaved(4), {"resume": "replay"}, 'resume="replay" makes everything again from the start of the epoch'),
        (ds.WellBehaved(4), {"on_error": "skip"}, 'on_error="skip" leaves samples out, which are lost then'),
        (
            ds.WellBehaved(4),
            {"on_timeout": "restart", "timeout": 1, "num_workers": 1},
            'on_timeout="restart" ends a worker with all that it has taken',
        ),
        (ds.WellBehaved(4), {"snapshot_every_n_steps": 2}, "saves the state of the dataset after every sample"),
        (
            ds.WellBehaved(4),
            {"group": alone(0, 2), "at_end": "stop"},
            'at_end="stop" leaves what some rank cannot fill',
        ),
    ],
)
def test_what_would_lose_or_repeat_something_is_refused(dataset: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        StatefulDataLoader(dataset, save_prefetched=True, **arguments)


def test_positions_with_and_without_what_was_made_ahead_are_not_exchanged() -> None:
    for saved in (True, False):
        loader = StatefulDataLoader(ds.WellBehaved(12), batch_size=2, save_prefetched=saved)
        next(iter(loader))
        other = StatefulDataLoader(ds.WellBehaved(12), batch_size=2, save_prefetched=not saved)
        with pytest.raises(StateMismatch, match=r"save_prefetched   saved .*data-changing"):
            other.load_state_dict(loader.state_dict(), strict=False)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda turn: turn.pop("batch"),
        lambda turn: turn.update(digests=[]),
        lambda turn: turn.update(digests=["x"]),
        lambda turn: turn.update(number=-1),
        lambda turn: turn["batch"].update(v="not base64!"),
        lambda turn: turn["batch"].update(shape=[9]),
    ],
)
def test_a_position_that_was_changed_is_refused_before_anything_is_used(spoil: Callable[[Any], Any]) -> None:
    with any_may_answer(lambda number: 0):
        loader = make(Once(20), batch_size=2, num_workers=1, prefetch_factor=2)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    leaf = json.loads(state["rank-0000"])
    spoil(leaf["lanes"][0]["prefetched"][0])
    with pytest.raises(InvalidState):
        make(Once(0), batch_size=2).load_state_dict({**state, "rank-0000": json.dumps(leaf)})
