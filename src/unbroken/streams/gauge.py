"""What one open source gives, counted and timed: pieces that are read, and rows that are made of them. Calls too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, final

from unbroken.meters import BYTES, DECODE, IDLE, MAP, READ, TOKENS, Meter

__all__ = ["Gauge", "timed"]

_ONE_IN = 16
_LONG = 20e-6
_END = object()

Call = TypeVar("Call", bound=Callable[..., Any])


@final
class Gauge:
    """Of one source in one lane, in the meter of its host. ``counts`` are its numbers there.

    Of the rows that are made one in 16 is timed, and stands for all; each, where that took more than 20 µs. The first
    of a piece is timed in any case, for itself: the work on a whole piece is often done then. While a row is timed
    ``began`` is when that began; else 0.

    ``left`` counts down to the next one, and ``counts[0]`` up: whoever makes rows does both, for a call a row would
    cost more than that; and only where it is ``live``, that is, where anybody reads the meter.
    """

    __slots__ = ("_gap", "_meter", "_sampled", "_stage", "_weight", "began", "counts", "left", "live", "name")

    def __init__(self, meter: Meter, name: str, stage: int = DECODE) -> None:
        self.name = name
        self.live = meter is not IDLE
        self.counts = meter.source(name)
        self.left = self._gap = self._weight = 1
        self.began = 0.0
        self._sampled = False
        self._meter = meter
        self._stage = stage

    def begin(self) -> None:
        """The next row is one that is timed."""
        self.left = self._weight = self._gap
        self._sampled = True
        self.began = self._meter.clock()

    def end(self) -> None:
        """It was made."""
        took = self._meter.clock() - self.began
        self._meter.seconds[self._stage] += took * self._weight
        self.began = 0.0
        if self._sampled:
            self._sampled = False
            self.left = self._gap = 1 if took > _LONG else _ONE_IN

    def pieces(self, pieces: Iterator[Any]) -> Iterator[Any]:
        """The same pieces. The time that they take is one of reading."""
        clock, seconds = self._meter.clock, self._meter.seconds
        while True:
            began = clock()
            piece: Any = next(pieces, _END)
            seconds[READ] += (now := clock()) - began
            if piece is _END:
                return
            if isinstance(piece, bytes):
                self.counts[BYTES] += len(piece)
            elif (tokens := getattr(piece, "tokens", None)) is None:
                self.counts[BYTES] += getattr(piece, "nbytes", 0)
            else:
                self.counts[BYTES] += tokens.nbytes
                self.counts[TOKENS] += piece.inputs
            self.began, self._weight = now, 1
            yield piece


def timed(meter: Meter, call: Call) -> Call:
    """The same function of the user's; how long it takes is in the meter, where anybody reads that."""
    gauge = Gauge(meter, "", MAP)

    def in_time(*given: Any) -> Any:
        gauge.left -= 1
        if not gauge.left:
            gauge.begin()
        try:
            found = call(*given)
        except BaseException:
            gauge.began = 0.0
            raise
        if gauge.began:
            gauge.end()
        return found

    return in_time if gauge.live else call  # type: ignore[return-value]
