"""Lanes in worker processes: tasks out, answers in.

One connection (a pair of sockets) per worker, and nothing that two processes could hold at once: no lock, no queue.
"""

from __future__ import annotations

import math
import os
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, final

from unbroken.engine.crew import Crew, Patience, Work
from unbroken.engine.engine import Engine, Positions, Reply, TakenOver
from unbroken.engine.host import MapTask, Plan, RowsTask
from unbroken.engine.process import WorkerProcess
from unbroken.engine.progress import Remaking
from unbroken.engine.ring import Bytes, Ring, Slot, map_memory
from unbroken.engine.wire import decode
from unbroken.errors import UnsendableBatch
from unbroken.lane_position import LanePosition
from unbroken.meters import DONE, IDLE, Meter
from unbroken.stats import Stats

__all__ = ["Pool", "SharedPlace"]


@final
@dataclass(frozen=True)
class SharedPlace:
    """A slot that several workers write rows of one batch into, and the lease that keeps it."""

    slot: Slot
    memory: Bytes


@final
@dataclass(slots=True)
class _Asked:
    """A task that a host was asked for: ``kept`` is the place it writes to, and ``answer`` what came of it, both held
    until the feed collects it. ``stale``: of a feed that is over.
    """

    host: int
    task: Any
    kept: Slot | SharedPlace | None
    answer: tuple[str, Any, int, bytes, Any] | None = None
    stale: bool = False


@final
@dataclass(slots=True)
class _Tally:
    """Of a host: how many tasks were not answered (``busy``), the last ticket that ever was (``furthest``), how many of
    the answers of its worker were ``taken`` away, and the worker's ``meter``.
    """

    busy: int = 0
    furthest: int = 0
    taken: int = 0
    meter: Meter = IDLE


@final
@dataclass(slots=True)
class _Course:
    """What the lanes were opened for, and where those of a host go on: where the feed says, once there is one."""

    epoch: int
    dataset_epoch: int | None
    starts: list[dict[int, LanePosition]]
    feed: weakref.WeakMethod[Positions] | None = None

    def positions(self, host: int) -> Mapping[int, LanePosition]:
        of_feed = None if self.feed is None else self.feed()
        return self.starts[host] if of_feed is None else of_feed(host)


