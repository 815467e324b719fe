"""Lanes of a stream in threads of this process: each thread has a host, as worker processes have.

Rows are handed over as they are, so nothing is copied or pickled, and the global generators and torch's worker info,
which belong to the process, are left alone (``Plan.in_threads``).
"""

from __future__ import annotations

import math
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, final

from unbroken.engine.engine import Engine, Reply, TakenOver, check_process
from unbroken.engine.host import Host, Plan, RowsTask, TurnTask
from unbroken.engine.progress import Remaking
from unbroken.engine.signals import PutOff
from unbroken.errors import WorkerDied, WorkerTimeout
from unbroken.lane_position import LanePosition
from unbroken.made import Made
from unbroken.meters import DONE
from unbroken.stats import Stats

__all__ = ["Threads"]

_GRACE = 1.0


@final
class Threads(Engine):
    """Threads, each hosting some of the lanes of a stream.

    ``prefetch_factor`` as torch's; ``timeout`` in seconds, 0 for none. The threads do not know the engine, so that one
    that is dropped is closed. They are daemons: a read that never returns keeps no interpreter from ending.
    """

    def __init__(self, plan: Plan, prefetch_factor: int, timeout: float, stats: Stats | None = None) -> None:
        self.hosts = plan.hosts
        self.lookahead = prefetch_factor
        self._timeout = timeout
        self._ticket = 0
        self._asked: dict[int, tuple[int, RowsTask]] = {}  # of each task that is not answered: its host, and itself
        self._replies: dict[int, tuple[int, Reply]] = {}  # with the host that it is of
        self._remaking = Remaking()
        self._common = _Common()
        self._threads = [_Thread(plan, number, self._common) for number in range(plan.hosts)]
        self._close = weakref.finalize(self, _shut_down, self._common, self._threads)
        try:
            for thread in self._threads:
                if stats is not None:
                    stats.watch(thread.work.meter)
                thread.start()
        except BaseException:
            self.close()
            raise

    def open(self, epoch: int, dataset_epoch: int | None, starts: Mapping[int, LanePosition]) -> None:
        """Lanes are dealt out in the order given: the first to host 0, the next to host 1, and so on."""
        self._check()
        self._common.first_ticket = self._ticket + 1
        for host, _ in self._replies.values():
            self._threads[host].taken += 1
        self._replies.clear()
        self._asked.clear()
        numbers = list(starts)
        for number, thread in enumerate(self._threads):
            thread.held = []  # another one: where an interrupt came between, the last may be on its way
            mine = {lane: starts[lane] for lane in numbers[number :: self.hosts]}
            thread.orders.put(("open", epoch, dataset_epoch, mine))

    def submit(self, host: int, task: Any, lease: Any = None) -> int:
        self._check()
        self._ticket += 1
        self._asked[self._ticket] = host, task
        self._threads[host].held.append((self._ticket, task))
        return self._ticket

    def flush(self) -> None:
        for thread in self._threads:
            if thread.held:
                held, thread.held = thread.held, []
                thread.orders.put(("tasks", held))

    def least_busy(self) -> int:
        """The host with the fewest tasks that it has not answered."""
        busy = [host for host, _ in self._asked.values()]
        return min(range(self.hosts), key=busy.count)

    def ready(self, ticket: int) -> bool:
        """Takes in what has come, without waiting."""
        while ticket not in self._replies and not self.closed:
            try:
                self._take(self._common.answers.get_nowait())
            except Empty:
                return False
        return True

    def collect(self, ticket: int) -> Reply:
        self._check_process()
        if ticket < self._common.first_ticket:
            raise TakenOver
        self.flush()
        deadline = self._deadline()
        while ticket not in self._replies:
            self._check()
            try:
                wait = None if deadline == math.inf else max(0.0, deadline - monotonic())
                answer = self._common.answers.get(timeout=wait)
            except Empty:
                raise WorkerTimeout(self._whereabouts(ticket)) from None
            if self._take(answer):
                deadline = self._deadline()
        host, reply = self._replies.pop(ticket)
        self._threads[host].taken += 1
        return reply

    def made_by(self, host: int) -> int:
        thread = self._threads[host]
        return max(0, int(thread.work.meter.counts[DONE]) - thread.taken)

    def _deadline(self) -> float:
        return monotonic() + self._timeout if self._timeout > 0 else math.inf

    def _take(self, answer: Any) -> bool:
        """Keep what a thread made; True where it told that it is making rows again."""
        if answer is None:  # only to wake up who waits
            return False
        if answer[0] == "progress":
            self._remaking.report(*answer[1:])
            return True
        self._remaking.end()
        _, ticket, host, reply = answer
        if ticket >= self._common.first_ticket:
            del self._asked[ticket]
            self._replies[ticket] = host, reply
        else:
            self._threads[host].taken += 1
        return False

    def _check(self) -> None:
        """Raises ``RuntimeError`` in a forked process and ``WorkerDied`` once the threads have been told to end."""
        self._check_process()
        if self.closed:
            raise WorkerDied("The threads of this iterator have been shut down; call iter() on the loader again.")

    def _check_process(self) -> None:
        check_process(self._common.process)

    def _whereabouts(self, ticket: int) -> str:
        """For a timeout: torch's words, and where the thread is."""
        host, task = self._asked[ticket]
        thread = self._threads[host]
        return (
            f"DataLoader timed out after {self._timeout} seconds\n"
            f"Thread {host} has {task}; it is on {thread.work.whereabouts()}.\n{thread.stack()}\n"
            "A longer timeout waits on, and so does another next(): a thread that hangs cannot be replaced."
        )

    @property
    def closed(self) -> bool:
        """Also in a forked process, where the threads are not."""
        return not self._close.alive or os.getpid() != self._common.process

    def close(self) -> None:
        """End the threads: at once where they are idle or between two rows. After a second, one that hangs is left."""
        self._remaking.end()
        with PutOff():  # an end that was begun is not begun again
            self._close()


