"""The last batches by the objects they are, and the way back to where the position was after each."""

from __future__ import annotations

import collections
import dataclasses
import enum
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.datasets import Pair
from unbroken.anchor import Anchor
from unbroken.lane_position import LanePosition
from unbroken.made import Made, Turn
from unbroken.position import LanesPosition, MapPosition, Position
from unbroken.skipped import Skipped
from unbroken.steps import Ranges
from unbroken.trail import LENGTH, Trail, check_made_again


@dataclasses.dataclass
class Sample:
    x: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    """Takes no weak reference, and is no container that anybody knows."""

    x: torch.Tensor


class Kind(enum.Enum):
    CAT = 1


def tensor() -> torch.Tensor:
    return torch.zeros(3)


# How objects of each kind are made. Some are watched by a weak reference to them or to a part of them; the others held.
WATCHED: dict[str, Callable[[], Any]] = {
    "tensor": tensor,
    "array": lambda: np.zeros(3),
    "dataclass": lambda: Sample(tensor()),
    "dataclass with slots": lambda: Slotted(tensor()),
    "set": lambda: {1, 2},
    "dict": lambda: {"x": tensor(), "y": 1},
    "dict of a class": lambda: collections.defaultdict(list, {"name": "a", "x": tensor()}),
    "ordered dict": lambda: collections.OrderedDict(x=1),
    "list": lambda: [tensor(), tensor()],
    "list, numbers first": lambda: [1, 2.0, "a", None, tensor()],
    "list of a dataclass": lambda: [Sample(tensor()), Sample(tensor())],
    "list of a dataclass with slots": lambda: [Slotted(tensor()), 1],
    "tuple": lambda: (1, tensor()),
    "namedtuple": lambda: Pair("image", np.zeros(2)),
    "nested": lambda: {"names": ["a"] * 50, "kind": Kind.CAT, "deep": [1, {"b": (tensor(), "c")}]},
}
HELD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "number": lambda: 7,
    "text": lambda: "".join(["row ", "one"]),
    "bytes": lambda: bytes([1, 2, 3, 4]),
    "list of numbers": lambda: [1, 2, 3],
    "empty dict": dict,
    "dict of texts": lambda: {"name": "a", "kind": Kind.CAT, "type": int, "function": tensor},
}


def trail_of(*batches: Any) -> tuple[Trail, MapPosition]:
    """A trail after these batches, with as many steps in the position after each as were delivered."""
    trail, position = Trail(), MapPosition()
    for number, batch in enumerate(batches):
        position.deliver(2 * number + 2, number)
        trail.note(batch, position)
    return trail, position


def step_after(trail: Trail, batch: Any) -> int:
    return trail.find(batch)[0].step


# Objects


@pytest.mark.parametrize("kind", [*WATCHED, *HELD])
def test_a_batch_of_any_kind_is_known_by_the_object_that_it_is(kind: str) -> None:
    make = (WATCHED | HELD)[kind]
    batch = make()
    trail, _ = trail_of(tensor(), batch, tensor())
    assert step_after(trail, batch) == 2
    other = make()
    if other is not batch:
        with pytest.raises(ValueError, match="none of the last 16"):
            trail.find(other)


@pytest.mark.parametrize("kind", WATCHED)
def test_no_tensor_is_kept_alive(kind: str) -> None:
    batch = WATCHED[kind]()
    held: list[Any] = []

    def watch(value: Any) -> None:
        if isinstance(value, torch.Tensor | np.ndarray):
            held.append(weakref.ref(value))
        elif isinstance(value, dict):
            [watch(part) for part in value.values()]
        elif isinstance(value, list | tuple):
            [watch(part) for part in value]
        elif isinstance(value, Sample | Slotted):
            watch(value.x)

    watch(batch)
    assert held or kind in ("set", "ordered dict")
    trail, _ = trail_of(batch)
    del batch
    assert [ref() for ref in held] == [None] * len(held)
    assert trail  # it is still there, and holds nothing


