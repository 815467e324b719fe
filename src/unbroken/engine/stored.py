"""Batches of a source that cannot be read again (a queue, a socket): what was made stays until it is delivered.

The position holds it. Nothing is made twice, so nothing may be lost either: not with a save, not with an interrupt, not
with an iterator that was left.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

from unbroken.engine.feeds import Feed, Prepared
from unbroken.engine.turns import Asked, Lanes
from unbroken.errors import WorkerDied, WorkerTimeout
from unbroken.lane_position import LanePosition
from unbroken.made import Made
from unbroken.prefetched import Held

__all__ = ["Kept", "StoredFeed"]

_Record = tuple[list[int], int]
"""The lanes that had ended before a batch was made, and the lane that it is of."""


@final
class Kept:
    """The feed of a loader, where what it made ahead cannot be made again: whoever iterates may come and go."""

    def __init__(self) -> None:
        self._feed: Feed | None = None

    def keep(self, feed: Feed) -> None:
        """The feed of the pass that begins, if it is such a one."""
        self._feed = feed if feed.keeps else None

    def settled(self) -> AbstractContextManager[None]:
        """See ``Feed.settled``."""
        return nullcontext() if self._feed is None else self._feed.settled()

    def put_aside(self) -> bool:
        """A pass is over, or left: all that was made for it goes into the position. Whether there was one."""
        there = self._feed is not None
        with self.settled():
            self._feed = None
        return there

    def let_go(self) -> None:
        """The workers are about to be ended."""
        if self._feed is not None:
            self._feed.let_go()
        self._feed = None

    def forget(self) -> None:
        """Another position takes its place."""
        self._feed = None

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()


@final
class StoredFeed(Feed):
    """Batches of a torch iterable dataset, a turn of a lane each. Those that are held are delivered first.

    In each lane, what is held comes before what hosts were asked for. ``lock`` is held by whoever takes something in.
    """

    def __init__(self, lanes: Lanes, size: int, *, in_order: bool) -> None:
        self._lanes = lanes
        self._size = size
        self._in_order = in_order
        self._held = lanes.position.held
        self._taken: Counter[int] = Counter()  # of what is held, how many were made and not delivered yet
        self._short: set[int] = set()
        self._ends: list[int] = []
        self._begun = False
        self._over: WorkerDied | None = None
        self._told = False
        self._lock = threading.RLock()
        for number in [lane for lane in lanes.turns.in_order() if lane in self._held]:
            for held in self._held[number]:
                if held.made.ended:
                    lanes.planned.end(number)
                else:
                    lanes.planned.take(number)
        self._asked = Asked(lanes, size, in_order=in_order)
        for number in lanes.turns.in_order():
            self._asked.count(number, self._turns_held(number))
        lanes.engine.go_on_at(self.positions)

    def positions(self, host: int) -> dict[int, LanePosition]:
        """Where the lanes of a host stand after all that is held: to be named where it dies."""
        lanes = self._lanes
        return {number: lanes.position.made(number) for number, of in lanes.host_of.items() if of == host}

    def knows(self, error: Exception) -> bool:
        return False  # what is held is still there, and is counted anew

    @property
    def keeps(self) -> bool:
        return True

    def make(self) -> Prepared:
        with self._lock:
            if self._over is not None:
                self._told = True
                raise self._over
            while self._lanes.turns:
                number = self._next_lane()
                held = self._held[number][self._taken[number]]
                if held.failure is not None:
                    del self._held[number][self._taken[number]]
                    try:
                        raise held.failure
                    finally:
                        del held  # or the error would keep itself, by its traceback, and the workers
                self._taken[number] += 1
                if held.made.ended:
                    self._lanes.end_turns(number)
                    self._ends.append(number)
                    continue
                self._asked.count(number, -1)
                self._lanes.turns.take(number)
                self._begun = True
                ends, self._ends = self._ends, []
                self._fill()
                return Prepared(held.batch, (ends, number))
            if (self._ends and not self._begun) or self._lanes.endless:
                self._lanes.check_data()
            raise StopIteration

    @property
    def passing(self) -> bool:
        return self._lanes.position.passing

    def commit(self, record: _Record) -> None:
        ends, number = record
        with self._lock:
            for lane in ends:
                self._end(lane)
            self._lanes.deliver(number, self._held[number].popleft().made, self._size)
            self._taken[number] -= 1
            self._lanes.position.step += 1

    def end(self) -> None:
        with self._lock:
            for lane in self._ends:
                self._end(lane)
            self._ends = []

    def again(self) -> None:
        with self._lock:
            for number, taken in self._taken.items():
                made = [held.made for held in list(self._held[number])[:taken]] if taken else []
                self._asked.count(number, sum(not turn.ended for turn in made))
            self._taken.clear()
            self._ends = []
            self._lanes.count_turns()

    def depth(self) -> int:
        engine, held = self._lanes.engine, list(self._held.items())
        waiting = sum(max(0, len(each) - self._taken[number]) for number, each in held)
        return waiting + sum(map(engine.made_by, range(engine.hosts)))

    def ready(self) -> bool:
        turns = self._lanes.turns
        lanes = turns.in_order() if not self._in_order else [turns.peek()] if turns else []
        return any(map(self._waiting, lanes)) or self._asked.ready()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Wait for all that hosts were asked for: then it is held, and nothing is made meanwhile.

        Raises ``WorkerTimeout``, and ``WorkerDied`` once where that lost something; all the rest is held.
        """
        with self._lock:
            if self._over is not None and not self._told:
                self._told = True
                raise self._over
            if self._lanes.engine.lookahead:  # else a turn is made when it is collected, and none is under way
                for number in self._asked.lanes():
                    while self._asked.waits(number):
                        self._take_in(number)
            for number in list(self._short):  # its end, or what was raised, is known and would not come again
                self._short.discard(number)
                self._take_in(number)
            yield

    def let_go(self) -> None:
        """Hold what has come; what has not is lost, and that is said."""
        if not self._lock.acquire(blocking=False):  # a thread that makes something finds out by itself
            return
        try:
            lost = self._lost()
        finally:
            self._lock.release()
        if lost:
            warnings.warn(
                f"The workers were ended while they had something to make: {self._text(lost)}.\n"
                "Call state_dict() before close(), which waits for them.",
                stacklevel=4,
            )

    # ---- what is held

    def _waiting(self, number: int) -> bool:
        """Whether a lane holds something that was not made yet."""
        return len(self._held.get(number, ())) > self._taken[number]

    def _turns_held(self, number: int) -> int:
        return sum(held.failure is None and not held.made.ended for held in self._held.get(number, ()))

    def _fill(self) -> None:
        try:
            self._asked.fill()
        except WorkerDied as error:
            self._died(error, told=False)

    def _next_lane(self) -> int:
        """The lane that is delivered next, once it holds something."""
        self._fill()
        lanes = self._lanes.turns.in_order()
        number = next(filter(self._waiting, lanes[:1] if self._in_order else lanes), None)
        if number is None:
            try:
                number = self._asked.next_lane()
            except WorkerDied as error:
                raise self._died(error) from error
            self._take_in(number)
        return number

    def _take_in(self, number: int) -> None:
        """Hold what comes next of a lane. Waits for it; raises ``WorkerTimeout`` and ``WorkerDied``."""
        try:
            self._hold(number)
        except WorkerTimeout as error:
            raise WorkerTimeout(
                f"{error}\nWhat a worker has taken from the source cannot be made again, so it is waited for. Nothing "
                "is lost: try again."
            ) from None
        except WorkerDied as error:
            raise self._died(error) from error

    def _hold(self, number: int) -> None:
        try:
            reply = self._asked.collect(number)
            held = Held(reply.made, reply.batch)
        except (WorkerDied, WorkerTimeout):
            raise
        except Exception as error:
            if id(error) != self._lanes.engine.failed:
                raise
            held = Held(Made(), None, error)
        self._held.setdefault(number, deque()).append(held)
        self._short.discard(number)
        if held.made.ended:
            self._lanes.planned.end(number)
            self._asked.end(number)
        elif held.failure is None:
            self._asked.count(number, 1)
            if held.made.number < self._size:
                self._short.add(number)

    def _died(self, error: WorkerDied, *, told: bool = True) -> WorkerDied:
        """The run is over. What that lost is said once, by the next batch or save at the latest."""
        self._told |= told
        if self._over is None:
            lost = self._lost()
            self._short.clear()
            found = (
                f"\nWhat was asked of workers and did not come cannot be made again: {self._text(lost)}."
                if lost
                else ""
            )
            self._over = WorkerDied(f"{error}{found}")
        return self._over

    def _lost(self) -> Counter[int]:
        """Hold what has come of what was asked for; how many turns of each lane have not, and are given up."""
        lost: Counter[int] = Counter()
        for number in self._asked.lanes():
            while self._asked.waits(number):
                if not self._lanes.engine.lookahead:  # a turn that was interrupted, and is made when it is asked for
                    self._asked.give_up(number)
                    continue
                try:
                    if self._asked.has_come(number):
                        self._hold(number)
                        continue
                except (WorkerDied, WorkerTimeout):
                    pass
                self._asked.give_up(number)
                lost[number] += 1
        return lost

    def _text(self, lost: Counter[int]) -> str:
        lanes = ", ".join(f"{count} of lane {number}" for number, count in sorted(lost.items())[:8])
        more = ", ..." if len(lost) > 8 else ""
        total = lost.total()
        return f"up to {total * self._size} samples are lost, in {total} batches of up to {self._size} ({lanes}{more})"

    def _end(self, number: int) -> None:
        self._lanes.end(number, self._held[number].popleft().made)
        self._taken[number] -= 1
