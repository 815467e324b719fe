"""What the tests run under torchrun: runs of loaders, one after another, as a plan in a file says.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.distributed.program PLAN OUT

PLAN is JSON: the path of a corpus, and a list of runs (the fields of ``Run``). Each rank writes OUT/rank-R.jsonl: a
line for every step that says which rows it had, and a line with the position for every save.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.loaders import make_loader, rows_of
from unbroken import StatefulDataLoader

STEPS_DURING_A_SAVE = 2


@dataclass
class Run:
    """A run of one loader.

    ``load`` is the checkpoint it starts from, ``begun`` the batches it has delivered before that. ``saves`` are
    ``{"after": steps, "how": ..., "to": path}``, the steps counted from the start of this run over all epochs (0 is
    before ``iter``, -1 after the last epoch). ``peers`` is the number of processes with the same dp rank, and ``mesh``
    says it with a DeviceMesh. ``random`` seeds torch's global generator, by rank.
    """

    name: str
    kind: str
    load: str | None = None
    begun: int = 0
    epochs: int = 2
    saves: list[dict[str, Any]] = field(default_factory=list)
    peers: int = 1
    mesh: bool = False
    random: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)


@final
class HeldStager(AsyncStager):
    """A stager that keeps what ``state_dict()`` returned as it is, and hands it on only when it is told to."""

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._held: list[tuple[Future[Any], Any]] = []

    def stage(self, state_dict: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._held.append((future, state_dict))
        return future

    def let_go(self) -> None:
        for future, state_dict in self._held:
            future.set_result(state_dict)

    def close(self) -> None:
        pass


@final
class Save:
    """A checkpoint under way; ``finish`` waits until it lies on disk."""

    def __init__(self, loader: StatefulDataLoader, how: str, to: str) -> None:
        # The loader lies in a checkpoint as it does in training: among tensors and counters.
        everything = {"loader": loader, "model": {"weight": torch.arange(4.0)}, "progress": {"step": 3}}
        self._stager: Any = None
        arguments: dict[str, Any] = {}
        if how == "sync":
            dcp.save(everything, checkpoint_id=to)
            self._done = None
            return
        if how == "async staged":
            self._stager = DefaultStager(StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False))
        elif how == "async held":
            self._stager = HeldStager()
        elif how == "async in a process":
            arguments["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        elif how != "async":
            raise ValueError(how)
        self._done = dcp.async_save(everything, checkpoint_id=to, async_stager=self._stager, **arguments)

    def finish(self) -> None:
        if isinstance(self._stager, HeldStager):
            self._stager.let_go()
        if isinstance(self._done, AsyncSaveResponse):
            self._done.staging_completion.result()
            self._done.upload_completion.result()
        elif self._done is not None:
            self._done.result()
        if self._stager is not None:
            self._stager.close()


def steps_of(loader: StatefulDataLoader, run: Run, log: TextIO) -> Iterator[int]:
    """Go through all epochs and write down every step; yields how many there were so far."""
    steps = 0
    for epoch in range(run.epochs):
        for batch in loader:
            steps += 1
            state = loader.state_dict()
            ended = any(json.loads(leaf)["ended"] for name, leaf in state.items() if name.startswith("lane-"))
            line = {"run": run.name, "epoch": epoch, "rows": rows_of(batch), "ended": ended}
            log.write(json.dumps(line) + "\n")
            yield steps


def perform(run: Run, loader: StatefulDataLoader, log: TextIO) -> None:
    """Load, run on, save; while an asynchronous save is under way the loader goes on."""
    if run.begun:
        for _ in zip(range(run.begun), loader, strict=False):
            pass
    if run.load is not None:
        dcp.load({"loader": loader, "model": {"weight": torch.zeros(4)}}, checkpoint_id=run.load)
    saves = {save["after"]: save for save in run.saves}
    under_way: list[tuple[int, Save]] = []

    def save_after(steps: int) -> None:
        if steps in saves:
            how, to = saves[steps]["how"], saves[steps]["to"]
            log.write(json.dumps({"run": run.name, "after": steps, "state": loader.state_dict()}) + "\n")
            under_way.append((steps, Save(loader, how, to)))

    save_after(0)
    for steps in steps_of(loader, run, log):
        if under_way and steps >= under_way[0][0] + STEPS_DURING_A_SAVE:
            under_way.pop()[1].finish()
        save_after(steps)
    for _, save in under_way:
        save.finish()
    under_way.clear()
    save_after(-1)
    for _, save in under_way:
        save.finish()


def main(plan: Path, out: Path) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everything = json.loads(plan.read_text())
    with (out / f"rank-{rank}.jsonl").open("w") as log:
        for described in everything["runs"]:
            run = Run(**described)
            torch.manual_seed(1000 * run.random + rank)
            others = dict(run.arguments)
            if run.mesh:
                mesh = init_device_mesh("cpu", (ranks // run.peers, run.peers), mesh_dim_names=("dp", "tp"))
                try:
                    make_loader(run.kind, everything["corpus"], 0, ranks // run.peers, mesh=mesh)
                except ValueError as error:
                    log.write(json.dumps({"run": run.name, "refused": str(error)}) + "\n")
                others["mesh"] = mesh["dp"]
            place = rank // run.peers, ranks // run.peers
            with closing(make_loader(run.kind, everything["corpus"], *place, **others)) as loader:
                perform(run, loader, log)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
