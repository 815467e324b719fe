"""Where the rows of an iterable with a state of its own stand: the anchor, and what may become the next one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, final

__all__ = ["Anchor", "Track"]

# A capture costs some 20 ns for each byte of the state, three or four of them make an anchor, and a row costs 10 µs.
_LEAST_APART, _BYTES_A_ROW = 16, 32
# States that change seldom are looked at after every row; large ones after so many rows, and then not for a while.
_SMALL_STATE, _MOST_LOOKS = 2048, 16
_WITNESSES = 8


class Anchor(NamedTuple):
    """The state ``after`` ``at`` rows, and the digests of later rows, ``first`` and those that follow it.

    ``before`` is the state one row earlier where the state changed over a single row: which of them is right shows on
    a resume. An anchor at 0 is the start of the epoch, and has no state.
    """

    at: int = 0
    before: str | None = None
    after: str | None = None
    first: int = 0
    witnesses: tuple[int, ...] = ()

    @property
    def hypotheses(self) -> list[list[tuple[str | None, int]]]:
        """What may be right, as (state, number of the row that it leads to).

        Of each list the first that fits is taken; no more than one list may fit.
        """
        before, after = (self.before, self.at - 1), (self.after, self.at)
        late = (self.after, self.at - 1)
        if not self.at:
            return [[(None, 0)]]
        return [[after, late]] if self.before is None else [[before], [after, late]]

    @property
    def due(self) -> int:
        """The number of rows after which the next anchor is looked for. A function of what is saved of this one."""
        apart = _apart(len(self.before or "") + len(self.after or ""))
        return max(self.at + apart, self.first + len(self.witnesses) + 1)


def _apart(state_bytes: int) -> int:
    return _LEAST_APART + state_bytes // _BYTES_A_ROW


def _fixes(witnesses: list[int]) -> bool:
    """Whether digests of neighbouring rows tell their place from those that lie one or two rows away."""
    return all(any(a != b for a, b in zip(witnesses, witnesses[shift:], strict=False)) for shift in (1, 2))


@final
class Track:
    """How many rows were made, the digests of the last two, the anchor, and what may become the next one.

    All of it is a function of the rows and states since the anchor, so that a resumed run comes to the same positions.
    """

    def __init__(self, anchor: Anchor, rows: int, last: list[int], *, looks: bool) -> None:
        self.anchor = anchor
        self.rows = rows
        self.last = last
        self._fields = {**anchor._asdict(), "witnesses": list(anchor.witnesses)}
        self._due = anchor.due if looks else sys.maxsize
        self._looks = 0
        self._trail: list[str] = []  # the states after the last rows, at most four
        self._next: Anchor | None = None
        self._witnesses: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "last": self.last, **self._fields}

    def note(self, mark: int, capture: Callable[[], str]) -> None:
        """A row was made, whose digest is ``mark``. Nothing has moved where ``capture`` raises."""
        state = capture() if self._next is None and self.rows + 1 >= self._due else None
        self.rows += 1
        self.last = [*self.last[-1:], mark]
        if state is not None:
            self._look(state)
        elif self._next is not None:
            self._witness(self._next, mark)

    def _look(self, state: str) -> None:
        """Judge by the states after the last rows whether there can be an anchor one row back.

        One that changed over the row before it and over the one after it is of an iterable that steps with its rows,
        and stands alone. One that changed over a single row may mean a shard just entered, or rows read ahead of their
        turn: both states are kept.
        """
        self._looks += 1
        self._trail = trail = [*self._trail[-3:], state]
        at = self.rows - 1
        if len(trail) > 2 and trail[-3] != trail[-2] != trail[-1]:
            self._next = Anchor(at, None, trail[-2], at + 2)
        elif len(trail) > 3 and trail[0] == trail[1] != trail[2] == trail[3]:
            self._next = Anchor(at, trail[1], trail[2], at + 2)
        elif len(state) <= _SMALL_STATE or self._looks < _MOST_LOOKS:
            return
        else:
            self._due = self.rows + _apart(len(state)) * _MOST_LOOKS
        self._looks, self._trail, self._witnesses = 0, [], []

    def _witness(self, candidate: Anchor, mark: int) -> None:
        """Take note of a row after a state; it becomes the anchor once the rows after it tell its place.

        The first row after an opening runs under the opening's random numbers, so witnesses begin two rows later.
        """
        number = self.rows - 1
        if number < candidate.first:
            return
        self._witnesses = [*self._witnesses, mark][-_WITNESSES:]
        if not _fixes(self._witnesses):
            return
        first = number + 1 - len(self._witnesses)
        self.anchor = candidate._replace(first=first, witnesses=tuple(self._witnesses))
        self._fields = {**self.anchor._asdict(), "witnesses": self._witnesses}
        self._due, self._next = self.anchor.due, None

    def expected(self) -> dict[int, int]:
        """The digests that must come again, by the number of the row."""
        known = dict(enumerate(self.anchor.witnesses, self.anchor.first))
        return known | dict(enumerate(self.last, self.rows - len(self.last)))
