"""The law: ``run(d)[:k] + resume(position_k) == run(d)``, for every dataset, topology and chain of restore points.

A dataset whose state leads back to the place is exact. One whose state does not is exact or refused, as
``InexactDataset``; no run is ever silently another.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st

from tests import strategies as draws
from tests.datasets import Numbers
from unbroken import StatefulDataLoader
from unbroken.errors import InexactDataset
from unbroken.testing import Point, assert_resumes_exactly

# An example with processes takes too long to be made smaller.
AS_FOUND = (Phase.explicit, Phase.reuse, Phase.generate)

# What is told about slow resumes and repeated data has tests of its own.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def hold(setup: draws.Setup, may_refuse: bool, topologies: list[dict[str, Any]], chain: list[Point]) -> None:
    try:
        assert_resumes_exactly(setup, topologies=topologies, restore_points=[chain], epochs=2)
    except InexactDataset:
        if not may_refuse:
            raise
    except ValueError as error:
        if "nothing to compare" not in str(error):
            raise
        reject()  # every row was dropped


@pytest.mark.parametrize("kind", sorted(draws.ITERABLE))
@settings(max_examples=12)
@given(data=st.data())
def test_an_iterable_dataset_is_exact_in_one_process(kind: str, data: st.DataObject) -> None:
    _, setup = data.draw(draws.iterable_setups(kind))
    hold(setup, kind in draws.REFUSED_OR_EXACT, [{}], data.draw(draws.chains()))


@settings(max_examples=30, phases=AS_FOUND)
@given(data=st.data())
def test_an_iterable_dataset_is_exact_on_worker_processes(data: st.DataObject) -> None:
    kind, setup = data.draw(draws.iterable_setups())
    topologies = data.draw(st.lists(draws.workers(2), min_size=2, max_size=3))
    hold(setup, kind in draws.REFUSED_OR_EXACT, topologies, data.draw(draws.chains()))


@pytest.mark.parametrize("sampler", sorted(draws.SAMPLERS))
@settings(max_examples=12)
@given(data=st.data())
def test_a_map_style_dataset_is_exact_in_one_process(sampler: str, data: st.DataObject) -> None:
    _, setup = data.draw(draws.map_style_setups(sampler))
    hold(setup, False, [{}], data.draw(draws.chains()))


@settings(max_examples=25, phases=AS_FOUND)
@given(data=st.data())
def test_a_map_style_dataset_is_exact_on_worker_processes(data: st.DataObject) -> None:
    _, setup = data.draw(draws.map_style_setups())
    topologies = data.draw(st.lists(draws.workers(2), min_size=2, max_size=3))
    hold(setup, False, topologies, data.draw(draws.chains()))


WORLDS = st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=2, max_size=3)


@settings(max_examples=25)
@given(worlds=WORLDS, q=st.integers(2, 4), shuffle=st.booleans(), data=st.data())
def test_every_step_has_the_same_rows_on_any_number_of_ranks(
    worlds: list[int], q: int, shuffle: bool, data: st.DataObject
) -> None:
    def make_loader(dp_rank: int, dp_world_size: int) -> StatefulDataLoader:
        return StatefulDataLoader(
            Numbers(12 * q),
            batch_size=12 // dp_world_size,
            shuffle=shuffle,
            seed=5,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
        )

    points = st.builds(Point, st.integers(0, 1), st.integers(-1, q))
    chain = sorted(data.draw(st.lists(points, min_size=1, max_size=3)))
    topologies = [{"dp_world_size": world} for world in worlds]
    assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[chain], epochs=2, compare="steps")


@settings(max_examples=25)
@given(
    worlds=WORLDS,
    kind=st.sampled_from(sorted(draws.EXACT)),
    rows=st.integers(4, 6),
    batch_size=st.integers(1, 3),
    chain=st.sampled_from([[1], [2], [1, 2]]),
)
def test_nothing_is_lost_or_repeated_when_lanes_move_to_other_ranks(
    worlds: list[int], kind: str, rows: int, batch_size: int, chain: list[int]
) -> None:
    def make_loader(dp_rank: int, dp_world_size: int) -> StatefulDataLoader:
        dataset = draws.EXACT[kind](24 * rows)
        return StatefulDataLoader(
            dataset, batch_size=batch_size, seed=5, lanes=24, dp_rank=dp_rank, dp_world_size=dp_world_size
        )

    topologies = [{"dp_world_size": world} for world in worlds]
    points = [Point(0, step) for step in chain]
    assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[points], epochs=1, compare="rows")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=4000)
@given(data=st.data())
def test_a_wide_sweep_in_one_process(data: st.DataObject) -> None:
    kind, setup = data.draw(st.one_of(draws.iterable_setups(), draws.map_style_setups()))
    hold(setup, kind in draws.REFUSED_OR_EXACT, [{}], data.draw(draws.chains()))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=400, phases=AS_FOUND)
@given(data=st.data())
def test_a_wide_sweep_on_worker_processes(data: st.DataObject) -> None:
    kind, setup = data.draw(st.one_of(draws.iterable_setups(), draws.map_style_setups()))
    topologies = data.draw(st.lists(draws.workers(2), min_size=2, max_size=4))
    hold(setup, kind in draws.REFUSED_OR_EXACT, topologies, data.draw(draws.chains()))
