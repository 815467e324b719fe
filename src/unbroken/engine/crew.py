"""Worker processes as a crew: watched, spoken to, and replaced where one ends or hangs.

What was not delivered can be made again from the position of its lane, so a worker that ends is replaced: the new one
is told again whatever the old one had to know, and what was asked of it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.util import Finalize
from time import monotonic
from typing import Any, final

from unbroken.engine.engine import check_process
from unbroken.engine.process import WorkerProcess
from unbroken.engine.signals import PutOff
from unbroken.errors import WorkerDied, WorkerTimeout

__all__ = ["Crew", "Patience", "Work"]

_GRACE = 1.0
_LOOK = 0.5
_log = logging.getLogger("unbroken")


@final
@dataclass(frozen=True)
class Patience:
    """How much is put up with: ``timeout`` in seconds without a batch (0: any), after which a worker is replaced if
    ``restart_late``; and ``restarts`` of a worker in a row in which it makes nothing more. ``again``: whether what was
    not delivered can be made again; else the end of a worker is the end.
    """

    timeout: float = 0.0
    restarts: int = 3
    restart_late: bool = False
    again: bool = True


class Work(ABC):
    """What a crew does, and for whom. Workers have the numbers of their hosts."""

    @abstractmethod
    def take(self, worker: WorkerProcess, message: Any) -> bool:
        """A message has come. True where it shows that the worker is busy with something that takes long."""

    @abstractmethod
    def unanswered(self, host: int) -> int:
        """How many tasks of a host were not answered."""

    @abstractmethod
    def reminders(self, host: int) -> Iterator[tuple[Any, int | None]]:
        """All that a new worker has to be told, with descriptors: what is left to do is asked of it again."""

    @abstractmethod
    def plight(self, host: int) -> tuple[str, str]:
        """The first task of a host that was not answered, and the positions of its lanes, for a message."""


@final
@dataclass(slots=True, eq=False)
class _Seat:
    """A host's ``worker`` of now, and how many in a row were ``lost`` before they made anything more."""

    worker: WorkerProcess
    lost: int = 0


