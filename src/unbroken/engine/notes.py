"""What a worker leaves where the consumer can read it, whatever becomes of the worker.

A piece of shared memory: three numbers that say what it is on, written before each row of a stream, each turn of
another dataset and each sample of a map-style one; behind them its meter; and at the end, on request, the stack of each
of its threads, which a signal handler writes even where the worker hangs in a library.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import weakref
from typing import Any, final

from unbroken.engine.ring import create_memory, map_memory
from unbroken.meters import Meter

__all__ = ["Notes", "take_notes"]

_METER = 4096
_TEXT = _METER + Meter.SIZE
_SETTLED = 0.05
# A signal that nobody else uses; where there are none of those, one that few do.
_SIGNAL = int(signal.SIGRTMIN) + 9 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR2)


@final
class Notes:
    """The consumer's side. The worker is not ready to write its stacks until it has said so (``listening``).

    What its ``meter`` has come to can still be read when this is closed.
    """

    def __init__(self) -> None:
        self.fd = create_memory(_TEXT)
        self.close = weakref.finalize(self, os.close, self.fd)
        self.close.atexit = False
        self.meter = Meter(map_memory(self.fd, _TEXT)[_METER:])
        self.listening = False
        self._read = _TEXT

    def place(self) -> tuple[int, int, bool] | None:
        """The lane and the number of the sample in it that the worker is on, and whether a batch begins with that and
        any of it may be meant; None where it is on none.

        For a map-style dataset the lane is -1, and the number is that of the sample in its batch, or -1.
        """
        numbers = memoryview(os.pread(self.fd, 24, 0)).cast("q")
        return (numbers[0] - 2, numbers[1], bool(numbers[2])) if numbers[0] else None

    def stacks(self, process: int, seconds: float = 1.0) -> str:
        """Where the threads of a process are now, as faulthandler writes it; empty where it does not answer."""
        if not self.listening:
            return ""
        try:
            os.kill(process, _SIGNAL)
        except ProcessLookupError:
            return ""
        until, size = time.monotonic() + seconds, self._read
        while time.monotonic() < until:  # written piece by piece: it is whole when nothing more comes
            time.sleep(_SETTLED)
            before, size = size, os.fstat(self.fd).st_size
            if size == before > self._read:
                break
        text = os.pread(self.fd, size - self._read, self._read).decode("utf-8", "replace")
        self._read = size
        return text.strip()


def take_notes(fd: int) -> tuple[Any, Meter]:
    """The worker's side: three numbers to write to (the lane plus 2, the sample, 1 for a batch), and its meter. Takes
    the descriptor over.
    """
    memory = map_memory(fd, _TEXT)
    numbers = memoryview(memory[:_METER]).cast("q")  # type: ignore[arg-type]
    os.lseek(fd, _TEXT, os.SEEK_SET)
    faulthandler.register(_SIGNAL, file=fd, all_threads=True)
    return numbers, Meter(memory[_METER:])
