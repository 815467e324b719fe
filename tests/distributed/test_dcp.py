"""Positions on several ranks, through torch.distributed.checkpoint: under torchrun, in real files.

Whatever the number of ranks, one run is a part of one global order. The reference is that order, on one rank, in this
process, without a save or a load. Two ranks save; four load that and save again; one, two, three and eight load what
four saved.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DistributedSampler

from tests import datasets as ds
from tests.distributed.loaders import LANES, encode, is_wanted, make_loader, rows_of, text_stream, write_corpus
from unbroken import StatefulDataLoader, read_jsonl
from unbroken.errors import IncompleteState, InvalidState, StateMismatch

# torch says so wherever a single process saves or loads, as this one does.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)

ROOT = Path(__file__).parent.parent.parent
KINDS = ["map", "lanes", "text", "adopted"]
EPOCHS = 2


class Step(NamedTuple):
    """One step of one rank."""

    epoch: int
    rows: list[Any]
    ended: bool


@final
class RunOfRanks:
    """What the ranks of one run wrote down: ``steps[rank]``, and positions by the step after which they were taken."""

    def __init__(self, logs: list[list[dict[str, Any]]]) -> None:
        self.errors = [line for log in logs for line in log if "error" in line]
        self.refusals = [line["refused"] for log in logs for line in log if "refused" in line]
        self.steps = [
            [Step(line["epoch"], line["rows"], line["ended"]) for line in log if "rows" in line] for log in logs
        ]
        self.states = [{line["after"]: line["state"] for line in log if "state" in line} for log in logs]

    def state(self, after: int) -> dict[str, str]:
        """The merged position of all ranks."""
        return dict(itertools.chain.from_iterable(states[after].items() for states in self.states))

    def batches(self, epoch: int, first: int = 0, last: int | None = None) -> Iterator[list[list[Any]]]:
        """The batches of all ranks for each step of an epoch, from the run's step ``first`` to before ``last``."""
        mine = [[s.rows for s in steps[first:last] if s.epoch == epoch] for steps in self.steps]
        return map(list, itertools.zip_longest(*mine, fillvalue=[]))

    def whole_steps(self, epoch: int) -> int:
        """How many steps of an epoch came before the first lane ended on any rank."""
        mine = [
            list(itertools.takewhile(lambda s: not s.ended, (s for s in steps if s.epoch == epoch)))
            for steps in self.steps
        ]
        return min(map(len, mine))


def in_global_order(kind: str, step: list[list[Any]]) -> list[Any]:
    """The rows of a step: those of the ranks by turns, or batch after batch where a turn is a batch."""
    if kind == "lanes":
        return [row for batch in step for row in batch]
    return [row for rows in itertools.zip_longest(*step) for row in rows if row is not None]


def flat(kind: str, steps: Iterable[list[list[Any]]]) -> list[Any]:
    return [row for step in steps for row in in_global_order(kind, step)]


