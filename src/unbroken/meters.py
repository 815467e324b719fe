"""What a host counts and times while it works: in memory of a fixed layout, so that others may read it at any time."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, ClassVar, final

__all__ = [
    "BYTES", "COLLATE", "DATASET", "DECODE", "DONE", "IDLE", "MAP", "PACK", "READ", "ROWS", "SKIPPED", "STAGES",
    "TOKENIZE", "TOKENS", "Meter", "Totals",
]  # fmt: skip

STAGES = ("read", "decode", "dataset", "map", "tokenize", "pack", "collate")
READ, DECODE, DATASET, MAP, TOKENIZE, PACK, COLLATE = range(len(STAGES))
"""Where the time of a stage stands in ``Meter.seconds``."""
DONE, SKIPPED, _SOURCES = range(3)
"""Where a number stands in ``Meter.counts``: tasks that are done, rows that were left out, sources that are known."""
ROWS, TOKENS, BYTES = range(3)
"""Where a number stands in the record of a source."""

_NUMBERS, _HEAD, _RECORD = 128, 256, 128
_COUNTED = 24  # bytes of a record; its name lies behind them
_OTHERS = "others"


@final
class Meter:
    """The numbers of one host. It alone writes them; whoever reads them from the same memory sees each one whole.

    The memory holds 16 float64, 16 int64, and for each source a record of 128 bytes: 3 int64 and its name in UTF-8.
    ``seconds`` are by stage and ``counts`` as above. ``ended`` says to the one who reads that no more will be written.
    A source without a name is what cannot be told apart. Where there are more than records, the last is for the rest.
    """

    SIZE: ClassVar[int] = 60 << 10

    def __init__(self, memory: Any = None, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.ended = False
        self._sources: dict[str, Any] = {}
        self._lie_in(memoryview(bytearray(self.SIZE) if memory is None else memory))

    def _lie_in(self, memory: memoryview) -> None:
        self._memory = memory
        self.seconds: Any = memory[:_NUMBERS].cast("d")
        self.counts: Any = memory[_NUMBERS:_HEAD].cast("q")

    def end(self) -> None:
        """No more will be written. Memory that is shared is let go of. May be called again, and from a finalizer."""
        if not self.ended:
            self.ended = True
            self._lie_in(memoryview(bytes(self._memory[: _HEAD + self.counts[_SOURCES] * _RECORD])))

    def source(self, name: str) -> Any:
        """The numbers of a source, to be added to: its rows, tokens and bytes."""
        found = self._sources.get(name)
        if found is None:
            number, most = len(self._sources), (self.SIZE - _HEAD) // _RECORD - 1
            record = self._record(min(number, most))
            text = (name if number < most else _OTHERS).encode(errors="replace")[: _RECORD - _COUNTED]
            record[_COUNTED : _COUNTED + len(text)] = text
            self.counts[_SOURCES] = min(number, most) + 1  # last, so that nobody reads half a name
            found = self._sources[name] = record[:_COUNTED].cast("q")
        return found

    def add_seconds(self, stage: int, began: float) -> None:
        """A stage worked since ``began``, by the clock."""
        self.seconds[stage] += self.clock() - began

    def sources(self) -> list[tuple[str, list[int]]]:
        """Of each source the name, and its rows, tokens and bytes; whoever wrote them."""
        found = []
        for number in range(self.counts[_SOURCES]):
            record = self._record(number)
            name = bytes(record[_COUNTED:]).rstrip(b"\0").decode(errors="replace")
            found.append((name, record[:_COUNTED].cast("q").tolist()))
        return found

    def _record(self, number: int) -> memoryview:
        return self._memory[_HEAD + number * _RECORD : _HEAD + (number + 1) * _RECORD]


IDLE = Meter()
"""For lanes that are opened without a loader: what is written here nobody reads."""


@final
class Totals:
    """The numbers of several hosts added up: ``seconds`` by stage, rows ``skipped``, and of each source its numbers."""

    def __init__(self) -> None:
        self.seconds = [0.0] * len(STAGES)
        self.skipped = 0
        self.sources: dict[str, list[int]] = {}

    def add(self, meter: Meter) -> None:
        """Add what a host has now."""
        self._add(meter.seconds.tolist(), meter.counts[SKIPPED], meter.sources())

    def plus(self, meters: list[Meter]) -> Totals:
        """These and some more."""
        total = Totals()
        total._add(self.seconds, self.skipped, list(self.sources.items()))
        for meter in meters:
            total.add(meter)
        return total

    def _add(self, seconds: list[float], skipped: int, sources: list[tuple[str, list[int]]]) -> None:
        self.seconds = [a + b for a, b in zip(self.seconds, seconds, strict=False)]
        self.skipped += skipped
        for name, numbers in sources:
            self.sources[name] = [a + b for a, b in zip(self.sources.get(name, [0, 0, 0]), numbers, strict=True)]
