"""What hosts lanes, or makes batches of a map-style dataset: the same in every process.

A worker process wraps a loop around it; inline loading calls it directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch.utils.data import default_collate, default_convert

from unbroken.engine.copies import copy_dataset
from unbroken.engine.cursor import Cursor, Report, Rules
from unbroken.engine.datapipes import sharer
from unbroken.engine.opening import UNTOUCHED, Opening, StreamOpening, TorchOpening, lane_info, set_worker_info
from unbroken.engine.skipping import Sound
from unbroken.engine.wire import Encoded, collate, encode
from unbroken.lane_position import LanePosition
from unbroken.lanes import Lane
from unbroken.ledger import digest, entry_of
from unbroken.made import Made, Turn
from unbroken.meters import ROWS, Meter
from unbroken.seeding import key, seed_globals
from unbroken.skipped import Fetched

__all__ = ["Host", "MapTask", "Plan", "RowsTask", "TurnTask"]


@final
@dataclass(frozen=True)
class Plan:
    """All that a process needs to host lanes: the same for every worker of a loader.

    ``kind`` is ``"map"``, ``"iterable"`` or ``"stream"``; ``lanes`` is the number of lanes of the run; ``hosts`` that
    of the processes (0: inline); ``batched`` whether samples are collated (torch's ``batch_size=None`` is not);
    ``in_threads`` whether hosts are threads of one process, and leave alone what belongs to it.
    """

    dataset: Any
    kind: str
    rules: Rules
    lanes: int
    hosts: int
    batched: bool
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], None] | None
    in_threads: bool = False


@final
class MapTask(NamedTuple):
    """Make one batch of a map-style dataset: ``indices`` (one, unbatched), whose first is sample ``place`` of
    ``epoch``.

    ``stride`` is the distance between the places of its samples: ranks take turns over the rows of the global order.
    Where epochs of ``length`` rows follow one another without an end, the samples beyond are of the next ones.
    """

    epoch: int
    place: int
    stride: int
    indices: Any
    length: int = 0

    def place_of(self, number: int) -> tuple[int, int]:
        """Epoch and place of a sample of the batch."""
        place = self.place + number * self.stride
        return (self.epoch + place // self.length, place % self.length) if self.length else (self.epoch, place)

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

    ``layout`` is that of the rows seen so far (its fields, pickled once), for a slot that holds ``rows`` of them.
    """

    turns: tuple[tuple[int, int], ...]
    rows: int
    layout: bytes | None

    def __str__(self) -> str:
        return f"rows of the lanes {_short([lane for lane, _ in self.turns])}"


@final
@dataclass(slots=True)
class _Hosted:
    """A lane and where it began. ``alone``: on the user's own object; ``yielded``: whether this epoch had anything."""

    cursor: Cursor
    start: LanePosition
    dataset_epoch: int | None
    alone: bool
    yielded: bool


@final
class Host:
    """Hosts lanes, or makes batches of a map-style dataset, in the process that it lives in."""

    def __init__(self, plan: Plan, number: int, report: Report) -> None:
        self._plan = plan
        self._number = number
        self._report = report
        self._hosted: dict[int, _Hosted] = {}
        self._datasets: dict[int, Any] = {}
        self._info: Any = None
        self._initialised: set[int] = set()
        self.notes: Any = None  # a worker's (see ``notes``): what it is on
        self.meter = Meter()
        if plan.kind == "map" and plan.hosts:
            self._info = lane_info(number, plan.hosts, key(plan.rules.run, "worker", number), plan.dataset)
            self._initialise(number, self._info)

    def open(self, epoch: int, dataset_epoch: int | None, starts: Mapping[int, LanePosition]) -> None:
        """Place lanes at their positions; each is opened when its first turn comes.

        ``dataset_epoch`` is the one that the user's dataset had in ``epoch`` of the lanes.
        """
        dataset = self._plan.dataset
        if self._plan.kind == "map" and dataset_epoch is not None and dataset.epoch != dataset_epoch:
            dataset.set_epoch(dataset_epoch)
        for lane, start in starts.items():
            of_lane = None if dataset_epoch is None else dataset_epoch + start.epoch - epoch
            self._host(lane, start, of_lane, len(starts) == 1)

    def _host(self, lane: int, start: LanePosition, dataset_epoch: int | None, alone: bool) -> Cursor:
        cursor = self._cursor(lane, start, dataset_epoch, alone)
        self._hosted[lane] = _Hosted(cursor, start, dataset_epoch, alone, start.delivered > 0)
        return cursor

    def _cursor(self, lane: int, start: LanePosition, dataset_epoch: int | None, alone: bool) -> Cursor:
        plan, dataset = self._plan, self._plan.dataset
        shared = not alone or (not plan.hosts and plan.lanes > 1 and plan.worker_init_fn is not None)
        if plan.rules.once and not hasattr(dataset, "state_dict"):
            shared = False  # what it reads from cannot be copied, and there is nothing else to it
        if plan.kind != "stream" and shared:
            if lane not in self._datasets:
                self._datasets[lane] = copy_dataset(dataset)
            dataset = self._datasets[lane]
        info: Any = UNTOUCHED if plan.in_threads else None
        if not plan.in_threads and (plan.hosts or plan.lanes > 1):  # one lane inline sees none, as in torch
            info = lane_info(lane, plan.lanes, key(plan.rules.run, "worker", start.epoch, lane), dataset)
            self._initialise(lane, info)
        if plan.kind == "stream":
            of_run = Lane(lane, plan.lanes, start.epoch, plan.rules.run)
            opening: Opening = StreamOpening(dataset, of_run, self.meter, lineage=plan.rules.lineage)
        else:
            what = f"the state_dict() of {type(dataset).__qualname__}"
            opening = TorchOpening(dataset, use_state=plan.rules.resume != "replay", what=what)
            opening.set_epoch(dataset_epoch)
            opening.set_share(sharer(dataset, lane, plan.lanes, key(plan.rules.run, "datapipe", start.epoch)))
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

    def place_of(self, lane: int) -> int:
        """The number of the sample of a lane that comes next."""
        return self._hosted[lane].cursor.place

    def where(self, task: Any) -> str:
        """The place that a failed task had come to, for a message."""
        if isinstance(task, TurnTask) and task.lane in self._hosted:
            return f"lane {task.lane}, sample {self._hosted[task.lane].cursor.place}"
        return str(task)

    def turn(self, task: TurnTask) -> Made:
        """The next turn of a lane; by the rules, of its next epoch where this one has ended, if it had anything."""
        return self._settled(task, self._hosted[task.lane].cursor.make(task.size))

    def row(self, lane: int) -> tuple[Any, Turn] | Made:
        """The next row of a lane of a stream, see ``Cursor.row``."""
        hosted = self._hosted[lane]
        made = hosted.cursor.row()
        if type(made) is Made:
            return self._settled(TurnTask(lane, 1), made)
        hosted.start.turns += 1
        return made

    def _settled(self, task: TurnTask, made: Made) -> Made:
        hosted = self._hosted[task.lane]
        if made.ended and hosted.yielded and self._plan.rules.endless:
            hosted.start.roll(carry := made.carry)
            later, out = None if hosted.dataset_epoch is None else hosted.dataset_epoch + 1, made.left_out
            made = self._host(task.lane, hosted.start, later, hosted.alone).make(task.size)
            made.rolled, made.carry, made.left_out = True, carry, [*out, *made.left_out]
            hosted = self._hosted[task.lane]
        if not made.ended:
            hosted.yielded = True
            hosted.start.turns += 1
        return made

    def fetch(self, task: MapTask) -> Any:
        """The samples of a batch of a map-style dataset (the sample, unbatched), under its own random numbers."""
        rules, dataset = self._plan.rules, self._plan.dataset
        indices = task.indices if self.notes is None or not self._plan.batched else self._noted(task.indices)
        aside = set_worker_info(self._info)
        try:
            seed_globals(key(rules.run, "map", task.epoch, task.place))
            if not self._plan.batched:
                return dataset[task.indices]
            together = getattr(dataset, "__getitems__", None)
            if rules.seed_by == "sample":
                samples = []
                for number, index in enumerate(indices):
                    seed_globals(key(rules.run, "sample", *task.place_of(number)))
                    samples.append(together([index])[0] if together else dataset[index])
                return samples
            return together(task.indices) if together else [dataset[index] for index in indices]
        finally:
            set_worker_info(aside)

    def batch(self, task: MapTask) -> tuple[Any, Any]:
        """The samples of a batch, and what there is to count of it: its entry in the ledger. By the rules some may
        be left out, and it is ``Fetched``.
        """
        plan, skipping = self._plan, self._plan.rules.skipping
        if skipping is None:
            samples = self.fetch(task)
            return samples, self._entry_of(samples)
        by_sample = plan.rules.seed_by == "sample"
        sound = Sound(plan.dataset, skipping, plan.rules.run, batched=plan.batched, by_sample=by_sample)
        aside = set_worker_info(self._info)
        try:
            indices = task.indices if self.notes is None or not plan.batched else self._noted(task.indices)
            samples, left_out = sound.fetch(task, indices)
            if not left_out:
                return samples, self._entry_of(samples)
            if plan.batched and samples:
                return samples, Fetched(left_out, self._entry_of(samples))
            shape = sound.shape(left_out)
            return shape, Fetched(left_out, shape=shape is not None)
        finally:
            set_worker_info(aside)

    def _noted(self, indices: Any) -> Iterator[Any]:
        for self.notes[1], index in enumerate(indices):
            yield index

    def _entry_of(self, samples: Any) -> int:
        if self._plan.batched and isinstance(samples, list) and samples:
            return entry_of(samples, digest(samples[-1]))
        return digest(samples)

    def count(self, samples: Any) -> None:
        """Count what was read of a dataset that is not a stream."""
        self.meter.source("dataset")[ROWS] += len(samples) if self._plan.batched and isinstance(samples, list) else 1

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
