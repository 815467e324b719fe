"""What a source left out: counted, named, and kept, so that it is left out again when rows are made again."""

from __future__ import annotations

from typing import Any, TypeAlias, final

from unbroken.errors import InvalidState
from unbroken.streams.arguments import read_state
from unbroken.streams.course import Record

__all__ = ["Skips"]

Place: TypeAlias = tuple[int, int, int]

# Positions stay small: of very many places the last are kept, of the reasons fewer still.
_MOST_PLACES, _MOST_NAMED = 256, 4


@final
class Skips(Record):
    """The rows (``"row"``) and the ends of chunks (``"rest"``) that were left out in one lane.

    A place is (epoch, number of the chunk in the lane, place in the chunk). ``count`` counts all of them; ``named`` are
    the last ones in words: ``[file and offset, reason]``. ``reached`` is the place after the furthest row read.
    """

    def __init__(self) -> None:
        self.count = 0
        self.named: list[list[str]] = []
        self.reached: Place = (0, 0, 0)
        self._places: dict[Place, str] = {}
        self._saved: dict[str, Any] | None = None

    def at(self, place: Place) -> str | None:
        """``"row"`` or ``"rest"`` where that was left out before."""
        return self._places.get(place) if self._places else None

    def reach(self, place: Place) -> None:
        """A row before this place was read."""
        if place > self.reached:
            self.reached = place

    def add(self, place: Place, what: str, where: str, reason: str) -> None:
        """Leave a place out from now on. One before the furthest row was counted when that was read."""
        if place < self.reached:
            return
        self.reach(place)
        self.count += 1
        self._places[place] = what
        if len(self._places) > _MOST_PLACES:
            del self._places[next(iter(self._places))]
        self.named = [*self.named, [where, reason[:200]]][-_MOST_NAMED:]
        self._saved = None

    def state_dict(self) -> dict[str, Any]:
        if self._saved is None:
            places = [[*place, what] for place, what in self._places.items()]
            self._saved = {"count": self.count, "places": places, "named": self.named}
        return {"reached": list(self.reached), **self._saved}

    def load_state_dict(self, state: Any) -> None:
        reached, count, places, named = read_state(
            state, "skipped rows", reached=list, count=int, places=list, named=list
        )
        try:
            epoch, chunk, place = map(int, reached)
            known = {(int(epoch), int(chunk), int(place)): str(what) for epoch, chunk, place, what in places}
        except (TypeError, ValueError) as error:
            raise InvalidState(f"skipped rows: a place in a position cannot be read: {error}.") from None
        self.reached = epoch, chunk, place
        self.count, self.named, self._places, self._saved = count, named, known, None
