"""``on_error="skip"``: what fails is left out, counted, named and kept; the rest is exact."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st

from tests import failing
from tests import strategies as draws
from unbroken import StatefulDataLoader, TooManySkipped
from unbroken.skipped import Skipped
from unbroken.testing import Point, assert_resumes_exactly

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BAD = {0, 5, 6, 7, 8, 9, 10, 11, 19}
KINDS = {
    "iterable": lambda n, bad, **more: failing.Failing(n, bad, **more),
    "its own iterator": lambda n, bad, **more: failing.FailingItself(n, bad, **more),
    "map-style": lambda n, bad, **more: failing.FailingItems(n, bad, **more),
    "asked for batches": lambda n, bad, **more: failing.FailingTogether(n, bad, **more),
}


def loader_of(kind: str, n: int = 20, bad: Any = frozenset(BAD), **arguments: Any) -> StatefulDataLoader:
    workers = {"multiprocessing_context": "fork"} if arguments.get("num_workers") else {}
    given = {"batch_size": 2, "on_error": "skip", "seed": 1, **workers, **arguments}
    return StatefulDataLoader(KINDS[kind](n, bad), **given)


def rows_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


# Exact


@st.composite
def setups(draw: st.DrawFn) -> draws.Setup:
    """A loader over a dataset with bad rows: some here and there, or a whole stretch of them."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    n = draw(st.integers(1, 36))
    some = st.sets(st.integers(0, n - 1))
    stretch = st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda ends: set(range(*sorted(ends))))
    bad = draw(st.one_of(some, stretch))
    batch_size = draw(st.sampled_from([None, 1, 2, 3, 5] if kind != "asked for batches" else [1, 2, 3, 5]))
    more: dict[str, Any] = {"noise": draw(st.booleans())}
    arguments = {
        "batch_size": batch_size,
        "drop_last": draw(st.booleans()) if batch_size else False,
        "seed_by": draw(st.sampled_from(["batch", "sample"])),
        "seed": draw(st.sampled_from([None, 0])),
        "on_error": "skip",
    }
    if "iter" in kind:
        more["state"] = draw(st.sampled_from(failing.STATES if kind == "iterable" else failing.STATES[:-1]))
        arguments["lanes"] = draw(st.sampled_from([None, 2, 3]))
        arguments["snapshot_every_n_steps"] = draw(st.sampled_from([None, 1, 2]))
        arguments["resume"] = draw(st.sampled_from(["checked", "checked", "replay"]))
    else:
        arguments["shuffle"] = draw(st.booleans())
    return draws.Setup(lambda n: KINDS[kind](n, bad, **more), n, arguments)


def hold(setup: draws.Setup, topologies: list[dict[str, Any]], chain: list[Point]) -> None:
    try:
        assert_resumes_exactly(setup, topologies=topologies, restore_points=[chain], epochs=2)
    except ValueError as error:
        if "nothing to compare" not in str(error):
            raise
        reject()  # every row was bad


@settings(max_examples=150)
@given(setup=setups(), chain=draws.chains())
def test_a_run_with_bad_samples_is_exact_in_one_process(setup: draws.Setup, chain: list[Point]) -> None:
    hold(setup, [{}], chain)


@settings(max_examples=12, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(setup=setups(), chain=draws.chains(), data=st.data())
def test_a_run_with_bad_samples_is_exact_on_worker_processes(
    setup: draws.Setup, chain: list[Point], data: st.DataObject
) -> None:
    topologies = data.draw(st.lists(draws.workers(2), min_size=2, max_size=3))
    hold(setup, topologies, chain)


@pytest.mark.parametrize("kind", KINDS)
def test_every_point_is_exact_whatever_the_number_of_workers(kind: str) -> None:
    def make_loader(num_workers: int) -> StatefulDataLoader:
        lanes = {"lanes": 3} if "iter" in kind else {}
        return loader_of(kind, num_workers=num_workers, **lanes)

    topologies = [{"num_workers": workers} for workers in (0, 2, 3, 1)]
    assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[0, 3, [1, 2, 4], [2, 6, 7]], epochs=1)


