"""Which batches were delivered last, and what the position was after each: for loops that look ahead."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, final

import numpy as np
import torch

from unbroken.lane_position import Mark
from unbroken.locks import new_lock
from unbroken.position import Position
from unbroken.steps import Steps

__all__ = ["LENGTH", "Trail", "check_made_again"]

LENGTH = 16
"""So many batches are remembered."""
_MOST_PARTS = 1000
_EVERYONES = (type, ModuleType, FunctionType, Enum)


class _Settled(NamedTuple):
    """A position that moves no more, and the fields of sources that were ``gone`` then (see ``Leaves.read``)."""

    position: Position
    gone: dict[str, Any]


_Known = tuple[Any, int]
"""What a batch is known by: a weak reference to it and 0, where it takes one; else one to a part of it, and its id.
Where no part takes one either, the batch itself, and -1.

A batch is not kept alive by the first two, and its slot of shared memory is free when the user lets go of it.
"""


@final
class Trail:
    """The batches that were delivered last, and how the position gets back to where it was after each.

    A position is not copied for that: it notes what its moves overwrite. ``lock`` is held while it moves, so that
    other threads may ask. A trail that is pickled comes out empty.
    """

    def __init__(self) -> None:
        self.lock = new_lock()
        self._position: Position | None = None
        self._batches: deque[tuple[_Known, Mark | _Settled]] = deque(maxlen=LENGTH)
        self._last: Mark | None = None  # where the position is after the last batch
        self._sure: Mark | None = None  # after the last that has reached the user

    def begin(self, position: Position) -> None:
        """Deliveries go on from here."""
        self._position = position
        self._last = self._sure = position.mark()

    def hand_out(self) -> None:
        """The last batch that was noted has reached the user, who asks for the next one."""
        self._sure = self._last

    def note(self, batch: Any, position: Position) -> None:
        """A batch was delivered, and the position is now where it is after that."""
        self._position = position
        self._last = mark = position.mark()
        self._batches.append((_known(batch), mark))

    @property
    def unsure(self) -> bool:
        """Whether the position has moved, or has begun to, since the last batch that has reached the user."""
        if self._position is None or self._sure is None:
            return False
        return self._last is not self._sure or self._position.moved_since(self._sure)

    def take_back(self, gone: dict[str, Any]) -> Position | None:
        """Where the position was after the last batch that has reached the user: one that was being counted when an
        interrupt came has not. None where it did not move since then.
        """
        with self.lock:
            if self._position is None or self._sure is None:
                return None
            later: list[Mark] = []
            while self._batches and not isinstance(mark := self._batches[-1][1], _Settled) and mark is not self._sure:
                later.insert(0, mark)
                self._batches.pop()
            position = self._position.back_at([self._sure, *later])
            self.settle(gone)
            return position

    def settle(self, gone: dict[str, Any]) -> None:
        """The position is about to move otherwise than by a delivery, or another to take its place: make what was noted
        independent of it.
        """
        with self.lock:
            if self._position is None:
                return
            batches = list(self._batches)
            position: Position = self._position.copy()
            for number in reversed(range(len(batches))):
                known, place = batches[number]
                if isinstance(place, _Settled):
                    break  # those before are so already
                position = position.back_at([place])
                batches[number] = known, _Settled(position, gone)
            self._batches = deque(batches, maxlen=LENGTH)
            self._position.forget_marks()
            self._position = self._last = self._sure = None

    def leave_out(self, passed: Steps, position: Position, gone: dict[str, Any]) -> None:
        """These steps are to be left out: also from where the position is after each batch that is known."""
        with self.lock:
            begun = self._position is not None
            self.settle(gone)
            for _, place in self._batches:
                if isinstance(place, _Settled):
                    place.position.passed = passed
            position.passed = passed
            if begun:
                self.begin(position)

    def pass_over(self, position: Position, gone: dict[str, Any], commit: Callable[[], None]) -> None:
        """Count a step that is left out. It stays done, whatever interrupts what comes next."""
        with self.lock:
            if not all(isinstance(place, _Settled) for _, place in self._batches):
                self.settle(gone)
                self.begin(position)
            ledgers = position.ledgers()
            commit()
            position.put_back(ledgers)
            self.begin(position)

    def clear(self) -> None:
        """Know no batch."""
        with self.lock:
            self._batches.clear()
            if self._position is not None:
                self._position.forget_marks()
                self._position = None

    def find(self, batch: Any) -> tuple[Position, dict[str, Any] | None]:
        """The position after a batch, to be written while ``lock`` is held; and the fields of sources that were gone
        then, or None for those of now.

        Raises ``ValueError`` where the batch is none of the last, or was delivered several times among them.
        """
        times = sum(_is_of(known, batch) for known, _ in self._batches)
        if times > 1:
            raise ValueError(
                f"state_after() got a {type(batch).__qualname__} that was delivered {times} times among the last "
                f"{len(self._batches)} batches of this loader: the same object, so that it does not say which of them "
                "is meant.\n"
                "Let the dataset or collate_fn make a new object each time (a tensor, not a number of Python's or a "
                "buffer that is filled anew). state_dict() is the position after the last one."
            )
        later: list[Mark] = []
        for known, place in reversed(self._batches):
            if isinstance(place, _Settled):
                if _is_of(known, batch):
                    return place
            else:
                later.insert(0, place)
                if _is_of(known, batch) and self._position is not None:
                    return self._position.back_at(later), None
        raise ValueError(
            f"state_after() got a {type(batch).__qualname__} that is none of the last {LENGTH} batches of this loader: "
            f"it knows those that its newest iterator delivered since the last load, of which it has "
            f"{len(self._batches)}, by the very object that next() returned.\n"
            "Pass that object, not what was made of it (a copy on another device, or a dict whose tensors were all "
            f"replaced), before {LENGTH} more are delivered. state_dict() is the position after the last one."
        )

    def __reduce__(self) -> tuple[type[Trail], tuple[()]]:
        return Trail, ()


def check_made_again(*, saved: bool) -> None:
    """Raises ``ValueError`` where batches that are delivered cannot be made again (``save_prefetched``)."""
    if saved:
        raise ValueError(
            "state_after() does not go with save_prefetched=True: what was delivered after that batch could not be "
            "made again, and is in no position.\nSave with state_dict(), and train on every batch before the next."
        )


def _known(batch: Any) -> _Known:
    kind = type(batch)
    if kind.__weakrefoffset__:
        return weakref.ref(batch), 0
    part = _watchable(batch, kind)
    return (batch, -1) if part is None else (weakref.ref(part), id(batch))


def _is_of(known: _Known, batch: Any) -> bool:
    what, number = known
    if number == -1:
        return what is batch
    if number == 0:
        return batch is not None and what() is batch  # None is what a freed one gives
    # An id may be another's by now; the part shows that it is not.
    return number == id(batch) and (part := what()) is not None and any(found is part for found in _parts(batch))


def _watchable(batch: Any, kind: type) -> Any:
    """A part of a batch that takes a weak reference: a tensor or an array, if there is one."""
    if kind is dict or kind is list:  # the usual ones, without a search
        for part in batch.values() if kind is dict else batch:
            if type(part) is torch.Tensor:
                return part
            break
    other = None
    for part in _parts(batch):
        if isinstance(part, torch.Tensor | np.ndarray):
            return part
        if other is None and type(part).__weakrefoffset__ and not isinstance(part, _EVERYONES):
            other = part
    return other


def _parts(batch: Any) -> Iterator[Any]:
    """What is in a batch, down to what takes a weak reference; from the outside in, up to a number of parts."""
    return islice(_all_parts(batch), _MOST_PARTS)


def _all_parts(batch: Any) -> Iterator[Any]:
    level = [batch]
    while level:
        level = gc.get_referents(*(part for part in level if not type(part).__weakrefoffset__))
        yield from level
