"""Cases 20 to 24: other numbers of workers and ranks, lanes that fit and lanes that do not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests import datasets as ds
from tests import strategies as draws
from unbroken import StatefulDataLoader
from unbroken.errors import LaneError, StateError, StateMismatch, UnbrokenError
from unbroken.testing import Point, assert_resumes_exactly

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def stopped_after(loader: StatefulDataLoader, k: int) -> dict[str, str]:
    iterator = iter(loader)
    for _ in range(k):
        next(iterator)
    state = loader.state_dict()
    loader.close()
    return state


def rows_of(loader: StatefulDataLoader) -> list[int]:
    return [row for batch in loader for row in batch.tolist()]


# Case 20


@pytest.mark.parametrize("after", [0, 1, 3, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("kind", ["late", "live buffer", "without state", "numbers"])
def test_what_two_workers_saved_goes_on_with_any_number(kind: str, after: int) -> None:
    """Case 20: the same batches in the same order, lanes unsaid on both sides."""

    def make_loader(num_workers: int) -> StatefulDataLoader:
        dataset = ds.Numbers(30) if kind == "numbers" else draws.EXACT[kind](30)
        return StatefulDataLoader(dataset, batch_size=3, num_workers=num_workers)

    topologies = [{"num_workers": 2}, {"num_workers": after}]
    assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[3, [Point(1, 2)], [2, 4]], epochs=2)


@pytest.mark.parametrize("before", [0, 1])
def test_what_few_workers_saved_goes_on_with_more(before: int) -> None:
    """Case 20: the number of lanes is adopted from the position; workers without one have nothing to do."""

    def make_loader(num_workers: int) -> StatefulDataLoader:
        return StatefulDataLoader(ds.Late(30), batch_size=3, num_workers=num_workers)

    topologies = [{"num_workers": before}, {"num_workers": 3}]
    assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[4, [4, 6]], epochs=1)


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["live buffer", "epoch counted", "permutation on opening, numpy"])
def test_the_order_is_a_function_of_the_lanes(kind: str, workers: int) -> None:
    """Case 20: never of the processes; in several epochs."""

    def batches(num_workers: int) -> list[Any]:
        loader = StatefulDataLoader(draws.EXACT[kind](40), batch_size=2, lanes=5, num_workers=num_workers, seed=1)
        return [batch if isinstance(batch, list) else batch.tolist() for _ in range(2) for batch in loader]

    assert repr(batches(workers)) == repr(batches(5))


# Case 22


@pytest.mark.parametrize("worlds", [(3, 5), (5, 3), (4, 1), (1, 4)])
def test_ranks_that_do_not_divide_the_lanes_lose_and_repeat_nothing(worlds: tuple[int, int]) -> None:
    """Case 22: eight lanes."""

    def make_loader(dp_rank: int, dp_world_size: int) -> StatefulDataLoader:
        return StatefulDataLoader(
            ds.Late(8 * 9), batch_size=2, seed=1, lanes=8, dp_rank=dp_rank, dp_world_size=dp_world_size
        )

    topologies = [{"dp_world_size": world} for world in worlds]
    assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[0, 1, 2, 4], epochs=1)


@pytest.mark.parametrize("num_workers", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("worlds", [(4, 4), (4, 3), (4, 1)])
def test_seven_files_keep_four_ranks_of_three_workers_busy(worlds: tuple[int, int], num_workers: int) -> None:
    """Case 22: twelve lanes, five of them empty."""

    def make_loader(dp_rank: int, dp_world_size: int) -> StatefulDataLoader:
        return StatefulDataLoader(
            ds.Files([5, 9, 3, 8, 6, 7, 4]),
            batch_size=1,
            seed=1,
            lanes=12,
            num_workers=num_workers,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
        )

    topologies = [{"dp_world_size": world} for world in worlds]
    assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[0, 1, 3], epochs=1, compare="rows")


def test_one_big_file_keeps_eight_owners_busy() -> None:
    """Case 22: eight ranks, each with a lane of its own."""

    def make_loader(dp_rank: int, dp_world_size: int) -> StatefulDataLoader:
        dataset = ds.WellBehaved(80)
        return StatefulDataLoader(dataset, batch_size=2, lanes=8, dp_rank=dp_rank, dp_world_size=dp_world_size)

    for after in (8, 4, 2):
        topologies = [{"dp_world_size": 8}, {"dp_world_size": after}]
        assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[1, 3], epochs=1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("lengths", [[7, 1, 4], [0, 5, 3], [1, 1, 9]])
def test_lanes_of_any_length_are_exact(lengths: list[int], num_workers: int) -> None:
    """Case 22: lanes that end early have no more turns."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.Uneven(lengths), batch_size=2, lanes=3, num_workers=num_workers)

    assert_resumes_exactly(make_loader, epochs=1)


