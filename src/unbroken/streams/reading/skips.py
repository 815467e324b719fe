"""What a source left out: counted, named, and kept, so that it is left out again when rows are made again."""

from __future__ import annotations

import logging
from typing import Any, TypeAlias, final

from unbroken.errors import InvalidState
from unbroken.meters import IDLE, SKIPPED, Meter
from unbroken.seeding import key
from unbroken.streams.arguments import read_state
from unbroken.streams.course import Record

__all__ = ["Rows", "Skips", "with_row"]

_log = logging.getLogger("unbroken")

Place: TypeAlias = tuple[int, int, int]
# Number and rolling digest of rows that were left out.
Rows: TypeAlias = tuple[int, int]

# Positions stay small: of very many places the last are kept, of the reasons fewer still.
_MOST_PLACES, _MOST_NAMED = 256, 4
_BEFORE_ALL: Place = (-1, 0, 0)


def with_row(rows: Rows, place: Place) -> Rows:
    """One more row that is left out."""
    return rows[0] + 1, key(rows[1], *place)


@final
class Skips(Record):
    """The rows (``"row"``) and the ends of chunks (``"rest"``) that were left out in one lane.

    A place is (epoch, number of the chunk in the lane, place in the chunk). ``count`` counts all of them; ``named`` are
    the last ones in words: ``[file and offset, reason]``. ``reached`` is the place after the furthest row read.

    Of many, the oldest are forgotten. ``rows`` is the number and a rolling digest of all rows left out before
    ``reached``, and rows that are made again must come to the same there. The end of a chunk may be readable then:
    ``forgotten`` is the last one that is not known any more, and what is made again must begin after it.
    """

    def __init__(self, meter: Meter = IDLE) -> None:
        self._meter = meter
        self.count = 0
        self.named: list[list[str]] = []
        self.reached: Place = (0, 0, 0)
        self.rows: Rows = (0, 0)
        self.forgotten: Place = _BEFORE_ALL
        self._places: dict[Place, str] = {}
        self._saved: dict[str, Any] | None = None

    def at(self, place: Place) -> str | None:
        """``"row"`` or ``"rest"`` where that was left out before."""
        return self._places.get(place) if self._places else None

    def reach(self, before: Place, place: Place, rows: Rows) -> bool:
        """What lies from ``before`` to ``place`` was read, and so many ``rows`` were left out up to there.

        False where others were when it was read first: windows and batches count on those.
        """
        if place <= self.reached:
            return place < self.reached or rows == self.rows
        if before < self.reached:
            return False
        self.reached, self.rows = place, rows
        return True

    def add(self, place: Place, what: str, where: str, reason: str) -> None:
        """Leave a place out from now on. One that was read before was counted then."""
        if place < self.reached or place in self._places:
            return
        self.count += 1
        self._meter.counts[SKIPPED] += 1
        if self.count <= _MOST_NAMED or self.count in (10, 100, 1000, 10_000, 100_000):
            left_out = "a row" if what == "row" else "the rest of"
            _log.warning(f'on_error="skip" leaves out {left_out} {where}: {reason} ({self.count} in this lane)')
        self._places[place] = what
        if len(self._places) > _MOST_PLACES:
            oldest = next((known for known, what in self._places.items() if what == "row"), None)
            if oldest is None:
                oldest = self.forgotten = next(iter(self._places))
            del self._places[oldest]
        said = [text.encode(errors="backslashreplace").decode() for text in (where, reason[:200])]
        self.named = [*self.named, said][-_MOST_NAMED:]
        self._saved = None

    def state_dict(self) -> dict[str, Any]:
        if self._saved is None:
            places = [[*place, what] for place, what in self._places.items()]
            forgotten = list(self.forgotten)
            self._saved = {"count": self.count, "places": places, "named": self.named, "forgotten": forgotten}
        return {"reached": list(self.reached), "rows": list(self.rows), **self._saved}

    def load_state_dict(self, state: Any) -> None:
        reached, rows, forgotten, count, places, named = read_state(
            state, "skipped rows", reached=list, rows=list, forgotten=list, count=int, places=list, named=list
        )
        try:
            reached, forgotten, (number, folded) = _place_of(*reached), _place_of(*forgotten), rows
            self.rows = int(number), int(folded)
            known = {_place_of(*place): str(what) for *place, what in places}
        except (TypeError, ValueError) as error:
            raise InvalidState(f"skipped rows: a place in a position cannot be read: {error}.") from None
        self.reached, self.forgotten = reached, forgotten
        self.count, self.named, self._places, self._saved = count, named, known, None


def _place_of(epoch: int, chunk: int, place: int) -> Place:
    return int(epoch), int(chunk), int(place)
