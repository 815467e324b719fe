"""Reading ahead: the next piece of a source is fetched in a thread while the rows of this one are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

__all__ = ["Pieces"]

_THREADS = 16
_END = object()
# Threads do not come along into a forked process, so each process has its own.
_threads: dict[int, ThreadPoolExecutor] = {}


def _submit(pieces: Iterator[Any]) -> Future[Any]:
    process = os.getpid()
    if process not in _threads:
        _threads.clear()
        _threads[process] = ThreadPoolExecutor(_THREADS, thread_name_prefix="unbroken-read-ahead")
    return _threads[process].submit(next, pieces, _END)


@final
class Pieces:
    """The pieces of an iterator, one of them fetched ahead, from the moment this is made.

    ``begun`` is called once the first of them was fetched.
    """

    def __init__(self, pieces: Iterator[Any]) -> None:
        self._pieces = pieces
        self._fetching = _submit(pieces)

    def going_on(self, begun: Callable[[], None]) -> Iterator[Any]:
        """The pieces, one after another. Raises what the iterator raises."""
        piece = self._fetching.result()
        if piece is not _END:
            self._fetching = _submit(self._pieces)
            begun()
        while piece is not _END:
            yield piece
            piece = self._fetching.result()
            if piece is not _END:
                self._fetching = _submit(self._pieces)