def test_the_turn_goes_to_the_lane_with_the_fewest_turns() -> None:
    """Case 22: lowest number first."""
    loader = StatefulDataLoader(ds.Uneven([3, 1, 2]), batch_size=1, lanes=3)
    assert rows_of(loader) == [0, 100, 200, 1, 201, 2]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("worlds", [(1, 2), (2, 1), (4, 2), (2, 4), (3, 1)])
def test_every_step_of_a_map_style_dataset_has_the_same_rows(worlds: tuple[int, int], shuffle: bool) -> None:
    """Case 21, in one process: where the sizes divide the global batch."""

    def make_loader(dp_rank: int, dp_world_size: int) -> StatefulDataLoader:
        return StatefulDataLoader(
            ds.Numbers(48),
            batch_size=12 // dp_world_size,
            shuffle=shuffle,
            seed=1,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
        )

    topologies = [{"dp_world_size": world} for world in worlds]
    assert_resumes_exactly(make_loader, topologies=topologies, epochs=2, compare="steps")


@pytest.mark.parametrize("batch_sampler", [ds.BatchesWithState, ds.BatchesWithoutState])
def test_batches_of_a_batch_sampler_are_dealt_to_ranks(batch_sampler: Any) -> None:
    """Case 21, in one process: batch j belongs to rank j mod dp_world_size."""

    def make_loader(dp_rank: int, dp_world_size: int) -> StatefulDataLoader:
        return StatefulDataLoader(
            ds.Numbers(24), batch_sampler=batch_sampler(24), seed=1, dp_rank=dp_rank, dp_world_size=dp_world_size
        )

    alone = [batch.tolist() for batch in StatefulDataLoader(ds.Numbers(24), batch_sampler=batch_sampler(24))]
    for rank in range(3):
        assert [batch.tolist() for batch in make_loader(rank, 3)] == alone[rank::3]
    topologies = [{"dp_world_size": 3}, {"dp_world_size": 2}]
    assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[0, 1, 2], epochs=1)


# Case 23


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ({"lanes": 2, "num_workers": 3}, r"2.*3"),
        ({"lanes": 3, "dp_rank": 0, "dp_world_size": 4}, r"3.*4"),
        ({"lanes": 3, "num_workers": 2, "dp_rank": 0, "dp_world_size": 2}, r"3.*4"),
    ],
)
def test_too_few_lanes_are_an_error_that_says_what_to_set(arguments: dict[str, Any], numbers: str) -> None:
    """Case 23: with both numbers."""
    with pytest.raises(LaneError, match=rf"(?s){numbers}.*(lanes=|num_workers=)"):
        iter(StatefulDataLoader(ds.WellBehaved(20), **arguments))


def test_a_rank_without_any_row_is_an_error() -> None:
    """Case 23: two rows on three ranks."""
    with pytest.raises(LaneError, match=r"(?s)2.*3|3.*2"):
        iter(StatefulDataLoader(ds.Numbers(2), dp_rank=2, dp_world_size=3))


@pytest.mark.parametrize("strict", [True, False])
def test_other_lanes_than_saved_are_an_error_in_mid_epoch(strict: bool) -> None:
    """Case 23: with both numbers, strict or not; nothing is dropped in silence."""
    state = stopped_after(StatefulDataLoader(ds.WellBehaved(40), batch_size=2, lanes=4, seed=1), 3)
    loader = StatefulDataLoader(ds.WellBehaved(40), batch_size=2, lanes=6, seed=1)
    with pytest.raises((LaneError, StateError), match=r"(?s)4.*6|6.*4"):
        loader.load_state_dict(state, strict=strict)
    assert rows_of(loader) == rows_of(StatefulDataLoader(ds.WellBehaved(40), batch_size=2, lanes=6, seed=1))


@pytest.mark.parametrize("arguments", [{"dp_rank": 2, "dp_world_size": 2}, {"dp_rank": 0, "dp_world_size": 0}])
@pytest.mark.parametrize("dataset", [ds.WellBehaved, ds.Numbers])
def test_ranks_that_cannot_be_are_an_error(dataset: Any, arguments: dict[str, Any]) -> None:
    """Case 23."""
    with pytest.raises((UnbrokenError, ValueError), match="dp_"):
        StatefulDataLoader(dataset(20), **arguments)


