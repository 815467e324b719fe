"""What the tests of ends run under torchrun: one case after another, each a training loop that would hang for ever if
one rank stopped before the others.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.distributed.ends PLAN OUT

PLAN is JSON: a list of cases (the fields of ``Case``). Each rank writes OUT/rank-R.json: what it saw, by case.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from tests import datasets as ds
from tests.distributed.peers import Words
from unbroken import PeerFailed, StatefulDataLoader


@final
@dataclass(frozen=True)
class Case:
    """A loader that goes on from the checkpoint ``load`` for some ``events`` (batches, and ends of an epoch), and is
    saved to ``save`` then.

    ``kind`` is ``"stream"`` or ``"iterable"``, with lanes of these ``lengths``, or ``"map"``, with as many rows.
    ``fails`` is the rank that cannot read the row ``at``, once; ``leaves`` the rank whose process ends there.
    """

    name: str
    kind: str
    lengths: list[int]
    events: int
    arguments: dict[str, Any] = field(default_factory=dict)
    load: str | None = None
    save: str | None = None
    mesh: bool = False
    fails: int | None = None
    leaves: int | None = None
    at: int = -1


def make_loader(case: Case, **ranks: Any) -> StatefulDataLoader:
    once: list[int] = []

    def row(number: int) -> int:
        if number == case.at and not once:
            once.append(number)
            if case.leaves is not None:
                os._exit(0)
            raise OSError(f"row {number} cannot be read")
        return number

    dataset: Any = ds.Numbers(sum(case.lengths))
    if case.kind == "stream":
        dataset = Words(case.lengths, row)
    elif case.kind == "iterable":
        dataset = ds.Uneven(case.lengths)
    lanes = {} if case.kind == "map" else {"lanes": len(case.lengths)}
    return StatefulDataLoader(dataset, seed=1, **lanes, **case.arguments, **ranks)


def run(case: Case, train: Any) -> dict[str, Any]:
    """The events of a case: the rows of a batch, None at the end of an epoch, the text of an error."""
    ranks = {"group": dist.group.WORLD}
    if case.mesh:
        ranks = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))}
    events: list[Any] = []
    with closing(make_loader(case, **ranks)) as loader:
        if case.load is not None:
            dcp.load({"loader": loader}, checkpoint_id=case.load)
        iterator = None
        while len(events) < case.events:
            iterator = iter(loader) if iterator is None else iterator
            try:
                batch = next(iterator, None)
            except (OSError, PeerFailed) as error:
                events.append(f"{type(error).__name__}: {error}")
                if case.leaves is not None:
                    break
                continue
            if batch is None:
                iterator = None
            else:
                train(batch)
            events.append(None if batch is None else batch.tolist())
        if case.save is not None:
            dcp.save({"loader": loader}, checkpoint_id=case.save)
        return {"events": events, "state": loader.state_dict()}


def main(plan: Path, out: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    votes = [0]
    all_reduce = dist.all_reduce

    def counted(*arguments: Any, **others: Any) -> Any:
        votes[0] += 1
        return all_reduce(*arguments, **others)

    dist.all_reduce = counted
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))

    def train(batch: torch.Tensor) -> None:
        model(batch[:, None].float()).sum().backward()  # needs every rank

    found = {}
    for described in json.loads(plan.read_text()):
        case = Case(**described)
        before = votes[0]
        found[case.name] = run(case, train)
        found[case.name]["votes"] = votes[0] - before
        (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    os._exit(0)  # a rank has left perhaps, and would be waited for


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