@final
class Launches:
    """Launches of torchrun, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.corpus = write_corpus(folder / "corpus.jsonl")
        self.two_save = functools.cache(self._two_save)
        self.four_load_and_save = functools.cache(self._four_load_and_save)
        self.load = functools.cache(self._load)

    def at(self, name: str, after: int) -> str:
        """The path of a checkpoint."""
        return str(self.folder / "checkpoints" / f"{name} after {after}")

    def saves(self, name: str, **how: str) -> list[dict[str, Any]]:
        places = {"fresh": 0, "end": -1}
        afters = {places[after] if after in places else int(after[1:]): manner for after, manner in how.items()}
        return [{"after": after, "how": manner, "to": self.at(name, after)} for after, manner in afters.items()]

    def launch(self, name: str, ranks: int, runs: list[dict[str, Any]]) -> dict[str, RunOfRanks]:
        out = self.folder / name
        out.mkdir()
        plan = out / "plan.json"
        plan.write_text(json.dumps({"corpus": str(self.corpus), "runs": runs}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "tests.distributed.program", str(plan), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:  # fmt: skip
            try:
                said, _ = process.communicate(timeout=110)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        assert process.returncode == 0, said
        texts = [(out / f"rank-{rank}.jsonl").read_text() for rank in range(ranks)]
        logs = [[json.loads(line) for line in text.splitlines()] for text in texts]
        names = [run["name"] for run in runs]
        return {run: RunOfRanks([[line for line in log if line["run"] == run] for log in logs]) for run in names}

    def _two_save(self) -> dict[str, RunOfRanks]:
        runs = []
        for kind in KINDS:
            name, workers = f"two, {kind}", {"num_workers": 2 if kind != "adopted" else 0}
            runs.append({"name": name, "kind": kind, "arguments": workers, "saves": self.saves(name, _3="sync")})
        for kind in ("plain map", "plain iterable"):
            saves = self.saves(kind, _3="async held")
            runs.append({"name": kind, "kind": kind, "saves": saves, "draw": 1})
            runs.append({"name": f"{kind} again", "kind": kind, "load": self.at(kind, 3), "draw": 2, "begun": 1})
        return self.launch("two save", 2, runs)

    def _four_load_and_save(self) -> dict[str, RunOfRanks]:
        self.two_save()
        runs: list[dict[str, Any]] = []
        for kind in KINDS:
            name, load = f"two to four, {kind}", self.at(f"two, {kind}", 3)
            runs.append({"name": name, "kind": kind, "load": load, "saves": self.saves(name, _1="async")})
            name = f"four, {kind}"
            saves = self.saves(name, fresh="sync", _2="async held", _5="async staged")
            runs.append({"name": name, "kind": kind, "saves": saves})
            name = f"one epoch, {kind}"
            runs.append({"name": name, "kind": kind, "epochs": 1, "saves": self.saves(name, end="sync")})
        for name in ("peers", "mesh"):
            saves, arguments = self.saves(name, _3="sync"), {"mesh": name == "mesh", "peers": 2}
            runs.append({"name": name, "kind": "lanes", "epochs": 1, "saves": saves, **arguments})
        saves = self.saves("map peers", _3="sync")
        runs.append({"name": "map peers", "kind": "map", "epochs": 1, "peers": 2, "saves": saves})
        return self.launch("four load and save", 4, runs)

    def _load(self, ranks: int) -> dict[str, RunOfRanks]:
        """Loads of what four ranks saved."""
        self.four_load_and_save()
        runs: list[dict[str, Any]] = []
        for kind in KINDS:
            for after in (2, 5):
                load = self.at(f"four, {kind}", after)
                workers = {"num_workers": 2 if ranks == 2 and after == 5 else 0}
                runs.append(
                    {
                        "name": f"{kind} from {after}",
                        "kind": kind,
                        "load": load,
                        "arguments": workers,
                        "begun": after == 2,
                    }
                )
            runs.append({"name": f"chain, {kind}", "kind": kind, "load": self.at(f"two to four, {kind}", 1)})
            load = self.at(f"one epoch, {kind}", -1)
            runs.append({"name": f"next epoch, {kind}", "kind": kind, "load": load, "first_epoch": 1, "epochs": 1})
        load = self.at("four, text", 5)
        runs.append({"name": "smaller batches", "kind": "text", "load": load, "arguments": {"batch_size": 5}})
        if ranks == 2:
            for name in ("peers", "mesh"):
                runs.append({"name": name, "kind": "lanes", "load": self.at(name, 3), "epochs": 1})
            for name, arguments in {
                "more lanes": {"lanes": 16},
                "fewer lanes": {"lanes": 4},
                "other seed": {"seed": 8},
            }.items():
                runs.append({"name": name, "kind": "lanes", "load": self.at("four, lanes", 5), "arguments": arguments})
        return self.launch(f"{ranks} load", ranks, runs)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("ranks"))


@functools.cache
def reference(kind: str, corpus: Path) -> RunOfRanks:
    """The run on one rank, never saved and never loaded."""
    lines = []
    if kind == "adopted":
        dataset = ds.Numbers(192)
        loader = StatefulDataLoader(dataset, batch_size=24, sampler=DistributedSampler(dataset, 1, 0, seed=5))
    else:
        loader = make_loader(kind, corpus)
    for epoch in range(EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            state = loader.state_dict()
            ended = any(json.loads(leaf)["ended"] for name, leaf in state.items() if name.startswith("lane-"))
            lines.append({"epoch": epoch, "rows": rows_of(batch), "ended": ended})
    return RunOfRanks([lines])


def assert_goes_on(
    kind: str, ref: RunOfRanks, before: list[Any], resumed: RunOfRanks, *, order: bool = True, steps: bool = True
) -> None:
    """``before`` and the resumed run make the reference: nothing lost, nothing repeated, in two epochs.

    ``order``: in the global order, for as long as no lane has ended. ``steps``: divided into the same steps.
    """
    assert not resumed.errors
    for epoch in range(EPOCHS):
        wanted, found = list(ref.batches(epoch)), list(resumed.batches(epoch))
        done = before if epoch == 0 else []
        assert Counter(flat(kind, wanted)) == Counter(done + flat(kind, found))
        if order:
            whole = resumed.whole_steps(epoch)
            ordered = done + flat(kind, found[:whole])
            until = min(len(ordered), len(flat(kind, wanted[: ref.whole_steps(epoch)])))
            assert until >= len(flat(kind, wanted)) / 2
            assert ordered[:until] == flat(kind, wanted)[:until]
        if order and steps:
            last = min(whole, ref.whole_steps(epoch) - len(done) // 24)
            sizes = [len(in_global_order(kind, step)) for step in wanted[len(done) // 24 :]]
            assert [len(in_global_order(kind, step)) for step in found[:last]] == sizes[:last]


def delivered(kind: str, run: RunOfRanks, steps: int) -> list[Any]:
    """The rows of the first steps of a run, in the global order."""
    return flat(kind, run.batches(0, 0, steps))


# Case 21


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_what_four_ranks_saved_goes_on_on_any_number(launches: Launches, ranks: int, kind: str) -> None:
    """Case 21: nothing lost or repeated in the rest of the epoch and the next, and the same rows in every step."""
    saved, loaded = launches.four_load_and_save()[f"four, {kind}"], launches.load(ranks)
    for after in (2, 5):
        # Three ranks have unequal shares of eight lanes, and after 5 steps half of the lanes are a turn ahead.
        order = kind != "lanes" or (ranks != 3 and (ranks, after) != (8, 5))
        before = delivered(kind, saved, after)
        ref = reference(kind, launches.corpus)
        assert_goes_on(kind, ref, before, loaded[f"{kind} from {after}"], order=order, steps=kind != "lanes")


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_saved_goes_on_on_four(launches: Launches, kind: str) -> None:
    """Case 21: saved with 2 workers, loaded with none."""
    before = delivered(kind, launches.two_save()[f"two, {kind}"], 3)
    resumed = launches.four_load_and_save()[f"two to four, {kind}"]
    order = kind != "lanes"  # six lanes of eight are a turn ahead, so four ranks cannot keep to the order
    assert_goes_on(kind, reference(kind, launches.corpus), before, resumed, order=order, steps=order)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_run_moves_from_two_ranks_to_four_and_on(launches: Launches, ranks: int, kind: str) -> None:
    """Cases 3 and 21: saved and loaded twice in one epoch, on other ranks each time."""
    before = delivered(kind, launches.two_save()[f"two, {kind}"], 3)
    before += delivered(kind, launches.four_load_and_save()[f"two to four, {kind}"], 1)
    resumed = launches.load(ranks)[f"chain, {kind}"]
    order = kind != "lanes"
    assert_goes_on(kind, reference(kind, launches.corpus), before, resumed, order=order, steps=order)


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_ranks_change_nothing(launches: Launches, kind: str) -> None:
    """Case 21: four ranks that save three times deliver what one rank delivers that saves nothing."""
    run = launches.four_load_and_save()[f"four, {kind}"]
    assert_goes_on(kind, reference(kind, launches.corpus), [], run, steps=kind != "lanes")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_after_the_end_of_an_epoch_comes_the_whole_of_the_next(launches: Launches, ranks: int, kind: str) -> None:
    """Cases 12 and 21: saved by four ranks after their last batch."""
    resumed = launches.load(ranks)[f"next epoch, {kind}"]
    assert not resumed.errors
    ref = reference(kind, launches.corpus)
    assert Counter(flat(kind, resumed.batches(1))) == Counter(flat(kind, ref.batches(1)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_rows_go_on_where_they_stopped_in_batches_of_another_size(launches: Launches, ranks: int) -> None:
    """Case 24: on other ranks too."""
    before = delivered("text", launches.four_load_and_save()["four, text"], 5)
    resumed = launches.load(ranks)["smaller batches"]
    # Five rows on each of 1, 2, 3 or 8 ranks: the order is that of the rows, not of the steps.
    assert_goes_on("text", reference("text", launches.corpus), before, resumed, steps=False)
    assert {len(step.rows) for step in resumed.steps[0][:10]} == {5}


# Case 25


def content_of(checkpoint: str | Path) -> dict[str, str]:
    """All that a checkpoint holds of the loader."""
    names = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    content = {name.removeprefix("loader."): "" for name in names if name.startswith("loader.")}
    dcp.load({"loader": content}, checkpoint_id=checkpoint)
    return content


SAVES = {"sync": ("four", 0), "async": ("two to four", 1), "async held": ("four", 2), "async staged": ("four", 5)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", SAVES)
def test_a_checkpoint_holds_the_position_of_the_call(launches: Launches, how: str, kind: str) -> None:
    """Case 25: though the loader ran on while it was written (held: nothing was copied before it had run on)."""
    name, after = SAVES[how]
    run = launches.four_load_and_save()[f"{name}, {kind}"]
    assert content_of(launches.at(f"{name}, {kind}", after)) == run.state(after)


@pytest.mark.slow
def test_a_checkpoint_written_by_a_process_of_its_own_holds_the_position_of_the_call(launches: Launches) -> None:
    """Case 25: torch starts that process itself."""
    runs = [
        {"name": k, "kind": k, "saves": launches.saves(k, _2="async by a process")} for k in ("map", "lanes", "text")
    ]
    found = launches.launch("process", 2, runs)
    for kind, run in found.items():
        assert not run.errors
        assert content_of(launches.at(kind, 2)) == run.state(2)


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_writes_the_same_keys_fresh_running_and_at_the_end(launches: Launches, kind: str) -> None:
    """Case 25: the header is the same on every rank, and no lane is on two."""
    runs = launches.four_load_and_save()
    states = runs[f"four, {kind}"].states
    for rank, (running, ended) in enumerate(zip(states, runs[f"one epoch, {kind}"].states, strict=True)):
        keys = set(running[0])
        assert keys == set(running[2]) == set(running[5]) == set(ended[-1])
        if kind in ("lanes", "text"):
            lanes = range(rank, LANES if kind == "lanes" else 48, 4)
            assert keys == {"unbroken", *(f"lane-{lane:06d}" for lane in lanes)}
        else:
            assert keys == {"unbroken", "place"}
    assert len({state[5]["unbroken"] for state in states}) == 1


@pytest.mark.parametrize("kind", ["map", "adopted"])
def test_the_place_is_the_same_on_every_rank(launches: Launches, kind: str) -> None:
    """Section 6 of the design: as far as it says where to go on; each rank's ledger digests what it delivered itself."""
    places = [json.loads(state[5]["place"]) for state in launches.four_load_and_save()[f"four, {kind}"].states]
    for name in ("step", "run", "epoch", "rows", "sampler"):
        assert len({json.dumps(place[name]) for place in places}) == 1


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
    world = {"sampler": DistributedSampler(ds.Numbers(192), 1, 0, seed=5)} if kind == "adopted" else {}
    loader = make_loader(kind, launches.corpus, **world)
    loader.load_state_dict(merged)
    rest = [row for batch in loader for row in rows_of(batch)]
    wanted = Counter(flat(kind, reference(kind, launches.corpus).batches(0)))
    assert Counter(rest) + Counter(delivered(kind, run, 5)) == wanted


