"""The plan over lanes: who owns which, and whose turn it is."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import LaneError
from unbroken.lanes import Lane, LaneStream, Turns, lanes_of_rank, plan_lanes


def naive_order(lengths: dict[int, int], taken: dict[int, int]) -> list[int]:
    """The live lane with the fewest turns taken, the lowest number first; an exhausted lane has no more turns."""
    taken, order = dict(taken), []
    live = {lane for lane in taken if taken[lane] < lengths[lane]}
    while live:
        fewest = min(taken[lane] for lane in live)
        lane = min(lane for lane in live if taken[lane] == fewest)
        taken[lane] += 1
        order.append(lane)
        if taken[lane] == lengths[lane]:
            live.remove(lane)
    return order


def order_of(lengths: dict[int, int], taken: dict[int, int], least: int = 0) -> list[int]:
    """The same through ``Turns``, which learns of a lane's end when its turn comes."""
    turns, order = Turns(taken), []
    while turns and len(order) >= least:
        lane = turns.peek()
        if taken.get(lane, 0) + order.count(lane) == lengths[lane]:
            turns.end(lane)
        else:
            assert turns.take() == lane
            order.append(lane)
    return order


LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6)


@given(LENGTHS)
def test_turns_go_to_the_lane_with_the_fewest_and_the_lowest_number_first(lengths: list[int]) -> None:
    of = dict(enumerate(lengths))
    assert order_of(of, dict.fromkeys(of, 0)) == naive_order(of, dict.fromkeys(of, 0))


@given(LENGTHS, st.data())
def test_turns_go_on_from_those_taken_and_nothing_else(lengths: list[int], data: st.DataObject) -> None:
    """The order from any point is the rest of the order from the start."""
    of = dict(enumerate(lengths))
    whole = order_of(of, dict.fromkeys(of, 0))
    done = data.draw(st.integers(0, len(whole)))
    taken = {lane: whole[:done].count(lane) for lane in of}
    assert order_of(of, taken) == whole[done:]


@given(LENGTHS, st.integers(1, 4))
def test_ranks_together_take_the_turns_that_one_rank_takes(lengths: list[int], world: int) -> None:
    """As long as no lane has ended, and the ranks divide the lanes: the same lanes in every round."""
    lanes = world * len(lengths)
    of = dict.fromkeys(range(lanes), min(lengths))
    alone = order_of(of, dict.fromkeys(of, 0))
    ranks = [order_of(of, dict.fromkeys(lanes_of_rank(lanes, rank, world), 0)) for rank in range(world)]
    together = [lane for step in zip(*ranks, strict=True) for lane in step]
    assert together == alone


def test_nobody_s_turn_is_left_when_all_lanes_have_ended() -> None:
    turns = Turns({3: 1, 5: 0})
    assert turns
    assert turns.peek() == 5
    turns.end(5)
    turns.end(3)
    assert not turns


def test_looking_whose_turn_it_is_takes_nothing() -> None:
    turns = Turns({0: 0, 1: 0})
    assert [turns.peek(), turns.peek(), turns.take(), turns.peek(), turns.take(), turns.take()] == [0, 0, 0, 1, 1, 0]


def test_a_copy_moves_on_its_own() -> None:
    turns = Turns({0: 0, 1: 0})
    other = turns.copy()
    other.take()
    other.end(1)
    assert [turns.take(), turns.take()] == [0, 1]
    assert other.take() == 0


def test_a_lane_that_is_not_there_may_end() -> None:
    turns = Turns({0: 0})
    turns.end(7)
    assert turns.peek() == 0


# Owners


@given(st.integers(1, 60), st.integers(1, 8))
def test_every_lane_belongs_to_one_rank(lanes: int, world: int) -> None:
    owned = [lane for rank in range(world) for lane in lanes_of_rank(lanes, rank, world)]
    assert sorted(owned) == list(range(lanes))
    assert all(lane % world == rank for rank in range(world) for lane in lanes_of_rank(lanes, rank, world))


# The plan


@pytest.mark.parametrize(
    ("asked", "default", "num_workers", "world", "expected"),
    [(None, 4, 0, 1, 4), (8, 4, 0, 1, 8), (8, 1, 8, 1, 8), (8, 1, 2, 4, 8), (1, 64, 0, 1, 1), (3, 1, 0, 3, 3)],
)
def test_the_number_of_lanes_is_the_one_asked_for_or_the_default(
    asked: int | None, default: int, num_workers: int, world: int, expected: int
) -> None:
    assert plan_lanes(asked, default, num_workers, world) == expected


@pytest.mark.parametrize(
    ("lanes", "num_workers", "world", "numbers"),
    [(2, 4, 1, (2, 4)), (3, 2, 2, (3, 4)), (1, 0, 2, (1, 2)), (7, 2, 4, (7, 8))],
)
def test_fewer_lanes_than_owners_is_an_error_with_both_numbers_and_the_remedy(
    lanes: int, num_workers: int, world: int, numbers: tuple[int, int]
) -> None:
    """Case 23."""
    with pytest.raises(LaneError) as caught:
        plan_lanes(lanes, 1, num_workers, world)
    text = str(caught.value)
    assert text.startswith(f"{numbers[0]} lanes cannot keep {numbers[1]} owners busy")
    assert f"dp_world_size={world}" in text
    assert f"num_workers={num_workers}" in text
    assert f"Pass lanes={numbers[1]} or more" in text


@pytest.mark.parametrize(("lanes", "num_workers", "world"), [(2, 4, 1), (3, 2, 2), (7, 2, 4), (1, 0, 2), (1, 3, 2)])
def test_every_remedy_that_the_error_names_is_one(lanes: int, num_workers: int, world: int) -> None:
    """Case 23: with the numbers it names, the plan holds."""
    with pytest.raises(LaneError) as caught:
        plan_lanes(lanes, 1, num_workers, world)
    text = str(caught.value)
    plan_lanes(int(re.search(r"Pass lanes=(\d+)", text)[1]), 1, num_workers, world)
    if fewer := re.search(r"num_workers=(\d+) or fewer", text):
        plan_lanes(lanes, 1, int(fewer[1]), world)
    if ranks := re.search(r"at most (\d+) ranks", text):
        plan_lanes(lanes, 1, 0, int(ranks[1]))


@pytest.mark.parametrize("lanes", [0, -1, True, 2.0, "2"])
def test_a_number_of_lanes_that_is_none_is_refused(lanes: Any) -> None:
    with pytest.raises(LaneError, match=re.escape(f"lanes={lanes!r}")):
        plan_lanes(lanes, 1, 0, 1)


# The words


def test_a_lane_is_frozen_and_begins_in_epoch_0_with_seed_0() -> None:
    lane = Lane(2, 8)
    assert (lane.epoch, lane.seed) == (0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        lane.index = 3  # type: ignore[misc]


class Stream:
    default_lanes = 4

    def open(self, lane: Lane) -> Any: ...
    def describe(self) -> dict[str, Any]: ...
    def difference_class(self, field: str) -> str: ...


class FileLike:
    def open(self, mode: str) -> Any: ...


def test_a_lane_stream_is_known_by_what_it_offers() -> None:
    assert isinstance(Stream(), LaneStream)
    assert not isinstance(FileLike(), LaneStream)