@final
class _Common:
    """What the threads of an engine have in common. A task whose ticket is below ``first_ticket`` is not wanted."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.first_ticket = 0
        self.ended = False
        self.answers: SimpleQueue[Any] = SimpleQueue()

    def wants(self, ticket: int) -> bool:
        return ticket >= self.first_ticket and not self.ended


@final
class _Raised:
    """An exception on its way to the training loop, with its traceback."""

    def __init__(self, error: BaseException, where: str) -> None:
        if isinstance(error, StopIteration):
            stopped = RuntimeError("The dataset or collate_fn raised StopIteration, which would end the epoch.")
            stopped.__cause__, error = error, stopped
        if hasattr(error, "add_note") and where not in getattr(error, "__notes__", ()):  # from Python 3.11 on
            error.add_note(where)
        self._error: BaseException | None = error

    def throw(self) -> None:
        """Raise it, once. It is kept by no frame of its own traceback, or all of them would live on as a cycle."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error


@final
class _Thread:
    """A thread, and what it is asked: ``orders``, and the tasks that are ``held`` until some go together. Of what it
    made so many were ``taken``.
    """

    def __init__(self, plan: Plan, number: int, common: _Common) -> None:
        self.orders: SimpleQueue[Any] = SimpleQueue()
        self.held: list[tuple[int, RowsTask]] = []
        self.taken = 0
        self.work = _Work(plan, number, common, self.orders)
        self._thread = threading.Thread(target=self.work.run, name=f"unbroken thread {number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stack(self) -> str:
        """Where it is now."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()

    def join(self, seconds: float) -> None:
        """Wait for its end; not where it is this very thread that collects garbage, or one that never started."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, seconds))


@final
class _Work:
    """What goes on in a thread."""

    def __init__(self, plan: Plan, number: int, common: _Common, orders: SimpleQueue[Any]) -> None:
        self._number = number
        self._common = common
        self._orders = orders
        self._broken: BaseException | None = None
        self._lane = -1
        self._host = Host(plan, number, self._report)
        self.meter = self._host.meter

    def run(self) -> None:
        while (order := self._orders.get()) is not None:
            if order[0] == "open":
                self._open(*order[1:])
            else:
                self._make(order[1])
            del order  # or what it holds would live until the next one comes

    def whereabouts(self) -> str:
        """What is made now, for a message. Called from another thread."""
        return self._host.where(TurnTask(self._lane, 1))

    def _report(self, what: str, done: int, total: int) -> None:
        self._common.answers.put(("progress", what, done, total))

    def _open(self, epoch: int, dataset_epoch: int | None, starts: dict[int, LanePosition]) -> None:
        self._broken = None
        try:
            self._host.open(epoch, dataset_epoch, starts)
        except BaseException as error:
            self._broken = error

    def _make(self, tasks: list[tuple[int, RowsTask]]) -> None:
        for ticket, task in tasks:
            if self._common.wants(ticket) and (reply := self._rows(ticket, task)) is not None:
                self._common.answers.put(("made", ticket, self._number, reply))
                self.meter.counts[DONE] += 1
                del reply

    def _rows(self, ticket: int, task: RowsTask) -> Reply | None:
        """None where nobody wants them any more."""
        rows: list[tuple[int, None, Any]] = []
        loose: list[Any] = []
        failure: _Raised | None = None
        if self._broken is not None:
            failure = _Raised(self._broken, f"In thread {self._number} of the loader.")
        for lane, _ in () if failure is not None else task.turns:
            if not self._common.wants(ticket):
                return None
            self._lane = lane
            try:
                found = self._host.row(lane)
            except BaseException as error:
                failure = _Raised(error, f"In thread {self._number} of the loader ({self.whereabouts()}).")
                break
            if isinstance(found, Made):
                loose.extend(found.samples)
                rows.append((lane, None, found))
            else:
                loose.append(found[0])
                rows.append((lane, None, found[1]))
        return Reply((rows, None, failure), loose)


def _shut_down(common: _Common, threads: list[_Thread]) -> None:
    if os.getpid() != common.process:
        return
    with PutOff():  # Ctrl-C can wait for a second
        common.ended = True
        for thread in threads:
            thread.orders.put(None)
        common.answers.put(None)
        until = monotonic() + _GRACE
        for thread in threads:
            thread.join(until - monotonic())
            thread.work.meter.ended = True