@pytest.mark.parametrize("kind", ["iterable", "map-style"])
def test_epochs_without_an_end_are_exact(kind: str) -> None:
    def make_loader() -> StatefulDataLoader:
        return loader_of(kind, at_end="repeat", **({"lanes": 2} if kind == "iterable" else {"shuffle": True}))

    assert_resumes_exactly(make_loader, stop_after=30, restore_points=[1, 5, 7, 12, [3, 11, 20]])
    loader = loader_of(kind, 5, {4}, at_end="repeat")
    counts = [loader.skipped.count for _ in zip(range(5), loader, strict=False)]
    assert counts == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("kind", ["iterable", "map-style"])
def test_a_position_is_exact_on_another_number_of_ranks(kind: str) -> None:
    def make_loader(dp_rank: int, dp_world_size: int) -> StatefulDataLoader:
        bad = {0, 5, 13, 22, 23}
        lanes = {"lanes": 6} if kind == "iterable" else {}
        return loader_of(kind, 24, bad, batch_size=3, dp_rank=dp_rank, dp_world_size=dp_world_size, **lanes)

    topologies = [{"dp_world_size": world} for world in (2, 1, 3)]
    assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[[Point(0, 1), Point(0, 2)]], epochs=1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_an_order_nothing_is_lost_or_comes_twice(num_workers: int) -> None:
    for kind in ("iterable", "map-style"):
        lanes = {"lanes": 3} if kind == "iterable" else {}

        def make_loader(kind: str = kind, lanes: Any = lanes) -> StatefulDataLoader:
            return loader_of(kind, num_workers=num_workers, in_order=False, **lanes)

        found: list[int] = []
        loader = make_loader()
        for _, batch in zip(range(3), loader, strict=False):
            found += batch.tolist()
        other = make_loader()
        other.load_state_dict(loader.state_dict())
        loader.close()
        found += [row for batch in rows_of(other) for row in batch]
        assert sorted(found) == sorted(set(range(20)) - BAD)
        assert other.skipped.count == len(BAD)


def test_a_position_after_an_earlier_batch_has_what_was_left_out_until_then() -> None:
    for kind in ("iterable", "map-style"):
        loader = loader_of(kind)
        batches = []
        states = []
        for batch in loader:
            batches.append(batch)
            states.append(loader.state_dict())
        assert [loader.state_after(batch) for batch in batches] == states


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes are killed")
def test_a_worker_that_is_replaced_leaves_out_the_same() -> None:
    reference = rows_of(loader_of("iterable", 60, lanes=2))
    loader = loader_of("iterable", 60, lanes=2, num_workers=2, prefetch_factor=3)
    found = []
    for number, batch in enumerate(loader):
        found.append(batch.tolist())
        if number == 6:
            for process in torch.multiprocessing.active_children():
                if process.name.startswith("unbroken worker") and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)
    assert found == reference
    assert loader.skipped.count == len(BAD)


# What is left


def test_a_batch_of_a_map_style_dataset_is_smaller_and_comes_not_at_all_where_nothing_is_left() -> None:
    for workers in (0, 2):
        batches = rows_of(loader_of("map-style", num_workers=workers))
        assert batches == [[1], [2, 3], [4], [12, 13], [14, 15], [16, 17], [18]]


def test_turns_of_a_lane_are_filled_up() -> None:
    for workers in (0, 2):
        batches = rows_of(loader_of("iterable", num_workers=workers, lanes=2))
        assert batches == [[2, 4], [1, 3], [12, 14], [13, 15], [16, 18], [17]]


def test_samples_that_are_not_batched_are_left_out_one_by_one() -> None:
    for kind in ("iterable", "map-style"):
        assert list(map(int, loader_of(kind, batch_size=None))) == sorted(set(range(20)) - BAD)


def test_a_batch_that_is_passed_over_is_not_made_again_after_a_load() -> None:
    loader = loader_of("map-style", 12, {4, 5, 6, 7})
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    assert json.loads(loader.state_dict()["rank-0000"])["rows"] == 4
    assert next(iterator).tolist() == [8, 9]
    saved = loader.state_dict()
    place = json.loads(saved["rank-0000"])
    assert (place["rows"], place["step"], place["skipped"]["count"]) == (10, 3, 4)
    other = loader_of("map-style", 12, {4, 5, 6, 7})
    other.load_state_dict(saved)
    assert rows_of(other) == [[10, 11]]
    assert other.dataset.asked == [10, 11]