# Ranks of one dp rank, meshes, ranks that nobody told the loader of


@pytest.mark.parametrize("name", ["peers", "mesh", "map peers"])
def test_peers_of_one_dp_rank_write_the_same(launches: Launches, name: str) -> None:
    """Section 6 of the design: tensor-parallel pairs; the same keys with the same values, and the same rows."""
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
    """Case 21: two dp ranks of two processes each, then two processes."""
    saved, loaded = launches.four_load_and_save()[name], launches.load(2)[name]
    assert not loaded.errors
    for rank in (0, 1):
        alone = [step.rows for step in launches.two_save()["two, lanes"].steps[rank] if step.epoch == 0]
        assert [step.rows for step in saved.steps[2 * rank]] == alone
        assert [step.rows for step in loaded.steps[rank]] == alone[3:]


def test_a_mesh_of_two_dimensions_is_refused(launches: Launches) -> None:
    """Section 5 of the design: on every rank, naming its dimensions and the way out."""
    refusals = launches.four_load_and_save()["mesh"].refusals
    assert len(refusals) == 4
    for said in refusals:
        assert "one dimension" in said and "('dp', 'tp')" in said and 'mesh["dp"]' in said


@pytest.mark.parametrize("kind", ["plain map", "plain iterable"])
def test_a_plain_loader_on_several_ranks_has_keys_that_carry_the_rank(launches: Launches, kind: str) -> None:
    """Case 25: each rank goes on with its own order, though the process draws other numbers now."""
    saved, loaded = launches.two_save()[kind], launches.two_save()[f"{kind} again"]
    assert not saved.errors and not loaded.errors
    assert [set(states[3]) for states in saved.states] == [{"unbroken", "rank-0000"}, {"unbroken", "rank-0001"}]
    assert set(content_of(launches.at(kind, 3))) == {"unbroken", "rank-0000", "rank-0001"}
    assert [steps[3:] for steps in saved.steps] == loaded.steps
    if kind == "plain map":
        assert saved.steps[0] != saved.steps[1]


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
    saving.close()
    loader = make_loader(kind, "", num_workers=after)
    dcp.load({"loader": loader}, checkpoint_id=tmp_path)
    assert [rows_of(batch) for _ in range(2) for batch in loader] == ref


