"""What hosts lanes, or makes batches of a map-style dataset: the same in every process.

A worker process wraps a loop around it; inline loading calls it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch.utils.data import default_collate, default_convert

from unbroken.engine.copies import copy_dataset
from unbroken.engine.cursor import Cursor, Report, Rules
from unbroken.engine.opening import Opening, StreamOpening, TorchOpening, lane_info, set_worker_info
from unbroken.engine.wire import Encoded, RowLayout, collate, encode
from unbroken.lanes import Lane
from unbroken.position import LanePosition, Made
from unbroken.seeding import key, seed_globals

__all__ = ["Host", "MapTask", "Plan", "RowsTask", "TurnTask"]


@final
@dataclass(frozen=True)
class Plan:
    """All that a process needs to host lanes: the same for every worker of a loader.

    ``kind`` is ``"map"``, ``"iterable"`` or ``"stream"``; ``lanes`` is the number of lanes of the run; ``hosts`` that
    of the processes (0: inline); ``batched`` whether samples are collated (torch's ``batch_size=None`` is not).
    """

    dataset: Any
    kind: str
    rules: Rules
    lanes: int
    hosts: int
    batched: bool
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], None] | None


@final
class MapTask(NamedTuple):
    """Make one batch of a map-style dataset: ``indices`` (one, unbatched), whose first is sample ``place`` of
    ``epoch``.

    ``stride`` is the distance between the places of its samples: ranks take turns over the rows of the global order.
    """

    epoch: int
    place: int
    stride: int
    indices: Any

    def __str__(self) -> str:
        return f"indices {_short(self.indices)} (from place {self.place} of epoch {self.epoch})"


@final
class TurnTask(NamedTuple):
    """Make the next turn of a lane: a batch of up to ``size`` samples."""

    lane: int
    size: int

    def __str__(self) -> str:
        return f"a batch of lane {self.lane}"


@final
class RowsTask(NamedTuple):
    """Make the next rows of some lanes of a stream: ``(lane, place in the batch)`` in the order of turns.

    ``layout`` is that of the rows seen so far, for a slot that holds ``rows`` of them.
    """

    turns: tuple[tuple[int, int], ...]
    rows: int
    layout: RowLayout | None

    def __str__(self) -> str:
        return f"rows of the lanes {_short([lane for lane, _ in self.turns])}"


@final
class Host:
    """Hosts lanes, or makes batches of a map-style dataset, in the process that it lives in."""

    def __init__(self, plan: Plan, number: int, report: Report) -> None:
        self._plan = plan
        self._number = number
        self._report = report
        self._cursors: dict[int, Cursor] = {}
        self._datasets: dict[int, Any] = {}
        self._info: Any = None
        self._initialised: set[int] = set()
        if plan.kind == "map" and plan.hosts:
            self._info = lane_info(number, plan.hosts, key(plan.rules.run, "worker", number), plan.dataset)
            self._initialise(number, self._info)

    def open(self, epoch: int, dataset_epoch: int | None, starts: Mapping[int, LanePosition]) -> None:
        """Place lanes at their positions; each is opened when its first turn comes."""
        dataset = self._plan.dataset
        if self._plan.kind == "map" and dataset_epoch is not None and dataset.epoch != dataset_epoch:
            dataset.set_epoch(dataset_epoch)
        for lane, start in starts.items():
            self._cursors[lane] = self._cursor(lane, start, dataset_epoch, len(starts))

    def _cursor(self, lane: int, start: LanePosition, dataset_epoch: int | None, neighbours: int) -> Cursor:
        plan, dataset = self._plan, self._plan.dataset
        shared = neighbours > 1 or (not plan.hosts and plan.lanes > 1 and plan.worker_init_fn is not None)
        if plan.kind != "stream" and shared:
            if lane not in self._datasets:
                self._datasets[lane] = copy_dataset(dataset)
            dataset = self._datasets[lane]
        info = None
        if plan.hosts or plan.lanes > 1:  # one lane inline sees none, as in torch
            info = lane_info(lane, plan.lanes, key(plan.rules.run, "worker", start.epoch, lane), dataset)
            self._initialise(lane, info)
        if plan.kind == "stream":
            opening: Opening = StreamOpening(dataset, Lane(lane, plan.lanes, start.epoch, plan.rules.run))
        else:
            what = f"the state_dict() of {type(dataset).__qualname__}"
            opening = TorchOpening(dataset, use_state=plan.rules.resume != "replay", what=what)
            opening.set_epoch(dataset_epoch)
        return Cursor(opening, lane, start, plan.rules, info=info, report=self._report)

    def _initialise(self, number: int, info: Any) -> None:
        if self._plan.worker_init_fn is None or number in self._initialised:
            return
        aside = set_worker_info(info)
        try:
            seed_globals(key(self._plan.rules.run, "init", number))
            self._plan.worker_init_fn(number)
        finally:
            set_worker_info(aside)
        self._initialised.add(number)

    def where(self, task: Any) -> str:
        """The place that a failed task had come to, for a message."""
        if isinstance(task, TurnTask) and task.lane in self._cursors:
            return f"lane {task.lane}, sample {self._cursors[task.lane].place}"
        return str(task)

    def turn(self, task: TurnTask) -> Made:
        """The next turn of a lane."""
        return self._cursors[task.lane].make(task.size)

    def fetch(self, task: MapTask) -> Any:
        """The samples of a batch of a map-style dataset (the sample, unbatched), under its own random numbers."""
        rules, dataset = self._plan.rules, self._plan.dataset
        aside = set_worker_info(self._info)
        try:
            seed_globals(key(rules.run, "map", task.epoch, task.place))
            if not self._plan.batched:
                return dataset[task.indices]
            together = getattr(dataset, "__getitems__", None)
            if rules.seed_by == "sample":
                samples = []
                for number, index in enumerate(task.indices):
                    seed_globals(key(rules.run, "sample", task.epoch, task.place + number * task.stride))
                    samples.append(together([index])[0] if together else dataset[index])
                return samples
            return together(task.indices) if together else [dataset[index] for index in task.indices]
        finally:
            set_worker_info(aside)

    def last_of(self, samples: Any) -> Any:
        """What stands for a batch of a map-style dataset in the ledger: its last sample."""
        return samples[-1] if self._plan.batched and isinstance(samples, list) and samples else samples

    def collate(self, samples: Any) -> Any:
        """A batch, as torch makes it. ``get_worker_info()`` is None meanwhile, or torch would use /dev/shm."""
        if self._plan.collate_fn is not None:
            return self._plan.collate_fn(samples)
        return default_collate(samples) if self._plan.batched else default_convert(samples)  # type: ignore[no-untyped-call]

    def encode(self, samples: Any, *, put_off: bool = True) -> Encoded:
        """The same batch, ready to be written to a slot: default collation is put off until then, if it may be."""
        if put_off and self._plan.collate_fn is None and self._plan.batched and isinstance(samples, list):
            return encode(collate(samples))
        return encode(self.collate(samples))


def _short(values: Any) -> str:
    text = repr(values)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(values)} of them)"
