"""Reading ahead: the next piece of a source is fetched in a thread while the rows of this one are used."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, final

__all__ = ["Forked", "Pieces"]

_THREADS = 16
_SECONDS_AT_EXIT = 1.0
_END = object()


@final
class Forked(Exception):
    """The process was forked in mid-read: the thread that fetches is not in this one. Read again from the place."""


@final
class _Threads:
    """Up to so many threads that take the next of an iterator, for this process alone.

    They are daemons: a read that never returns must not keep the interpreter from ending, as those of
    ``concurrent.futures`` do, which are joined there.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self._asked: SimpleQueue[tuple[Future[Any], Iterator[Any]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._busy = 0

    def ask(self, pieces: Iterator[Any]) -> Future[Any]:
        """The next of ``pieces``, or ``_END``."""
        answer: Future[Any] = Future()
        with self._lock:
            self._busy += 1
            if self._busy > self._started and self._started < _THREADS:
                self._started += 1
                threading.Thread(target=self._work, name="unbroken-read-ahead", daemon=True).start()
        self._asked.put((answer, pieces))
        return answer

    def _work(self) -> None:
        while True:
            answer, pieces = self._asked.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(next(pieces, _END))
                except BaseException as error:
                    answer.set_exception(error)
            del answer, pieces  # or they would live until the next one
            with self._lock:
                self._busy -= 1

    def end(self) -> None:
        """Wait a moment for reads in hand, so that the interpreter does not go from under them; start no other."""
        with contextlib.suppress(Empty):
            while True:
                self._asked.get_nowait()[0].cancel()
                with self._lock:
                    self._busy -= 1
        until = time.monotonic() + _SECONDS_AT_EXIT
        while self._busy and time.monotonic() < until:
            time.sleep(0.01)


_threads: _Threads | None = None


def _of_this_process() -> _Threads:
    global _threads
    if _threads is None or _threads.process != os.getpid():
        _threads = _Threads()
    return _threads


@atexit.register
def _end() -> None:
    if _threads is not None and _threads.process == os.getpid():
        _threads.end()


@final
class Pieces:
    """The pieces of an iterator, one of them fetched ahead, from the moment this is made.

    ``begun`` is called once the first of them was fetched.
    """

    def __init__(self, pieces: Iterator[Any]) -> None:
        self.fetched = pieces
        self._threads = _of_this_process()
        self._asked = self._threads.ask(pieces)

    def going_on(self, begun: Callable[[], None]) -> Iterator[Any]:
        """The pieces, one after another. Raises what the iterator raises, and ``Forked``."""
        try:
            piece = self._next()
            if piece is not _END:
                self._asked = self._threads.ask(self.fetched)
                begun()
            while piece is not _END:
                yield piece
                piece = self._next()
                if piece is not _END:
                    self._asked = self._threads.ask(self.fetched)
        finally:
            self.close()

    def close(self) -> None:
        """Fetch no more. What is being fetched goes to its end."""
        if self._threads.process == os.getpid():  # else a thread of the parent may hold the lock of what was asked
            self._asked.cancel()

    def _next(self) -> Any:
        if self._threads.process != os.getpid():
            raise Forked
        return self._asked.result()
