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
from tests.distributed.loaders import LANES, encode, make_loader, rows_of, text_stream, write_corpus
from unbroken import StatefulDataLoader, read_jsonl
from unbroken.errors import IncompleteState, InvalidState, StateMismatch

# torch says so wherever a single process saves or loads, as this one does.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")

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
        self.steps = [[Step(line["epoch"], line["rows"], line["ended"]) for line in log if "rows" in line] for log in logs]
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
        mine = [list(itertools.takewhile(lambda s: not s.ended, (s for s in steps if s.epoch == epoch))) for steps in self.steps]
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
        logs = [[json.loads(line) for line in (out / f"rank-{rank}.jsonl").open()] for rank in range(ranks)]
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
                runs.append({"name": f"{kind} from {after}", "kind": kind, "load": load, "arguments": workers, "begun": after == 2})
            runs.append({"name": f"chain, {kind}", "kind": kind, "load": self.at(f"two to four, {kind}", 1)})
            load = self.at(f"one epoch, {kind}", -1)
            runs.append({"name": f"next epoch, {kind}", "kind": kind, "load": load, "first_epoch": 1, "epochs": 1})
        load = self.at("four, text", 5)
        runs.append({"name": "smaller batches", "kind": "text", "load": load, "arguments": {"batch_size": 5}})
        if ranks == 2:
            for name in ("peers", "mesh"):
                runs.append({"name": name, "kind": "lanes", "load": self.at(name, 3), "epochs": 1})
            for name, arguments in {"more lanes": {"lanes": 16}, "fewer lanes": {"lanes": 4}, "other seed": {"seed": 8}}.items():
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