@pytest.mark.parametrize("keep_part", [False, True], ids=["all freed", "the tensor kept"])
def test_an_id_that_is_used_again_is_not_taken_for_the_batch(keep_part: bool) -> None:
    part = tensor()
    batch = {"x": part}
    trail, _ = trail_of(batch)
    number = id(batch)
    if not keep_part:
        del part
    del batch
    others = []
    while not others or id(others[-1]) != number:
        others.append({"x": tensor()})
        assert len(others) < 100_000
    with pytest.raises(ValueError, match="none of the last 16"):
        trail.find(others[-1])


def test_numbers_that_are_held_keep_their_id() -> None:
    trail, _ = trail_of([1, 2, 3])
    for _ in range(1000):
        with pytest.raises(ValueError, match="none of the last 16"):
            trail.find([1, 2, 3])


def test_a_batch_may_be_changed_in_place() -> None:
    batch = {"x": tensor(), "y": tensor()}
    trail, _ = trail_of(batch, tensor())
    labels = batch.pop("y")
    batch["z"], batch["x"] = labels, batch.pop("x")
    assert step_after(trail, batch) == 1


def test_a_batch_of_which_no_tensor_is_left_is_no_longer_known() -> None:
    batch = {"x": tensor()}
    trail, _ = trail_of(batch)
    batch["x"] = batch["x"] + 1
    with pytest.raises(ValueError, match="tensors were all replaced"):
        trail.find(batch)


def test_an_object_that_came_several_times_does_not_say_which_batch_is_meant() -> None:
    buffer, other = tensor(), tensor()
    trail, _ = trail_of(buffer, None, buffer, None, other)
    assert step_after(trail, other) == 5
    for batch in (buffer, None):
        with pytest.raises(ValueError, match="delivered 2 times among the last 5 batches"):
            trail.find(batch)


def test_the_last_sixteen_are_known() -> None:
    batches = [tensor() for _ in range(3 * LENGTH)]
    trail, _ = trail_of(*batches)
    assert [step_after(trail, batch) for batch in batches[-16:]] == [*range(2 * LENGTH + 1, 3 * LENGTH + 1)]
    with pytest.raises(ValueError, match=r"Tensor that is none of the last 16 batches.*\n.*state_dict\(\)"):
        trail.find(batches[-17])


def test_a_trail_that_is_cleared_or_sent_knows_nothing() -> None:
    batch = tensor()
    trail, position = trail_of(batch)
    for empty in (pickle.loads(pickle.dumps(trail)), Trail()):
        with pytest.raises(ValueError, match="of which it has 0"):
            empty.find(batch)
    trail.clear()
    with pytest.raises(ValueError, match="of which it has 0"):
        trail.find(batch)
    position.deliver(9, 9)
    trail.note(batch, position)
    assert step_after(trail, batch) == 2


def test_what_cannot_be_made_again_has_no_way_back() -> None:
    check_made_again(saved=False)
    with pytest.raises(ValueError, match="does not go with save_prefetched=True"):
        check_made_again(saved=True)


# The way back


def written(position: Position) -> Any:
    if isinstance(position, LanesPosition):
        return position.leaves(), position.leaf_of_all()
    assert isinstance(position, MapPosition)
    return position.leaf(shared=False)


MOVES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["turn", "row", "end", "roll", "nothing"]), st.integers(1, 3)),
    max_size=8,
)


def move(position: LanesPosition, number: int, kind: str, size: int, count: int) -> None:
    """One delivery; ``count`` makes the digests differ."""
    if kind == "nothing":
        return
    if kind == "row":
        position.deliver_row(number, Turn(position.lanes[number].delivered + 1, count, f'"{count}"'))
        return
    lane = position.moving(number)
    digests = list(range(count, count + size))
    capture = (lane.delivered + size, '"a"', '"b"') if count % 2 else None
    if kind == "end":
        lane.end(Made(ended=True, carry=f'"end {count}"', rolled=count % 3 == 0))
    else:
        opened = (0, '"open"') if lane.anchor is None else None
        made = Made([0] * size, size, digests, None, capture, opened, f'"carry {count}"', rolled=kind == "roll")
        lane.deliver(made, size)


