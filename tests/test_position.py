"""The records of the consumer: what a delivery moves, and when an anchor takes the place of the one before."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.anchor import Anchor
from unbroken.errors import InvalidState
from unbroken.lane_position import LanePosition
from unbroken.ledger import fold
from unbroken.made import Made
from unbroken.position import LanesPosition, MapPosition
from unbroken.state import seal, unseal


def turn(number: int = 1, digests: list[int] | None = None, **fields: Any) -> Made:
    """A turn of ``number`` samples."""
    return Made(list(range(number)), number, [0] if digests is None else digests, **fields)


def opened(state: str | None = None) -> Made:
    return turn(opened=(0, state))


def capture_at(at: int, state: str | None = None) -> tuple[int, str, str]:
    return at, seal(state or f"before {at}"), seal(state or f"after {at}")


def begun() -> LanePosition:
    position = LanePosition()
    position.deliver(opened(), 1)
    return position


# A turn on its way


def test_a_turn_travels_with_all_but_its_samples() -> None:
    made = Made([object(), lambda: None], 2, [1, 2], None, (2, '"a"', '"b"'), (0, '"s"'), '"c"', True, True)
    again = pickle.loads(pickle.dumps(made))
    assert again.samples == []
    made.samples = []
    assert again == made


# Counting


@given(st.lists(st.integers(1, 5), max_size=10))
def test_a_delivery_counts_its_turn_and_its_samples(sizes: list[int]) -> None:
    position = LanePosition()
    rolled = 0
    for number, size in enumerate(sizes):
        position.deliver(turn(size, [5, 100 + number], opened=None if number else (0, None)), 5)
        rolled = fold(rolled, [100 + number])
    assert (position.turns, position.delivered) == (len(sizes), sum(sizes))
    assert position.last == (99 + len(sizes) if sizes else None)
    assert position.ledger == (sum(sizes), rolled)


def test_what_was_made_and_not_delivered_moves_nothing() -> None:
    position = begun()
    before = position.to_json()
    turn(3, [5], capture=capture_at(3))
    assert position.to_json() == before


SIZES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=5)


@given(SIZES, st.integers(0, 5))
def test_the_bounds_of_batches_are_known_after_the_batch_size_changed(
    changes: list[tuple[int, int]], shorter: int
) -> None:
    """Random numbers are seeded per batch, so samples made again need the bounds of the batches they were in."""
    position, firsts = LanePosition(), set()
    for size, batches in changes:
        for _ in range(batches):
            firsts.add(position.delivered)
            position.deliver(turn(size, opened=None if position.turns else (0, None)), size)
    assert {sample for sample in range(position.delivered) if position.starts_batch(sample)} == firsts


# Anchors


def test_the_first_anchor_is_the_opening_whose_place_is_known() -> None:
    position = LanePosition()
    position.deliver(turn(2, [5], opened=(0, seal({"done": 0}))), 2)
    assert position.anchor is not None
    assert position.anchor.fixed
    assert (position.anchor.at, unseal(position.anchor.after or "")) == (0, {"done": 0})


def test_a_capture_becomes_the_anchor_when_neighbours_that_differ_have_followed() -> None:
    position = begun()
    position.deliver(turn(2, [1], capture=capture_at(3)), 2)
    assert position.anchor is not None
    assert position.anchor.at == 0
    position.deliver(turn(2, [2, 3]), 2)  # made under the random numbers of an opening when it comes again
    assert position.anchor.at == 0
    position.deliver(turn(2, [4, 5]), 2)
    assert position.anchor.at == 3
    assert unseal(position.anchor.before or "") == "before 3"
    assert unseal(position.anchor.after or "") == "after 3"


def test_the_anchor_in_use_lies_at_least_one_delivered_batch_back() -> None:
    position = begun()
    for number in range(1, 20):
        position.deliver(turn(1, [number], capture=capture_at(position.delivered + 1)), 1)
        assert position.anchor is not None
        assert position.anchor.at < position.delivered or position.delivered == 1


def test_samples_that_are_all_equal_fix_no_place() -> None:
    """Case 9: constant content."""
    position = begun()
    position.deliver(turn(2, [7, 7], capture=capture_at(3)), 2)
    for _ in range(50):
        position.deliver(turn(2, [7, 7]), 2)
    assert position.anchor is not None
    assert position.anchor.at == 0


def test_witnesses_that_are_not_neighbours_are_not_held_together() -> None:
    """Two samples that differ, with others between them that nobody looked at, tell no shift."""
    position = begun()
    position.deliver(turn(4, [1], capture=capture_at(5)), 4)
    position.deliver(turn(4, [1]), 4)
    for number in range(10):
        position.deliver(turn(4, [number % 2]), 4)
        assert position.anchor is not None
        assert position.anchor.at == 0


@given(st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(1, 3), min_size=30, max_size=30), st.data())
def test_an_anchor_is_promoted_only_when_its_witnesses_differ(
    content: list[int], numbers: list[int], data: st.DataObject
) -> None:
    """Against a naive reading: some two neighbouring digests after the anchor's first batch differ."""
    position = begun()
    told: dict[int, int] = {}
    for number, of_turn in zip(content, numbers, strict=False):
        first = position.delivered
        seen = data.draw(st.integers(1, of_turn))
        digests = [(number + i) % 2 for i in range(seen)]
        told |= dict(enumerate(digests, first + of_turn - seen))
        capture = capture_at(first + of_turn) if data.draw(st.booleans()) else None
        position.deliver(turn(of_turn, digests, capture=capture), 3)
        anchor = position.anchor
        assert anchor is not None
        if anchor.at:
            witnessed = {sample: digest for sample, digest in told.items() if sample >= anchor.at}
            assert any(witnessed[s] != witnessed[s + 1] for s in witnessed if s + 1 in witnessed)
            kept = dict(enumerate(anchor.witnesses, anchor.first_witness))
            assert all(told[sample] == digest for sample, digest in kept.items())