@final
class Pool(Engine, Work):
    """Worker processes, each hosting some of the lanes.

    ``context`` is a multiprocessing context; ``prefetch_factor`` as torch's; ``most`` bytes may be made ahead.
    """

    def __init__(
        self,
        plan: Plan,
        context: Any,
        prefetch_factor: int,
        patience: Patience,
        most: int | None = None,
        stats: Stats | None = None,
    ) -> None:
        self._stats = Stats() if stats is None else stats
        self.hosts = plan.hosts
        self.lookahead = prefetch_factor
        self._timeout = patience.timeout
        self._ticket = 0
        self._asked: dict[int, _Asked] = {}
        self._tallies = [_Tally() for _ in range(plan.hosts)]
        self._course = _Course(0, None, [{} for _ in range(plan.hosts)])
        self._remaking = Remaking()
        self._ring = Ring(self._announce, self._retract, most)
        weakref.finalize(self, self._ring.close).atexit = False
        self._crew = Crew(_starter(plan, context, self._tallies, self._stats), patience, self)
        try:
            for _ in range(plan.hosts):
                self._crew.add()
        except BaseException:
            self.close()
            raise

    def open(self, epoch: int, dataset_epoch: int | None, starts: Mapping[int, LanePosition]) -> None:
        """Lanes are dealt out in the order given: the first to host 0, the next to host 1, and so on."""
        self._crew.check_process()
        for ticket, asked in list(self._asked.items()):
            if asked.answer is not None:
                self._release(self._asked.pop(ticket).kept)
                self._tallies[asked.host].taken += 1
            asked.stale = True
        numbers = list(starts)
        mine = [{lane: starts[lane] for lane in numbers[host :: self.hosts]} for host in range(self.hosts)]
        self._course = _Course(epoch, dataset_epoch, mine)
        for host in range(self.hosts):
            self._crew.send(host, self._opening(host))

    def go_on_at(self, positions: Positions) -> None:
        self._course.feed = weakref.WeakMethod(positions)

    def submit(self, host: int, task: Any, lease: Any = None) -> int:
        self._crew.check_process()
        self.failed = 0
        self._ticket += 1
        kept = lease if isinstance(task, RowsTask) else self._ring.acquire()
        asked = self._asked[self._ticket] = _Asked(host, task, kept)
        self._tallies[host].busy += 1
        ticket, message = self._ticket, _message(self._ticket, asked)
        try:
            self._crew.hold(host, message)
        except Exception as error:
            if not _can_be_sent(message):  # indices that cannot be pickled
                self.failed = id(error)
                self._tallies[host].busy -= 1
                self._release(self._asked.pop(ticket).kept)
            raise
        if not isinstance(task, RowsTask):
            self._crew.send(host)
        return ticket

    def flush(self) -> None:
        for host in range(self.hosts):
            self._crew.send(host)

    def share(self, nbytes: int) -> SharedPlace | None:
        self._ring.want(nbytes)
        slot = self._ring.acquire()
        return None if slot is None else SharedPlace(slot, slot.lease(nbytes))

    def has_room(self) -> bool:
        return not self._ring.bounded or self._ring.has_room(_places(self._asked.values()))

    def least_busy(self) -> int:
        """The host with the fewest tasks that it has not answered."""
        return min(range(self.hosts), key=lambda host: self._tallies[host].busy)

    def made_by(self, host: int) -> int:
        tally = self._tallies[host]
        stale = sum(asked.stale and asked.host == host for asked in list(self._asked.values()))
        return max(0, int(tally.meter.counts[DONE]) - tally.taken - stale)

    def ready(self, ticket: int) -> bool:
        """Takes in what has come, without waiting. Raises ``WorkerDied``."""
        while self._of_now(ticket).answer is None and not self.closed:
            if self._crew.receive(0) is None:
                return False
        return True

    def collect(self, ticket: int) -> Reply:
        self._crew.check_process()
        self.failed = 0
        asked, timeout = self._of_now(ticket), self._timeout if self._timeout > 0 else math.inf
        deadline = monotonic() + timeout
        while asked.answer is None:
            busy = self._crew.receive(None if timeout == math.inf else max(0.0, deadline - monotonic()))
            if busy is None:
                self._crew.lose_patience(asked.host)
            if busy is not False:
                deadline = monotonic() + timeout
        kind, place, nbytes, data, made = asked.answer
        if isinstance(place, Slot):
            asked.kept = None  # the lease gives it back, and nobody else does
            place = place.lease(nbytes)
            asked.answer = kind, place, nbytes, data, made
        try:
            if kind == "failed":
                made.throw()
            reply = Reply(made, _decoded(data, place, asked.task) if data else None)
        except Exception as error:
            if kind == "failed" or isinstance(error, UnsendableBatch):
                self.failed = id(error)
                del self._asked[ticket]
                self._tallies[asked.host].taken += 1
            raise
        del self._asked[ticket]
        self._tallies[asked.host].taken += 1
        return reply

    def first_of(self, tickets: Sequence[int]) -> int:
        timeout = self._timeout if self._timeout > 0 else math.inf
        deadline = monotonic() + timeout
        while (found := next((t for t in tickets if self._of_now(t).answer is not None), None)) is None:
            busy = self._crew.receive(None if timeout == math.inf else max(0.0, deadline - monotonic()))
            if busy is None:
                self._crew.lose_patience(self._asked[tickets[0]].host)
            if busy is not False:
                deadline = monotonic() + timeout
        return found

    def _of_now(self, ticket: int) -> _Asked:
        asked = self._asked.get(ticket)
        if asked is None or asked.stale:
            self._crew.check_open()
            raise TakenOver
        return asked

    # ---- for the crew

    def take(self, worker: WorkerProcess, message: Any) -> bool:
        if message[0] == "progress":
            self._remaking.report(*message[1])
            return True
        self._remaking.end()
        kind, ticket, *rest = message
        where, nbytes, data, made = rest if kind == "done" else (None, 0, b"", rest[0])
        asked, host = self._asked[ticket], worker.number
        place: Any = None
        tally = self._tallies[host]
        tally.busy -= 1
        if ticket > tally.furthest:
            tally.furthest = ticket
            self._crew.made_more(host)
        if where == "memory":
            fd = worker.channel.take_descriptor()
            try:
                place = map_memory(fd, nbytes)
            finally:
                os.close(fd)
        if where is not None and not isinstance(asked.kept, SharedPlace):
            self._ring.want(nbytes)
        if where == "slot" and nbytes and not asked.stale:
            place = asked.kept
        elif isinstance(asked.kept, Slot):
            self._release(asked.kept)
            asked.kept = None
        if asked.stale:
            del self._asked[ticket]
            tally.taken += 1
        asked.answer = kind, place, nbytes, data, made
        return False

    def unanswered(self, host: int) -> int:
        return self._tallies[host].busy

    def reminders(self, host: int) -> Iterator[tuple[Any, int | None]]:
        """Turns follow from one another: those that were answered and not collected are made again too, for the feed's
        positions are without them.
        """
        for ticket, asked in list(self._asked.items()):
            if asked.stale and asked.host == host:
                self._release(self._asked.pop(ticket).kept)
        again = {
            ticket: asked
            for ticket, asked in self._asked.items()
            if asked.host == host and (asked.answer is None or not isinstance(asked.task, MapTask))
        }
        for asked in again.values():
            asked.answer = None
        answered = sum(asked.host == host and asked.answer is not None for asked in self._asked.values())
        self._tallies[host].busy, self._tallies[host].taken = len(again), -answered
        self._stats.restarts += 1
        for arena, fd, size in self._ring.arenas():
            yield ("arena", arena, size), fd
        yield self._opening(host), None
        for ticket, asked in again.items():
            yield _message(ticket, asked), None

    def plight(self, host: int) -> tuple[str, str]:
        first = next((a.task for a in self._asked.values() if a.host == host and a.answer is None), None)
        lanes = [lane for lane, _ in first.turns] if isinstance(first, RowsTask) else [getattr(first, "lane", None)]
        at = [
            f"lane {lane} at sample {position.delivered} of epoch {position.epoch}"
            for lane, position in self._course.positions(host).items()
            if lane in lanes
        ]
        return str(first), ", ".join(at[:4]) + (", ..." if len(at) > 4 else "")

    def _opening(self, host: int) -> Any:
        return "open", self._course.epoch, self._course.dataset_epoch, self._course.positions(host)

    def _release(self, kept: Any) -> None:
        if isinstance(kept, Slot):
            self._ring.give_back(kept)

    def _announce(self, arena: int, fd: int, size: int) -> None:
        self._crew.tell_all(("arena", arena, size), fd)

    def _retract(self, arena: int) -> None:
        self._crew.tell_all(("forget", arena))

    @property
    def closed(self) -> bool:
        return self._crew.closed

    def close(self) -> None:
        """End the workers: at once where they are idle, by force after a second."""
        self._remaking.end()
        self._crew.close()
        self._ring.close()


