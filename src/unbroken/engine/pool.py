"""Lanes in worker processes: start, feed, collect, close.

One connection (a pair of sockets) per worker, and nothing that two processes could hold at once: no lock, no queue.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from time import monotonic
from typing import Any, final

from unbroken.engine.channel import Channel
from unbroken.engine.engine import Engine, Reply
from unbroken.engine.host import Plan, RowsTask
from unbroken.engine.progress import Remaking
from unbroken.engine.ring import Bytes, Ring, Slot, map_memory
from unbroken.engine.wire import decode
from unbroken.engine.worker import Failure, main, open_pidfd
from unbroken.errors import UnsendableBatch, WorkerDied, WorkerTimeout
from unbroken.position import LanePosition

__all__ = ["Pool", "SharedPlace"]

_GRACE = 1.0
_our_ends: weakref.WeakSet[Channel] = weakref.WeakSet()


@final
@dataclass(frozen=True)
class SharedPlace:
    """A slot that several workers write rows of one batch into, and the lease that keeps it."""

    slot: Slot
    memory: Bytes


@final
@dataclass(slots=True)
class _Pending:
    """A task that a worker has: ``kept`` is the place it writes to, held until the answer comes."""

    task: Any
    kept: Slot | SharedPlace | None


@final
@dataclass(eq=False)
class _Worker:
    number: int
    process: Any
    channel: Channel
    watch: int | None = None
    pending: dict[int, _Pending] = field(default_factory=dict)
    dead: bool = False


@final
class Pool(Engine):
    """Worker processes, each hosting some of the lanes.

    ``context`` is a multiprocessing context; ``prefetch_factor`` as torch's; ``timeout`` in seconds, 0 for none.
    """

    def __init__(self, plan: Plan, context: Any, prefetch_factor: int, timeout: float) -> None:
        self.hosts = plan.hosts
        self.lookahead = prefetch_factor
        self._timeout = timeout
        self._ticket = 0
        self._first_ticket = 0
        self._replies: dict[int, tuple[str, Any, int, bytes, Any, Any]] = {}
        self._remaking = Remaking()
        self._ring = Ring(self._announce, self._retract)
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        # Unlike weakref.finalize, it runs before multiprocessing waits for the children of a process that ends, in the
        # main process and in those that multiprocessing started.
        self._close = Finalize(self, _shut_down, args=(self._workers, self._selector), exitpriority=100)
        try:
            for number in range(plan.hosts):
                self._start(plan, context, number)
        except BaseException:
            self.close()
            raise

    def _start(self, plan: Plan, context: Any, number: int) -> None:
        ours, theirs = Channel.pair()
        by_fork = context.get_start_method() == "fork"
        main_thread = threading.current_thread() is threading.main_thread()
        _our_ends.add(ours)
        inherited = list(_our_ends) if by_fork else []
        process = context.Process(
            target=main,
            args=(theirs, plan, number, os.getpid(), inherited, by_fork and main_thread),
            name=f"unbroken worker {number}",
            daemon=True,
        )
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        worker = _Worker(number, process, ours)
        self._workers.append(worker)
        watch = worker.watch = open_pidfd(process.pid)
        if watch is None:  # a sentinel will do, but it stays silent while a grandchild holds its pipe open
            watch = process.sentinel
        self._selector.register(ours, selectors.EVENT_READ, (worker, False))
        self._selector.register(watch, selectors.EVENT_READ, (worker, True))

    def open(self, epoch: int, dataset_epoch: int | None, starts: Mapping[int, LanePosition]) -> None:
        """Lanes are dealt out in the order given: the first to host 0, the next to host 1, and so on."""
        for _, place, *_ in self._replies.values():
            self._release(place)
        self._replies.clear()
        self._first_ticket = self._ticket + 1
        numbers = list(starts)
        for worker in self._workers:
            mine = {lane: starts[lane] for lane in numbers[worker.number :: self.hosts]}
            self._send(worker, ("open", epoch, dataset_epoch, mine))

    def submit(self, host: int, task: Any, lease: Any = None) -> int:
        self._ticket += 1
        worker = self._workers[host]
        if isinstance(task, RowsTask):
            slot, kept = (lease.slot, lease) if lease is not None else (None, None)
        else:
            slot = kept = self._ring.acquire()
        worker.pending[self._ticket] = _Pending(task, kept)
        place = None if slot is None else (slot.arena, slot.offset, slot.size)
        try:
            message = "task", self._ticket, place, task
            if isinstance(task, RowsTask):
                worker.channel.hold(message)
            else:
                self._send(worker, message)
        except WorkerDied:
            raise
        except Exception:  # indices that cannot be pickled
            self._release(worker.pending.pop(self._ticket).kept)
            raise
        return self._ticket

    def flush(self) -> None:
        for worker in self._workers:
            self._send(worker)

    def share(self, nbytes: int) -> SharedPlace | None:
        self._ring.want(nbytes)
        slot = self._ring.acquire()
        return None if slot is None else SharedPlace(slot, slot.lease(nbytes))

    def least_busy(self) -> int:
        """The host with the fewest tasks that it has not answered."""
        return min(self._workers, key=lambda worker: len(worker.pending)).number

    def ready(self, ticket: int) -> bool:
        """Takes in what has come, without waiting. Raises ``WorkerDied``."""
        while ticket not in self._replies and self._close.still_active():
            if not self._selector.select(0):
                return False
            self._receive(math.inf)
        return True

    def collect(self, ticket: int) -> Reply:
        if os.getpid() != self._ring.pid:
            raise RuntimeError("This iterator belongs to the process that made it; a forked process makes its own.")
        if ticket < self._first_ticket:
            raise RuntimeError(
                "A newer iterator has taken over the persistent workers of this loader: only the newest one goes "
                "on.\n"
                "Use persistent_workers=False to have several iterators at a time."
            )
        deadline = monotonic() + self._timeout if self._timeout > 0 else math.inf
        while ticket not in self._replies:
            if self._receive(deadline):
                deadline = monotonic() + self._timeout if self._timeout > 0 else math.inf
        kind, place, nbytes, data, made, task = self._replies.pop(ticket)
        if kind == "failed":
            made.throw()
        if isinstance(place, Slot):
            place = place.lease(nbytes)
        try:
            return Reply(made, decode(data, place) if data else None)
        except Exception as error:
            raise UnsendableBatch(
                f"A batch came from a worker and cannot be made again here: {task}: {error!r}."
            ) from error

    # ---- messages

    def _receive(self, deadline: float) -> bool:
        """Take in what has come; True where a worker told that it is making samples again."""
        if not self._close.still_active():
            raise WorkerDied(
                "The worker processes of this iterator have been shut down; call iter() on the loader again."
            )
        wait = None if deadline == math.inf else max(0.0, deadline - monotonic())
        events = self._selector.select(wait)
        if not events and wait is not None:
            raise WorkerTimeout(f"DataLoader timed out after {self._timeout} seconds")
        progress = False
        dead: list[_Worker] = []
        for chosen, _ in events:
            worker, died = chosen.data
            if died:
                dead.append(worker)
            else:
                progress |= self._read(worker)
        for worker in dead:
            self._bury(worker)
        return progress

    def _read(self, worker: _Worker) -> bool:
        try:
            messages = worker.channel.receive()
        except (EOFError, ConnectionResetError):
            self._selector.unregister(worker.channel)  # it has ended; the watch tells when and how
            return False
        told = False
        for message in messages:
            told |= self._take(worker, message)
        return told

    def _take(self, worker: _Worker, message: Any) -> bool:
        if message[0] == "progress":
            self._remaking.report(*message[1])
            return True
        self._remaking.end()
        if message[0] == "failed":
            _, ticket, failure = message
            waited = worker.pending.pop(ticket)
            self._release(waited.kept)
            if ticket >= self._first_ticket:
                failure = failure or Failure(None, "the worker could not start")
                self._replies[ticket] = ("failed", None, 0, b"", failure, waited.task)
            return False
        _, ticket, where, nbytes, data, made = message
        waited = worker.pending.pop(ticket)
        kept = waited.kept
        place: Any = None
        if where == "memory":
            fd = worker.channel.take_descriptor()
            try:
                place = map_memory(fd, nbytes)
            finally:
                os.close(fd)
            if not isinstance(kept, SharedPlace):
                self._ring.want(nbytes)
        if where == "slot" and nbytes and ticket >= self._first_ticket:
            place = kept
        else:
            self._release(kept)
        if ticket < self._first_ticket:
            return False
        self._replies[ticket] = ("done", place, nbytes, data, made, waited.task)
        return False

    def _release(self, kept: Any) -> None:
        if isinstance(kept, Slot):
            self._ring.give_back(kept)

    def _send(self, worker: _Worker, message: Any = None, descriptor: int | None = None) -> None:
        """Send a message, after those that wait; without one, only these."""
        try:
            if message is not None:
                worker.channel.hold(message)
            worker.channel.flush(descriptor, when_full=lambda: self._read(worker))
        except OSError:
            if not self._close.still_active():
                raise WorkerDied("The worker processes of this iterator have been shut down.") from None
            self._bury(worker)

    def _announce(self, arena: int, fd: int, size: int) -> None:
        for worker in self._workers:
            self._send(worker, ("arena", arena, size), fd)

    def _retract(self, arena: int) -> None:
        for worker in self._workers:
            self._send(worker, ("forget", arena))

    def _bury(self, worker: _Worker) -> None:
        """A worker is dead: take what it still sent, then say how it ended, if anything was still asked of it."""
        if not worker.dead:
            worker.dead = True
            self._selector.unregister(worker.process.sentinel if worker.watch is None else worker.watch)
        try:
            while worker.pending:
                for message in worker.channel.receive(wait=False):
                    self._take(worker, message)
        except (EOFError, OSError):
            pass
        if not worker.pending:
            return
        worker.process.join(_GRACE)
        text = _death_text(worker)
        self.close()
        raise WorkerDied(text)

    @property
    def closed(self) -> bool:
        return not self._close.still_active()

    def close(self) -> None:
        """End the workers: at once where they are idle, by force after a second."""
        self._remaking.end()
        self._close()


def _death_text(worker: _Worker) -> str:
    code = worker.process.exitcode
    how, cause = f"with exit code {code}", "the dataset, or a library under it, ended the process"
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        how = f"by signal {-code} ({name})"
        causes = {
            "SIGKILL": "usually the kernel or the container ran out of memory: fewer workers, smaller batches or a "
            "smaller prefetch_factor need less",
            "SIGBUS": "usually memory or a mapped file ran out, or a file was truncated while it was read",
            "SIGSEGV": "a library crashed: num_workers=0 with faulthandler shows where",
        }
        cause = causes.get(name, "something sent it this signal")
    first = next(iter(worker.pending.values())).task
    return (
        f"DataLoader worker {worker.number} (pid {worker.process.pid}) ended {how}, with {len(worker.pending)} tasks "
        f"not done; the first was {first}.\n"
        f"Likely cause: {cause}.\n"
        "Nothing that was delivered is lost: state_dict() still gives the position after the last batch, and iter() "
        "after load_state_dict() goes on there."
    )


def _shut_down(workers: list[_Worker], selector: selectors.BaseSelector) -> None:
    selector.close()
    try:
        for worker in workers:
            worker.channel.shut_down()  # an idle worker ends at once
        until = monotonic() + _GRACE
        for worker in workers:
            worker.process.join(max(0.0, until - monotonic()))
    finally:  # also where Ctrl-C comes in between: workers do not heed the SIGTERM that would come at the exit
        for worker in workers:
            if worker.process.exitcode is None:
                worker.process.kill()
    for worker in workers:
        worker.process.join(_GRACE)
        if worker.watch is not None:
            os.close(worker.watch)
        if worker.process.exitcode is not None:
            worker.process.close()
