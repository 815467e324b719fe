"""The other end: a worker process.

It reads tasks from its one connection, writes batches into the slots that came with them, and ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from time import perf_counter
from typing import Any, final

import torch

from unbroken.engine.channel import Channel
from unbroken.engine.host import Host, MapTask, Plan, RowsTask, TurnTask
from unbroken.engine.notes import take_notes
from unbroken.engine.ring import Bytes, create_memory, map_memory
from unbroken.engine.wire import Encoded, RowLayout, encode
from unbroken.errors import UnbrokenError, UnsendableBatch
from unbroken.lane_position import LanePosition
from unbroken.made import Made, Turn
from unbroken.meters import COLLATE, DATASET, DONE, Meter
from unbroken.skipped import Fetched

__all__ = ["Failure", "main", "open_pidfd"]


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way to the training process: its type (pickled, where that is possible) and its text."""

    kind: bytes | None
    text: str

    @staticmethod
    def of(error: BaseException, where: str) -> Failure:
        name = type(error).__qualname__
        if isinstance(error, UnsendableBatch):
            text = f"{error}\nIt came up {where}."
        elif isinstance(error, UnbrokenError):
            text = str(error)
        else:
            text = f"Caught {name} {where}.\nOriginal {''.join(traceback.format_exception(error))}"
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            # Neither sys.exit() nor a stray StopIteration is to end the training loop in silence.
            return Failure(None, text)
        try:
            return Failure(pickle.dumps(type(error)), text)
        except Exception:  # a class that cannot be found by name
            return Failure(None, text)

    def throw(self) -> None:
        """Raise it: as its own type where that can be made from a text, else as a RuntimeError. The text is in its
        cause if it does not show it itself.
        """
        error = self._made_again() or RuntimeError(self.text)
        try:
            if _shows(error, self.text):
                raise error
            raise error from RuntimeError(self.text)
        finally:
            del error  # or it would keep itself, by its traceback, and all that this frame was called from

    def _made_again(self) -> BaseException | None:
        try:
            kind = pickle.loads(self.kind) if self.kind is not None else None
            if kind is None:
                return None
            if getattr(kind, "message", None):  # torch's way with these
                error = kind(message=self.text)
            else:
                error = kind(_Text(self.text) if issubclass(kind, KeyError) else self.text)
        except Exception:  # a constructor that takes other arguments
            return None
        return error if isinstance(error, BaseException) else None


def _shows(error: BaseException, text: str) -> bool:
    try:
        return text in str(error)
    except Exception:  # a __str__ that fails
        return False


class _Text(str):
    """A message that KeyError shows as it is, and not as a quoted literal."""

    def __repr__(self) -> str:
        return str(self)


class _Gone(BaseException):
    """The consumer closed its end: nothing more to do. No error of a dataset is mistaken for it."""


def main(
    channel: Channel, plan: Plan, number: int, parent: int, ours: bool, handled: set[int], blocked: set[int] | None
) -> None:
    """A worker process: tasks in, batches out, until the channel closes or the parent is gone.

    ``ours``: it is the main thread of the parent that started this process. The consumer has handlers for the signals
    ``handled``; ``blocked`` are those that are to be blocked here, where they are not as they should be.
    """
    _end_with(parent, ours)
    for name in handled:
        # Signals to the group are the consumer's to handle. A handler, unlike SIG_IGN, is not inherited by exec.
        signal.signal(name, lambda *_: None)
    if blocked is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    torch.set_num_threads(1)
    try:
        _Worker(channel, plan, number).run()
    except _Gone:
        pass
    finally:
        channel.close()


