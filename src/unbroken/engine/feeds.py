"""What is handed out next, and what the position is then.

A feed keeps its engine busy, collects batches in the order that the plan fixes, and moves the position with each one
that is delivered: for map-style datasets in the order of steps, for torch iterable datasets a turn (a batch of one
lane) at a time. Streams have theirs in ``rows``.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

from unbroken.engine.empty import emptied
from unbroken.engine.engine import Engine, Reply
from unbroken.engine.front import Front
from unbroken.engine.host import MapTask
from unbroken.engine.skipping import Watch
from unbroken.engine.turns import Asked, Lanes
from unbroken.errors import TooManySkipped, WorkerDied, WorkerTimeout
from unbroken.lane_position import LanePosition
from unbroken.made import Made
from unbroken.position import MapPosition
from unbroken.sampling import Step
from unbroken.skipped import Fetched, Skipping
from unbroken.steps import lies_in

__all__ = ["Feed", "LaneFeed", "MapFeed", "Prepared"]

_MOST_AHEAD = 16


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
    @abstractmethod
    def passing(self) -> bool:
        """Whether the batch that is delivered next is of a step that is to be left out."""

    def depth(self) -> int:
        """How many batches were made ahead, and could be delivered at once. May be asked from any thread."""
        return 0

    @property
    def keeps(self) -> bool:
        """Whether what was made ahead cannot be made again, and is kept whatever comes between."""
        return False

    def again(self) -> None:  # noqa: B027 - a feed that keeps nothing is made anew
        """What was made and not delivered is made again: an interrupt came between."""

    def settled(self) -> AbstractContextManager[None]:
        """All that was asked for has come, and nothing is made meanwhile. Raises ``WorkerDied``, ``WorkerTimeout``."""
        return nullcontext()

    def let_go(self) -> None:  # noqa: B027 - what is not kept can be made again
        """The engine is about to be closed."""

    @property
    def apart(self) -> bool:
        """Whether some lanes stand in a later epoch, so that this one may be over before it begins."""
        return False

    @abstractmethod
    def knows(self, error: Exception) -> bool:
        """Whether it has raised this, and goes on after it. Else a handler of signals has, and it may be torn."""


@final
class MapFeed(Feed):
    """Batches of a map-style dataset: any free host makes the next one. They are delivered ``in_order``, or as they
    become ready; how far they may be ahead of one that is slow has a bound then.
    """

    def __init__(
        self,
        engine: Engine,
        position: MapPosition,
        steps: Iterator[Step],
        cursor_size: int,
        *,
        in_order: bool = True,
        skipping: Skipping | None = None,
    ) -> None:
        self._engine = engine
        self._position = position
        self._watch = Watch(position, skipping)
        self._passed: list[tuple[int, Fetched]] = []
        self._over: TooManySkipped | None = None
        self._front = Front(position, steps, cursor_size)
        self._in_order = in_order
        # Ticket (None for a step that is to be left out, for which nothing is asked), number of the step, step.
        self._queue: deque[tuple[int | None, int, Step]] = deque()
        self._made = 0  # and not delivered
        self._broken: Exception | None = None
        self._late: Exception | None = None
        self._known = 0  # the id of what was raised last
        engine.open(position.epoch, position.epochs.get("dataset"), {})

    def make(self) -> Prepared:
        self._known = 0
        while (prepared := self._next()) is None:
            pass  # nothing was left of a batch
        self._made += 1
        return prepared

    def _next(self) -> Prepared | None:
        if self._over is not None:
            raise self._over
        if self._late is not None:
            late, self._late = self._late, None
            self._known = id(late)
            raise late
        self._fill(max(1, self._engine.hosts * self._engine.lookahead))
        if not self._queue:
            if self._broken is not None:
                raise self._broken
            raise StopIteration
        place = 0
        if not self._in_order:
            tickets = [ticket for ticket, _, _ in self._queue if ticket is not None]
            place = tickets.index(self._engine.first_of(tickets))
        ticket, number, step = self._queue[place]
        left_out = self._in_order and self._is_left_out(self._made)
        if ticket is None and left_out:
            self._queue.popleft()
            return self._nothing(number)
        try:
            if ticket is None:  # one before it failed, so that its number is another one
                ticket = self._ask(step)
                self._queue[place] = ticket, number, step
            reply = self._engine.collect(ticket)
        except Exception as error:
            if id(error) == self._engine.failed and left_out:
                del self._queue[place]
                return self._nothing(number)
            if id(error) == self._engine.failed:
                del self._queue[place]  # a batch that fails is passed over if the user goes on, as in torch
                self._front.fail(number)
                self._known = id(error)
            raise  # else it may still come, or be made by others
        del self._queue[place]
        try:
            self._fill(self._engine.hosts * self._engine.lookahead, ahead=1)
        except Exception as error:
            if id(error) != self._known:
                raise
            self._late = error  # it is about another batch
        if left_out:
            return self._nothing(number)
        if step.empty:
            return Prepared(emptied(reply.batch), (number, None))
        if type(reply.made) is Fetched or self._passed:
            return self._without(number, reply)
        return Prepared(reply.batch, (number, reply.made))

    def _nothing(self, number: int) -> Prepared:
        """In place of a batch that is left out, whatever became of it: the same where it was made and where not."""
        passed, self._passed = self._passed, []
        return Prepared(None, (number, Fetched((), before=passed) if passed else None))

    def _without(self, number: int, reply: Reply) -> Prepared | None:
        """A batch without the samples that were left out; None where it has no other."""
        made = reply.made if type(reply.made) is Fetched else Fetched((), reply.made)
        try:
            self._watch.expect(made.left_out, nothing=made.nothing)
        except TooManySkipped as error:
            self._over = error
            raise
        if made.nothing:
            self._passed.append((number, made))
            return None
        made, self._passed = made._replace(before=self._passed), []
        return Prepared(emptied(reply.batch) if made.shape else reply.batch, (number, made))

    @property
    def passing(self) -> bool:
        return self._is_left_out(0)

    def _is_left_out(self, ahead: int) -> bool:
        """Whether the step is to be left out that is so many ahead of the next one."""
        passed = self._position.ranges.passed
        return bool(passed) and lies_in(self._position.step + ahead, passed)

    def commit(self, record: tuple[int, int | Fetched | None]) -> None:
        self._made -= 1
        number, made = record
        if isinstance(made, Fetched):
            self._pass_over(made.before)
            self._watch.deliver(made.left_out)
            made = made.entry
        self._front.deliver(number, made)

    def _pass_over(self, passed: Sequence[tuple[int, Fetched]]) -> None:
        for number, made in passed:
            self._front.pass_over([number])
            self._watch.deliver(made.left_out)

    def end(self) -> None:
        """Rows are counted with the batches that they are in; those of which nothing was left after the last, now."""
        self._pass_over(self._passed)
        self._passed = []

    def knows(self, error: Exception) -> bool:
        return id(error) == self._known

    def depth(self) -> int:
        return sum(map(self._engine.made_by, range(self._engine.hosts)))

    def ready(self) -> bool:
        tickets = [ticket for ticket, _, _ in self._queue]
        return not tickets or any(t is None or self._engine.ready(t) for t in tickets[: 1 if self._in_order else None])

    def _fill(self, wanted: int, *, ahead: int = 0) -> None:
        """``ahead``: so many are on their way to the user, and in the queue no more."""
        while self._broken is None and len(self._queue) < wanted and (not self._queue or self._engine.has_room()):
            if self._queue and not self._in_order and self._front.ahead >= _MOST_AHEAD * wanted:
                return
            try:
                found = self._front.next_step()
            except Exception as error:  # of the sampler: raised when the batches before it are through
                self._broken = error
                return
            if found is None:
                return
            number, step = found
            if self._in_order and self._is_left_out(self._made + ahead + len(self._queue)):
                self._queue.append((None, number, step))
                continue
            try:
                ticket = self._ask(step)
            except WorkerDied as error:
                self._broken = error
                return
            except Exception as error:
                if id(error) == self._engine.failed:  # indices that cannot be sent
                    self._front.fail(number)
                    self._known = id(error)
                raise
            self._queue.append((ticket, number, step))

    def _ask(self, step: Step) -> int:
        epoch = self._position.epoch if step.epoch is None else step.epoch
        task = MapTask(epoch, step.place, step.stride, step.indices, step.length)
        return self._engine.submit(self._engine.least_busy(), task)


_Turns = tuple[list[tuple[int, Made]], int, Made]
"""A turn with its lane, after the ends of the lanes that had ended when it was made."""


def _end(lanes: Mapping[int, LanePosition], ends: list[tuple[int, Made]]) -> None:
    for number, made in ends:
        if number in lanes:
            lanes[number].end(made)


@final
class LaneFeed(Feed):
    """Batches of a torch iterable dataset: a turn is a batch, collated within its lane."""

    def __init__(self, lanes: Lanes, size: int, *, in_order: bool = True) -> None:
        self._lanes = lanes
        self._size = size
        self._in_order = in_order
        self._asked = Asked(lanes, size, in_order=in_order)
        self._failed = False
        self._begun = False
        self._made: deque[_Turns] = deque()
        self._ends: list[tuple[int, Made]] = []
        self._first_digests: dict[tuple[int, ...], int] = {}
        lanes.engine.go_on_at(self.positions)

    def positions(self, host: int) -> dict[int, LanePosition]:
        """The positions of a host's lanes after all that was collected."""
        lanes = self._lanes.copies(host)
        for ends, number, made in self._made:
            _end(lanes, ends)
            if number in lanes:
                lanes[number].deliver(made, self._size)
        _end(lanes, self._ends)
        return lanes

    def make(self) -> Prepared:
        lanes = self._lanes
        if self._failed:
            self._failed, self._ends = False, []
            self._made.clear()
            lanes.restart()
            self._asked = Asked(lanes, self._size, in_order=self._in_order)
            lanes.engine.go_on_at(self.positions)
        while lanes.turns:
            number = self._asked.next_lane()
            reply = self._collect(number)
            made = reply.made
            if made.ended:
                lanes.end_turns(number)
                self._asked.end(number)
                self._ends.append((number, made))
                continue
            lanes.turns.take(number)
            self._begun = True
            self._made.append((self._ends, number, made))
            self._ends = []
            self._asked.fill()
            return Prepared(reply.batch, self._made[-1])
        if (self._ends and not self._begun) or lanes.endless:
            lanes.check_data()
        raise StopIteration

    @property
    def passing(self) -> bool:
        return self._lanes.position.passing

    def commit(self, record: _Turns) -> None:
        ends, number, made = record
        self._made.popleft()
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

    def depth(self) -> int:
        return sum(map(self._lanes.engine.made_by, range(self._lanes.engine.hosts)))

    def ready(self) -> bool:
        return self._asked.ready()

    def knows(self, error: Exception) -> bool:
        return self._failed

    def _collect(self, number: int) -> Reply:
        try:
            reply = self._asked.collect(number)
            if reply.made.left_out:
                self._lanes.watch.expect(reply.made.left_out)
            return reply
        except WorkerTimeout:
            raise
        except BaseException:
            self._failed = True
            raise

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
