"""The lanes of a rank in one epoch: whose turn it is, and which turns hosts were asked for ahead."""

from __future__ import annotations

from collections import deque
from typing import final

from unbroken.engine.cursor import Rules
from unbroken.engine.engine import Engine, Reply
from unbroken.engine.host import TurnTask
from unbroken.engine.skipping import Watch
from unbroken.errors import LaneError, WorkerDied, WorkerTimeout
from unbroken.lane_position import LanePosition
from unbroken.lanes import Turns
from unbroken.made import Made
from unbroken.position import LanesPosition

__all__ = ["Asked", "Lanes"]


@final
class Lanes:
    """The lanes of a rank in one epoch: whose turn it is, for what is made and for what is asked for ahead.

    By the ``rules`` a lane may go on with its own next epoch. ``needed``: lanes that all yield nothing are an error.
    """

    def __init__(self, engine: Engine, position: LanesPosition, rules: Rules, *, needed: bool = False) -> None:
        self.engine = engine
        self.position = position
        self.endless = rules.endless
        self.watch = Watch(position, rules.skipping)
        self._pristine: str | None = None
        self._needed = needed
        self.restart()
        self._pristine = rules.pristine

    def restart(self) -> None:
        """Place every lane at its position; whatever was made ahead is forgotten."""
        position = self.position
        self.watch.restart()
        self.count_turns()
        self.planned = self.turns.copy()
        self.host_of = {number: place % self.engine.hosts for place, number in enumerate(position.lanes)}
        starts = {number: position.made(number) for number in position.lanes}
        for start in starts.values():  # of the very first epoch; the dataset is not as it was before it was opened
            if start.anchor is None and start.carry is None:
                start.carry = self._pristine
        epoch = position.epoch if position.noted is None else position.noted
        self.engine.open(epoch, position.epochs.get("dataset"), starts)

    def copies(self, host: int) -> dict[int, LanePosition]:
        """The positions of a host's lanes after what was delivered; they move on their own."""
        lanes = self.position.lanes
        return {number: lanes[number].copy() for number, of in self.host_of.items() if of == host}

    def count_turns(self) -> None:
        """Whose turn it is, from what was delivered."""
        self.turns = Turns(self.position.turns(endless=self.endless))

    def end_turns(self, number: int) -> None:
        """A lane has no more turns."""
        self.turns.end(number)
        self.planned.end(number)

    def deliver(self, number: int, made: Made, size: int) -> None:
        """A turn is delivered."""
        self.position.moving(number).deliver(made, size)
        if made.left_out:
            self.watch.deliver(made.left_out, number)

    def end(self, number: int, made: Made) -> None:
        """All that a lane had is delivered."""
        self.position.moving(number).end(made)
        if made.left_out:
            self.watch.deliver(made.left_out, number)

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
class Asked:
    """The turns that hosts were asked for and that were not collected, of up to ``size`` samples each.

    ``in_order``: lanes are delivered in the order of turns, and all hosts share what may be ahead. Else any lane is
    whose next turn is ready, and each host has a part of its own: a slow one would come to have all of it.
    """

    def __init__(self, lanes: Lanes, size: int, *, in_order: bool) -> None:
        engine = lanes.engine
        self._lanes = lanes
        self._size = size
        self._in_order = in_order
        self._tickets: dict[int, deque[int]] = {}
        if in_order:
            self._plans = [lanes.planned]
            self._most = engine.hosts * engine.lookahead
        else:
            mine = [[n for n, of in lanes.host_of.items() if of == host] for host in range(engine.hosts)]
            self._plans = [lanes.planned.of(numbers) for numbers in mine]
            self._most = engine.lookahead
        self._out = [0] * len(self._plans)

    def fill(self) -> None:
        """Ask for as many turns as may be ahead: one of each part, and more as long as there is room for them."""
        engine, out = self._lanes.engine, self._out
        for part, plan in enumerate(self._plans):
            while plan and out[part] < self._most and (not out[part] or engine.has_room()):
                self._submit(plan.take())

    def next_lane(self) -> int:
        """The lane to collect of. Asks for more turns first; waits only where there is a choice.

        Raises ``WorkerDied`` or ``WorkerTimeout``.
        """
        self.fill()
        turns = self._lanes.turns
        if self._in_order:
            return turns.peek()
        heads = {self._tickets[lane][0]: lane for lane in turns.in_order() if self._tickets.get(lane)}
        return heads[self._lanes.engine.first_of(list(heads))] if heads else turns.peek()

    def collect(self, lane: int) -> Reply:
        """The next turn of a lane. Where none comes, after ``WorkerTimeout`` or Ctrl-C, it is waited for again."""
        if not self._tickets.get(lane):
            self._submit(lane)
        try:
            reply = self._lanes.engine.collect(self._tickets[lane][0])
        except (WorkerDied, WorkerTimeout):
            raise
        except Exception as error:
            if id(error) == self._lanes.engine.failed:  # else a handler of signals raised it, and the turn still comes
                self.give_up(lane)
            raise
        self.give_up(lane)
        return reply

    def give_up(self, lane: int) -> None:
        """The next turn of a lane is no more waited for."""
        self._tickets[lane].popleft()
        self.count(lane, -1)

    def count(self, lane: int, number: int) -> None:
        """So many more turns of a lane are ahead, or fewer, that hosts need not be asked for."""
        self._out[self._part_of(lane)] += number

    def lanes(self) -> list[int]:
        """Those that something was asked of."""
        return list(self._tickets)

    def waits(self, lane: int) -> bool:
        """Whether a lane was asked for something that was not collected."""
        return bool(self._tickets.get(lane))

    def has_come(self, lane: int) -> bool:
        """Whether the next turn of a lane can be collected without waiting."""
        return self._lanes.engine.ready(self._tickets[lane][0])

    def end(self, lane: int) -> None:
        """A lane has no more turns: what it was asked for beyond that is nothing."""
        if not self._in_order:
            self._plans[self._part_of(lane)].end(lane)
        self._out[self._part_of(lane)] -= len(self._tickets.pop(lane, ()))

    def ready(self) -> bool:
        """Whether a turn could be collected without waiting."""
        turns, engine = self._lanes.turns, self._lanes.engine
        lanes = turns.in_order() if not self._in_order else [turns.peek()] if turns else []
        heads = [self._tickets[lane][0] for lane in lanes if self._tickets.get(lane)]
        return not heads or any(map(engine.ready, heads))

    def _part_of(self, lane: int) -> int:
        return 0 if self._in_order else self._lanes.host_of[lane]

    def _submit(self, lane: int) -> None:
        ticket = self._lanes.engine.submit(self._lanes.host_of[lane], TurnTask(lane, self._size))
        self._tickets.setdefault(lane, deque()).append(ticket)
        self._out[self._part_of(lane)] += 1
