"""Runs: one that is never stopped, and those that are ended at a place and go on in other processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from unbroken.audit.findings import Stop
from unbroken.audit.plan import Audit, Place, Topology, TrialPlan, extra_batches
from unbroken.audit.processes import NO_OUTPUT, Ended, Runs
from unbroken.audit.saves import saved_steps
from unbroken.audit.stretch import Line, Log, Orders, read_log
from unbroken.errors import AuditError

__all__ = ["Reference", "Run", "Step", "Stretch", "digests", "run_probe", "run_reference", "run_trial", "steps_of"]

Step: TypeAlias = tuple[Line | None, ...]
"""A batch of each rank; None of a rank that has no more."""

_OTHER_SEEDS: Final = 1_000_003


@final
@dataclass
class Stretch:
    """What one stretch delivered: ``steps`` from batch ``start`` on, of which the first ``saved - start`` stayed."""

    arguments: Mapping[str, Any]
    start: int
    steps: list[Step]
    saved: int | None = None
    said: Mapping[str, Any] = field(default_factory=dict)
    epochs: list[list[int]] = field(default_factory=list)
    began_empty: bool = False  # its first pass had no batch, for it was saved at the end of an epoch

    @property
    def kept(self) -> list[Step]:
        return self.steps if self.saved is None else self.steps[: self.saved - self.start]


@final
@dataclass
class Run:
    """A trial as it went: its stretches, its stops, and the error that ended it."""

    plan: TrialPlan
    stretches: list[Stretch] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    error: str = ""
    ended: bool = False  # the data came to its end

    def forget(self) -> None:
        """Let go of what was delivered, where nothing more is asked of it."""
        for stretch in self.stretches:
            stretch.steps, stretch.epochs = [], []


@final
@dataclass(frozen=True)
class Reference:
    """The run that was never stopped, longer than what is compared by some batches."""

    steps: list[Step]
    said: Mapping[str, Any]
    ended: bool

    def goes_on_in(self, longer: Reference) -> bool:
        """Whether another one begins with all the batches of this one."""
        pairs = itertools.zip_longest(self.steps, longer.steps[: len(self.steps)], fillvalue=())
        return all(digests(a) == digests(b) for a, b in pairs)

    def rows_of_epochs(self) -> dict[int, int]:
        """How many rows each epoch has, of those that are whole."""
        found: dict[int, int] = {}
        last = max((line.epoch for step in self.steps for line in step if line), default=0)
        for step in self.steps:
            for line in step:
                if line is not None and (line.epoch < last or self.ended):
                    found[line.epoch] = found.get(line.epoch, 0) + len(line.rows)
        return found

    @property
    def whole(self) -> int:
        """For how many steps every rank has a batch."""
        return sum(all(line is not None for line in step) for step in self.steps)

    def is_over(self, batches: int, rank: int) -> bool:
        """Whether an epoch of a rank ended with that number of batches."""
        last, following = (self.steps[at][rank] if at < len(self.steps) else None for at in (batches - 1, batches))
        if last is None or following is None:
            return last is None or self.ended
        return last.epoch != following.epoch

    def epoch_ends(self) -> list[int]:
        """The numbers of batches after which an epoch ended, of rank 0."""
        return [number for number in range(1, len(self.steps) + 1) if self.is_over(number, 0)]


def steps_of(logs: Sequence[Log]) -> list[Step]:
    """The batches of all ranks, step by step."""
    return list(itertools.zip_longest(*(log.lines for log in logs)))


def run_reference(
    audit: Audit, processes: Runs, topology: Topology, name: str, seed: int, end: int | None = None
) -> Reference:
    """A run without a stop, of ``end`` batches; by default some more than are compared.

    Raises ``AuditError`` where it fails, or delivers nothing.
    """
    end = end or audit.batches + extra_batches(audit.batches)
    orders = _orders(audit, processes.folder / name, topology, seed, end=end)
    ended = processes.run(orders, "none")
    logs = [read_log(each.log, processes.known) for each in orders]
    error = next((log.said["error"] for log in logs if "error" in log.said), ended.error)
    if error and next((log.said["cannot"] for log in logs if "cannot" in log.said), False):
        raise AuditError(error)
    if error:
        raise AuditError(f"{audit.factory} failed in the run without a stop: {_whole(error, ended)}")
    steps = steps_of(logs)
    if not steps:
        raise AuditError(f"The loader of {audit.factory} delivered no batch, so there is nothing to compare.")
    return Reference(steps, logs[0].said, any(log.ended for log in logs))


def _orders(
    audit: Audit,
    folder: Path,
    topology: Topology,
    seed: int,
    **more: Any,
) -> list[Orders]:
    workers, world = topology
    folder.mkdir(parents=True, exist_ok=True)
    return [
        Orders(
            audit.factory,
            audit.arguments(workers, rank, world),
            str(folder),
            audit.save,
            rank=rank,
            seed=seed,
            **more,
        )
        for rank in range(world)
    ]


def run_trial(audit: Audit, plan: TrialPlan, processes: Runs, reference: Reference, tell: Callable[[str], None]) -> Run:
    """Run a trial through its stops.

    Raises ``AuditError`` for what is no fault of the loader; a fault of the loader is the ``error`` of the run.
    """
    run = Run(plan)
    start = 0
    before: dict[str, Any] = {}
    counted: dict[int, int] = {}
    for number, topology in enumerate(plan.topologies):
        place = plan.places[number] if number < len(plan.places) else None
        folder = processes.folder / f"trial-{plan.number}-{number}"
        tell(f"trial {plan.number + 1}: " + (_told(place) if place else "runs to its end"))
        seed = audit.seed if number == 0 else audit.seed + _OTHER_SEEDS * (plan.number + 1) + number
        where = _until(audit, place) if place else {"end": _end(audit, plan, run, reference)}
        places = _places(run, reference, counted, start, topology[1])
        if before:
            before = {**before, "epochs": [epoch for epoch, _ in places]}
        orders = _orders(audit, folder, topology, seed, start=start, before=before, **where)
        ended = processes.run(orders, audit.kill)
        logs = [read_log(each.log, processes.known) for each in orders]
        stretch = Stretch(_said(audit, topology), start, steps_of(logs), None, logs[0].said)
        run.stretches.append(stretch)
        stretch.epochs = _epochs(stretch, places, reference)
        error = next((log.said["error"] for log in logs if "error" in log.said), ended.error)
        if error and any(log.said.get("cannot") for log in logs):
            raise AuditError(error)
        if error:
            run.error = _whole(error, ended)
            return run
        run.ended = any(log.ended for log in logs)
        if place is None or run.ended:
            return run  # perhaps it came to its end before the stop
        steps = saved_steps(folder, topology[1])
        if steps:
            start = steps[-1]
            before = {"folder": str(folder), "world": topology[1], "of": logs[0].said.get("state_of", "")}
        stretch.saved = start  # without a save it goes back to the one before, or begins anew
        run.stops.append(_stop(place, stretch, min(len(log.lines) for log in logs)))
        _keep(stretch, counted)
    return run


def _whole(error: str, ended: Ended) -> str:
    """What was raised, in a line, and the traceback below it."""
    told = error == ended.error or not ended.error or ended.error.endswith(NO_OUTPUT)
    return error if told else f"{error}\n{ended.error}"


def _until(audit: Audit, place: Place) -> dict[str, Any]:
    """The orders of a stretch that is ended at a place."""
    halt = place.halt
    saves = (*place.earlier, *((halt.after,) if halt.where == "save" else ()))
    made = {"saves": saves, "over": (place.saved,)} if place.over else {"saves": (*saves, place.saved)}
    return {"end": halt.after, **made} if audit.kill == "none" else {"end": halt.after + 1, "halt": halt, **made}


def _said(audit: Audit, topology: Topology) -> dict[str, Any]:
    """The topology of a stretch, as it is told."""
    told: dict[str, Any] = {} if audit.workers is None else {"num_workers": topology[0]}
    return told if audit.ranks is None else {**told, "dp_world_size": topology[1]}


def _end(audit: Audit, plan: TrialPlan, run: Run, reference: Reference) -> int:
    """Up to where the last stretch runs: as many rows as the reference has, and some batches more."""
    extra = extra_batches(audit.batches) // 2
    if not plan.changes_world:
        return audit.batches + extra
    left = _rows(reference.steps[: audit.batches]) - sum(_rows(stretch.kept) for stretch in run.stretches)
    # A factory may fix the rows of a rank or those of all ranks: the fewer, the more steps.
    before, now = plan.first[1], plan.topologies[-1][1]
    each = max(1, min(_rows(reference.steps[:1]), _rows(reference.steps[:1]) * now // before))
    start = run.stretches[-1].saved or 0
    return start + max(1, -(-left // each)) + extra


def digests(step: Step) -> list[tuple[int, bytes] | None]:
    """Epochs and digests of its batches, rank by rank."""
    return [None if line is None else (line.epoch, line.digest) for line in step]


def _rows(steps: Sequence[Step]) -> int:
    return sum(len(line.rows) for step in steps for line in step if line is not None)


def _places(
    run: Run, reference: Reference, counted: Mapping[int, int], start: int, world: int
) -> list[tuple[int, bool]]:
    """For each rank that goes on at ``start``: the epoch that it was in, and whether that epoch is over."""
    if start == 0:
        return [(0, False)] * world
    if run.plan.changes_world:
        epoch = max(counted, default=0)
        whole = reference.rows_of_epochs().get(epoch)
        return [(epoch, whole is not None and counted[epoch] >= whole)] * world
    kept = [epochs for stretch in run.stretches for epochs in stretch.epochs[: len(stretch.kept)]]
    last = (max((epochs[rank] for epochs in kept), default=0) for rank in range(world))
    return [(epoch, reference.is_over(start, rank)) for rank, epoch in enumerate(last)]


def _epochs(stretch: Stretch, places: Sequence[tuple[int, bool]], reference: Reference) -> list[list[int]]:
    """The epoch of each batch, counted as the reference does.

    A stretch that was saved at the end of an epoch goes on with the next one: whether it begins with a pass without a
    batch or not makes no difference to what is delivered.
    """
    shift: list[int | None] = [None] * len(places)
    found = []
    for step in stretch.steps:
        for rank, line in enumerate(step):
            if line is not None and shift[rank] is None:
                before, over = places[rank]
                shift[rank] = (
                    1 if over and line.epoch == before and not _repeats(stretch, rank, before, reference) else 0
                )
                stretch.began_empty = stretch.began_empty or (over and line.epoch > before)
        found.append([line.epoch + (shift[rank] or 0) if line else -1 for rank, line in enumerate(step)])
    return found


def _repeats(stretch: Stretch, rank: int, epoch: int, reference: Reference) -> bool:
    """Whether the first pass is no epoch, but batches from the end of the one that was over, once more."""
    came = [line.digest for step in stretch.steps if (line := step[rank]) and line.epoch == epoch]
    earlier = [
        line.digest
        for step in reference.steps[: stretch.start]
        if rank < len(step) and (line := step[rank]) and line.epoch == epoch
    ]
    return 2 * len(came) <= len(earlier) and earlier[len(earlier) - len(came) :] == came


def _keep(stretch: Stretch, counted: dict[int, int]) -> None:
    for step, epochs in zip(stretch.kept, stretch.epochs, strict=False):
        for line, epoch in zip(step, epochs, strict=True):
            if line is not None:
                counted[epoch] = counted.get(epoch, 0) + len(line.rows)


def _told(place: Place) -> str:
    where = {"between": "ended between batches", "fetch": "ended in a fetch", "save": "ended in a save"}
    return f"{where[place.halt.where]}, after {place.halt.after} batches"


def _stop(place: Place, stretch: Stretch, delivered: int) -> Stop:
    """The stop as it came about, which is not always as it was planned: a fetch may have been done already."""
    ended, saved = stretch.start + delivered, stretch.saved or 0
    how = "between batches"
    if place.halt.where == "fetch":
        how = "in the middle of a fetch" if ended == place.halt.after else "right after a fetch"
    elif place.halt.where == "save":
        how = "during a save" if saved < place.halt.after else "right after a save"
    return Stop(saved, ended, f"{how}, saved between epochs" if place.over and saved == place.saved else how)


def run_probe(audit: Audit, processes: Runs) -> dict[str, Any]:
    """What a close look at the dataset tells, in a process of its own; empty where it cannot be looked at."""
    orders = _orders(audit, processes.folder / "probe", (0 if audit.workers else None, 1), audit.seed, end=0)
    processes.run(orders, "none")
    return read_log(orders[0].log).said.get("probe", {})  # type: ignore[no-any-return]
