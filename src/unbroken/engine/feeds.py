"""What is handed out next, and what the position is then.

A feed keeps its engine busy, collects batches in the order that the plan fixes, and moves the position with each one
that is delivered: for map-style datasets in the order of steps, for torch iterable datasets a turn (a batch of one
lane) at a time. Streams have theirs in ``rows``.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, final

from unbroken.engine.cursor import Rules
from unbroken.engine.empty import emptied
from unbroken.engine.engine import Engine, Reply
from unbroken.engine.host import MapTask, TurnTask
from unbroken.errors import LaneError, WorkerTimeout
from unbroken.lanes import Turns
from unbroken.made import Made, Turn
from unbroken.position import LanesPosition, MapPosition
from unbroken.sampling import Step

__all__ = ["Feed", "LaneFeed", "Lanes", "MapFeed", "Prepared"]


@final
class Prepared(NamedTuple):
    """A batch that was made, and what there is to count when it is delivered."""

    batch: Any
    record: Any


class Feed(ABC):
    """Makes batches in order, and moves the position when one is delivered.

    Several may be made before the first of them is delivered; they are delivered in the order in which they were made.
    """

    @abstractmethod
    def make(self) -> Prepared:
        """The next batch. Raises ``StopIteration`` at the end of the epoch, and what the dataset raises.

        After an error of a lane, all that was made has to be delivered before the next call, which starts again at the
        position; after ``WorkerTimeout`` it waits on.
        """

    @abstractmethod
    def commit(self, record: Any) -> None:
        """Count a batch as delivered."""

    @abstractmethod
    def end(self) -> None:
        """All that was made is delivered, and there is no more: count what ended after the last batch."""

    def ready(self) -> bool:
        """Whether the next batch could be made now, without waiting for a worker."""
        return True

    @property
    def apart(self) -> bool:
        """Whether some lanes stand in a later epoch, so that this one may be over before it begins."""
        return False


@final
class MapFeed(Feed):
    """Batches of a map-style dataset: any free host makes the next one, they are delivered in order."""

    def __init__(self, engine: Engine, position: MapPosition, steps: Iterator[Step], cursor_size: int) -> None:
        self._engine = engine
        self._position = position
        self._steps = steps
        self._cursor_size = cursor_size
        self._queue: deque[tuple[int, Step]] = deque()
        self._broken: Exception | None = None
        engine.open(position.epoch, position.epochs.get("dataset"), {})

    def make(self) -> Prepared:
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
        if step.empty:
            return Prepared(emptied(reply.batch), (step, None))
        return Prepared(reply.batch, (step, reply.made))

    def commit(self, record: tuple[Step, int | None]) -> None:
        step, digest = record
        for _ in range(step.over):
            self._position.next_epoch(None)
        self._position.deliver(step.rows, digest)
        if step.made is not None:
            self._position.cursor.deliver(step.made, self._cursor_size)

    def end(self) -> None:
        """Rows are counted with the batches that they are in."""

    def ready(self) -> bool:
        return not self._queue or self._engine.ready(self._queue[0][0])

    def _fill(self, number: int) -> None:
        while self._broken is None and len(self._queue) < number:
            try:
                step = next(self._steps, None)
            except Exception as error:  # of the sampler: raised when the batches before it are through
                self._broken = error
                return
            if step is None:
                return
            epoch = self._position.epoch if step.epoch is None else step.epoch
            task = MapTask(epoch, step.place, step.stride, step.indices, step.length)
            self._queue.append((self._engine.submit(self._engine.least_busy(), task), step))


@final
class Lanes:
    """The lanes of a rank in one epoch: whose turn it is, for what is made and for what is asked for ahead.

    By the ``rules`` a lane may go on with its own next epoch. ``needed``: lanes that all yield nothing are an error.
    """

    def __init__(self, engine: Engine, position: LanesPosition, rules: Rules, *, needed: bool = False) -> None:
        self.engine = engine
        self.position = position
        self.endless = rules.endless
        self._pristine: str | None = None
        self._needed = needed
        self.restart()
        self._pristine = rules.pristine

    def restart(self) -> None:
        """Place every lane at its position; whatever was made ahead is forgotten."""
        position = self.position
        self.count_turns()
        self.planned = self.turns.copy()
        self.host_of = {number: place % self.engine.hosts for place, number in enumerate(position.lanes)}
        starts = {number: replace(lane) for number, lane in position.lanes.items()}
        for start in starts.values():  # of the very first epoch; the dataset is not as it was before it was opened
            if start.anchor is None and start.carry is None:
                start.carry = self._pristine
        epoch = position.epoch if position.noted is None else position.noted
        self.engine.open(epoch, position.epochs.get("dataset"), starts)

    def count_turns(self) -> None:
        """Whose turn it is, from what was delivered."""
        self.turns = Turns(self.position.turns(endless=self.endless))

    def end_turns(self, number: int) -> None:
        """A lane has no more turns."""
        self.turns.end(number)
        self.planned.end(number)

    def deliver(self, number: int, made: Made, size: int) -> None:
        """A turn is delivered."""
        self.position.lanes[number].deliver(made, size)

    def deliver_row(self, number: int, turn: Turn) -> None:
        """A row of a stream is delivered."""
        self.position.lanes[number].deliver_row(turn)

    def end(self, number: int, made: Made) -> None:
        """All that a lane had is delivered."""
        self.position.lanes[number].end(made)

    def check_data(self) -> None:
        """There are no more turns: was there ever one? Raises ``LaneError`` where there had to be."""
        epoch, lanes = self.position.epoch, self.position.lanes.values()
        # A lane in a later epoch had its rows of this one on another rank.
        if self.endless or (self._needed and not any(lane.turns or lane.epoch > epoch for lane in lanes)):
            more = "more " * any(lane.ledger[0] for lane in lanes)
            raise LaneError(
                f"This rank has no {more}data: of its lanes {list(self.position.lanes)} none has a row, or rows enough "
                f"for a batch, in epoch {epoch}.\n"
                "Cut the data into more pieces (more or smaller files), or use fewer ranks or lanes, so that every "
                "rank has a lane with data in it."
            )


@final
class LaneFeed(Feed):
    """Batches of a torch iterable dataset: a turn is a batch, collated within its lane.

    A record is a turn with its lane, and the lanes that had ended when it was made.
    """

    def __init__(self, lanes: Lanes, size: int) -> None:
        self._lanes = lanes
        self._size = size
        self._ahead: dict[int, deque[int]] = {}
        self._undelivered = 0
        self._failed = False
        self._made = False
        self._ends: list[tuple[int, Made]] = []
        self._first_digests: dict[tuple[int, ...], int] = {}

    def make(self) -> Prepared:
        lanes = self._lanes
        if self._failed:
            lanes.restart()
            self._ahead, self._undelivered, self._failed, self._ends = {}, 0, False, []
        while lanes.turns:
            number = lanes.turns.peek()
            reply = self._collect(number)
            made = reply.made
            if made.ended:
                lanes.end_turns(number)
                self._ends.append((number, made))
                self._undelivered -= len(self._ahead.pop(number, ()))
                continue
            lanes.turns.take()
            self._fill()
            self._made = True
            ends, self._ends = self._ends, []
            return Prepared(reply.batch, (ends, number, made))
        if (self._ends and not self._made) or lanes.endless:
            lanes.check_data()
        raise StopIteration

    def commit(self, record: tuple[list[tuple[int, Made]], int, Made]) -> None:
        ends, number, made = record
        for lane, end in ends:
            self._lanes.end(lane, end)
        self._lanes.deliver(number, made, self._size)
        self._lanes.position.step += 1
        if made.unaware and not made.rolled:
            self._warn_of_repeats(number, made)

    def end(self) -> None:
        for lane, end in self._ends:
            self._lanes.end(lane, end)
        self._ends = []

    def ready(self) -> bool:
        turns = self._lanes.turns
        ahead = self._ahead.get(turns.peek()) if turns else None
        return not ahead or self._lanes.engine.ready(ahead[0])

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