def test_of_exact_states_the_last_one_is_the_anchor() -> None:
    position = LanePosition(exact=True)
    position.deliver(turn(1, [7], opened=(0, '"s"')), 1)
    position.deliver(turn(1, [7], capture=(2, None, '"two"')), 1)
    assert position.anchor == Anchor(2, None, '"two"')


def test_the_witnesses_that_are_saved_are_few_and_still_differ() -> None:
    anchor = Anchor(3, '"a"', '"b"', witnesses=[1] * 30 + [2], first_witness=3)
    fields = anchor.fields()
    assert len(fields["witnesses"]) < 20
    assert len(set(fields["witnesses"])) == 2
    assert fields["first_witness"] + len(fields["witnesses"]) == 3 + 31


# Epochs


def test_the_next_epoch_begins_with_the_state_that_the_last_one_ended_with() -> None:
    position = begun()
    position.end(turn(0, [], ended=True, carry='"end"'))
    assert position.ended
    position.next_epoch('"pristine"')
    assert (position.epoch, position.turns, position.delivered, position.ended) == (1, 0, 0, False)
    assert (position.carry, position.anchor, position.newer, position.last) == ('"end"', None, [], None)


def test_a_lane_left_in_mid_epoch_begins_the_next_as_it_began() -> None:
    position = begun()
    position.next_epoch('"pristine"')
    assert position.carry == '"pristine"'
    position.next_epoch('"other"')
    assert position.carry == '"pristine"'


def test_the_ledger_counts_over_all_epochs() -> None:
    position = begun()
    position.next_epoch(None)
    position.deliver(turn(digests=[9], opened=(0, None)), 1)
    assert position.ledger == (2, fold(fold(0, [0]), [9]))


def test_lanes_that_had_begun_the_next_epoch_wait_for_the_others() -> None:
    """They came from a rank that was ahead, and have no turns until the others are there."""
    lanes = {0: LanePosition(epoch=3), 1: LanePosition(epoch=2, turns=4), 2: LanePosition(epoch=2, ended=True)}
    position = LanesPosition(lanes)
    position.settle(None)
    assert position.epoch == 2
    assert position.turns() == {1: 4}
    position.next_epoch(None)
    assert position.turns() == {0: 0, 1: 0, 2: 0}
    assert [lane.epoch for lane in lanes.values()] == [3, 3, 3]


