"""``at_end="repeat"``: each lane goes on with its own next epoch, and there is no end."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests import datasets as ds
from tests import strategies as draws
from tests.distributed.peers import Words, merged
from unbroken import StatefulDataLoader
from unbroken.errors import InexactDataset, LaneError
from unbroken.testing import assert_resumes_exactly

# What is told about repeated data, and torch's advice on a machine with few cores, have tests of their own.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def endless(dataset: Any, **arguments: Any) -> StatefulDataLoader:
    return StatefulDataLoader(dataset, **({"seed": 1, "at_end": "repeat"} | arguments))


def first(loader: Any, number: int) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(loader, number)]


# The law


@pytest.mark.parametrize("kind", sorted(draws.ITERABLE))
@settings(max_examples=5)
@given(rows=st.integers(2, 6), size=st.integers(1, 4), lanes=st.integers(1, 3), drop_last=st.booleans(), data=st.data())
def test_every_restore_point_of_every_dataset_is_exact(
    kind: str, rows: int, size: int, lanes: int, drop_last: bool, data: st.DataObject
) -> None:
    """Case 14: in the first epoch of a lane, in later ones, and at the borders."""
    if drop_last and rows < size:
        rows += size

    def make_loader() -> StatefulDataLoader:
        return endless(draws.ITERABLE[kind](rows * lanes), batch_size=size, lanes=lanes, drop_last=drop_last)

    chain = sorted(data.draw(st.sets(st.integers(0, 14), min_size=1, max_size=3)))
    try:
        assert_resumes_exactly(make_loader, stop_after=16, restore_points=[chain])
    except InexactDataset:
        if kind not in draws.REFUSED_OR_EXACT:
            raise
    except LaneError:
        reject()  # some make one sample of several rows, and had none


@pytest.mark.parametrize("workers", [[2, 0], [0, 1, 2]])
@pytest.mark.parametrize("dataset", [ds.Late, ds.StateOnBoth, ds.Stateless, ds.EpochCounting])
def test_workers_may_come_and_go(dataset: Any, workers: list[int]) -> None:
    """Case 20."""

    def make_loader(num_workers: int) -> StatefulDataLoader:
        return endless(dataset(14), batch_size=2, lanes=2, num_workers=num_workers)

    topologies = [{"num_workers": number} for number in workers]
    assert_resumes_exactly(make_loader, topologies=topologies, stop_after=14, restore_points=[[3, 8], 4, 9])


# The order


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=12, max_size=12),
    stretches=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(0, 7)), min_size=1, max_size=4),
)
def test_every_step_has_the_same_rows_on_any_number_of_ranks(
    lengths: list[int], stretches: list[tuple[int, int]]
) -> None:
    """Case 21: lanes take turns for ever, whichever of them begins anew; no group is needed."""
    alone = first(endless(Words(lengths), batch_size=12), sum(steps for _, steps in stretches))
    found: list[list[int]] = []
    state = None
    for world, steps in stretches:
        loaders = [
            endless(Words(lengths), batch_size=12 // world, dp_rank=rank, dp_world_size=world) for rank in range(world)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        ranks = [first(loader, steps) for loader in loaders]
        found += [[row for batch in step for row in batch] for step in zip(*ranks, strict=True)]
        state = merged([loader.state_dict() for loader in loaders])
    assert list(map(sorted, found)) == list(map(sorted, alone))


def test_lanes_take_turns_whatever_their_lengths_are() -> None:
    rows = [batch[0] for batch in first(endless(Words([2, 3, 1])), 12)]
    assert rows == [0, 100, 200, 1, 101, 200, 0, 102, 200, 1, 100, 200]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_lane_without_rows_drops_out_and_the_others_go_on(num_workers: int) -> None:
    loader = endless(Words([2, 0, 1, 0]), batch_size=2, num_workers=num_workers)
    assert first(loader, 4) == [[0, 200], [1, 200], [0, 200], [1, 200]]


def test_a_lane_that_runs_dry_later_drops_out_for_good() -> None:
    class Drying(ds.WellBehaved):
        """Lane 1 has rows in its first two epochs."""

        epoch = 0

        def __iter__(self) -> Iterator[int]:
            lane = ds.my_lane()
            while self.done < 2 and not (lane == 1 and self.epoch > 1):
                self.done += 1
                yield 100 * lane + 10 * self.epoch + self.done - 1
            self.done, self.epoch = 0, self.epoch + 1

        def state_dict(self) -> dict[str, Any]:
            return {"done": self.done, "epoch": self.epoch}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.done, self.epoch = state["done"], state["epoch"]

    def make_loader() -> StatefulDataLoader:
        return endless(Drying(4), lanes=2)

    # Its next epoch yields nothing with the state that it came to, so it begins once more as it did at first.
    rows = [batch[0] for batch in first(make_loader(), 16)]
    assert rows[:8] == [0, 100, 1, 101, 10, 110, 11, 111]
    assert_resumes_exactly(make_loader, stop_after=16)


@pytest.mark.parametrize("by_rows", [True, False], ids=["stream", "iterable"])
@pytest.mark.parametrize("ranks", [{}, {"dp_rank": 1, "dp_world_size": 2}], ids=["alone", "ranks"])
def test_lanes_that_all_have_nothing_are_an_error_and_no_endless_search(ranks: Any, by_rows: bool) -> None:
    loader = endless(Words([0, 0]) if by_rows else ds.Uneven([0, 0]), lanes=2, **ranks)
    for _ in range(2):
        with pytest.raises(LaneError, match="none has a row, or rows enough for a batch, in epoch 0"):
            next(iter(loader))


def test_what_too_large_a_batch_drops_whole_is_nothing() -> None:
    loader = endless(ds.Uneven([3, 9]), batch_size=4, lanes=2, drop_last=True)
    assert first(loader, 4) == [[100, 101, 102, 103], [104, 105, 106, 107]] * 2
    with pytest.raises(LaneError):
        next(iter(endless(ds.Uneven([3, 2]), batch_size=4, lanes=2, drop_last=True)))


# Passes


def test_a_new_pass_goes_on_where_the_last_one_stopped() -> None:
    whole = first(endless(Words([5, 3]), batch_size=2), 12)
    loader = endless(Words([5, 3]), batch_size=2)
    assert first(loader, 4) + first(loader, 5) + first(loader, 3) == whole


def test_a_length_that_was_told_is_no_promise_of_an_end() -> None:
    loader = endless(ds.WithLength(4))
    assert len(loader) == 4
    with pytest.warns(UserWarning) as caught:
        assert len(first(loader, 20)) == 20
        warnings.warn("nothing else", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["nothing else"]


def test_the_dataset_s_epoch_counts_on_with_each_lane() -> None:
    """Case 13: as if ``set_epoch`` had been called before each epoch of a lane, after a load too."""

    class Told(ds.Sized, ds.IterableDataset):
        def __init__(self, lengths: list[int]) -> None:
            super().__init__(sum(lengths))
            self.lengths, self.epoch = lengths, 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            lane = ds.my_lane()
            for row in range(self.lengths[lane]):
                yield 100 * lane + 10 * self.epoch + row

    def make_loader() -> StatefulDataLoader:
        dataset = Told([2, 3])
        dataset.set_epoch(4)
        return endless(dataset, lanes=2)

    rows = [batch[0] for batch in first(make_loader(), 12)]
    assert rows == [40, 140, 41, 141, 50, 142, 51, 150, 60, 151, 61, 152]
    assert_resumes_exactly(make_loader, stop_after=20)
    loader = make_loader()
    first(loader, 5)
    loader.dataset.set_epoch(7)
    with pytest.raises(ValueError, match="set to epoch 7 in the middle of its epoch 4"):
        iter(loader)


def test_random_numbers_of_each_epoch_are_others() -> None:
    """Case 17."""

    class Noise(ds.Stateless):
        def __iter__(self) -> Iterator[float]:
            for _ in range(self.n):
                yield float(torch.rand(()))

    numbers = [float(batch) for batch in itertools.islice(endless(Noise(3)), 12)]
    assert len(set(numbers)) == 12


def test_lanes_that_repeat_each_other_are_told_once() -> None:
    """Case 11: and not again in each of their epochs."""
    loader = endless(ds.UnawareOfWorkers(2), lanes=2)
    with pytest.warns(UserWarning, match="Lanes 0 and 1 yield the same samples") as caught:
        first(loader, 20)
    assert len(caught) == 1