def _starter(plan: Plan, context: Any, tallies: list[_Tally], stats: Stats) -> Callable[[int], WorkerProcess]:
    """What starts a worker for a host. It does not know the pool, so that one that is dropped is closed."""

    def start(number: int) -> WorkerProcess:
        worker = WorkerProcess(plan, context, number)
        tallies[number].meter = worker.notes.meter
        stats.watch(worker.notes.meter)
        return worker

    return start


def _places(asked: Iterable[_Asked]) -> Iterator[Slot | Bytes | None]:
    """Where the tasks that were not collected have their data, or will have it; None where that is not known yet."""
    for each in asked:
        place = each.kept if each.kept is not None or each.answer is None else each.answer[1]
        if place is not None or each.answer is None:
            yield place.slot if isinstance(place, SharedPlace) else place


def _decoded(data: bytes, place: Any, task: Any) -> Any:
    try:
        return decode(data, place)
    except Exception as error:
        try:
            decode(data, place)
        except Exception:
            raise UnsendableBatch(
                f"A batch came from a worker and cannot be made again here: {task}: {error!r}."
            ) from error
        raise  # a handler of signals did


def _can_be_sent(message: Any) -> bool:
    try:
        pickle.dumps(message, 5)
    except Exception:
        return False
    return True


def _message(ticket: int, asked: _Asked) -> tuple[Any, ...]:
    kept = asked.kept
    slot = kept.slot if isinstance(kept, SharedPlace) else kept
    return "task", ticket, None if slot is None else (slot.arena, slot.offset, slot.size), asked.task
