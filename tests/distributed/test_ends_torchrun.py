"""The ends of finite data under torchrun: real process groups, DDP, checkpoints in real files.

Four ranks run and save; one, two and three load that. A backward pass of DDP needs every rank: one that stopped early
would hang the others. What each rank should see is worked out by the plain model of ``peers``.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests.distributed.ends import Case, make_loader
from tests.distributed.launches import torchrun
from tests.distributed.peers import Model

pytestmark = [
    # torch says so wherever a single process saves or loads, as this one does.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
]
LENGTHS = [13, 0, 22, 40, 3, 14, 9, 18]
AT_END = ["stop", "pad", "repeat"]
KINDS = ["stream", "iterable"]
STEPS, MORE = {"stream": 7, "iterable": 9}, 12


def arguments_of(kind: str, at_end: str, size: int) -> dict[str, Any]:
    workers = 1 if at_end == "stop" else 0
    return {"batch_size": size, "at_end": at_end, "drop_last": at_end == "pad", "num_workers": workers}


class Launches:
    """Launches of torchrun, each made when it is first asked for, and once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[int, list[dict[str, Any]]] = {}

    def on(self, world: int) -> list[dict[str, Any]]:
        """What each rank saw, by case: four save, others load."""
        if world not in self._made:
            cases = list(self._saving() if world == 4 else self._loading(world))
            if world != 4:
                self.on(4)
            out = self.folder / f"{world} ranks"
            out.mkdir()
            plan = out / "plan.json"
            plan.write_text(json.dumps([asdict(case) for case in cases]))
            torchrun(world, "tests.distributed.ends", str(plan), str(out))
            self._made[world] = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(world)]
        return self._made[world]

    def at(self, kind: str, at_end: str) -> str:
        return str(self.folder / f"{kind} {at_end}")

    def _saving(self) -> list[Case]:
        cases = [
            Case(
                f"{kind} {at_end}",
                kind,
                LENGTHS,
                STEPS[kind],
                arguments_of(kind, at_end, 2),
                save=self.at(kind, at_end),
            )
            for kind in KINDS
            for at_end in AT_END
        ]
        cases += [
            Case(f"map {at_end}", "map", [61], 9, {"batch_size": 2, "at_end": at_end}, save=self.at("map", at_end))
            for at_end in AT_END
        ]
        long = {"batch_size": 1, "at_end": "stop"}
        cases.append(Case("long", "stream", [200, 230, 250, 300], 201, long))
        cases.append(Case("mesh", "stream", [5, 9, 13, 7], 6, long, mesh=True))
        cases.append(Case("fails", "stream", [20, 20, 20, 20], 22, long, fails=2, at=205))
        cases.append(Case("leaves", "stream", [20, 20, 20, 20], 22, long, leaves=1, at=109))
        return cases

    def _loading(self, world: int) -> list[Case]:
        size = {1: 5, 2: 4, 3: 3}[world]
        return [
            Case(
                f"{kind} {at_end}", kind, LENGTHS, MORE,
                arguments_of(kind, at_end, size if kind == "stream" else 2), load=self.at(kind, at_end),
            )
            for kind in KINDS
            for at_end in AT_END
        ]  # fmt: skip


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("ends"))


def seen(launches: Launches, world: int, name: str) -> list[list[Any]]:
    """The events of each rank."""
    return [rank[name]["events"] for rank in launches.on(world)]


def expected(model: Model, world: int, size: int, events: int, resumed: bool) -> list[list[Any]]:
    """The same by the model."""
    found: list[Any] = []
    steps = 0
    before = list(model.taken), list(model.turns), model.over
    while len(found) < events:  # as many steps as make so many events, ends counted
        model.taken, model.turns, model.over = list(before[0]), list(before[1]), before[2]
        steps += 1
        found = model.play(world, size, steps, resumed=resumed, past_end=False)
    assert resumed or len(found) == events, "the model stands beyond the last event now"
    return [[None if step is None else step[rank] for step in found[:events]] for rank in range(world)]


