"""Lanes in this process: the same host that workers have, called when a batch is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from unbroken.engine.engine import Engine, Reply
from unbroken.engine.host import Host, Plan, RowsTask, TurnTask
from unbroken.engine.progress import Remaking
from unbroken.lane_position import LanePosition
from unbroken.made import Made
from unbroken.meters import COLLATE, DATASET, IDLE, Meter
from unbroken.seeding import alone, put_back_globals, take_globals
from unbroken.skipped import Fetched

__all__ = ["Inline"]


@final
class Inline(Engine):
    """Makes each batch when it is collected, under random numbers of its own; the global generators are put back."""

    hosts = 1
    lookahead = 0

    def __init__(self, plan: Plan, meter: Meter = IDLE) -> None:
        self._remaking = Remaking()
        self._host = Host(plan, 0, self._remaking.report)
        self._host.meter = meter
        self._batched = plan.batched
        self._tasks: dict[int, Any] = {}
        self._ticket = 0
        self.last: tuple[Any, Any] = (None, None)  # the task that was run last, and what came of it

    def open(self, epoch: int, dataset_epoch: int | None, starts: Mapping[int, LanePosition]) -> None:
        with alone():
            aside = take_globals()
            try:
                self._host.open(epoch, dataset_epoch, starts)
            finally:
                put_back_globals(aside)

    def submit(self, host: int, task: Any, lease: Any = None) -> int:
        self._ticket += 1
        self._tasks[self._ticket] = task
        return self._ticket

    def collect(self, ticket: int) -> Reply:
        self.failed = 0
        with alone():
            return self._collect(ticket)

    def _collect(self, ticket: int) -> Reply:
        aside = take_globals()
        try:
            task = self._tasks[ticket]
            reply = self._run(task)
            self.last = task, reply.made
            del self._tasks[ticket]  # kept where Ctrl-C came between, so that the batch can be asked for again
            return reply
        except StopIteration as error:
            stopped = RuntimeError("The dataset or collate_fn raised StopIteration, which would end the epoch.")
            self.failed = id(stopped)
            raise stopped from error
        except Exception as error:
            self.failed = id(error)
            raise
        finally:
            put_back_globals(aside)
            self._remaking.end()

    def _run(self, task: Any) -> Reply:
        if isinstance(task, RowsTask):
            return self._run_rows(task)
        meter = self._host.meter
        began = meter.clock()
        made: Any
        if isinstance(task, TurnTask):
            made = self._host.turn(task)
            if made.ended:
                return Reply(made, None)
            samples = made.samples if self._batched else made.samples[0]
        else:
            samples, made = self._host.batch(task)
            if type(made) is Fetched and made.nothing:
                return Reply(made, None)
        meter.add_seconds(DATASET, began)
        self._host.count(samples)
        began = meter.clock()
        batch = self._host.collate(samples)
        meter.add_seconds(COLLATE, began)
        return Reply(made, batch)

    def _run_rows(self, task: RowsTask) -> Reply:
        rows: list[tuple[int, None, Any]] = []
        loose: list[Any] = []
        for lane, _ in task.turns:
            found = self._host.row(lane)
            if isinstance(found, Made):
                loose.extend(found.samples)
                rows.append((lane, None, found))
            else:
                loose.append(found[0])
                rows.append((lane, None, found[1]))
        return Reply((rows, None, None), loose)

    def close(self) -> None:
        self._tasks.clear()