def test_when_all_lanes_have_ended_the_next_epoch_is_on() -> None:
    position = LanesPosition({0: LanePosition(epoch=1, ended=True), 1: LanePosition(epoch=2)}, step=9)
    position.settle('"p"')
    assert [(lane.epoch, lane.ended, lane.delivered) for lane in position.lanes.values()] == [(2, False, 0)] * 2
    assert not position.mid_epoch
    assert position.began == 9


def test_a_map_style_epoch_starts_its_order_anew() -> None:
    position = MapPosition(sampler={"seed": 3})
    position.deliver(8, 5)
    position.deliver(16, 6)
    assert (position.rows, position.step, position.ledger) == (16, 2, fold(fold(0, [5]), [6]))
    assert position.mid_epoch
    position.next_epoch(None)
    assert (position.epoch, position.rows, position.step, position.began, position.sampler) == (1, 0, 2, 2, None)
    assert not position.mid_epoch


# Copies


def positions() -> Iterator[Any]:
    lanes = LanesPosition({lane: begun() for lane in (0, 2)}, step=2, run=5, epochs={"dataset": 1})
    for lane in lanes.lanes.values():
        lane.deliver(turn(1, [3], capture=capture_at(2)), 1)
    yield lanes
    cursor = begun()
    cursor.deliver(turn(1, [3], capture=capture_at(2)), 1)
    yield MapPosition(rows=4, step=1, run=5, sampler={"seed": 1}, epochs={"sampler": 2}, cursor=cursor)


def move(position: Any) -> None:
    """Everything that a run does to a position."""
    for lane in position.lanes.values() if isinstance(position, LanesPosition) else [position.cursor]:
        for number in range(4):
            lane.deliver(turn(2, [number, 9], capture=capture_at(lane.delivered + 2)), 2)
    position.step += 1
    if isinstance(position, MapPosition):
        position.deliver(8, 3)


@pytest.mark.parametrize("which", [0, 1], ids=["lanes", "map"])
@pytest.mark.parametrize("written", [False, True])
def test_a_copy_moves_on_its_own(which: int, written: bool) -> None:
    position = list(positions())[which]
    if written:  # leaves are kept once they are written
        _ = leaf_of(position)
    move(position.copy())
    assert told(position) == told(list(positions())[which])


def told(record: Any) -> Any:
    """What a record says, without what it keeps for later."""
    if dataclasses.is_dataclass(record):
        return {f.name: told(getattr(record, f.name)) for f in dataclasses.fields(record) if f.name[0] != "_"}
    if isinstance(record, dict):
        return {name: told(value) for name, value in record.items()}
    return [told(value) for value in record] if isinstance(record, list) else record


def leaf_of(position: Any) -> str:
    return position.leaves()[0] if isinstance(position, LanesPosition) else position.leaf(shared=False)


def test_equal_places_are_written_alike_however_they_came_about() -> None:
    one, other = (next(positions()) for _ in range(2))
    one.leaves()
    assert one.leaves() == other.leaves()
    assert one.leaf_of_all() == other.leaf_of_all()


def test_a_leaf_of_all_ranks_has_nothing_that_one_rank_alone_was_given() -> None:
    """Each delivers other rows, and whichever leaf is kept is the right one."""
    one, other = (list(positions())[1] for _ in range(2))
    one.deliver(8, 5)
    other.deliver(8, 6)
    assert one.leaf(shared=True) == other.leaf(shared=True)
    assert one.leaf(shared=False) != other.leaf(shared=False)


# Reading and writing


def roundtrip(position: LanesPosition) -> LanesPosition:
    leaves = [(lane, f"lane-{lane:06d}", json.loads(leaf)) for lane, leaf in position.leaves().items()]
    return LanesPosition.from_leaves(leaves, exact=False)


def test_lanes_come_back_from_their_leaves() -> None:
    position = next(positions())
    for lane in position.lanes.values():
        lane.deliver(turn(2, [4, 5], capture=capture_at(9)), 2)
        lane.newer.clear()  # what is not an anchor yet is not saved
    again = roundtrip(position)
    assert again.leaves() == position.leaves()
    assert (again.step, again.run, again.epochs) == (2, 5, {"dataset": 1})