def _end_with(parent: int, ours: bool) -> None:
    """See to it that this process ends when its parent does, however that ends."""
    if ours and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="unbroken-parent").start()
    if ours and os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    descriptor = open_pidfd(parent)
    if descriptor is not None:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        waiting.poll()
        os._exit(1)
    born_of = os.getppid()  # of a zombie it changes, while the process can still be signalled
    while os.getppid() == born_of and _alive(parent):
        time.sleep(1.0)
    os._exit(1)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def open_pidfd(process: int) -> int | None:
    """A descriptor that becomes readable when a process ends; None where the system has none, or refuses it."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(process)
    except OSError:  # an old kernel, or a sandbox that does not let it through
        return None


@final
class _Worker:
    def __init__(self, channel: Channel, plan: Plan, number: int) -> None:
        self._channel = channel
        self._plan = plan
        self._number = number
        self._arenas: dict[int, Bytes] = {}
        self._broken: Failure | None = None
        self._host: Host | None = None
        self._layout: tuple[bytes, RowLayout] | None = None
        self._notes: Any = [0, 0, 0]  # see ``take_notes``
        self._meter = Meter()

    def run(self) -> None:
        try:
            self._host = Host(self._plan, self._number, self._report)
        except BaseException as error:
            self._broken = Failure.of(error, f"in DataLoader worker process {self._number}")
        while True:
            for message in self._receive():
                getattr(self, f"_on_{message[0]}")(*message[1:])

    def _report(self, what: str, done: int, total: int) -> None:
        self._send("progress", (what, done, total))

    def _send(self, kind: str, *rest: Any, descriptor: int | None = None) -> None:
        try:
            self._channel.send((kind, *rest), descriptor)
        except OSError:
            raise _Gone from None

    def _receive(self) -> list[Any]:
        try:
            return self._channel.receive()
        except (EOFError, ConnectionResetError):
            raise _Gone from None

    def _on_notes(self) -> None:
        self._notes, self._meter = take_notes(self._channel.take_descriptor())
        if self._host is not None:
            self._host.notes, self._host.meter = self._notes, self._meter
        self._send("listening")

    def _on_arena(self, arena: int, size: int) -> None:
        fd = self._channel.take_descriptor()
        try:
            self._arenas[arena] = map_memory(fd, size)
        finally:
            os.close(fd)

    def _on_forget(self, arena: int) -> None:
        self._arenas.pop(arena, None)

    def _on_open(self, epoch: int, dataset_epoch: int | None, starts: dict[int, LanePosition]) -> None:
        if self._host is None:
            return
        self._broken = None
        try:
            self._host.open(epoch, dataset_epoch, starts)
        except BaseException as error:
            self._broken = Failure.of(error, f"in DataLoader worker process {self._number}")

    def _on_task(self, ticket: int, slot: tuple[int, int, int] | None, task: Any) -> None:
        where = f"in DataLoader worker process {self._number}"
        try:
            if self._broken is not None or self._host is None:
                self._send("failed", ticket, self._broken)
            elif isinstance(task, RowsTask):
                self._rows(ticket, slot, task, self._host)
            else:
                self._batch(ticket, slot, task, self._host)
        except _Gone:
            raise
        except BaseException as error:  # sys.exit() and a cancelled task too: it is no reason to end the process
            where += f" ({self._host.where(task)})" if self._host is not None else ""
            self._send("failed", ticket, Failure.of(error, where))
        self._notes[0] = 0
        self._meter.counts[DONE] += 1

    def _batch(self, ticket: int, slot: tuple[int, int, int] | None, task: Any, host: Host) -> None:
        made: Any
        began = perf_counter()
        if isinstance(task, MapTask):
            self._notes[0], self._notes[1] = 1, -1  # the host counts the samples, if they are asked for one by one
            samples, made = host.batch(task)
            if type(made) is Fetched and made.nothing:
                self._send("done", ticket, None, 0, b"", made)
                return
        else:
            self._notes[0], self._notes[1], self._notes[2] = task.lane + 2, host.place_of(task.lane), 1
            made = host.turn(task)
            if made.ended:
                self._send("done", ticket, None, 0, b"", made)
                return
            samples = made.samples if self._plan.batched else made.samples[0]
            made.samples = []
        seconds = self._meter.seconds
        seconds[DATASET] += (made_at := perf_counter()) - began
        host.count(samples)
        encoded = host.encode(samples)
        try:
            self._deliver(ticket, slot, encoded, made)
        except (RuntimeError, ValueError):  # samples that do not stack: torch decides what comes of them
            self._deliver(ticket, slot, host.encode(samples, put_off=False), made)
        seconds[COLLATE] += perf_counter() - made_at

    def _deliver(self, ticket: int, slot: tuple[int, int, int] | None, encoded: Encoded, made: Any) -> None:
        """Write a batch to its slot, or to memory of its own where there is no slot large enough yet."""
        if encoded.nbytes == 0 or (slot is not None and encoded.nbytes <= slot[2]):
            if slot is not None and encoded.nbytes:
                memory = self._arenas[slot[0]][slot[1] : slot[1] + slot[2]]
                encoded.write(memory)
            self._send("done", ticket, "slot", encoded.nbytes, encoded.data, made)
            return
        fd = create_memory(encoded.nbytes)
        try:
            memory = map_memory(fd, encoded.nbytes)
            encoded.write(memory)
            self._send("done", ticket, "memory", encoded.nbytes, encoded.data, made, descriptor=fd)
        finally:
            os.close(fd)

    def _rows(self, ticket: int, slot: tuple[int, int, int] | None, task: RowsTask, host: Host) -> None:
        rows: list[tuple[int, int | None, Made | Turn]] = []
        loose: list[Any] = []
        memory = None if slot is None else self._arenas[slot[0]][slot[1] : slot[1] + slot[2]]
        failure: Failure | None = None
        room = None
        if memory is not None and task.layout is not None:
            room = self._layout_of(task.layout).places(memory, task.rows)
        for lane, place in task.turns:
            self._notes[0], self._notes[1] = lane + 2, host.place_of(lane)
            try:
                found = host.row(lane)
            except _Gone:
                raise
            except BaseException as error:
                spot = host.where(TurnTask(lane, 1))
                failure = Failure.of(error, f"in DataLoader worker process {self._number} ({spot})")
                break
            made: Made | Turn
            if isinstance(found, Made):
                made = found
                if found.ended:
                    rows.append((lane, None, made))
                    continue
                row, found.samples = found.samples[0], []
            else:
                row, made = found
            began = perf_counter() if not rows and room is not None else 0.0
            if room is not None and room.put(place, row):
                rows.append((lane, place, made))
            else:
                loose.append(row)
                rows.append((lane, None, made))
            if began:  # one stands for all
                self._meter.seconds[COLLATE] += (perf_counter() - began) * len(task.turns)
        self._deliver_rows(ticket, loose, rows, failure)

    def _layout_of(self, sealed: bytes) -> RowLayout:
        """The layout that comes with every task, and is read once."""
        if self._layout is None or self._layout[0] != sealed:
            self._layout = sealed, RowLayout(pickle.loads(sealed))
        return self._layout[1]

    def _deliver_rows(self, ticket: int, loose: list[Any], rows: list[Any], failure: Failure | None) -> None:
        """Those that lie in their places are there already; the ``loose`` ones go by themselves."""
        if not loose:
            self._send("done", ticket, "rows", 0, b"", (rows, None, failure))
            return
        began = perf_counter()
        encoded, made = encode(loose), (rows, RowLayout.of(loose[0]), failure)
        if not encoded.nbytes:
            self._send("done", ticket, "rows", 0, encoded.data, made)
        else:
            self._deliver(ticket, None, encoded, made)
        self._meter.add_seconds(COLLATE, began)
