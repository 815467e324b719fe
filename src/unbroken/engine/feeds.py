"""What is handed out next, and what the position is then.

A feed keeps its engine busy, collects batches in the order that the plan fixes, and moves the position with each one it
hands out: for map-style datasets in the order of steps, for torch iterable datasets a turn (a batch of one lane) at a
time, for streams a batch of consecutive turns (rows).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch.utils.data import default_convert

from unbroken.engine.engine import Engine, Reply
from unbroken.engine.host import MapTask, RowsTask, TurnTask
from unbroken.engine.wire import RowLayout, collate, stacked
from unbroken.errors import LaneError, WorkerTimeout
from unbroken.lanes import Turns
from unbroken.position import LanesPosition, Made, MapPosition
from unbroken.sampling import Step
from unbroken.seeding import isolated, key

__all__ = ["Batching", "Feed", "LaneFeed", "MapFeed", "RowFeed"]


class Feed(ABC):
    """Makes batches in order, and moves the position when one is handed out."""

    @abstractmethod
    def make(self) -> Any:
        """The next batch. Raises ``StopIteration`` at the end of the epoch, and what the dataset raises.

        After an error of a lane, the next call starts again at the position; after ``WorkerTimeout`` it waits on.
        """

    @abstractmethod
    def commit(self) -> None:
        """Count the batch that was made last as delivered."""


@final
class MapFeed(Feed):
    """Batches of a map-style dataset: any free host makes the next one, they are delivered in order."""

    def __init__(self, engine: Engine, position: MapPosition, steps: Iterator[Step], cursor_size: int) -> None:
        self._engine = engine
        self._position = position
        self._steps = steps
        self._cursor_size = cursor_size
        self._queue: deque[tuple[int, Step]] = deque()
        self._made: tuple[Step, int] | None = None
        self._broken: Exception | None = None
        engine.open(position.epoch, position.epochs.get("dataset"), {})

    def make(self) -> Any:
        self._fill(max(1, self._engine.hosts * self._engine.lookahead))
        if not self._queue:
            if self._broken is not None:
                raise self._broken
            raise StopIteration
        ticket, step = self._queue[0]
        try:
            reply = self._engine.collect(ticket)
        except WorkerTimeout:
            raise  # it may still come
        except Exception:
            self._queue.popleft()  # a batch that fails is passed over if the user goes on, as in torch
            raise
        self._queue.popleft()
        self._fill(self._engine.hosts * self._engine.lookahead)
        self._made = step, reply.made
        return reply.batch

    def commit(self) -> None:
        if self._made is not None:
            step, digest = self._made
            self._position.deliver(step.rows, digest)
            if step.made is not None:
                self._position.cursor.deliver(step.made, self._cursor_size)

    def _fill(self, number: int) -> None:
        while self._broken is None and len(self._queue) < number:
            try:
                step = next(self._steps, None)
            except Exception as error:  # of the sampler: raised when the batches before it are through
                self._broken = error
                return
            if step is None:
                return
            task = MapTask(self._position.epoch, step.place, step.stride, step.indices)
            self._queue.append((self._engine.submit(self._engine.least_busy(), task), step))


class _Lanes:
    """The lanes of a rank in one epoch: whose turn it is, for delivery and for what is asked for ahead."""

    def __init__(self, engine: Engine, position: LanesPosition, dp_world_size: int) -> None:
        self.engine = engine
        self.position = position
        self.dp_world_size = dp_world_size
        self.restart()

    def restart(self) -> None:
        """Place every lane at its position; whatever was made ahead is forgotten."""
        position = self.position
        self.count_turns()
        self.planned = self.turns.copy()
        self.host_of = {number: place % self.engine.hosts for place, number in enumerate(position.lanes)}
        starts = {number: replace(lane) for number, lane in position.lanes.items()}
        self.engine.open(position.epoch, position.epochs.get("dataset"), starts)

    def count_turns(self) -> None:
        """Whose turn it is, from what was delivered."""
        self.turns = Turns(self.position.turns())

    def end_turns(self, number: int) -> None:
        """A lane has no more turns in this epoch."""
        self.turns.end(number)
        self.planned.end(number)

    def end(self, number: int, made: Made) -> None:
        """All that a lane had in this epoch is delivered."""
        self.position.lanes[number].end(made)
        if not self.turns and self.dp_world_size > 1 and not any(p.turns for p in self.position.lanes.values()):
            raise LaneError(
                f"This rank has no data: its lanes {list(self.position.lanes)} yielded nothing in epoch "
                f"{self.position.epoch}.\n"
                "Cut the data into more pieces (more or smaller files), or use fewer ranks or lanes, so that every "
                "rank has a lane with data in it."
            )


@final
class LaneFeed(Feed):
    """Batches of a torch iterable dataset: a turn is a batch, collated within its lane."""

    def __init__(self, engine: Engine, position: LanesPosition, size: int, dp_world_size: int) -> None:
        self._lanes = _Lanes(engine, position, dp_world_size)
        self._size = size
        self._ahead: dict[int, deque[int]] = {}
        self._undelivered = 0
        self._failed = False
        self._made: tuple[int, Made] | None = None
        self._first_digests: dict[tuple[int, ...], int] = {}

    def make(self) -> Any:
        if self._failed:
            self._lanes.restart()
            self._ahead, self._undelivered, self._failed = {}, 0, False
        lanes = self._lanes
        while lanes.turns:
            number = lanes.turns.peek()
            reply = self._collect(number)
            made = reply.made
            if made.ended:
                lanes.end_turns(number)
                lanes.end(number, made)
                self._undelivered -= len(self._ahead.pop(number, ()))
                continue
            lanes.turns.take()
            self._fill()
            self._made = number, made
            return reply.batch
        raise StopIteration

    def commit(self) -> None:
        if self._made is not None:
            number, made = self._made
            self._lanes.position.lanes[number].deliver(made, self._size)
            self._lanes.position.step += 1
            if made.unaware:
                self._warn_of_repeats(number, made)

    def _collect(self, number: int) -> Reply:
        self._fill()
        if not self._ahead.get(number):
            self._submit(number)
        ticket = self._ahead[number].popleft()
        self._undelivered -= 1
        try:
            return self._lanes.engine.collect(ticket)
        except WorkerTimeout:
            self._ahead[number].appendleft(ticket)  # it may still come
            self._undelivered += 1
            raise
        except BaseException:
            self._failed = True
            raise

    def _fill(self) -> None:
        engine = self._lanes.engine
        while self._lanes.planned and self._undelivered < engine.hosts * engine.lookahead:
            self._submit(self._lanes.planned.take())

    def _submit(self, number: int) -> None:
        ticket = self._lanes.engine.submit(self._lanes.host_of[number], TurnTask(number, self._size))
        self._ahead.setdefault(number, deque()).append(ticket)
        self._undelivered += 1

    def _warn_of_repeats(self, number: int, made: Made) -> None:
        other = self._first_digests.setdefault(tuple(made.digests), number)
        if other != number:
            self._first_digests.clear()
            warnings.warn(
                f"Lanes {other} and {number} yield the same samples: the dataset does not look at its worker info, so "
                "each of its lanes repeats all of it (as it does in torch's loader).\n"
                "Shard it in __iter__ by torch.utils.data.get_worker_info(), whose id is the lane and num_workers "
                "the number of lanes; or pass lanes=1.",
                stacklevel=5,
            )


@dataclass(slots=True)
class _Row:
    """A row that came, and where it lies: in its place in a shared batch, or by itself."""

    made: Made
    loose: Any = None
    shared: Any = None
    layout: RowLayout | None = None
    place: int = -1


@dataclass(slots=True)
class _Ahead:
    """Rows asked of one host for one batch."""

    ticket: int
    task: RowsTask
    shared: Any


@final
@dataclass(frozen=True)
class Batching:
    """How rows become a batch: ``size`` rows (``batched``, or one sample as it is), or what ``collate_fn`` makes of
    them.
    """

    size: int
    batched: bool
    drop_last: bool
    collate_fn: Callable[[Any], Any] | None
    dp_world_size: int


@final
class RowFeed(Feed):
    """Batches of a stream: consecutive turns of a row each. Workers write rows into one shared place where they can."""

    def __init__(self, engine: Engine, position: LanesPosition, batching: Batching) -> None:
        self._lanes = _Lanes(engine, position, batching.dp_world_size)
        self._batching = batching
        self._layout: RowLayout | None = None
        self._ahead: list[deque[_Ahead]] = [deque() for _ in range(engine.hosts)]
        self._rows: dict[int, deque[_Row]] = {}
        self._taken: list[tuple[int, _Row]] = []
        self._failed = False

    def make(self) -> Any:
        if self._failed:
            self._lanes.restart()
            self._ahead = [deque() for _ in self._ahead]
            self._rows, self._failed = {}, False
        taken = self._taken = []
        try:
            rows = self._take(taken)
            if not rows or (self._batching.drop_last and len(rows) < self._batching.size):
                self._end_lanes()
                raise StopIteration
            self._fill(self._lanes.engine.lookahead)
            return self._batch(rows)
        except StopIteration:
            raise
        except WorkerTimeout:  # what is missing may still come
            for number, row in reversed(taken):
                self._rows[number].appendleft(row)
            self._lanes.count_turns()
            raise
        except BaseException:
            self._failed = True
            raise

    def _take(self, taken: list[tuple[int, _Row]]) -> list[_Row]:
        """The rows of the next batch; ``taken`` gets them too, and the ends of lanes between them."""
        rows: list[_Row] = []
        turns = self._lanes.turns
        while turns and len(rows) < self._batching.size:
            number = turns.peek()
            row = self._row_of(number)
            taken.append((number, row))
            if row.made.ended:
                self._lanes.end_turns(number)
            else:
                turns.take()
                rows.append(row)
        return rows

    def commit(self) -> None:
        lanes = self._lanes.position.lanes
        for number, row in self._taken:
            if not row.made.ended:
                lanes[number].deliver(row.made, 1)
        self._end_lanes()
        self._lanes.position.step += 1

    def _end_lanes(self) -> None:
        """Lanes end in the position when their last rows are delivered, and not when that is known."""
        for number, row in self._taken:
            if row.made.ended:
                self._lanes.end(number, row.made)

    def _row_of(self, number: int) -> _Row:
        rows = self._rows.get(number)
        if rows:
            return rows.popleft()
        rows = self._rows.setdefault(number, deque())
        host = self._lanes.host_of[number]
        while not rows:
            self._fill(max(1, self._lanes.engine.lookahead))
            if not any(number == lane for ahead in self._ahead[host] for lane, _ in ahead.task.turns):
                self._submit([(number, 0)], shared=None)
            self._take_in(host)
        return rows.popleft()

    def _fill(self, batches: int) -> None:
        """Ask for rows until this many batches are under way."""
        planned, size = self._lanes.planned, self._batching.size
        while planned and sum(map(len, self._ahead)) < batches * len(self._ahead):
            shared = None
            if self._layout is not None and self._batching.collate_fn is None and self._batching.batched:
                shared = self._lanes.engine.share(self._layout.nbytes(size))
            self._submit([(planned.take(), place) for place in range(size)], shared)

    def _submit(self, turns: list[tuple[int, int]], shared: Any) -> None:
        for host in range(self._lanes.engine.hosts):
            mine = tuple(turn for turn in turns if self._lanes.host_of[turn[0]] == host)
            if mine:
                task = RowsTask(mine, self._batching.size, self._layout if shared is not None else None)
                self._ahead[host].append(_Ahead(self._lanes.engine.submit(host, task, shared), task, shared))

    def _take_in(self, host: int) -> None:
        ahead = self._ahead[host][0]
        reply = self._lanes.engine.collect(ahead.ticket)
        self._ahead[host].popleft()
        rows, layout, failure = reply.made
        self._layout = self._layout or layout
        loose = iter(reply.batch or ())
        for number, place, made in rows:
            row = _Row(made)
            if not made.ended and place is None:
                row.loose = next(loose)
            elif not made.ended:
                row.shared, row.layout, row.place = ahead.shared, ahead.task.layout, place
            self._rows.setdefault(number, deque()).append(row)
        if failure is not None:
            failure.throw()

    def _batch(self, rows: list[_Row]) -> Any:
        first, batching = rows[0], self._batching
        whole = first.shared is not None and len(rows) == batching.size
        if whole and all(row.shared is first.shared and row.place == place for place, row in enumerate(rows)):
            return first.layout.batch(first.shared.memory, batching.size)  # type: ignore[union-attr]
        values = [self._value(row) for row in rows]
        if any(row.layout is not None for row in rows):  # some came as tensors, so all are to
            values = [{name: torch.as_tensor(value) for name, value in row.items()} for row in values]
        if batching.collate_fn is not None:
            position = self._lanes.position
            place = key(position.run or 0, "collate", position.epoch, position.step, min(position.lanes))
            try:
                with isolated(place):
                    return batching.collate_fn(values if batching.batched else values[0])
            except StopIteration as error:
                raise RuntimeError("collate_fn raised StopIteration, which would end the epoch.") from error
        return stacked(collate(values)) if batching.batched else default_convert(values[0])  # type: ignore[no-untyped-call]

    def _value(self, row: _Row) -> Any:
        if row.layout is None:
            return row.loose
        batch = row.layout.batch(row.shared.memory, self._batching.size)
        return {name: tensor[row.place] for name, tensor in batch.items()}