# A sampler that knows its rank


def distributed_loaders(rows: int, world: int, **others: Any) -> list[StatefulDataLoader]:
    dataset = ds.Numbers(rows)
    samplers = [DistributedSampler(dataset, world, rank, seed=5, **others) for rank in range(world)]
    return [StatefulDataLoader(dataset, batch_size=4, sampler=sampler) for sampler in samplers]


def run_ranks(loaders: list[StatefulDataLoader], steps: int) -> tuple[list[list[list[Any]]], dict[str, str]]:
    """The next batches of each rank, and the merged position after them."""
    rows, merged = [], {}
    for loader in loaders:
        rows.append([rows_of(batch) for batch in itertools.islice(loader, steps)])
        merged |= loader.state_dict()
    return rows, merged


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_adopted_sampler_is_exact_on_the_same_ranks(drop_last: bool) -> None:
    """Cases 19 and 21: four ranks, 50 rows: padded, or cut."""
    ref, _ = run_ranks(distributed_loaders(50, 4, drop_last=drop_last), 99)
    first, state = run_ranks(distributed_loaders(50, 4, drop_last=drop_last), 2)
    resumed = distributed_loaders(50, 4, drop_last=drop_last)
    for loader in resumed:
        loader.load_state_dict(state)
    rest, _ = run_ranks(resumed, 99)
    assert [one + other for one, other in zip(first, rest, strict=True)] == ref


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_an_adopted_sampler_is_elastic_on_other_ranks(world: int) -> None:
    """Cases 19 and 21: no row is lost, and none repeated but what the sampler pads its epoch with."""
    first, state = run_ranks(distributed_loaders(50, 4), 2)
    resumed = distributed_loaders(50, world)
    for loader in resumed:
        loader.load_state_dict(state)
    rest, _ = run_ranks(resumed, 99)
    counts = Counter(row for batches in (*first, *rest) for batch in batches for row in batch)
    padding = -50 % world
    assert set(counts) == set(range(50))
    assert sum(counts.values()) == 50 + padding and max(counts.values()) <= 2


