"""A position as leaves: which there are, what of them is checked at a load, and that nothing is half-loaded."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.errors import IncompleteState, InvalidState, StateError, StateMismatch
from unbroken.lanes import Lane
from unbroken.leaves import Leaves
from unbroken.state import HEADER


class Words(ds.Sized, ds.IterableDataset):
    """A stream of lanes: lane l yields l, l + lanes, ... of its files."""

    default_lanes = 4

    def open(self, lane: Lane) -> ds.RowIterator:
        return ds.RowIterator(range(lane.index, self.n, lane.count))

    def describe(self) -> dict[str, Any]:
        return {"files": [f"file of {self.n} rows"]}

    def difference_class(self, field: str) -> str:
        return "data, held" if field == "files" else "data"

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a stream is opened lane by lane")


SHARED = {"batch_size": 2, "seed": 1}
LAYOUTS: dict[str, Callable[..., StatefulDataLoader]] = {
    "map-style": lambda **a: StatefulDataLoader(ds.Numbers(24), **SHARED, **a),
    "map-style, drawn": lambda **a: StatefulDataLoader(ds.Numbers(24), batch_size=2, shuffle=True, **a),
    "map-style, sampler": lambda **a: StatefulDataLoader(ds.Numbers(24), sampler=ds.SamplerWithState(24), **SHARED),
    "map-style, ranks": lambda **a: StatefulDataLoader(
        ds.Numbers(24), **SHARED, **{"dp_rank": 1, "dp_world_size": 2, **a}
    ),
    "iterable": lambda **a: StatefulDataLoader(ds.Late(24), snapshot_every_n_steps=1, **SHARED, **a),
    "lanes": lambda **a: StatefulDataLoader(ds.Late(24), snapshot_every_n_steps=1, **SHARED, **{"lanes": 4, **a}),
    "lanes, ranks": lambda **a: StatefulDataLoader(
        ds.Late(24), **SHARED, **{"lanes": 4, "dp_rank": 1, "dp_world_size": 2, **a}
    ),
    "stream": lambda **a: StatefulDataLoader(Words(24), **SHARED, **a),
    "stream, ranks": lambda **a: StatefulDataLoader(Words(24), **SHARED, **{"dp_rank": 1, "dp_world_size": 2, **a}),
}
KEYS = {
    "map-style": ["rank-0000"],
    "map-style, drawn": ["rank-0000"],
    "map-style, sampler": ["rank-0000"],
    "map-style, ranks": ["place"],
    "iterable": ["rank-0000"],
    "lanes": ["lane-000000", "lane-000001", "lane-000002", "lane-000003"],
    "lanes, ranks": ["lane-000001", "lane-000003"],
    "stream": ["lane-000000", "lane-000001", "lane-000002", "lane-000003"],
    "stream, ranks": ["lane-000001", "lane-000003"],
}


def state_after(layout: str, steps: int, **arguments: Any) -> dict[str, str]:
    loader = LAYOUTS[layout](**arguments)
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    return loader.state_dict()


def changed(state: dict[str, str], name: str, **fields: Any) -> dict[str, str]:
    return {**state, name: json.dumps({**json.loads(state[name]), **fields})}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_leaves_of_each_layout_are_named_as_documented(layout: str) -> None:
    """Case 25: and the same fresh as running."""
    assert sorted(LAYOUTS[layout]().state_dict()) == sorted(state_after(layout, 3)) == sorted([*KEYS[layout], HEADER])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_is_of_values_that_a_later_step_does_not_change(layout: str) -> None:
    loader = LAYOUTS[layout]()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    kept = dict(state)
    next(iterator)
    assert state == kept
    assert all(type(value) is str for value in state.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_that_was_loaded_is_the_state_that_is_saved(layout: str) -> None:
    state = state_after(layout, 3)
    loader = LAYOUTS[layout]()
    loader.load_state_dict(state)
    assert loader.state_dict() == state


@pytest.mark.parametrize("layout", ["lanes, ranks", "stream, ranks"])
def test_the_states_of_ranks_merge_and_any_number_of_ranks_reads_them(layout: str) -> None:
    """Case 21."""
    merged: dict[str, str] = {}
    for rank in range(2):
        merged |= state_after(layout, 2, dp_rank=rank)
    for world in (1, 2, 4):
        for rank in range(world):
            loader = LAYOUTS[layout](dp_rank=rank, dp_world_size=world)
            loader.load_state_dict(merged)
            mine = loader.state_dict()
            told = {HEADER: merged[HEADER].replace('"world":2', f'"world":{world}')}
            assert mine == {name: (merged | told)[name] for name in mine}


# What does not fit


def refusal(layout: str, state: Any, kind: type[StateError], **arguments: Any) -> str:
    """The text of the refusal; the loader stands where it stood."""
    loader = LAYOUTS[layout](**arguments)
    loader.load_state_dict(state_after(layout, 1, **arguments))
    before = loader.state_dict()
    with pytest.raises(kind) as caught:
        loader.load_state_dict(state, strict=False)
    assert loader.state_dict() == before
    return str(caught.value)


def test_another_kind_of_dataset_is_named() -> None:
    """Case 26."""
    text = refusal("map-style", state_after("iterable", 2), StateMismatch)
    assert "saved iterable   now map" in text


def test_another_number_of_lanes_is_named_with_the_remedy() -> None:
    """Case 23."""
    text = refusal("lanes", state_after("lanes", 2, lanes=6), StateMismatch)
    assert "saved 6" in text
    assert "now 4" in text
    assert text.endswith("pass lanes=6.")


def test_missing_lanes_are_counted_and_the_first_is_named() -> None:
    """Case 27: the state of one rank of two, given to one rank that has all lanes."""
    state = {name: value for name, value in state_after("lanes", 2).items() if name not in KEYS["lanes, ranks"]}
    text = refusal("lanes", state, IncompleteState)
    assert text.startswith("2 of the 4 lanes of this rank are missing from this position: lane-000001")
    assert "{**a, **b}" in text


def test_lanes_of_different_steps_are_refused_with_the_steps() -> None:
    """Case 27: ranks that saved at different times."""
    states = [state_after("lanes, ranks", steps, dp_rank=rank) for rank, steps in ((0, 2), (1, 3))]
    text = refusal("lanes", states[0] | states[1], IncompleteState)
    assert "lane-000000 at step 2" in text
    assert "lane-000001 at step 3" in text


def test_lanes_of_different_runs_are_refused() -> None:
    """Case 27."""
    state = state_after("lanes", 2)
    text = refusal("lanes", changed(state, "lane-000002", run=7), IncompleteState)
    assert "come from different runs" in text


def test_a_rank_whose_lanes_have_ended_may_stand_still() -> None:
    """Its step is smaller than that of the others, and the lanes belong together all the same."""

    def make(rank: int, world: int) -> StatefulDataLoader:
        return StatefulDataLoader(ds.Uneven([2, 8]), lanes=2, dp_rank=rank, dp_world_size=world, **SHARED)

    states: dict[str, str] = {}
    for rank, steps in ((0, 1), (1, 3)):
        loader = make(rank, 2)
        iterator = iter(loader)
        for _ in range(steps):
            next(iterator)
        if rank == 0:
            assert next(iterator, None) is None
        states |= loader.state_dict()
    alone = make(0, 1)
    alone.load_state_dict(states)
    assert [batch.tolist() for batch in alone] == [[106, 107]]


def test_a_plain_loader_takes_its_number_of_lanes_from_the_position() -> None:
    """Case 20: lanes unsaid on both sides."""
    state = StatefulDataLoader(ds.Late(24), num_workers=2, **SHARED).state_dict()
    loader = StatefulDataLoader(ds.Late(24), **SHARED)
    loader.load_state_dict(state)
    assert json.loads(loader.state_dict()[HEADER])["lanes"] == 2
    assert loader.state_dict() == state


def test_a_plain_loader_says_what_a_position_by_lanes_needs() -> None:
    assert "lanes=4" in refusal("iterable", state_after("lanes", 2), StateError)


@pytest.mark.parametrize(("layout", "other"), [("map-style", "map-style, ranks"), ("map-style, ranks", "map-style")])
def test_map_style_positions_are_read_with_and_without_ranks(layout: str, other: str) -> None:
    """All that is in them is the place in one global order."""
    loader = LAYOUTS[layout]()
    loader.load_state_dict(state_after(other, 2))
    assert len(list(loader)) > 0


def test_other_files_are_refused_in_mid_epoch_and_accepted_by_name_between_epochs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = StatefulDataLoader(Words(28), **SHARED)
    state = other.state_dict()
    inside = changed(state_after("stream", 2), HEADER, fingerprint=json.loads(state[HEADER])["fingerprint"])
    text = refusal("stream", inside, StateMismatch)
    assert "In the middle of an epoch files cannot change" in text
    loader = LAYOUTS["stream"]()
    with pytest.raises(StateMismatch, match="files"):
        loader.load_state_dict(state)
    loader.load_state_dict(state, strict=False)
    assert "A position of another pipeline was accepted: files" in caplog.text


def test_a_header_is_the_same_on_every_rank() -> None:
    headers = {state_after(layout, 2, dp_rank=rank)[HEADER] for layout in ("stream, ranks",) for rank in range(2)}
    assert len(headers) == 1


# Positions that were changed


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for name in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, name)
        yield from places_in(value[name], (*path, name))


JUNK = [None, True, -1, 0, 1.5, 10**30, "x", [], [[]], {}, {"x": 1}]
CUT = object()
CHANGED = {layout: {name: json.loads(text) for name, text in state_after(layout, 3).items()} for layout in LAYOUTS}


def with_change(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, str]:
    """The state with another value at a path, or without the path."""
    state = {**state, path[0]: copy.deepcopy(state[path[0]])}
    holder = state
    for name in path[:-1]:
        holder = holder[name]
    if value is CUT:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return {name: json.dumps(leaf) for name, leaf in state.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_is_changed_in_a_position_it_is_read_or_refused_whole(layout: str) -> None:
    """Case 27: a field of another type, a field missing; no other error than a ``StateError``, nothing half-loaded."""
    faults = []
    loader = LAYOUTS[layout]()
    fresh = loader.state_dict()
    for path in places_in(CHANGED[layout]):
        for value in [*JUNK, CUT] if isinstance(path[-1], str) else JUNK:
            try:
                loader.load_state_dict(with_change(CHANGED[layout], path, value), strict=False)
            except StateError:
                if loader.state_dict() != fresh:
                    faults.append((path, value, "half-loaded"))
            except Exception as error:
                faults.append((path, value, repr(error)))
            try:
                loader.state_dict()
                loader.load_state_dict({})
            except Exception as error:
                faults.append((path, value, repr(error)))
                loader = LAYOUTS[layout]()
    assert faults == []


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=30)
@given(data=st.data())
def test_a_leaf_cut_anywhere_is_refused(layout: str, data: st.DataObject) -> None:
    """Case 27."""
    state = {name: json.dumps(leaf) for name, leaf in CHANGED[layout].items()}
    name = data.draw(st.sampled_from(sorted(state)))
    state[name] = state[name][: data.draw(st.integers(0, len(state[name]) - 1))]
    loader = LAYOUTS[layout]()
    with pytest.raises(InvalidState, match=name):
        loader.load_state_dict(state)


def test_a_layout_is_frozen() -> None:
    assert Leaves.__dataclass_params__.frozen  # type: ignore[attr-defined]
