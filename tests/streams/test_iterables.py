"""``from_iterable``: a function that makes an iterable for each lane."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.streams.runs import assert_law, run, run_lanes
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.streams.reading.iterables import from_iterable


class Share:
    """The numbers below ``rows`` of one lane, each with noise; another order in each epoch."""

    def __init__(self, lane: int, lanes: int, rows: int = 100) -> None:
        self.numbers = list(range(lane, rows, lanes))
        self.at = self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, float]]:
        order = random.Random(self.epoch).sample(self.numbers, len(self.numbers)) if self.epoch else self.numbers
        while self.at < len(order):
            self.at += 1
            noise = random.random() + np.random.rand() + float(torch.rand(()))
            yield {"id": order[self.at - 1], "noise": noise}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def ids(rows: list[Any]) -> list[int]:
    return [row["id"] for row in rows]


@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(0, 3), Lane(2, 3, epoch=1), Lane(1, 2, epoch=2, seed=5)])
def test_every_restore_point_of_every_lane_and_epoch_is_exact(lane: Lane) -> None:
    rows = assert_law(from_iterable(Share), lane, [1, 0, 20, 3])
    assert sorted(ids(rows)) == list(range(lane.index, 100, lane.count))
    assert (ids(rows) == sorted(ids(rows))) == (lane.epoch == 0)


@pytest.mark.parametrize("lanes", [1, 2, 7, 200])
def test_lanes_share_out_every_row_once(lanes: int) -> None:
    found = [row for rows in run_lanes(from_iterable(Share), lanes) for row in rows]
    assert sorted(ids(found)) == list(range(100))


def test_random_numbers_differ_by_row_lane_epoch_and_seed_and_come_again() -> None:
    """Case 17."""
    stream = from_iterable(Share)
    places: list[dict[str, int]] = [{}, {"epoch": 1}, {"seed": 1}]
    noises = [row["noise"] for place in places for rows in run_lanes(stream, 2, **place) for row in rows]
    assert len(set(noises)) == len(noises) == 300
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    assert run(stream) == run(stream)


def test_iterating_leaves_the_global_generators_alone() -> None:
    """Case 18."""

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    ref = drawn(), drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = drawn()
    assert len(list(from_iterable(Share))) == 100
    assert (first, drawn()) == ref


def test_under_torchs_own_loader_a_worker_is_a_lane() -> None:
    loader = DataLoader(from_iterable(Share), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(int(row["id"]) for row in loader) == list(range(100))


def test_lists_and_generators_and_lazy_iterators_are_iterables_too() -> None:
    makers: list[Any] = [
        lambda lane, lanes: list(range(lane, 30, lanes)),
        lambda lane, lanes: (n for n in range(lane, 30, lanes)),
        lambda lane, lanes: itertools.islice(itertools.count(lane, lanes), len(range(lane, 30, lanes))),
    ]
    for maker in makers:
        assert assert_law(from_iterable(maker), Lane(1, 2), [4, 4]) == list(range(1, 30, 2))


def test_an_empty_lane_is_at_its_end() -> None:
    assert assert_law(from_iterable(lambda lane, lanes: []), Lane(0, 1), [1]) == []


def test_lineage_names_the_factory_the_lane_and_the_number_of_the_row() -> None:
    rows = from_iterable(Share).open(Lane(1, 4), lineage=True)
    assert rows.origin() == ()
    assert rows.where() == "Share, lane 1 of 4, the first row"
    next(rows), next(rows)
    assert rows.origin() == (Origin("from_iterable", "Share, lane 1 of 4", 1),)
    assert rows.where() == "Share, lane 1 of 4, row 1"
    window = from_iterable(Share).shuffle(8, seed=1).open(Lane(0, 1), lineage=True)
    for row in itertools.islice(window, 20):
        assert window.origin() == (Origin("from_iterable", "Share, lane 0 of 1", row["id"]),)


def test_the_fingerprint_is_the_factory() -> None:
    described = from_iterable(Share).describe()
    assert described["stages"] == "from_iterable"
    assert described["factory[0]"].startswith("Share:")
    assert from_iterable(Share, resume="replay").describe() == described
    assert from_iterable(lambda lane, lanes: [lane]).describe() != from_iterable(lambda lane, lanes: [lanes]).describe()
    assert from_iterable(Share).difference_class("factory[0]") == "data"
    assert repr(from_iterable(Share).shuffle(5)) == "from_iterable(Share).shuffle(window=5)"
    assert "from_iterable(Share)" in str(from_iterable(Share))


def test_a_stage_travels_to_another_process() -> None:
    assert run(pickle.loads(pickle.dumps(from_iterable(Share)))) == run(from_iterable(Share))


def test_the_position_holds_no_row_and_stays_small() -> None:
    rows = from_iterable(Share).open(Lane(0, 1))
    sizes = [len(json.dumps(rows.state_dict())) for _ in rows]
    assert max(sizes) < 500


@pytest.mark.parametrize(
    ("factory", "options", "error", "text"),
    [
        (Share(0, 1), {}, TypeError, "factory must be a function of (lane, lanes)"),
        ([1, 2], {}, TypeError, "factory must be a function of (lane, lanes)"),
        (Share, {"resume": "trust"}, ValueError, "resume must be 'checked' or 'replay', but got 'trust'"),
    ],
)
def test_wrong_arguments_fail_at_construction(factory: Any, options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        from_iterable(factory, **options)
    assert text in str(caught.value)


def test_what_cannot_be_iterated_is_named() -> None:
    with pytest.raises(TypeError, match=r"factory\(1, 3\) returned 7 \(int\), which cannot be iterated"):
        next(from_iterable(lambda lane, lanes: 7).open(Lane(1, 3)))  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        next(from_iterable(lambda lane, lanes: [1 // lane]).open(Lane(0, 3)))
