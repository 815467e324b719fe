"""Processes that run stretches: started in groups of ranks, watched, ended, and none of them left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, final

from unbroken.audit.records import Row
from unbroken.audit.stretch import Kill, Orders

__all__ = ["AUDITED", "NO_OUTPUT", "Ended", "Processes", "Runs", "Stopped"]

AUDITED: Final = "UNBROKEN_AUDITED"  # in the environment of every run of an audit
NO_OUTPUT: Final = "(no output)"
_POLL: Final = 0.05  # seconds between two looks at a process that says nothing
_IMPORTING: Final = 60.0  # seconds that a process may take to come to its orders, besides the timeout
_LONGEST_FOLDER: Final = 60  # bytes; sockets below it may have paths of 107
_GRACE: Final = 10.0  # seconds that a process has to end after SIGTERM
_DONE: Final = b'{"done":true}\n'
_TAIL: Final = 30  # lines of its output that are shown of a process that failed


class Stopped(Exception):
    """The audit was interrupted: nothing is started any more."""


@final
@dataclass(frozen=True)
class Ended:
    """How the processes of a stretch ended: all where they were to, or with an ``error`` in words."""

    error: str = ""


class Runs(Protocol):
    """What carries stretches out, the folder for what they write, and the rows that were read of it."""

    @property
    def folder(self) -> Path: ...

    @property
    def known(self) -> dict[bytes, Row]: ...

    def run(self, ranks: list[Orders], kill: Kill) -> Ended: ...

    def stop(self) -> None: ...


@final
class _Rank:
    """One process, in a session of its own: Ctrl-C reaches the audit alone, which then ends it."""

    def __init__(self, orders: Orders) -> None:
        folder = Path(orders.folder)
        folder.mkdir(parents=True, exist_ok=True)
        given = folder / f"orders-{orders.rank:04d}.json"
        given.write_text(orders.to_json(), "utf-8")
        self.orders, self.output = orders, folder / f"output-{orders.rank:04d}.txt"
        self.halted = False
        self.events, events = os.pipe()
        control, self.control = os.pipe()
        environment = {
            **os.environ,
            AUDITED: "1",
            # What can be imported here can be there.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            # Another process has another order of sets, and one core is shared with other trials.
            "PYTHONHASHSEED": str(orders.seed % 4_000_000_000),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        if len(orders.folder) <= _LONGEST_FOLDER:
            environment["TMPDIR"] = orders.folder  # what killed workers leave there goes with the folder
        command = [sys.executable, "-m", "unbroken.audit.run", str(given), str(events), str(control), str(os.getpid())]
        try:
            with self.output.open("ab") as output:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=(events, control),
                    start_new_session=True,
                )
        except BaseException:
            os.close(self.events)
            os.close(self.control)
            raise
        finally:
            os.close(events)
            os.close(control)

    def size(self) -> int:
        """Bytes of its log: it grows while the process gets on."""
        try:
            return self.orders.log.stat().st_size
        except OSError:
            return 0

    def finished(self) -> bool:
        """Whether it said so: a loader may end its process, and that with the exit code of success."""
        try:
            return self.orders.log.read_bytes()[-len(_DONE) :] == _DONE
        except OSError:
            return False

    def look(self, seconds: float) -> None:
        """Wait for the halt for a while."""
        if not self.halted:
            waiting = select.poll()
            waiting.register(self.events, select.POLLIN)
            if waiting.poll(seconds * 1000):
                self.halted = os.read(self.events, 1) == b"h"

    def end(self, kill: Kill) -> None:
        """End it where it waits, then everything that it has started."""
        if self.control >= 0:
            if kill == "sigterm" and self.process.poll() is None:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.2)
                os.close(self.control)  # what a handler let live goes on now, and ends by itself
                self.control = -1
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_GRACE)
            if self.process.poll() is None:  # the group first: its number may be another one's once this is over
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for name in ("events", "control"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)

    def failure(self) -> str:
        code = self.process.returncode
        how = f"was ended by {_name(-code)}" if code < 0 else f"ended with exit code {code}"
        how += "" if code else " before it had done what it was to do"
        lines = self.output.read_text("utf-8", errors="replace").splitlines()[-_TAIL:]
        return f"A process {how}. Its output ends with\n" + ("\n".join(lines) or NO_OUTPUT)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a signal without a name of its own
        return f"signal {number}"


@final
class Processes:
    """All processes of an audit. As a context manager it leaves none of them, and no file, behind.

    What a loader starts is in the session of its run, and ends with it. A process that a loader puts into a session of
    its own (``Popen(start_new_session=True)``) is the loader's to end.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.known: dict[bytes, Row] = {}
        self._lock = threading.Lock()
        self._running: set[_Rank] = set()
        self._stopped = False
        self._folder = tempfile.TemporaryDirectory(prefix="unbroken-audit-", ignore_cleanup_errors=True)

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.stop()
        finally:
            self._folder.cleanup()

    def stop(self) -> None:
        """End all; whoever waits for one gets ``Stopped``."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for rank in running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)

    def run(self, ranks: list[Orders], kill: Kill) -> Ended:
        """Run the ranks of a stretch until all have halted and were ended, or have come to their end."""
        started: list[_Rank] = []
        try:
            for orders in ranks:
                with self._lock:
                    if self._stopped:
                        raise Stopped
                    started.append(_Rank(orders))
                    self._running.add(started[-1])
            return self._watch(started)
        finally:
            for rank in started:
                rank.end(kill)
            with self._lock:
                self._running.difference_update(started)

    def _watch(self, ranks: list[_Rank]) -> Ended:
        seen: list[int] = []
        since = time.monotonic()
        while True:
            waiting = [rank for rank in ranks if not rank.halted and rank.process.poll() is None]
            failed = [rank for rank in ranks if rank.process.poll() not in (None, 0)]
            if self._stopped:
                raise Stopped
            if failed:
                return Ended(failed[0].failure())
            if not waiting:
                silent = [rank for rank in ranks if not rank.halted and not rank.finished()]
                return Ended(silent[0].failure()) if silent else Ended()
            waiting[0].look(_POLL)
            sizes = [rank.size() for rank in ranks]
            if sizes != seen:
                seen, since = sizes, time.monotonic()
            elif time.monotonic() - since > self.timeout + (0 if all(sizes) else _IMPORTING):
                return Ended(f"No batch came for {self.timeout:g} s, and the process was ended.")
