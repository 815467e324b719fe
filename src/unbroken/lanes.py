"""Lanes, and the pure plan over them: who owns which lane, and whose turn it is.

A lane is a logical worker. Their number is fixed for a run while processes and ranks come and go, so whatever is a
function of lanes alone is the same on every topology.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

from unbroken.errors import LaneError

__all__ = ["Lane", "LaneIterator", "LaneStream", "Turns", "lanes_of_rank", "plan_lanes"]


@final
@dataclass(frozen=True)
class Lane:
    """One lane of a run, as a stream sees it when it is opened.

    ``index`` is in ``[0, count)``; ``seed`` is the run's seed (64 bits), the same for all lanes.
    """

    index: int
    count: int
    epoch: int = 0
    seed: int = 0


class LaneIterator(Protocol):
    """What ``open`` returns: rows of one lane, with a position of JSON values that is exact after every row."""

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class LaneStream(Protocol):
    """A dataset that knows lanes: one turn is one row, and its own state is exact by construction.

    It sees to its random numbers itself, by the lane's seed and the place of a row: the loader seeds none for it.

    ``default_lanes`` is the number of lanes where the user names none; ``describe()`` is its fingerprint: a dict of
    JSON values whose keys are the fields that a mismatch report lists. ``difference_class(field)`` says what another
    value means: ``"safe"``, ``"order"`` or ``"data"``; ``"order, held"`` and ``"data, held"`` are never accepted in the
    middle of an epoch, and nor is ``"held"``, which is safe between epochs.
    """

    default_lanes: int

    def open(self, lane: Lane) -> LaneIterator: ...
    def describe(self) -> dict[str, Any]: ...
    def difference_class(self, field: str) -> str: ...


def plan_lanes(asked: int | None, default: int, num_workers: int, dp_world_size: int) -> int:
    """The number of lanes of a run. Raises ``LaneError`` where an owner would have none."""
    owners = max(1, num_workers) * dp_world_size
    lanes = default if asked is None else asked
    if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
        raise LaneError(f"lanes must be a whole number of at least 1, but got lanes={lanes!r}.")
    if lanes < owners:
        fewer = f"num_workers={lanes // dp_world_size} or fewer" if lanes >= dp_world_size else f"at most {lanes} ranks"
        raise LaneError(
            f"{lanes} lanes cannot keep {owners} owners busy (dp_world_size={dp_world_size} times "
            f"num_workers={num_workers}): some would have no data.\n"
            f"Pass lanes={owners} or more, or use {fewer}."
        )
    return lanes


def lanes_of_rank(lanes: int, dp_rank: int, dp_world_size: int) -> range:
    """The lanes that a rank owns: lane l belongs to rank ``l mod dp_world_size``."""
    return range(dp_rank, lanes, dp_world_size)


@final
class Turns:
    """Whose turn it is: the live lane with the fewest turns taken, the lowest number first.

    Nothing of it needs saving but the turns of each lane, so it is defined after any change of topology.
    """

    def __init__(self, taken: Mapping[int, int]) -> None:
        self._heap = [(turns, lane) for lane, turns in taken.items()]
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def copy(self) -> Turns:
        """Another one at the same place, which moves on its own."""
        return Turns({lane: turns for turns, lane in self._heap})

    def peek(self) -> int:
        """The lane whose turn it is."""
        return self._heap[0][1]

    def in_order(self) -> list[int]:
        """The lanes that have more turns, in the order of turns."""
        return [lane for _, lane in sorted(self._heap)]

    def of(self, lanes: Collection[int]) -> Turns:
        """The turns of some lanes alone, which move on their own."""
        return Turns({lane: turns for turns, lane in self._heap if lane in lanes})

    def take(self, lane: int | None = None) -> int:
        """Count a turn of the lane whose turn it is, or of another one, and return its number."""
        turns, first = self._heap[0]
        if lane is None or lane == first:
            heapq.heapreplace(self._heap, (turns + 1, first))
            return first
        self._heap = [(turns + (number == lane), number) for turns, number in self._heap]
        heapq.heapify(self._heap)
        return lane

    def end(self, lane: int) -> None:
        """An exhausted lane has no more turns."""
        self._heap = [entry for entry in self._heap if entry[1] != lane]
        heapq.heapify(self._heap)