def test_batches_at_the_end_of_an_epoch_of_which_nothing_is_left_end_it() -> None:
    loader = loader_of("map-style", 8, {4, 5, 6, 7})
    assert [rows_of(loader), rows_of(loader)] == [[[0, 1], [2, 3]]] * 2
    assert loader.skipped.count == 8
    assert json.loads(loader.state_dict()["rank-0000"])["step"] == 4


@pytest.mark.parametrize("kind", ["iterable", "map-style"])
def test_a_dataset_of_nothing_but_bad_samples_is_an_empty_epoch(kind: str) -> None:
    loader = loader_of(kind, 6, set(range(6)))
    assert [rows_of(loader), rows_of(loader)] == [[], []]
    assert loader.skipped.count == 12


def test_errors_of_anything_but_a_sample_are_raised() -> None:
    def refuses(samples: list[Any]) -> Any:
        raise failing.Bad("collate_fn")

    for workers in (0, 1):
        for kind in ("iterable", "map-style"):
            with pytest.raises(failing.Bad, match="collate_fn"):
                rows_of(loader_of(kind, num_workers=workers, collate_fn=refuses))
        with pytest.raises(TooManySkipped, match="It is a generator, and a generator cannot go on"):
            dataset, context = failing.FailingGenerator(9, {5}), "fork" if workers else None
            list(StatefulDataLoader(dataset, on_error="skip", num_workers=workers, multiprocessing_context=context))


def test_by_default_a_sample_that_fails_is_an_error_and_a_position_has_no_more_in_it() -> None:
    for kind in ("iterable", "map-style"):
        loader = loader_of(kind, on_error="raise")
        with pytest.raises(failing.Bad, match="row 0 is bad"):
            rows_of(loader)
        saved = []
        for on_error in ("raise", "skip"):
            loader = loader_of(kind, 9, set(), on_error=on_error)
            next(iter(loader))
            saved.append(loader.state_dict())
        assert saved[0] == saved[1]
        assert not any("skipped" in leaf for leaf in saved[0].values())


# Counted, named, kept


def test_what_was_left_out_is_told_and_named_once_it_is_delivered(caplog: pytest.LogCaptureFixture) -> None:
    for kind, place in {"iterable": "lane 0, sample", "map-style": "index"}.items():
        named = [(f"{place} {row} of epoch 0", f"Bad: row {row} is bad") for row in (0, 5)]
        for workers in (0, 1):
            caplog.clear()
            loader = loader_of(kind, 12, {0, 5, 11}, num_workers=workers, prefetch_factor=4 if workers else None)
            assert loader.skipped == Skipped()
            iterator = iter(loader)
            counts = [(next(iterator).tolist(), loader.skipped.count)[1] for _ in range(3)]
            assert counts == [1, 1, 2]
            assert loader.skipped == Skipped(2, tuple(named))
            texts = [
                f'on_error="skip" leaves out {where}: {why} ({n} in this run)'
                for n, (where, why) in enumerate(named, 1)
            ]
            assert [r.getMessage() for r in caplog.records if "leaves out" in r.getMessage()] == texts
            loader.close()


@pytest.mark.parametrize("kind", ["iterable", "map-style"])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_kept_in_the_position_and_counts_on_over_epochs(kind: str, workers: int) -> None:
    lanes = {"lanes": 2} if kind == "iterable" else {}
    whole = loader_of(kind, **lanes)
    rows_of(whole), rows_of(whole)
    assert whole.skipped.count == 2 * len(BAD)
    for k in range(5):
        loader = loader_of(kind, num_workers=workers, **lanes)
        iterator = iter(loader)
        for _ in range(k):
            next(iterator)
        saved, skipped = loader.state_dict(), loader.skipped
        loader.close()
        loader = loader_of(kind, **lanes)
        loader.load_state_dict(json.loads(json.dumps(saved)))
        assert loader.skipped == skipped
        rows_of(loader), rows_of(loader)
        assert loader.skipped == whole.skipped
    loader.load_state_dict({})
    assert loader.skipped == Skipped()


