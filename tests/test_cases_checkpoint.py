"""Cases 25 to 27: what a position is made of, and positions that do not fit."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.errors import IncompleteState, InvalidState, StateError, StateMismatch, UnsealableState

LOADERS: dict[str, Any] = {
    "map-style": lambda **a: StatefulDataLoader(ds.Numbers(20), batch_size=2, **{"seed": 1, **a}),
    "map-style, shuffled": lambda **a: StatefulDataLoader(ds.Numbers(20), batch_size=2, shuffle=True, **a),
    "map-style, sampler": lambda **a: StatefulDataLoader(
        ds.Numbers(20), batch_size=2, sampler=ds.SamplerWithState(20), **{"seed": 1, **a}
    ),
    "iterable": lambda **a: StatefulDataLoader(ds.Late(20), batch_size=2, **{"seed": 1, **a}),
    "lanes": lambda **a: StatefulDataLoader(ds.Late(20), batch_size=2, lanes=4, **{"seed": 1, **a}),
    "map-style, ranks": lambda **a: StatefulDataLoader(
        ds.Numbers(20), batch_size=2, dp_rank=1, dp_world_size=2, **{"seed": 1, **a}
    ),
    "lanes, ranks": lambda **a: StatefulDataLoader(
        ds.Late(20), batch_size=2, lanes=4, dp_rank=1, dp_world_size=2, **{"seed": 1, **a}
    ),
}
KEYS = {
    "map-style": {"rank-0000"},
    "map-style, shuffled": {"rank-0000"},
    "map-style, sampler": {"rank-0000"},
    "iterable": {"rank-0000"},
    "lanes": {"lane-000000", "lane-000001", "lane-000002", "lane-000003"},
    "map-style, ranks": {"place"},
    "lanes, ranks": {"lane-000001", "lane-000003"},
}


def rest_of(loader: StatefulDataLoader) -> list[Any]:
    return [batch.tolist() for batch in loader]


def stopped_after(loader: StatefulDataLoader, k: int) -> dict[str, str]:
    iterator = iter(loader)
    for _ in range(k):
        next(iterator)
    state = loader.state_dict()
    loader.close()
    return state


# Case 25


@pytest.mark.parametrize("kind", LOADERS)
def test_the_keys_are_the_same_fresh_running_and_at_the_end(kind: str) -> None:
    """Case 25: and every value is a text that holds valid JSON."""
    loader = LOADERS[kind]()
    states = [loader.state_dict()]
    for _ in range(2):
        for _ in loader:
            states.append(loader.state_dict())
        states.append(loader.state_dict())
    for state in states:
        assert set(state) == KEYS[kind] | {"unbroken"}
        assert all(type(key) is str and type(value) is str for key, value in state.items())
        assert all(isinstance(json.loads(value), dict) for value in state.values())


def through_json(state: dict[str, str]) -> Any:
    return json.loads(json.dumps(state))


def through_torch(state: dict[str, str]) -> Any:
    file = io.BytesIO()
    torch.save({"loader": state}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["loader"]


@pytest.mark.parametrize("through", [through_json, through_torch])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_position_survives_the_round_trip(kind: str, through: Any) -> None:
    """Case 25: JSON, and ``torch.save`` with ``torch.load(weights_only=True)``."""
    if "ranks" in kind:
        state = LOADERS[kind]().state_dict()
        assert through(state) == state
        return
    torch.manual_seed(1)
    reference = rest_of(LOADERS[kind]())
    torch.manual_seed(1)
    state = stopped_after(LOADERS[kind](), 4)
    assert through(state) == state
    loader = LOADERS[kind]()
    loader.load_state_dict(through(state))
    assert rest_of(loader) == reference[4:]


class RichState(ds.WellBehaved):
    """Its state holds everything that a position can carry besides JSON."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.generator = torch.Generator().manual_seed(4)

    def state_dict(self) -> dict[str, Any]:
        return {
            "done": np.int64(self.done),
            "generator": self.generator.get_state(),
            "tuple": (1, (2, "three")),
            "ints": {1: "one", -2: None},
            "bytes": b"\x00\xff",
            "set": {1, 2},
            "nan": float("nan"),
            "array": np.arange(6, dtype=np.float16).reshape(2, 3),
            "big": 2**80,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = self.state_dict()
        assert {key: type(value) for key, value in state.items()} == {key: type(value) for key, value in mine.items()}
        for key in ("tuple", "ints", "bytes", "set", "big"):
            assert state[key] == mine[key]
        assert state["array"].dtype == mine["array"].dtype and (state["array"] == mine["array"]).all()
        assert state["nan"] != state["nan"]
        self.generator.set_state(state["generator"])
        self.done = int(state["done"])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_states_of_many_types_come_back_as_they_were(num_workers: int) -> None:
    """Case 25: tuples, int keys, bytes, sets, NaN, numpy scalars and arrays, tensors."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(RichState(20), batch_size=2, snapshot_every_n_steps=1, num_workers=num_workers)

    reference = rest_of(make_loader())
    loader = make_loader()
    loader.load_state_dict(through_json(stopped_after(make_loader(), 5)))
    assert rest_of(loader) == reference[5:]


class Unsealable(ds.WellBehaved):
    """Its state holds an object that no position can carry."""

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "deep": [{"here": object()}]}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_that_cannot_be_carried_is_refused_by_path_and_type(num_workers: int) -> None:
    """Case 25: when it is first captured."""
    loader = StatefulDataLoader(Unsealable(20), batch_size=2, num_workers=num_workers, snapshot_every_n_steps=1)
    with pytest.raises(UnsealableState, match=r"(?s)\['deep'\]\[0\]\['here'\].*object"):
        rest_of(loader)
    loader.close()


# Case 26


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("state", [{"model": "weights"}, {"model": {"w": torch.zeros(2)}, "step": 3}])
def test_a_checkpoint_without_a_loader_in_it_is_an_error(state: Any, strict: bool) -> None:
    """Case 26."""
    loader = LOADERS["map-style"]()
    with pytest.raises(InvalidState, match="unbroken"):
        loader.load_state_dict(state, strict=strict)
    assert len(rest_of(loader)) == 10


@pytest.mark.parametrize(("shuffle", "other"), [(False, 24), (True, 26)])
def test_another_length_is_an_error_that_lists_it(shuffle: bool, other: int, caplog: pytest.LogCaptureFixture) -> None:
    """Case 26: data-changing, accepted by name only; what was accepted is said."""

    def make_loader(n: int) -> StatefulDataLoader:
        return StatefulDataLoader(ds.Numbers(n), batch_size=2, shuffle=shuffle, seed=1)

    state = stopped_after(make_loader(20), 3)
    loader = make_loader(other)
    with pytest.raises(StateMismatch, match=rf"(?s)length +saved 20 +now {other} +\(data-changing\).*strict=False"):
        loader.load_state_dict(state)
    assert rest_of(loader) == rest_of(make_loader(other))
    loader = make_loader(other)
    loader.load_state_dict(state, strict=False)
    assert re.search(rf"length +saved 20 +now {other}", caplog.text)
    assert len(rest_of(loader)) == (other - 6) // 2


def test_all_differences_are_listed() -> None:
    """Case 26: seed, order and length in one report."""
    state = stopped_after(StatefulDataLoader(ds.Numbers(20), batch_size=2, seed=1), 3)
    loader = StatefulDataLoader(ds.Numbers(21), batch_size=2, seed=2, shuffle=True)
    with pytest.raises(StateMismatch) as caught:
        loader.load_state_dict(state)
    for field, kind in [("seed", "order"), ("length", "data"), ("shuffle", "order")]:
        assert any(field in line and f"({kind}-changing)" in line for line in str(caught.value).splitlines())


@pytest.mark.parametrize(
    ("before", "after"), [("map-style", "iterable"), ("iterable", "map-style"), ("lanes", "map-style, ranks")]
)
def test_a_position_of_another_kind_of_dataset_is_an_error(before: str, after: str) -> None:
    """Case 26: map-style and iterable."""
    state = stopped_after(LOADERS[before](), 3)
    loader = LOADERS[after]()
    with pytest.raises(StateError):
        loader.load_state_dict(state)
    assert rest_of(loader) == rest_of(LOADERS[after]())


def test_safe_differences_are_no_error() -> None:
    """Case 26: workers, prefetch, drop_last and the batch size of a map-style dataset."""
    state = stopped_after(StatefulDataLoader(ds.Numbers(20), batch_size=2, seed=1), 3)
    loader = StatefulDataLoader(
        ds.Numbers(20), batch_size=4, seed=1, num_workers=1, prefetch_factor=5, drop_last=True, timeout=30
    )
    loader.load_state_dict(state)
    assert [len(batch) for batch in rest_of(loader)] == [4, 4, 4]


# Case 27


def without(state: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in keys}


def with_leaf(state: dict[str, str], leaf: str, **fields: Any) -> dict[str, str]:
    return {**state, leaf: json.dumps({**json.loads(state[leaf]), **fields})}


def with_lane(state: dict[str, str], leaf: str, *missing: str, **fields: Any) -> dict[str, str]:
    lane = without(json.loads(state[leaf])["lane"], *missing)
    return with_leaf(state, leaf, lane={**lane, **fields})


# Each breaks a good position of four lanes after three batches.
BROKEN: dict[str, Any] = {
    "a later version": lambda s: with_leaf(s, "unbroken", version=2),
    "a header cut short": lambda s: {**s, "unbroken": s["unbroken"][:-9]},
    "a header that is a list": lambda s: {**s, "unbroken": "[]"},
    "a header without lanes": lambda s: {**s, "unbroken": json.dumps(without(json.loads(s["unbroken"]), "lanes"))},
    "no header": lambda s: without(s, "unbroken"),
    "a leaf cut short": lambda s: {**s, "lane-000002": s["lane-000002"][:-9]},
    "a leaf that is a number": lambda s: {**s, "lane-000002": "3"},
    "a leaf that is no text": lambda s: {**s, "lane-000002": 3},
    "a leaf without its lane": lambda s: with_leaf(s, "lane-000001", lane=None),
    "a lane without its epoch": lambda s: with_lane(s, "lane-000001", "epoch"),
    "a leaf of another step": lambda s: with_leaf(s, "lane-000001", step=9),
    "a lane with a negative count": lambda s: with_lane(s, "lane-000001", delivered=-1),
    "a leaf missing": lambda s: without(s, "lane-000003"),
    "no leaf": lambda s: {"unbroken": s["unbroken"]},
    "not a dict": lambda s: [*s.items()],
    "nothing": lambda s: None,
}


def broken_state(name: str) -> Any:
    return BROKEN[name](stopped_after(LOADERS["lanes"](), 3))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_position_is_an_error_and_nothing_is_half_loaded(name: str, strict: bool) -> None:
    """Case 27: the loader stands where it stood, new or loaded before."""
    state = broken_state(name)
    reference = rest_of(LOADERS["lanes"]())
    loader = LOADERS["lanes"]()
    with pytest.raises((InvalidState, IncompleteState, TypeError)):
        loader.load_state_dict(state, strict=strict)
    assert rest_of(loader) == reference

    loader = LOADERS["lanes"]()
    loader.load_state_dict(stopped_after(LOADERS["lanes"](), 5))
    with pytest.raises((InvalidState, IncompleteState, TypeError)):
        loader.load_state_dict(state, strict=strict)
    assert rest_of(loader) == reference[5:]


def test_a_later_version_is_named() -> None:
    """Case 27."""
    with pytest.raises(InvalidState, match=r"version.*2"):
        LOADERS["lanes"]().load_state_dict(broken_state("a later version"))


def test_missing_leaves_are_named() -> None:
    """Case 27."""
    with pytest.raises(IncompleteState, match="lane"):
        LOADERS["lanes"]().load_state_dict(broken_state("a leaf missing"))


@pytest.mark.parametrize("kind", ["map-style", "iterable", "map-style, ranks", "map-style, sampler"])
@pytest.mark.parametrize("length", [0, 1, 20, -1])
def test_a_leaf_cut_short_anywhere_is_an_error(kind: str, length: int) -> None:
    """Case 27: in the other forms of a position."""
    state = stopped_after(LOADERS[kind](), 3)
    name = next(key for key in state if key != "unbroken")
    for key in (name, "unbroken"):
        with pytest.raises(StateError):
            LOADERS[kind]().load_state_dict({**state, key: state[key][:length]})


def test_nothing_in_a_position_is_unpickled() -> None:
    """Case 27: it is text with JSON in it and no more."""
    state = stopped_after(StatefulDataLoader(RichState(20), batch_size=2, snapshot_every_n_steps=1), 3)
    assert "pickle" not in json.dumps(state)