@pytest.mark.parametrize("at_end", AT_END)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_end_together_and_what_they_saved_goes_on_elsewhere(
    launches: Launches, world: int, kind: str, at_end: str
) -> None:
    """Cases 12, 21 and 24: two ranks and three under torchrun, one in this process; streams in other batches."""
    arguments = arguments_of(kind, at_end, 2)
    model = Model(LENGTHS, kind == "stream", at_end, arguments["drop_last"])
    assert seen(launches, 4, f"{kind} {at_end}") == expected(model, 4, 2, STEPS[kind], False)
    size = {1: 5, 2: 4, 3: 3}[world] if kind == "stream" else 2
    if world == 1:
        case = Case("", kind, LENGTHS, MORE, arguments_of(kind, at_end, size) | {"num_workers": 0})
        loader = make_loader(case)
        dcp.load({"loader": loader}, checkpoint_id=launches.at(kind, at_end))
        iterator, found = iter(loader), []
        while len(found) < MORE:
            batch = next(iterator, None)
            iterator = iter(loader) if batch is None else iterator
            found.append(None if batch is None else batch.tolist())
        ranks = [found]
    else:
        ranks = seen(launches, world, f"{kind} {at_end}")
    assert ranks == expected(model, world, size, MORE, True)


def test_map_style_ranks_end_together_without_a_vote(launches: Launches) -> None:
    """Cases 15 and 21: of 61 rows four ranks of 2 take 56, and have 2, 1, 1 and 1 left for a last step."""
    for at_end in AT_END:
        ranks = launches.on(4)
        assert [rank[f"map {at_end}"]["votes"] for rank in ranks] == [0] * 4
        assert len({rank[f"map {at_end}"]["state"]["place"] for rank in ranks}) == 1
        events = list(zip(*seen(launches, 4, f"map {at_end}"), strict=True))
        rows = [row for step in events for batch in step for row in batch or ()]
        if at_end == "repeat":
            assert sorted(rows) == sorted([*range(61), *range(72 - 61)])
        else:
            assert events[8] == (None,) * 4
            assert sorted(rows) == list(range(61))


def test_one_vote_serves_several_steps(launches: Launches) -> None:
    """And all ranks vote as often."""
    votes = [rank["long"]["votes"] for rank in launches.on(4)]
    assert [len(events) for events in seen(launches, 4, "long")] == [201] * 4
    assert all(events[200] is None for events in seen(launches, 4, "long"))
    assert len(set(votes)) == 1
    assert votes[0] <= 201 / 4


def test_a_mesh_brings_its_group(launches: Launches) -> None:
    assert seen(launches, 4, "mesh") == [[*([100 * rank + row] for row in range(5)), None] for rank in range(4)]


def test_an_error_on_one_rank_is_named_on_the_others_and_nobody_hangs(launches: Launches) -> None:
    """Case 35: it is raised there after what was made before it; all try again, and nothing is lost."""
    for rank, events in enumerate(seen(launches, 4, "fails")):
        errors = [event for event in events if isinstance(event, str)]
        (error,) = errors
        assert events.index(error) == 5
        assert error.startswith("OSError: row 205" if rank == 2 else "PeerFailed: Rank 2 of the group could not make")
        assert [event for event in events if event != error] == [*([100 * rank + row] for row in range(20)), None]


def test_a_rank_whose_process_ends_is_an_error_on_the_others(launches: Launches) -> None:
    """Not a wait for ever."""
    ranks = launches.on(4)
    assert "leaves" not in ranks[1]
    for rank in (0, 2, 3):
        *before, error = ranks[rank]["leaves"]["events"]
        assert before == [[100 * rank + row] for row in range(len(before))]
        assert error.startswith("PeerFailed: The ranks of the group could not agree on their next step")