@given(st.lists(MOVES, min_size=1, max_size=24), st.sets(st.integers(0, 23)), st.booleans())
def test_lanes_get_back_to_where_they_were_after_any_batch(
    steps: list[list[tuple[int, str, int]]], settled: set[int], between: bool
) -> None:
    """Settled after some batches, as at the end of an epoch; and with moves after the last batch, as there."""
    trail = Trail()
    position = LanesPosition({number: LanePosition(exact=number == 1) for number in range(3)}, run=5)
    known: list[tuple[Any, Any]] = []
    count = 0
    for number, moves in enumerate(steps):
        for lane, kind, size in moves:
            count += 1
            move(position, lane, kind, size, count)
        position.step += 1
        known.append((tensor(), written(position)))
        trail.note(known[-1][0], position)
        if between:
            move(position, 0, "end", 1, count)
        if number in settled:
            trail.settle({"gone": number})
            position = position.copy()
            position.next_epoch('"pristine"')
        for batch, then in known[-LENGTH:]:
            assert written(trail.find(batch)[0]) == then
        before = written(position)
        assert written(position) == before  # asking moves nothing
    for number, (batch, _) in enumerate(known[-LENGTH:], len(known[:-LENGTH])):
        gone = trail.find(batch)[1]
        assert gone == next(({"gone": at} for at in sorted(settled) if number <= at < len(steps)), None)


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=24), st.sets(st.integers(0, 23)))
def test_the_order_of_a_map_style_dataset_gets_back_too(steps: list[tuple[int, bool]], settled: set[int]) -> None:
    trail, position, known = Trail(), MapPosition(run=3, sampler={"seed": 4}, epochs={"sampler": 2}), []
    for number, (size, over) in enumerate(steps):
        if over:
            position.next_epoch(None)
        position.deliver(position.rows + size, number)
        position.cursor.deliver(Made([0] * size, size, [number], None, (number, '"a"', '"b"'), (0, '"open"')), size)
        known.append((tensor(), written(position)))
        trail.note(known[-1][0], position)
        if number in settled:
            trail.settle({})
            position = position.copy()
            position.next_epoch(None)
        for batch, then in known[-LENGTH:]:
            assert written(trail.find(batch)[0]) == then


def filled(kind: type, **others: Any) -> Any:
    """A record in which every field has a value of its own."""
    values = {part.name: getattr(kind(**others), part.name, None) for part in dataclasses.fields(kind)}
    for number, (name, value) in enumerate(values.items()):
        if name not in others and isinstance(value, int | None) and not name.startswith("_"):
            values[name] = 100 + number
    return kind(**{part.name: (values | others)[part.name] for part in dataclasses.fields(kind) if part.init})


def test_a_mark_has_every_field_that_is_saved() -> None:
    lane = filled(LanePosition, anchor=Anchor(3, None, '"s"'), sizes=[[0, 2], [4, 3]], ledger=(7, 8), carry='"c"')
    assert LanePosition().back_at(lane.mark(), lane.mark()).to_json() == lane.to_json()
    order = filled(
        MapPosition, cursor=lane, skipped=Skipped(), ranges=Ranges((), ((1, 2),)), epochs={"sampler": 1}, sampler={}
    )
    again = order.back_at([order.mark()])
    assert dataclasses.replace(again, cursor=lane) == order
    assert again.cursor.to_json() == lane.to_json()
    lanes = filled(LanesPosition, lanes={0: lane}, epochs={"dataset": 1}, skipped={0: Skipped()})
    assert lanes.back_at([lanes.mark()]) == lanes


def test_lanes_that_did_not_move_are_not_copied_and_nothing_is_kept_unasked() -> None:
    position = LanesPosition({number: LanePosition() for number in range(3)})
    move(position, 1, "turn", 2, 1)
    assert position.moved is None
    mark = position.mark()
    move(position, 1, "turn", 2, 2)
    back = position.back_at([mark])
    assert [back.lanes[number] is position.lanes[number] for number in range(3)] == [True, False, True]
    position.forget_marks()
    move(position, 1, "turn", 2, 3)
    assert position.moved is None
