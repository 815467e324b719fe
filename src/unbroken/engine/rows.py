"""What is handed out next of a stream: consecutive turns of a row each, gathered into batches."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import default_convert

from unbroken.engine.feeds import Feed, Prepared
from unbroken.engine.host import RowsTask
from unbroken.engine.turns import Lanes
from unbroken.engine.wire import RowLayout, collate, stack_rows, stacked
from unbroken.errors import WorkerTimeout
from unbroken.lane_position import LanePosition
from unbroken.lineage import Lineage, with_lineage
from unbroken.made import Made, Turn
from unbroken.meters import COLLATE
from unbroken.seeding import isolated, key

__all__ = ["Batching", "RowFeed"]


@dataclass(slots=True)
class _Row:
    """A row that came, and where it lies: in its place in a shared batch, or by itself; or the end of its lane."""

    made: Made | Turn
    ended: bool = False
    loose: Any = None
    shared: Any = None
    layout: RowLayout | None = None
    place: int = -1


@dataclass(slots=True)
class _Ahead:
    """Rows asked of one host for one batch, and the shared place of that with its layout, if there is one."""

    ticket: int
    task: RowsTask
    shared: Any
    layout: RowLayout | None


@final
@dataclass(frozen=True)
class Batching:
    """How rows become a batch: ``size`` rows (``batched``, or one sample as it is), or what ``collate_fn`` makes of
    them; and whether their ``lineage`` goes with it.
    """

    size: int
    batched: bool
    drop_last: bool
    collate_fn: Callable[[Any], Any] | None
    lineage: bool = False


_Taken = list[tuple[int, _Row]]
"""The rows of a batch with their lanes, and the ends of lanes between them."""


@final
class RowFeed(Feed):
    """Batches of a stream. Workers write rows into one shared place where they can. A record is what was taken."""

    def __init__(self, lanes: Lanes, batching: Batching) -> None:
        self._lanes = lanes
        self._batching = batching
        self._layout: tuple[RowLayout, bytes] | None = None  # of the rows seen so far; and as tasks carry it
        self._ahead: list[deque[_Ahead]] = [deque() for _ in range(lanes.engine.hosts)]
        self._rows: dict[int, deque[_Row]] = {}
        self._made: deque[_Taken] = deque()
        self._rest: _Taken = []
        self._taken: _Taken = []
        self._failed = False
        lanes.engine.go_on_at(self.positions)

    def positions(self, host: int) -> dict[int, LanePosition]:
        """The positions of a host's lanes after all that was collected."""
        lanes = self._lanes.copies(host)
        collected = [*self._made, self._taken]
        collected += [[(number, row) for row in self._rows.get(number, ())] for number in lanes]
        for number, row in (entry for taken in collected for entry in taken):
            if number not in lanes:
                continue
            if type(row.made) is Turn:
                lanes[number].deliver_row(row.made)
            elif row.ended:
                lanes[number].end(row.made)
            else:
                lanes[number].deliver(row.made, 1)
        return lanes

    def make(self) -> Prepared:
        if self._failed:
            self._ahead = [deque() for _ in self._ahead]
            self._rows, self._rest, self._failed = {}, [], False
            self._made.clear()
            self._lanes.restart()
            self._lanes.engine.go_on_at(self.positions)
        taken = self._taken = []
        try:
            rows = self._take(taken)
            if not rows or (self._batching.drop_last and len(rows) < self._batching.size):
                self._rest, self._taken = self._rest or taken, []
                if self._lanes.endless or (taken and not self._made):
                    self._lanes.check_data()
                raise StopIteration
            self._fill(self._lanes.engine.lookahead)
            meter = self._lanes.engine.meter
            began = meter.clock()
            batch = self._batch(rows)
            meter.add_seconds(COLLATE, began)
            if self._batching.lineage:
                batch = with_lineage(batch, Lineage(row.made.origins for row in rows))
        except StopIteration:
            raise
        except WorkerTimeout:  # what is missing may still come
            for number, row in reversed(taken):
                self._rows[number].appendleft(row)
            self._taken = []
            self._count_turns()
            raise
        except BaseException:
            self._failed = True
            raise
        self._made.append(taken)
        self._taken = []
        return Prepared(batch, taken)

    def _count_turns(self) -> None:
        """Whose turn it is, from what was made."""
        self._lanes.count_turns()
        turns = self._lanes.turns
        for number, row in (entry for taken in self._made for entry in taken):
            if row.ended:
                turns.end(number)
            else:
                turns.take()

    def _take(self, taken: _Taken) -> list[_Row]:
        """The rows of the next batch; ``taken`` gets them too, and the ends of lanes between them."""
        rows: list[_Row] = []
        turns = self._lanes.turns
        while turns and len(rows) < self._batching.size:
            number = turns.peek()
            row = self._row_of(number)
            taken.append((number, row))
            if row.ended:
                self._lanes.end_turns(number)
            else:
                turns.take()
                rows.append(row)
        return rows

    @property
    def passing(self) -> bool:
        return self._lanes.position.passing

    def commit(self, record: _Taken) -> None:
        lanes = self._lanes
        deliver_row = lanes.position.deliver_row
        ends = []
        for number, row in record:
            made = row.made
            if type(made) is Turn:
                deliver_row(number, made)
            elif row.ended:
                ends.append((number, made))
            else:
                lanes.deliver(number, made, 1)
        for number, made in ends:
            lanes.end(number, made)
        lanes.position.step += 1
        self._made.popleft()

    def end(self) -> None:
        """Lanes whose last rows were too few for a batch have not ended: elsewhere they may be enough."""
        left = {number for number, row in self._rest if not row.ended}
        for number, row in self._rest:
            if type(row.made) is Made and row.ended and number not in left:
                self._lanes.end(number, row.made)
        self._rest = []

    def knows(self, error: Exception) -> bool:
        return self._failed

    def depth(self) -> int:
        """A batch has rows of each host that has any left, or of as many hosts as it has rows."""
        engine = self._lanes.engine
        made = [engine.made_by(host) for host, ahead in enumerate(self._ahead) if ahead]
        return min(made, default=0) * max(1, len(made) // self._batching.size)

    def ready(self) -> bool:
        return all(not ahead or self._lanes.engine.ready(ahead[0].ticket) for ahead in self._ahead)

    def _row_of(self, number: int) -> _Row:
        rows = self._rows.get(number)
        if rows:
            return rows.popleft()
        rows = self._rows.setdefault(number, deque())
        host = self._lanes.host_of[number]
        while not rows:
            self._fill(max(1, self._lanes.engine.lookahead))
            while not (asked := self._is_asked(number, host)) and self._lanes.planned:
                if self._lanes.engine.has_room():
                    break
                self._ask()  # it is needed now
                self._lanes.engine.flush()
            if not asked:
                self._submit([(number, 0)], shared=None)
                self._lanes.engine.flush()
            self._take_in(host)
        return rows.popleft()

    def _is_asked(self, number: int, host: int) -> bool:
        return any(number == lane for ahead in self._ahead[host] for lane, _ in ahead.task.turns)

    def _fill(self, batches: int) -> None:
        """Ask for rows where fewer than this many batches are under way: on several hosts for some more than that, so
        that a message to a host, which costs more than what is in it, is for several batches. Where memory has a bound,
        for one, and for more as long as there is room for them.
        """
        planned, hosts, engine = self._lanes.planned, len(self._ahead), self._lanes.engine
        under_way = sum(map(len, self._ahead))
        wanted = batches * hosts * hosts if under_way < batches * hosts else 0
        if not planned or under_way >= wanted:
            return
        while planned and sum(map(len, self._ahead)) < wanted and (not any(self._ahead) or engine.has_room()):
            self._ask()
        engine.flush()

    def _ask(self) -> None:
        """Ask for the rows of one more batch."""
        size, shared = self._batching.size, None
        if self._layout is not None and self._batching.collate_fn is None and self._batching.batched:
            shared = self._lanes.engine.share(self._layout[0].nbytes(size))
        self._submit([(self._lanes.planned.take(), place) for place in range(size)], shared)

    def _submit(self, turns: list[tuple[int, int]], shared: Any) -> None:
        for host in range(self._lanes.engine.hosts):
            mine = tuple(turn for turn in turns if self._lanes.host_of[turn[0]] == host)
            if mine:
                layout, sealed = (None, None) if shared is None or self._layout is None else self._layout
                task = RowsTask(mine, self._batching.size, sealed)
                self._ahead[host].append(_Ahead(self._lanes.engine.submit(host, task, shared), task, shared, layout))

    def _take_in(self, host: int) -> None:
        ahead = self._ahead[host][0]
        reply = self._lanes.engine.collect(ahead.ticket)
        self._ahead[host].popleft()
        rows, layout, failure = reply.made
        if self._layout is None and layout is not None:
            self._layout = layout, pickle.dumps(layout.fields)
        loose = iter(reply.batch or ())
        for number, place, made in rows:
            if type(made) is Made and made.ended:
                row = _Row(made, True)
            elif place is None:
                row = _Row(made, False, next(loose))
            else:
                row = _Row(made, False, None, ahead.shared, ahead.layout, place)
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
            values = [{name: _as_tensor(value) for name, value in row.items()} for row in values]
        if batching.collate_fn is not None:
            position = self._lanes.position
            step = position.step - position.began + len(self._made)
            place = key(position.run or 0, "collate", position.epoch, step, min(position.lanes))
            try:
                with isolated(place):
                    return batching.collate_fn(values if batching.batched else values[0])
            except StopIteration as error:
                raise RuntimeError("collate_fn raised StopIteration, which would end the epoch.") from error
        if not batching.batched:
            return default_convert(values[0])  # type: ignore[no-untyped-call]
        batch = stack_rows(values)
        if batch is not None:
            return batch
        try:
            return stacked(collate(values))
        except (RuntimeError, ValueError) as error:
            raise type(error)(
                f"The rows of a batch do not stack: {error}.\n"
                "Make them equal in shape (documents by pack()), or pass a collate_fn, or batch_size=None."
            ) from error

    def _value(self, row: _Row) -> Any:
        if row.layout is None:
            return row.loose
        batch = row.layout.batch(row.shared.memory, self._batching.size)
        return {name: tensor[row.place] for name, tensor in batch.items()}


def _as_tensor(value: Any) -> Any:
    """Numbers and arrays of them, as a place in a slot gives them; anything else as it is."""
    return torch.as_tensor(value) if isinstance(value, np.ndarray | np.number | int | float) else value
