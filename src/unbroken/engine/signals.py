"""Signals that come while a process is started, or ended, wait until that is done.

A handler may raise, as Ctrl-C does, between any two steps: between a process and the note of its number, say, and then
nobody would ever end it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

__all__ = ["PutOff", "blocked", "handled"]

_ALL = sorted(map(int, signal.valid_signals()))
_ENDING = {int(signal.SIGINT), int(signal.SIGTERM)}


def handled() -> set[int]:
    """The signals that this process handles, and those that are sent to whole groups of processes to end them."""
    return _ENDING | {number for number in _ALL if callable(signal.getsignal(number))}


@contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[set[int]]:
    """A process that is started meanwhile gets none of these signals until it says so; what was blocked before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@final
class PutOff:
    """As a context: handlers of signals do not run in it, but at its end, and so comes what one raises on the way in.
    Only those of the main thread ever run.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[int] = []
        self._errors: list[BaseException] = []
        self._over = False

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            while not self._replace() and len(self._errors) < len(_ALL):
                pass

    def _replace(self) -> bool:
        try:
            for number in _ALL:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._note:
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException as error:  # of a handler that was not replaced yet
            self._errors.append(error)
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self._put_back()
        errors, self._errors = self._errors, []
        try:
            self._run(list(dict.fromkeys(self._came)))
        finally:
            if errors:
                raise errors.pop(0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._over:  # another one raised while they were put back
            self._handlers[number](number, frame)
        else:
            self._came.append(number)

    def _run(self, came: list[int]) -> None:
        """All of them, whatever they raise."""
        if came:
            try:
                self._handlers[came[0]](came[0], None)
            finally:
                self._run(came[1:])

    def _put_back(self) -> None:
        self._over = True
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
