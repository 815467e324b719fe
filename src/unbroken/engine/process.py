"""A worker process, as the consumer sees it: started, watched, and what there is to say when it ends."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
import threading
import weakref
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from typing import Any, final

from unbroken.engine.channel import Channel
from unbroken.engine.host import Plan
from unbroken.engine.notes import Notes
from unbroken.engine.signals import PutOff, blocked, handled
from unbroken.engine.worker import main, open_pidfd

__all__ = ["WorkerProcess"]

_GRACE = 1.0
_started: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


@final
class WorkerProcess:
    """One worker. ``watch`` becomes readable when the process ends, however that comes."""

    def __init__(self, plan: Plan, context: Any, number: int) -> None:
        self.number = number
        self.process: Any = None
        self._descriptor: int | None = None
        self._end: Callable[[], Any] = _nothing
        try:
            with PutOff():
                self.notes = Notes()
                self.channel, theirs = Channel.pair()
                _started.add(self)  # before it is started, so that the process itself has none of our ends
                try:
                    self.process = _start(plan, context, number, theirs)
                finally:
                    theirs.close()
                self.pid: int = self.process.pid
                self._descriptor = open_pidfd(self.pid)
                # Where nobody comes who knows of it: at the latest before multiprocessing would wait for it.
                args = self.process, self.channel, self._descriptor
                self._end = Finalize(self, _end, args=args, exitpriority=50)
        except BaseException:  # of a handler that waited, too: then nobody gets this worker
            _started.discard(self)
            self._end()
            for kept in (vars(self).get("channel"), vars(self).get("notes")):
                if kept is not None:
                    kept.close()
            raise

    @property
    def watch(self) -> int:
        """A sentinel does where there is no pidfd, but stays silent while a grandchild holds its pipe open."""
        return self.process.sentinel if self._descriptor is None else self._descriptor

    def hang_up(self) -> None:
        """Close our end: an idle worker ends at once."""
        self.channel.shut_down()

    def kill(self) -> None:
        """End it by force, if it has not ended."""
        with contextlib.suppress(ValueError):  # it was let go
            if self.process.exitcode is None:
                self.process.kill()

    def ended(self, seconds: float) -> bool:
        """Wait for its end."""
        with contextlib.suppress(ValueError):  # it was let go
            self.process.join(max(0.0, seconds))
            return self.process.exitcode is not None
        return True

    def let_go(self) -> None:
        """Close all that was kept of it; may be called again. A process that even SIGKILL does not end (it waits for a
        disk) stays.
        """
        self.channel.shut_down()
        self.notes.meter.end()
        self.notes.close()
        _started.discard(self)
        self._end()

    def leave(self) -> None:
        """In a forked process: close the copies of all that is kept of it."""
        self.channel.close()
        self.notes.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
        multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]

    def bury(self) -> tuple[str, str]:
        """How a process ended that was not asked to, and the likely cause; by force where it only closed its end."""
        if not self.ended(_GRACE):
            self.kill()
            self.ended(_GRACE)
        try:
            code = self.process.exitcode
        except ValueError:
            return "was let go", "another thread closed the loader"
        return _end_of(code)

    def whereabouts(self) -> str:
        """The sample that it was on last."""
        place = self.notes.place()
        if place is None:
            return "it was on no sample"
        lane, number, many = place
        if lane < 0:
            return f"it was on sample {number} of its batch" if number >= 0 else "it was on the whole of its batch"
        return f"it was on {'the batch that begins with ' if many else ''}sample {number} of lane {lane}"

    def stacks(self) -> str:
        """Where its threads are now."""
        return self.notes.stacks(self.pid) or (
            "It does not say where it is: it was stopped, or waits in the kernel."
            if self.notes.listening
            else "It has not come to its first task: it is still starting, or hangs there."
        )


def _start(plan: Plan, context: Any, number: int, theirs: Channel) -> Any:
    """A process that runs a worker. A signal to the group comes to it only where it can tell that it is not for it."""
    method = context.get_start_method()
    if method == "spawn":
        resource_tracker.ensure_running()  # which would put back what is blocked
    # A server of forks lives on, and must not inherit what is blocked.
    with blocked(handled() if method != "forkserver" else ()) as before:
        # The signal is sent when the thread that started it ends, so it is asked for in the main thread only.
        ours = method != "forkserver" and threading.current_thread() is threading.main_thread()
        process = context.Process(
            target=main,
            args=(theirs, plan, number, os.getpid(), ours, handled(), before if method != "forkserver" else None),
            name=f"unbroken worker {number}",
            daemon=True,
        )
        process.start()
    return process


def _end(process: Any, channel: Channel, descriptor: int | None) -> None:
    """Whatever is left of a worker."""
    channel.close()
    if descriptor is not None:
        os.close(descriptor)
    with contextlib.suppress(ValueError):
        if process.exitcode is None:
            process.kill()
            process.join(_GRACE / 4)
        if process.exitcode is not None:
            process.close()


def _nothing() -> None:
    """There is nothing to end yet."""


def _leave_to_parent() -> None:
    """In a forked process: workers, and our ends of their channels, are its parent's. multiprocessing would end them
    with this process.
    """
    for worker in list(_started):
        worker.leave()
    _started.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _end_of(code: int | None) -> tuple[str, str]:
    if code is None:
        return "did not end even when it was killed", "it waits for a device or a file system in the kernel"
    if code >= 0:
        return f"ended with exit code {code}", "the dataset, or a library under it, ended the process"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "a real-time signal"
    causes = {
        "SIGKILL": "usually the kernel or the container ran out of memory: fewer workers, smaller batches or a "
        "smaller prefetch_factor need less",
        "SIGBUS": "usually memory or a mapped file ran out, or a file was truncated while it was read",
        "SIGSEGV": "a library crashed: num_workers=0 with faulthandler shows where",
    }
    return f"ended by signal {-code} ({name})", causes.get(name, "something sent it this signal")