def test_lanes_take_what_was_left_out_of_them_to_other_ranks() -> None:
    def make_loader(rank: int, world: int) -> StatefulDataLoader:
        return loader_of("iterable", lanes=4, dp_rank=rank, dp_world_size=world)

    merged: dict[str, str] = {}
    counts = []
    for rank in range(2):
        loader = make_loader(rank, 2)
        next(iter(loader)), next(iter(loader))
        rows_of(loader)
        merged |= loader.state_dict()
        counts.append(loader.skipped.count)
    alone = make_loader(0, 1)
    alone.load_state_dict(merged)
    assert alone.skipped.count == sum(counts) > 0


def test_a_position_goes_on_where_nothing_more_may_be_left_out() -> None:
    for kind in ("iterable", "map-style"):
        loader = loader_of(kind, 12, {1, 2})
        iterator = iter(loader)
        before = [next(iterator).tolist() for _ in range(2)]
        other = loader_of(kind, 12, {1, 2}, on_error="raise")
        other.load_state_dict(loader.state_dict())
        assert before + rows_of(other) == rows_of(loader_of(kind, 12, {1, 2}))
        assert other.skipped.count == 2


# The budget


@pytest.mark.parametrize("most", [0, 1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["iterable", "map-style"])
def test_more_than_may_be_left_out_end_the_run_after_the_last_batch_delivered(
    kind: str, workers: int, most: int
) -> None:
    given = {"n": 12, "bad": {3, 6, 7}, **({"lanes": 2} if kind == "iterable" else {})}
    whole = rows_of(loader_of(kind, **given))
    loader = loader_of(kind, num_workers=workers, max_skipped=most, **given)
    if most == 3:
        assert rows_of(loader) == whole
        return
    iterator, found = iter(loader), []
    for _ in range(3):  # it does not go on
        with pytest.raises(TooManySkipped, match=rf"samples failed, and max_skipped={most} may be left out"):
            for batch in iterator:
                found.append(batch.tolist())
    assert loader.skipped.count <= most
    other = loader_of(kind, **given)
    other.load_state_dict(loader.state_dict())
    assert 0 < len(found) < len(whole)
    assert found + rows_of(other) == whole


@pytest.mark.parametrize("kind", ["iterable", "map-style"])
def test_the_budget_is_that_of_the_run_over_epochs_and_loads(kind: str) -> None:
    loader = loader_of(kind, 12, {3}, max_skipped=2)
    rows_of(loader), rows_of(loader)
    assert loader.skipped.count == 2
    other = loader_of(kind, 12, {3}, max_skipped=2)
    other.load_state_dict(loader.state_dict())
    for run in (loader, other):
        with pytest.raises(TooManySkipped, match="3 samples failed, and max_skipped=2"):
            rows_of(run)


def test_one_that_fails_only_once_ends_nothing_for_good() -> None:
    loader = StatefulDataLoader(
        failing.Failing(8, set(), once={5}), batch_size=2, seed=1, on_error="skip", max_skipped=0
    )
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(TooManySkipped):
        next(iterator)
    assert rows_of(iterator) == [[4, 5], [6, 7]]


# Ranks that take the same steps


def ranks(at_end: str, **more: Any) -> Iterator[StatefulDataLoader]:
    for rank in range(2):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2)
        yield loader_of("map-style", 12, {1, 3, 4}, batch_size=2, group=group, at_end=at_end, **more)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_of_several_has_a_batch_without_rows_where_it_may_pad(workers: int) -> None:
    batches = [list(loader) for loader in ranks("pad", num_workers=workers)]
    assert [[batch.tolist() for batch in each] for each in batches] == [[[0, 2], [6], [8, 10]], [[], [5, 7], [9, 11]]]
    assert {batch.dtype for each in batches for batch in each} == {torch.int64}


def test_a_rank_of_several_that_may_not_pad_says_that_it_would_fall_behind() -> None:
    first, second = ranks("stop")
    assert rows_of(first) == [[0, 2], [6], [8, 10]]
    with pytest.raises(TooManySkipped, match=r"No sample of a batch is left(.|\n)*at_end=\"pad\""):
        rows_of(second)
