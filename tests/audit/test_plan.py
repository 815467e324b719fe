"""Where trials are ended: a function of the seed, with every kind of place among them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.audit.plan import Audit, Topology, first_topologies, plan_trials

NO_ENDS: dict[Topology, list[int]] = {}


@given(
    batches=st.integers(4, 60),
    trials=st.integers(1, 12),
    seed=st.integers(0, 99),
    ends=st.lists(st.integers(1, 60)),
    kill=st.sampled_from(["sigkill", "none"]),
    ranks=st.sampled_from([None, (1, 2), (3,)]),
    whole=st.booleans(),
)
def test_every_stop_lies_in_the_run_and_after_its_save(
    batches: int, trials: int, seed: int, ends: list[int], kill: str, ranks: tuple[int, ...] | None, whole: bool
) -> None:
    audit = Audit("a:b", batches, trials, kill, (0, 2), ranks, seed=seed)  # type: ignore[arg-type]
    for plan in plan_trials(audit, dict.fromkeys(first_topologies(audit), ends), batches, whole=whole):
        start = 0
        for place in plan.places:
            assert start < place.saved or place.saved == start == 0  # a save may come before the first batch
            assert max(1, place.saved) <= place.halt.after < batches + (whole and not plan.changes_world)
            assert place.halt.after < batches or place.halt.where != "fetch"  # no batch is left to be fetched
            assert not place.over or place.saved in ends
            assert all(start < each < place.saved for each in place.earlier)
            assert place.halt.where != "save" or place.saved < place.halt.after
            assert kill != "none" or place.halt.where == "between"
            start = place.halt.after
        assert len(plan.topologies) == len(plan.places) + 1


def test_every_kind_of_place_comes_and_some_trials_are_ended_twice() -> None:
    plans = plan_trials(Audit("a:b", trials=9), NO_ENDS, 100)
    assert {place.halt.where for plan in plans for place in plan.places} == {"between", "fetch", "save"}
    assert [len(plan.places) for plan in plans] == [1, 1, 2, 1, 1, 2, 1, 1, 2]


def test_the_same_seed_is_the_same_plan() -> None:
    assert plan_trials(Audit("a:b", seed=4), NO_ENDS, 50) == plan_trials(Audit("a:b", seed=4), NO_ENDS, 50)
    assert plan_trials(Audit("a:b", seed=4), NO_ENDS, 50) != plan_trials(Audit("a:b", seed=5), NO_ENDS, 50)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("end", "batches"), [(50, 100), (60, 100), (96, 100), (3, 8), (10, 30)])
def test_ten_trials_have_every_place_about_the_end_of_an_epoch(seed: int, end: int, batches: int) -> None:
    plans = plan_trials(Audit("a:b", seed=seed), {(None, 1): [end]}, batches)
    saved = {(place.saved, place.over) for plan in plans for place in plan.places}
    assert saved >= {(end, True), (end, False), (end - 1, False), (end + 1, False), (0, False), (batches - 2, False)}


def test_four_trials_have_the_end_of_an_epoch_within_the_loop_and_after_it() -> None:
    plans = plan_trials(Audit("a:b", trials=4), {(None, 1): [50]}, 100)
    assert {(50, True), (50, False)} <= {(place.saved, place.over) for plan in plans for place in plan.places}


def test_data_that_are_whole_are_saved_at_their_end_too() -> None:
    plans = plan_trials(Audit("a:b"), {(None, 1): [12]}, 12, whole=True)
    saved = {(place.saved, place.over) for plan in plans for place in plan.places}
    assert {(12, True), (12, False), (11, False), (0, False)} <= saved


def test_without_the_end_of_an_epoch_the_other_places_are_sought_once() -> None:
    plans = plan_trials(Audit("a:b", trials=40), NO_ENDS, 100)
    saved = [place.saved for plan in plans for place in plan.places]
    assert saved.count(0) == 1 and 98 in saved


def test_half_of_the_trials_change_the_topology_and_every_first_one_has_a_reference() -> None:
    audit = Audit("a:b", trials=8, workers=(0, 2), ranks=(1, 2))
    plans = plan_trials(audit, NO_ENDS, 100)
    assert {plan.first for plan in plans} == set(first_topologies(audit)) == {(0, 1), (2, 2)}
    assert [len({workers for workers, _ in plan.topologies}) > 1 for plan in plans] == [True, False] * 4
    assert [plan.changes_world for plan in plans] == [True, True, False, False] * 2


@pytest.mark.parametrize(("workers", "expected"), [(None, [(None, 1)]), ((3,), [(3, 1)])])
def test_a_single_choice_is_kept(workers: tuple[int, ...] | None, expected: list[Topology]) -> None:
    assert first_topologies(Audit("a:b", workers=workers)) == expected
