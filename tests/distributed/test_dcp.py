"""Positions of several ranks through torch.distributed.checkpoint: under torchrun, in real files.

Whatever the number of ranks, a run is one global order that they share. The reference is that order, on one rank, in
this process, without a save or a load. Two ranks save; four load that and save again; one, two, three and eight load
what four saved.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.launches import KINDS, Launches, RunOfRanks, flat
from tests.distributed.loaders import GLOBAL_BATCH, LANES, TEXT_LANES, ended_of, make_loader, rows_of
from tests.distributed.program import Run

pytestmark = [
    # torch says so wherever a single process saves or loads, as this one does.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
    # torch's opinion of three workers on a small machine
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
EPOCHS = 2
RANKS = [1, 2, 3, 8]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("ranks"))


@functools.cache
def reference(kind: str, corpus: Path) -> RunOfRanks:
    """The run on one rank, never saved and never loaded."""
    lines = []
    loader = make_loader(kind, corpus)
    for epoch in range(EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            lines.append({"epoch": epoch, "rows": rows_of(batch), "ended": ended_of(loader.state_dict())})
    return RunOfRanks([lines])


def delivered(kind: str, run: RunOfRanks, steps: int) -> list[Any]:
    """The rows of the first steps of a run."""
    return flat(kind, run.batches(0, steps))


def assert_goes_on(
    kind: str, ref: RunOfRanks, before: list[Any], resumed: RunOfRanks, *, order: bool = True, steps: bool = True
) -> None:
    """``before`` and the resumed run make the reference: nothing lost, nothing repeated, in two epochs.

    ``order``: in the global order, until the first lane ends. ``steps``: divided into the same steps too.
    """
    assert not resumed.errors
    for epoch in range(EPOCHS):
        wanted, found = list(ref.batches(epoch)), list(resumed.batches(epoch))
        done = before if epoch == 0 else []
        assert Counter(flat(kind, wanted)) == Counter(done + flat(kind, found))
        if order:
            ordered = done + flat(kind, found[: resumed.whole_steps(epoch)])
            whole = flat(kind, wanted[: ref.whole_steps(epoch)])
            until = min(len(ordered), len(whole))
            assert until >= len(flat(kind, wanted)) / 2
            assert ordered[:until] == whole[:until]
        if order and steps:
            first = len(done) // GLOBAL_BATCH
            number = min(resumed.whole_steps(epoch), ref.whole_steps(epoch) - first)
            sizes = [sum(map(len, step)) for step in wanted[first : first + number]]
            assert [sum(map(len, step)) for step in found[:number]] == sizes


# Case 21


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", RANKS)
def test_what_four_ranks_saved_goes_on_on_any_number(launches: Launches, ranks: int, kind: str) -> None:
    """Case 21: nothing lost or repeated in the rest of the epoch and the next, and the same rows in every step."""
    saved, loaded = launches.four_load_and_save()[f"four, {kind}"], launches.load(ranks)
    for after in (2, 5):
        # Three ranks have unequal shares of eight lanes, and after 5 steps half of the lanes are a turn ahead.
        order = kind != "lanes" or (ranks != 3 and (ranks, after) != (8, 5))
        before, resumed = delivered(kind, saved, after), loaded[f"{kind} from {after}"]
        assert_goes_on(kind, reference(kind, launches.corpus), before, resumed, order=order, steps=kind != "lanes")


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_saved_goes_on_on_four(launches: Launches, kind: str) -> None:
    """Case 21: saved with 2 workers, loaded with none."""
    before = delivered(kind, launches.two_save()[f"two, {kind}"], 3)
    resumed = launches.four_load_and_save()[f"two to four, {kind}"]
    order = kind != "lanes"  # six lanes of eight are a turn ahead, so that four ranks cannot keep to the order
    assert_goes_on(kind, reference(kind, launches.corpus), before, resumed, order=order)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_run_moves_from_two_ranks_to_four_and_on(launches: Launches, ranks: int, kind: str) -> None:
    """Cases 3 and 21: saved and loaded twice in one epoch, on other ranks each time."""
    before = delivered(kind, launches.two_save()[f"two, {kind}"], 3)
    before += delivered(kind, launches.four_load_and_save()[f"two to four, {kind}"], 1)
    resumed = launches.load(ranks)[f"chain, {kind}"]
    assert_goes_on(kind, reference(kind, launches.corpus), before, resumed, order=kind != "lanes")


@pytest.mark.parametrize("kind", KINDS)
def test_saves_and_ranks_change_nothing(launches: Launches, kind: str) -> None:
    """Case 21: four ranks that save three times deliver what one rank delivers that saves nothing."""
    run = launches.four_load_and_save()[f"four, {kind}"]
    assert_goes_on(kind, reference(kind, launches.corpus), [], run, steps=kind != "lanes")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", RANKS)
def test_after_the_end_of_an_epoch_comes_the_whole_of_the_next(launches: Launches, ranks: int, kind: str) -> None:
    """Cases 12 and 21: saved by four ranks after their last batch."""
    resumed = launches.load(ranks)[f"next epoch, {kind}"]
    assert not resumed.errors
    ref = reference(kind, launches.corpus)
    assert Counter(flat(kind, resumed.batches(1))) == Counter(flat(kind, ref.batches(1)))


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_go_on_where_they_stopped_in_batches_of_another_size(launches: Launches, ranks: int) -> None:
    """Case 24: on other ranks too, in the same order."""
    before = delivered("text", launches.four_load_and_save()["four, text"], 5)
    resumed = launches.load(ranks)["smaller batches"]
    assert_goes_on("text", reference("text", launches.corpus), before, resumed, steps=False)
    assert {len(step.rows) for step in resumed.steps[0][:10]} == {5}


# Case 25


def content_of(checkpoint: str) -> dict[str, str]:
    """All that a checkpoint holds of the loader."""
    names = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    content = {name.removeprefix("loader."): "" for name in names if name.startswith("loader.")}
    dcp.load({"loader": content}, checkpoint_id=checkpoint)
    return content


def assert_holds(checkpoint: str, states: list[dict[str, str]]) -> None:
    """A checkpoint holds each leaf of each rank, and of one that several ranks have, that of one of them."""
    content = content_of(checkpoint)
    assert set(content) == {name for state in states for name in state}
    for name, leaf in content.items():
        assert leaf in [state[name] for state in states if name in state]


SAVES = {"sync": ("four", 0), "async": ("two to four", 1), "async held": ("four", 2), "async staged": ("four", 5)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", SAVES)
def test_a_checkpoint_holds_the_position_of_the_call(launches: Launches, how: str, kind: str) -> None:
    """Case 25: though the loader ran on while it was written (held: nothing was copied before it had run on)."""
    name, after = SAVES[how]
    run = launches.four_load_and_save()[f"{name}, {kind}"]
    assert_holds(launches.at(f"{name}, {kind}", after), [states[after] for states in run.states])


@pytest.mark.slow
def test_a_process_of_its_own_writes_the_position_of_the_call(launches: Launches) -> None:
    """Case 25: torch starts that process itself."""
    kinds = ("map", "lanes", "text")
    runs = [Run(kind, kind, saves=launches.saves(kind, {2: "async by a process"})) for kind in kinds]
    for kind, run in launches.launch("process", 2, lambda: runs).items():
        assert not run.errors
        assert_holds(launches.at(kind, 2), [states[2] for states in run.states])


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_writes_the_same_keys_fresh_running_and_at_the_end(launches: Launches, kind: str) -> None:
    """Case 25: the header is the same on every rank, and no lane is on two."""
    runs = launches.four_load_and_save()
    states = runs[f"four, {kind}"].states
    lanes = {"lanes": LANES, "text": TEXT_LANES}.get(kind)
    for rank, (running, ended) in enumerate(zip(states, runs[f"one epoch, {kind}"].states, strict=True)):
        leaves = {f"lane-{lane:06d}" for lane in range(rank, lanes, 4)} if lanes else {"place"}
        for state in (running[0], running[2], running[5], ended[-1]):
            assert set(state) == leaves | {"unbroken"}
    assert len({state[5]["unbroken"] for state in states}) == 1


@pytest.mark.parametrize("kind", ["map", "adopted"])
def test_the_place_is_the_same_on_every_rank(launches: Launches, kind: str) -> None:
    """Case 25: a checkpoint keeps one of them, whichever it is."""
    states = launches.four_load_and_save()[f"four, {kind}"].states
    for after in (0, 2, 5):
        assert len({state[after]["place"] for state in states}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_ranks_are_merged_from_files(launches: Launches, kind: str, tmp_path: Path) -> None:
    """Case 25: torch.save, torch.load with weights_only, json, ``{**a, **b}``."""
    run = launches.four_load_and_save()[f"four, {kind}"]
    merged: dict[str, str] = {}
    for rank, states in enumerate(run.states):
        torch.save({"loader": states[5]}, tmp_path / f"{rank}.pt")
        loaded = torch.load(tmp_path / f"{rank}.pt", weights_only=True)["loader"]
        assert loaded == json.loads(json.dumps(loaded)) == states[5]
        merged = {**merged, **loaded}
    loader = make_loader(kind, launches.corpus)
    loader.load_state_dict(merged)
    rest = [row for batch in loader for row in rows_of(batch)]
    wanted = Counter(flat(kind, reference(kind, launches.corpus).batches(0)))
    assert Counter(rest) + Counter(delivered(kind, run, 5)) == wanted


# Processes of one dp rank, and ranks that nobody told the loader of


@pytest.mark.parametrize("name", ["peers", "mesh", "map peers"])
def test_processes_of_one_dp_rank_write_the_same(launches: Launches, name: str) -> None:
    """Case 25: tensor-parallel pairs have the same rows, and the same keys with the same values."""
    run = launches.four_load_and_save()[name]
    assert not run.errors
    for first, second in ((0, 1), (2, 3)):
        assert run.states[first] == run.states[second]
        assert run.steps[first] == run.steps[second]
    assert run.steps[0] != run.steps[2]
    if name != "map peers":
        assert set(run.states[0][3]) & set(run.states[2][3]) == {"unbroken"}


@pytest.mark.parametrize("name", ["peers", "mesh"])
def test_what_pairs_saved_goes_on_without_pairs(launches: Launches, name: str) -> None:
    """Case 21: two dp ranks of two processes each, then of one."""
    saved, loaded = launches.four_load_and_save()[name], launches.load(2)[name]
    assert not loaded.errors
    for rank, alone in enumerate(launches.two_save()["two, lanes"].steps):
        ref = [step for step in alone if step.epoch == 0]
        assert saved.steps[2 * rank] == ref
        assert loaded.steps[rank] == ref[3:]


def test_a_mesh_of_two_dimensions_is_refused(launches: Launches) -> None:
    """Case 23: on every rank, with the names of its dimensions and the way out."""
    refusals = launches.four_load_and_save()["mesh"].refusals
    assert len(refusals) == 4
    for said in refusals:
        assert "one dimension" in said and "('dp', 'tp')" in said and 'mesh["dp"]' in said


@pytest.mark.parametrize("kind", ["plain map", "plain iterable"])
def test_a_plain_loader_has_a_key_that_carries_the_rank(launches: Launches, kind: str) -> None:
    """Cases 23 and 25: each rank goes on in its own order, though it draws other numbers; one rank alone does not."""
    saved, loaded = launches.two_save()[kind], launches.two_save()[f"{kind} again"]
    assert not saved.errors and not loaded.errors
    assert [set(states[3]) for states in saved.states] == [{"unbroken", "rank-0000"}, {"unbroken", "rank-0001"}]
    assert_holds(launches.at(kind, 3), [states[3] for states in saved.states])
    assert [steps[3:] for steps in saved.steps] == loaded.steps
    if kind == "plain map":
        assert saved.steps[0] != saved.steps[1]
    (refused,) = launches.load(1)[kind].errors
    assert re.search(r"StateMismatch.*ranks +saved 2 +now 1\b.*dp_world_size", refused["error"], re.DOTALL)
    assert refused["unchanged"]


# Case 20


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("kind", ["plain map", "plain iterable"])
def test_what_two_workers_saved_goes_on_with_any_number(tmp_path: Path, kind: str, after: int) -> None:
    """Case 20: through a checkpoint of a single process, lanes unsaid on both sides."""
    saving = make_loader(kind, "", num_workers=2)
    batches = iter(saving)
    for _ in range(3):
        next(batches)
    dcp.save({"loader": saving}, checkpoint_id=tmp_path)
    ref = [rows_of(batch) for batch in batches] + [rows_of(batch) for batch in saving]
    loader = make_loader(kind, "", num_workers=after)
    dcp.load({"loader": loader}, checkpoint_id=tmp_path)
    assert [rows_of(batch) for _ in range(2) for batch in loader] == ref


# Cases 23 and 26


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("more lanes", r"Missing key in checkpoint state_dict: loader\.lane-000008"),
        ("fewer lanes", r"StateMismatch.*lanes +saved 8 +now 4 .*lanes=8"),
        ("other seed", r"StateMismatch.*seed +saved 7 +now 8 "),
    ],
)
def test_a_load_that_does_not_fit_is_refused_on_every_rank(launches: Launches, name: str, words: str) -> None:
    """Cases 23 and 26: under torchrun; the loader is as it was, and the ranks can go on."""
    errors = launches.load(2)[name].errors
    assert len(errors) == 2
    for error in errors:
        assert re.search(words, error["error"], re.DOTALL)
        assert error["unchanged"]