@pytest.mark.parametrize("shared", [False, True])
def test_a_map_position_comes_back_from_its_leaf(shared: bool) -> None:
    _, position = positions()
    again = MapPosition.from_leaf(json.loads(position.leaf(shared=shared)), "place")
    assert again.leaf(shared=shared) == position.leaf(shared=shared)


def test_a_leaf_is_written_anew_after_every_move() -> None:
    position = next(positions())
    seen = {leaf_of(position)}
    for number in range(5):
        position.lanes[0].deliver(turn(1, [number]), 1)
        seen.add(leaf_of(position))
    position.lanes[0].end(turn(0, [], ended=True))
    seen.add(leaf_of(position))
    position.next_epoch(None)
    seen.add(leaf_of(position))
    assert len(seen) == 8


def fields_of(leaf: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything in a leaf but what is inside a sealed state."""
    for name in leaf if isinstance(leaf, dict) else range(len(leaf)) if isinstance(leaf, list) else ():
        yield (*path, name)
        if name not in ("before", "after", "carry", "sampler"):
            yield from fields_of(leaf[name], (*path, name))


def holder_of(leaf: Any, path: tuple[Any, ...]) -> Any:
    for name in path[:-1]:
        leaf = leaf[name]
    return leaf


LEAVES = [json.loads(leaf_of(position)) for position in positions()]
CHANGES = [(which, path) for which, leaf in enumerate(LEAVES) for path in fields_of(leaf)]


def read(which: int, leaf: Any) -> Any:
    if which == 0:
        return LanesPosition.from_leaves([(0, "lane-000000", leaf)], exact=False)
    return MapPosition.from_leaf(leaf, "place")


# Whose epochs are known depends on the user's objects, so one of them may be missing.
@pytest.mark.parametrize(("which", "path"), [c for c in CHANGES if type(c[1][-1]) is str and "epochs" not in c[1][:-1]])
def test_a_leaf_with_a_field_cut_out_is_refused(which: int, path: tuple[Any, ...]) -> None:
    """Case 27."""
    leaf = copy.deepcopy(LEAVES[which])
    del holder_of(leaf, path)[path[-1]]
    with pytest.raises(InvalidState):
        read(which, leaf)


@pytest.mark.parametrize(("which", "path"), CHANGES)
@pytest.mark.parametrize("junk", ["x", -1, 1.5, [{}], {"x": []}, True], ids=repr)
def test_a_leaf_with_another_type_in_a_field_is_refused_or_read(which: int, path: tuple[Any, ...], junk: Any) -> None:
    """Case 27: whatever stands there, no other error than the one that names the leaf."""
    leaf = copy.deepcopy(LEAVES[which])
    holder_of(leaf, path)[path[-1]] = junk
    try:
        position = read(which, leaf)
    except InvalidState:
        return
    place = position.lanes[0] if which == 0 else position.cursor
    assert all(type(n) is int and n >= 0 for n in (place.epoch, place.turns, place.delivered, *place.ledger))
    if place.anchor is not None:
        assert all(type(witness) is int for witness in place.anchor.witnesses)
    assert all(type(epoch) is int for epoch in position.epochs.values())


@pytest.mark.parametrize("path", [("sampler",), ("lane", "sizes", 0, 1)], ids=["sampler", "size"])
def test_fields_that_would_fail_later_are_refused_at_the_load(path: tuple[Any, ...]) -> None:
    """Case 27: nothing half-loaded. A sampler's state is a dict; a batch size of 0 has no bounds."""
    which = 0 if path[0] == "lane" else 1
    leaf = copy.deepcopy(LEAVES[which])
    holder_of(leaf, path)[path[-1]] = 0
    with pytest.raises(InvalidState):
        read(which, leaf)


def test_the_refusal_names_the_leaf() -> None:
    with pytest.raises(InvalidState, match="'lane-000007' of this position is cut short or changed"):
        LanePosition.from_json({}, "lane-000007", exact=False)
    with pytest.raises(InvalidState, match="'place' of this position is cut short or changed"):
        MapPosition.from_leaf({"step": 0, "began": 0, "run": 0, "epochs": {}}, "place")
