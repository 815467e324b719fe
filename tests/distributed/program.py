"""What the tests run under torchrun: runs of loaders, one after another, as a plan in a file says.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.distributed.program PLAN OUT

PLAN is JSON: the path of a corpus, and a list of runs (the fields of ``Run``). Each rank writes OUT/rank-R.jsonl: a
line for every step that says which rows it had, one with the position for every save, and one for an error.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.loaders import ended_of, make_loader, rows_of
from unbroken import StatefulDataLoader

STEPS_DURING_A_SAVE = 2


@final
@dataclass(frozen=True)
class Run:
    """A run of one loader.

    ``load`` is the checkpoint it starts from, ``begun`` the batches it has delivered before that, ``first_epoch`` the
    epoch it goes on with. ``saves`` are ``{"after": steps, "how": ..., "to": path}``: steps of this run over all its
    epochs; 0 is before ``iter``, -1 after the last epoch. ``peers`` is the number of processes with the same dp rank;
    ``mesh`` says it with a DeviceMesh. ``draw`` seeds torch's global generator, on each rank otherwise.
    """

    name: str
    kind: str
    load: str | None = None
    begun: int = 0
    first_epoch: int = 0
    epochs: int = 2
    saves: list[dict[str, Any]] = field(default_factory=list)
    peers: int = 1
    mesh: bool = False
    draw: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)


@final
class HeldStager(AsyncStager):
    """Keeps what ``state_dict()`` returned, not a copy of it, and hands it on only when it is told to."""

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
        # The loader is saved as it is in training: among tensors and counters.
        everything = {"loader": loader, "model": {"weight": torch.arange(4.0)}, "progress": {"step": 3}}
        self._stager: AsyncStager | None = None
        self._done: Any = None
        others: dict[str, Any] = {}
        if how == "sync":
            dcp.save(everything, checkpoint_id=to)
            return
        if how == "async staged":
            self._stager = DefaultStager(
                StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False)
            )
        elif how == "async held":
            self._stager = HeldStager()
        elif how == "async by a process":
            others["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        elif how != "async":
            raise ValueError(how)
        self._done = dcp.async_save(everything, checkpoint_id=to, async_stager=self._stager, **others)

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


@final
class Performer:
    """Performs one run: loads, goes on, saves. While an asynchronous save is under way the loader runs on."""

    def __init__(self, run: Run, loader: StatefulDataLoader, log: TextIO) -> None:
        self._run = run
        self._loader = loader
        self._log = log
        self._saves = {save["after"]: save for save in run.saves}
        self._under_way: list[tuple[int, Save]] = []

    def write(self, **line: Any) -> None:
        self._log.write(json.dumps({"run": self._run.name, **line}) + "\n")

    def perform(self) -> None:
        if self._run.begun:
            for _ in itertools.islice(self._loader, self._run.begun):
                pass
        if self._run.load is not None:
            dcp.load({"loader": self._loader, "model": {"weight": torch.zeros(4)}}, checkpoint_id=self._run.load)
        self._save(0)
        for steps in self._steps():
            self._finish(before=steps - STEPS_DURING_A_SAVE)
            self._save(steps)
        self._finish(before=sys.maxsize)
        self._save(-1)
        self._finish(before=sys.maxsize)

    def _steps(self) -> Iterator[int]:
        """Go through all epochs and write down every step; yields how many there were so far."""
        steps = 0
        for epoch in range(self._run.first_epoch, self._run.first_epoch + self._run.epochs):
            if hasattr(self._loader.sampler, "set_epoch"):
                self._loader.sampler.set_epoch(epoch)
            for batch in self._loader:
                steps += 1
                self.write(epoch=epoch, rows=rows_of(batch), ended=ended_of(self._loader.state_dict()))
                yield steps

    def _save(self, steps: int) -> None:
        if steps in self._saves:
            how, to = self._saves[steps]["how"], self._saves[steps]["to"]
            self.write(after=steps, state=self._loader.state_dict())
            self._under_way.append((steps, Save(self._loader, how, to)))

    def _finish(self, before: int) -> None:
        while self._under_way and self._under_way[0][0] <= before:
            self._under_way.pop(0)[1].finish()


def main(plan: Path, out: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everything = json.loads(plan.read_text())
    corpus = everything["corpus"]
    with (out / f"rank-{rank}.jsonl").open("w") as log:
        for described in everything["runs"]:
            run = Run(**described)
            torch.manual_seed(1000 * run.draw + rank)
            others, world = dict(run.arguments), ranks // run.peers
            if run.mesh:
                mesh = init_device_mesh("cpu", (world, run.peers), mesh_dim_names=("dp", "tp"))
                others["mesh"] = mesh["dp"]
            with closing(make_loader(run.kind, corpus, rank // run.peers, world, **others)) as loader:
                performer = Performer(run, loader, log)
                try:
                    if run.mesh:
                        performer.write(refused=refusal(run.kind, corpus, mesh))
                    before = loader.state_dict()
                    performer.perform()
                except (Exception, CheckpointException) as error:  # the latter is no Exception
                    performer.write(error=f"{type(error).__name__}: {error}", unchanged=loader.state_dict() == before)
            dist.barrier()
    dist.destroy_process_group()


def refusal(kind: str, corpus: str, mesh: Any) -> str | None:
    """What a loader says to a mesh of two dimensions."""
    try:
        make_loader(kind, corpus, mesh=mesh)
    except ValueError as error:
        return str(error)
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