# Ranks whose data end at different steps


def uneven(world: int, state: Mapping[str, str] | None = None) -> list[StatefulDataLoader]:
    loaders = [make_loader("uneven", "", rank, world) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def epochs_of(loader: StatefulDataLoader, until: int) -> Iterator[list[Any]]:
    """Batches in one epoch after another, each rank going on by itself, up to the start of epoch ``until``."""
    while True:
        for batch in loader:
            if min(json.loads(leaf)["epoch"] for name, leaf in loader.state_dict().items() if "lane" in name) >= until:
                return
            yield rows_of(batch)


def assert_whole(*parts: Iterable[list[Any]]) -> None:
    """All parts together are both epochs."""
    found = Counter(row for part in parts for batch in part for row in batch)
    assert found == Counter(row for batch in epochs_of(uneven(1)[0], EPOCHS) for row in batch)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("steps", range(13))
def test_ranks_that_go_on_to_their_next_epoch_lose_and_repeat_nothing(steps: int, world: int) -> None:
    """Case 21: of four ranks, one ends its epoch after 6 steps, the last after 13; saved after any step."""
    before, state = [], {}
    for loader in uneven(4):
        before += itertools.islice(epochs_of(loader, EPOCHS), steps)
        state |= loader.state_dict()
    after = [batch for loader in uneven(world, state) for batch in epochs_of(loader, EPOCHS)]
    assert_whole(before, after)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_ranks_that_wait_for_each_other_after_an_epoch_may_count_different_steps(world: int) -> None:
    """Case 21: each rank went through its epoch 0, then two steps of epoch 1."""
    before, state = [], {}
    for loader in uneven(4):
        before += [rows_of(batch) for batch in loader]
        before += [rows_of(batch) for batch in itertools.islice(loader, 2)]
        state |= loader.state_dict()
    after = [batch for loader in uneven(world, state) for batch in epochs_of(loader, EPOCHS)]
    assert_whole(before, after)


@pytest.mark.parametrize("worlds", [(2, 1), (2, 4), (4, 2), (8, 4)])
def test_ranks_that_wait_at_their_end_may_be_saved_and_loaded_again(worlds: tuple[int, int]) -> None:
    """Case 21: saved after 8 steps, one of four ranks having stopped after its 6; on other ranks saved a step later."""
    before, state = [], {}
    for loader in uneven(4):
        before += [rows_of(batch) for batch in itertools.islice(loader, 8)]
        state |= loader.state_dict()
    between, again = [], {}
    for loader in uneven(worlds[0], state):
        between += [rows_of(batch) for batch in itertools.islice(loader, 1)]
        again |= loader.state_dict()
    after = [batch for loader in uneven(worlds[1], again) for batch in epochs_of(loader, EPOCHS)]
    assert_whole(before, between, after)


# Cases 23, 26 and 27: what is refused


def lanes_of(world: int, steps: Mapping[int, int], **others: Any) -> dict[str, str]:
    """The merged position of ranks, each after a number of steps of its own."""
    merged: dict[str, str] = {}
    for rank, count in steps.items():
        merged |= run_ranks([make_loader("lanes", "", rank, world, **others)], count)[1]
    return merged


def load_from_file(loader: StatefulDataLoader, content: Mapping[str, Any], folder: Path) -> None:
    """Load what is in ``content``, through a checkpoint."""
    dcp.save({"loader": dict(content)}, checkpoint_id=folder)
    dcp.load({"loader": loader}, checkpoint_id=folder)


def assert_untouched(loader: StatefulDataLoader, load: Any) -> None:
    """``load``, which must raise, changes nothing, neither before the first batch nor in the middle."""
    state = loader.state_dict()
    load()
    assert loader.state_dict() == state
    batches = iter(loader)
    begun = [rows_of(next(batches)) for _ in range(2)]
    state = loader.state_dict()
    load()
    assert loader.state_dict() == state
    ref = [rows_of(batch) for batch in type(loader)(loader.dataset, **AS_SAVED)]
    assert begun + [rows_of(batch) for batch in batches] == ref


AS_SAVED: dict[str, Any] = {"batch_size": 2, "lanes": 8, "seed": 7, "dp_rank": 0, "dp_world_size": 1}


def changed_header(**changes: Any) -> dict[str, str]:
    state = lanes_of(1, {0: 3})
    return state | {"unbroken": json.dumps(json.loads(state["unbroken"]) | changes)}


def changed_leaf(change: Any) -> dict[str, str]:
    state = lanes_of(1, {0: 3})
    return state | {"lane-000005": change(state["lane-000005"])}


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "different steps": (lambda: lanes_of(2, {0: 3, 1: 4}), IncompleteState, r"lane-000000 at step 3, lane-000001 at step 4"),
    "different runs": (lambda: lanes_of(2, {0: 3}, seed=8) | lanes_of(2, {1: 3}), IncompleteState, "different runs"),
    "lanes of one rank of two": (lambda: lanes_of(2, {0: 3}), IncompleteState, "4 of the 8 lanes.*lane-000001"),
    "a lane too few": (lambda: dict(list(lanes_of(1, {0: 3}).items())[:-1]), IncompleteState, "1 of the 8.*lane-000007"),
    "the header alone": (lambda: {"unbroken": lanes_of(1, {0: 3})["unbroken"]}, IncompleteState, "8 of the 8 lanes"),
    "no header": (lambda: dict(list(lanes_of(1, {0: 3}).items())[1:]), InvalidState, "'unbroken' is missing"),
    "other lanes": (lambda: changed_header(lanes=6), StateMismatch, "saved 6.*now 8"),
    "another kind": (lambda: changed_header(kind="map"), StateMismatch, "saved map.*now iterable"),
    "a later version": (lambda: changed_header(version=2), InvalidState, "version 2.*up to 1.*Install"),
    "no version": (lambda: changed_header(version=None), InvalidState, "no version"),
    "no fingerprint": (lambda: changed_header(fingerprint=None), InvalidState, "no fingerprint"),
    "a leaf cut short": (lambda: changed_leaf(lambda leaf: leaf[:-9]), InvalidState, "lane-000005.*not JSON"),
    "a leaf without fields": (lambda: changed_leaf(lambda leaf: "{}"), InvalidState, "cut short"),
    "a leaf that is a list": (lambda: changed_leaf(lambda leaf: "[1]"), InvalidState, "lane-000005.*list"),
    "an empty leaf": (lambda: changed_leaf(lambda leaf: ""), InvalidState, "lane-000005"),
    "a count below zero": (
        lambda: changed_leaf(lambda leaf: json.dumps(json.loads(leaf) | {"turns": -1})), InvalidState, "lane-000005.*-1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_position_that_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    """Cases 23 and 27: with a named error that says what is wrong."""
    make, error, words = REFUSED[name]
    loader, state = make_loader("lanes", ""), make()

    def load() -> None:
        with pytest.raises(error, match=f"(?s){words}"):
            loader.load_state_dict(state)

    assert_untouched(loader, load)


@pytest.mark.parametrize("name", ["different steps", "different runs", "a later version", "a leaf cut short"])
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    """Cases 23 and 27: the same, as dcp.load reads it."""
    make, error, words = REFUSED[name]
    loader, state = make_loader("lanes", ""), make()

    def load() -> None:
        with pytest.raises(error, match=f"(?s){words}"):
            load_from_file(loader, state, tmp_path)

    assert_untouched(loader, load)


def test_positions_of_another_loader_are_refused() -> None:
    """Case 27: what is not ours."""
    loader = make_loader("lanes", "")
    for state in ({"_snapshot": {"_last_yielded_worker_id": 0}}, {"model": {"weight": torch.ones(2)}}, [1], None, "x"):

        def load(state: Any = state) -> None:
            with pytest.raises(InvalidState):
                loader.load_state_dict(state)

        assert_untouched(loader, load)


@pytest.mark.parametrize("left", [{}, {"lane-000003": "{}"}])
def test_a_checkpoint_without_the_loader_is_refused_by_torch(tmp_path: Path, left: dict[str, str]) -> None:
    """Case 26: dcp.load names what is missing before the loader is asked, and the loader is as it was."""
    dcp.save({"model": {"weight": torch.ones(2)}, "loader": left}, checkpoint_id=tmp_path)
    loader = make_loader("lanes", "")

    def load() -> None:
        with pytest.raises(BaseException, match=r"Missing key in checkpoint state_dict: loader\.") as caught:
            dcp.load({"loader": loader}, checkpoint_id=tmp_path)
        assert type(caught.value).__name__ == "CheckpointException"

    assert_untouched(loader, load)


def test_loads_that_do_not_fit_are_refused_on_every_rank(launches: Launches) -> None:
    """Cases 23 and 26: under torchrun; the loader is as it was, and the ranks go on."""
    found = launches.load(2)
    wanted = {
        "more lanes": r"Missing key in checkpoint state_dict: loader\.lane-000008",
        "fewer lanes": r"StateMismatch.*lanes +saved 8 +now 4.*lanes=8",
        "other seed": r"StateMismatch.*seed +saved 7 +now 8",
    }
    for name, words in wanted.items():
        errors = found[name].errors
        assert len(errors) == 2
        for error in errors:
            assert re.search(words, error["error"], re.DOTALL)
            assert error["unchanged"]


def others(kind: str, corpus: Path) -> dict[str, tuple[StatefulDataLoader, dict[str, tuple[str, str]]]]:
    """Loaders that are not the one that saved, and the fields in which they differ: saved and now."""

    def text(stream: Any, **arguments: Any) -> StatefulDataLoader:
        return StatefulDataLoader(stream, **{"batch_size": 24, "lanes": 48, "seed": 7, **arguments})

    if kind == "map":
        more = {"batch_size": 24, "shuffle": True, "seed": 7, "dp_rank": 0, "dp_world_size": 1}
        return {
            "seed": (make_loader("map", "", seed=8), {"seed": ("7", "8")}),
            "length": (StatefulDataLoader(ds.Numbers(150), **more), {"length": ("151", "150")}),
            "order": (make_loader("map", "", shuffle=False), {"sampler": ("shuffle with a seed", "SequentialSampler")}),
            "all": (
                StatefulDataLoader(ds.FetchedTogether(9, "numpy"), **{**more, "seed": 1, "seed_by": "sample"}),
                {"seed": ("7", "1"), "length": ("151", "9"), "seed_by": ("batch", "sample"), "dataset": ("Numbers", "Fetched")},
            ),
        }  # fmt: skip
    return {
        "window": (text(text_stream(corpus, window=50)), {"window": ("400", "50")}),
        "tokenizer": (
            text(read_jsonl(str(corpus)).shuffle(400, seed=3).filter(is_wanted).tokenize(list, append=0).pack(64)),
            {"tokenizer": ("encode", "list")},
        ),
        "append and seed": (
            text(
                read_jsonl(str(corpus)).shuffle(400, seed=3).filter(is_wanted).tokenize(encode, append=1).pack(64),
                seed=1,
            ),
            {"append": (r"\[0\]", r"\[1\]"), "seed": ("7", "1")},
        ),
    }


OTHERS = [("map", "seed"), ("map", "length"), ("map", "order"), ("map", "all")]
OTHERS += [("text", "window"), ("text", "tokenizer"), ("text", "append and seed")]


@pytest.mark.parametrize(("kind", "name"), OTHERS)
def test_another_pipeline_is_refused_unless_the_difference_is_accepted(
    kind: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 26: every field that differs is listed, as it was saved and as it is now."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    _, state = run_ranks([make_loader(kind, corpus)], 2)
    loader, fields = others(kind, corpus)[name]
    before = loader.state_dict()
    with pytest.raises(StateMismatch, match="another pipeline") as caught:
        load_from_file(loader, state, tmp_path / "checkpoint")
    assert loader.state_dict() == before
    listed = {line.split()[0] for line in str(caught.value).splitlines() if re.search("saved .* now ", line)}
    assert listed == set(fields)
    for field, (saved, now) in fields.items():
        assert re.search(rf"{field} +saved .*{saved}.* now .*{now}", str(caught.value))
    assert "strict=False" in str(caught.value)
    loader.load_state_dict(state, strict=False)
    leaf = "place" if kind == "map" else "lane-000007"
    assert json.loads(loader.state_dict()[leaf])["step"] == 2
    assert rows_of(next(iter(loader)))


@pytest.mark.parametrize("strict", [True, False])
def test_other_files_are_refused_in_mid_epoch_and_accepted_between_epochs(tmp_path: Path, strict: bool) -> None:
    """Case 26: in mid-epoch they cannot be without loss, whatever the user says."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    loader = make_loader("text", corpus)
    _, state = run_ranks([loader], 2)
    list(loader)
    between = loader.state_dict()
    with corpus.open("a") as file:
        file.write(json.dumps({"text": "one more", "number": 1}) + "\n")
    loader = make_loader("text", corpus)
    before = loader.state_dict()
    with pytest.raises(StateMismatch, match=r"files +saved .* now "):
        loader.load_state_dict(state, strict=strict)
    assert loader.state_dict() == before
    if strict:
        with pytest.raises(StateMismatch, match=r"files +saved .* now "):
            loader.load_state_dict(between)
    else:
        loader.load_state_dict(between, strict=False)
        assert len(list(loader)) > 50