@final
class Crew:
    """The workers of a pool. It ends with whoever works with it, and with the process."""

    def __init__(self, start: Callable[[int], WorkerProcess], patience: Patience, work: Work) -> None:
        self._start = start
        self._patience = patience
        self._work: Work = weakref.proxy(work)
        self._selector = selectors.DefaultSelector()
        self._seats: list[_Seat] = []
        self._owner = os.getpid()
        # Unlike weakref.finalize, it runs before multiprocessing waits for the children of a process that ends, in the
        # main process and in those that multiprocessing started.
        self._end = Finalize(work, _shut_down, args=(self._seats, self._selector), exitpriority=100)

    def add(self) -> None:
        """Start one more worker."""
        self._seats.append(seat := _Seat(self._start(len(self._seats))))
        self._watch(seat)

    @property
    def closed(self) -> bool:
        """Also in a forked process, whose workers these are not."""
        return self._owner != os.getpid() or not self._end.still_active()

    def close(self) -> None:
        """End the workers: at once where they are idle, by force after a second. May be called again."""
        with PutOff():  # an end that was begun is not begun again
            self._end()

    def check_process(self) -> None:
        """Raises ``OfAnotherProcess`` in a forked process: what it sent or took would be missing in its parent."""
        check_process(self._owner)

    def hold(self, host: int, message: Any) -> None:
        """Keep a message for the next one, or for ``send`` without one."""
        self._seats[host].worker.channel.hold(message)

    def send(self, host: int, message: Any = None, descriptor: int | None = None) -> None:
        """Send a message, after those that wait; without one, only these. Raises ``WorkerDied``."""
        self.check_process()
        seat = self._seats[host]
        if message is not None:
            seat.worker.channel.hold(message)
        try:
            self._flush(seat, descriptor)
        except (EOFError, OSError):
            self.check_open()
            self._replace(seat)
        except BaseException:
            self.close()
            raise

    def tell_all(self, message: Any, descriptor: int | None = None) -> None:
        for host in range(len(self._seats)):
            self.send(host, message, descriptor)

    def check_open(self) -> None:
        """Raises ``WorkerDied`` where the workers have been shut down, and what ``check_process`` raises."""
        if self.closed:
            self.check_process()
            raise WorkerDied(
                "The worker processes of this iterator have been shut down; call iter() on the loader again."
            )

    def receive(self, seconds: float | None) -> bool | None:
        """Take in what has come, or comes within so many seconds (None: wait). None where nothing did; True where a
        worker is busy with something that takes long, or was replaced. Raises ``WorkerDied``.
        """
        self.check_open()
        events = self._wait(seconds)
        if not events:
            return None
        try:
            return self._receive(events)
        except (WorkerDied, WorkerTimeout, Warning):
            raise
        except BaseException as error:
            if isinstance(error, OSError | ValueError):
                self.check_open()
            self.close()  # a message may have been lost on its way, and would be waited for
            raise

    def _wait(self, seconds: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """What has come. Another thread, or a handler of signals, may close the selector meanwhile, which wakes nobody
        up: so it is looked after that.
        """
        until = math.inf if seconds is None else monotonic() + seconds
        while True:
            try:
                events = self._selector.select(_LOOK if seconds is None else min(_LOOK, until - monotonic()))
            except (OSError, ValueError):
                self.check_open()
                raise
            if events or (seconds is not None and monotonic() >= until):
                return events
            self.check_open()

    def _receive(self, events: list[tuple[selectors.SelectorKey, int]]) -> bool:
        busy = False
        ended: dict[int, _Seat] = {}
        for chosen, _ in events:
            seat, worker, is_watch = chosen.data
            if seat.worker is not worker:
                continue  # it was replaced meanwhile
            try:
                if is_watch:
                    raise EOFError
                busy |= self._read(seat)
            except (EOFError, ConnectionResetError):
                ended[worker.number] = seat
        for seat in ended.values():
            self._see_off(seat)
        return busy or bool(ended)

    def made_more(self, host: int) -> None:
        """A worker came further than any before it."""
        self._seats[host].lost = 0

    def lose_patience(self, host: int) -> None:
        """A worker makes nothing. Raises ``WorkerTimeout``, or replaces it."""
        seat = self._seats[host]
        worker, (task, _) = seat.worker, self._work.plight(host)
        late = (
            f"DataLoader timed out after {self._patience.timeout} seconds\n"
            f"Worker {worker.number} (pid {worker.pid}) has {task}; {worker.whereabouts()}.\n{worker.stacks()}"
        )
        if not self._patience.restart_late:
            raise WorkerTimeout(
                f'{late}\nA longer timeout waits on, and on_timeout="restart" replaces a worker that hangs.'
            )
        worker.kill()
        self._replace(seat, late)

    # ---- one worker

    def _watch(self, seat: _Seat) -> None:
        self._selector.register(seat.worker.channel, selectors.EVENT_READ, (seat, seat.worker, False))
        self._selector.register(seat.worker.watch, selectors.EVENT_READ, (seat, seat.worker, True))
        with contextlib.suppress(EOFError, OSError):  # one that has ended is found out later on
            seat.worker.channel.send(("notes",), seat.worker.notes.fd)

    def _unwatch(self, worker: WorkerProcess) -> None:
        for watched in (worker.channel, worker.watch):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(watched)

    def _read(self, seat: _Seat, *, wait: bool = True) -> bool:
        busy = False
        for message in seat.worker.channel.receive(wait=wait):
            if message[0] == "listening":
                seat.worker.notes.listening = busy = True
            else:
                busy |= self._work.take(seat.worker, message)
        return busy

    def _flush(self, seat: _Seat, descriptor: int | None = None) -> None:
        seat.worker.channel.flush(descriptor, when_full=lambda: self._read(seat))

    def _see_off(self, seat: _Seat) -> None:
        """A worker has ended: take what it still sent. It is replaced, now or when there is something to ask of it."""
        with contextlib.suppress(EOFError, OSError):
            while self._work.unanswered(seat.worker.number):
                self._read(seat, wait=False)
        self._unwatch(seat.worker)
        if self._work.unanswered(seat.worker.number):
            self._replace(seat)
        else:
            seat.worker.hang_up()  # so that the next message fails, whoever else holds the other end

    def _replace(self, seat: _Seat, late: str = "") -> None:
        """Another worker takes the seat. Raises ``WorkerDied``, or ``WorkerTimeout`` where the last one was ``late``,
        where that was done often enough.
        """
        try:
            while not self._start_another(seat, late):
                late = ""  # that one has ended as well
        except BaseException:  # a seat without a worker would be waited for in vain
            self.close()
            raise

    def _start_another(self, seat: _Seat, late: str) -> bool:
        worker, patience = seat.worker, self._patience
        self._unwatch(worker)
        end, cause = worker.bury()
        self.check_open()
        seat.lost += 1
        if seat.lost > patience.restarts or not patience.again:
            text = self._last_words(seat, late, f"{end}, with", cause)
            raise WorkerTimeout(text) if late else WorkerDied(text)
        told = late or (
            f"DataLoader worker {worker.number} (pid {worker.pid}) {end}; {worker.whereabouts()}.\n"
            f"Likely cause: {cause}."
        )
        worker.let_go()
        try:
            seat.worker = self._start(worker.number)
        except OSError as error:
            raise WorkerDied(f"{told}\nAnother one could not be started: {error}.") from error
        if self.closed:  # meanwhile, by another thread, which may have known of the one before only
            seat.worker.kill()
            seat.worker.let_go()
        self.check_open()
        _log.warning(
            f"{told}\nAnother one takes its place (pid {seat.worker.pid}) and makes again what was not delivered. "
            f"If {patience.restarts - seat.lost + 1} more make nothing, that is an error (see worker_restarts)."
        )
        self._watch(seat)
        try:
            for message, descriptor in self._work.reminders(worker.number):
                seat.worker.channel.hold(message)
                if descriptor is not None:
                    self._flush(seat, descriptor)
            self._flush(seat)
        except (EOFError, OSError):
            self.check_open()
            return False
        return True

    def _last_words(self, seat: _Seat, late: str, end: str, cause: str) -> str:
        worker, patience = seat.worker, self._patience
        task, positions = self._work.plight(worker.number)
        tasks = self._work.unanswered(worker.number)
        whole = (
            f"DataLoader worker {worker.number} (pid {worker.pid}) {end} {tasks} tasks not done; the first was {task}: "
            f"{worker.whereabouts()}."
        )
        lines = [late or whole]
        if positions:
            lines.append(f"Position: {positions}.")
        if seat.lost > 1:
            lines.append(
                f"It was number {seat.lost} in a row that made nothing more (worker_restarts={patience.restarts})."
            )
        if not late:
            lines.append(f"Likely cause: {cause}.")
        if not patience.again:
            lines.append(
                f"With save_prefetched=True nothing can be made again: what the {tasks} tasks had taken from the "
                "source is lost."
            )
        lines.append(
            "Nothing that was delivered is lost: state_dict() still gives the position after the last batch, and "
            "iter() after load_state_dict() goes on there."
        )
        return "\n".join(lines)


def _shut_down(seats: list[_Seat], selector: selectors.BaseSelector) -> None:
    with PutOff():  # Ctrl-C can wait for two seconds
        selector.close()
        workers = [seat.worker for seat in seats]
        try:
            for worker in workers:
                worker.hang_up()
            until = monotonic() + _GRACE
            for worker in workers:
                worker.ended(until - monotonic())
        finally:
            for worker in workers:
                worker.kill()
        until = monotonic() + _GRACE
        for worker in workers:
            worker.ended(until - monotonic())
            worker.let_go()
