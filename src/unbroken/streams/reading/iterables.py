"""Iterables of the user's: a function that makes one for each lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from unbroken.lanes import Lane
from unbroken.streams.identity import identity_of
from unbroken.streams.reading.checked import Checked, Supply
from unbroken.streams.stage import Stage

__all__ = ["from_iterable"]


def from_iterable(factory: Callable[[int, int], Iterable[Any]], *, resume: str = "checked") -> Stage:
    """A stream of the rows of iterables: ``factory(lane, lanes)`` makes a new one for each of ``lanes`` lanes.

    It has to yield the lane's share of the rows, the same ones at every call, and must not take a share of that by
    torch's ``get_worker_info()``: a dataset that does so goes to the loader as it is. Where it has ``set_epoch``, that
    is called with the number of the epoch before it is iterated.

    Where the iterable or its iterator has ``state_dict`` and ``load_state_dict``, a resume opens a new one at such a
    state. The state is taken a few rows back, and the rows since are made again and must come out as they were, so
    that a state that lags a row behind, or stands for a whole shard or document, is exact too. Without a state all
    rows of the epoch are made again, which is told once. ``resume="replay"`` does that in any case: for iterables
    whose own state does not lead back.

    Before each row the global generators of torch, numpy and random are seeded by its place, see ``Checked``.

    Raises ``TypeError`` where ``factory`` cannot be called, ``ValueError`` where ``resume`` is not known. The iterator
    raises ``TypeError`` where what ``factory`` returned cannot be iterated, ``UnsealableState`` where its state holds
    what no position can carry, ``InexactDataset`` where a resume does not lead back to its place, and what the
    iterable raises; the next call then goes on behind the last row, in a new iterable.
    """
    if not callable(factory):
        raise TypeError(
            f"from_iterable: factory must be a function of (lane, lanes) that makes an iterable, but got {factory!r} "
            f"({type(factory).__name__}).\nWrite lambda lane, lanes: MyDataset(lane, lanes), so that each lane has one "
            "of its own."
        )
    return Checked(_Made(factory), resume)


@final
@dataclass(frozen=True)
class _Made(Supply):
    """What the function of the user makes."""

    NAME: ClassVar[str] = "from_iterable"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"factory": "data"}

    factory: Callable[[int, int], Iterable[Any]]

    def open(self, lane: Lane) -> Iterable[Any]:
        iterable = self.factory(lane.index, lane.count)
        if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
            raise TypeError(
                f"from_iterable: factory({lane.index}, {lane.count}) returned {iterable!r} "
                f"({type(iterable).__name__}), which cannot be iterated. Return an iterable of the lane's rows."
            )
        set_epoch = getattr(iterable, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(lane.epoch)
        return iterable

    def what(self) -> str:
        return self.arguments()

    def fields(self) -> dict[str, Any]:
        return {"factory[]": identity_of(self.factory)}

    def arguments(self) -> str:
        return identity_of(self.factory).rpartition(":")[0]

    def extent(self, lanes: int) -> str:
        return ""