# Case 24


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_go_on_where_they_stopped_with_another_batch_size(shuffle: bool) -> None:
    """Case 24: map-style."""

    def make_loader(batch_size: int) -> StatefulDataLoader:
        return StatefulDataLoader(ds.Numbers(40), batch_size=batch_size, shuffle=shuffle, seed=1)

    reference = rows_of(make_loader(4))
    for k in (1, 3, 5):
        loader = make_loader(6)
        loader.load_state_dict(stopped_after(make_loader(4), k))
        batches = [batch.tolist() for batch in loader]
        assert [row for batch in batches for row in batch] == reference[4 * k :]
        assert len(batches[0]) == 6
    topologies = [{"batch_size": 4}, {"batch_size": 6}, {"batch_size": 1}]
    assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[1, [2, 3], [2, 3, 5]], compare="rows")


@pytest.mark.parametrize("kind", ["well-behaved", "late", "live buffer", "random content, torch"])
def test_rows_of_one_lane_go_on_with_another_batch_size(kind: str) -> None:
    """Case 24: iterable; and saved again soon after."""

    def make_loader(batch_size: int) -> StatefulDataLoader:
        return StatefulDataLoader(draws.EXACT[kind](40), batch_size=batch_size, seed_by="sample", seed=1)

    topologies = [{"batch_size": 4}, {"batch_size": 3}, {"batch_size": 2}]
    assert_resumes_exactly(
        make_loader, topologies=topologies, restore_points=[1, [2, 3], [1, 2, 5]], epochs=1, compare="rows"
    )


def test_another_batch_size_of_several_lanes_is_accepted_by_name_only(caplog: pytest.LogCaptureFixture) -> None:
    """Case 24: the order of their batches would be another; what was accepted is said."""

    def make_loader(batch_size: int) -> StatefulDataLoader:
        return StatefulDataLoader(ds.WellBehaved(40), batch_size=batch_size, lanes=2, seed=1)

    state = stopped_after(make_loader(4), 3)
    with pytest.raises(StateMismatch, match=r"batch_size +saved 4 +now 5 +\(order-changing\)"):
        make_loader(5).load_state_dict(state)
    loader = make_loader(5)
    loader.load_state_dict(state, strict=False)
    assert re.search(r"batch_size +saved 4 +now 5", caplog.text)
    delivered = sorted(rows_of(make_loader(4))[:12])
    assert sorted(delivered + rows_of(loader)) == list(range(40))


def test_the_leaves_of_all_ranks_can_be_merged_and_belong_together() -> None:
    """Case 22: leaves of different steps are refused."""

    def make_loader(rank: int) -> StatefulDataLoader:
        return StatefulDataLoader(ds.WellBehaved(40), batch_size=2, lanes=4, seed=1, dp_rank=rank, dp_world_size=2)

    states = [stopped_after(make_loader(rank), 2) for rank in range(2)]
    assert lanes_in(states[0]) == {0, 2} and lanes_in(states[1]) == {1, 3}
    assert states[0]["unbroken"] == states[1]["unbroken"]
    with pytest.raises(StateError, match="step"):
        make_loader(0).load_state_dict({**states[0], **stopped_after(make_loader(1), 3)})
    with pytest.raises(StateError, match="lane"):
        StatefulDataLoader(ds.WellBehaved(40), batch_size=2, lanes=4, seed=1).load_state_dict(states[0])


def test_leaves_of_two_saves_across_the_end_of_an_epoch_are_refused() -> None:
    """Case 22: one rank saved when its epoch had ended, the other two steps into the next."""

    def state_of(rank: int, k: int) -> dict[str, str]:
        loader = StatefulDataLoader(ds.WellBehaved(40), batch_size=2, lanes=4, seed=1, dp_rank=rank, dp_world_size=2)
        assert len(list(loader)) == 10
        return stopped_after(loader, k) if k else loader.state_dict()

    loader = StatefulDataLoader(ds.WellBehaved(40), batch_size=2, lanes=4, seed=1, dp_rank=0, dp_world_size=1)
    loader.load_state_dict({**state_of(0, 0), **state_of(1, 0)})
    with pytest.raises(StateError, match="step"):
        loader.load_state_dict({**state_of(0, 0), **state_of(1, 2)})


def lanes_in(state: Mapping[str, str]) -> set[int]:
    assert all(json.loads(value) for value in state.values())
    return {int(key.removeprefix("lane-")) for key in state if key.startswith("lane-")}
