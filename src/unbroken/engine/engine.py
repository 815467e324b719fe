"""What the feeds ask of an engine, whether it runs lanes inline or on worker processes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from unbroken.lane_position import LanePosition
from unbroken.meters import IDLE, Meter

__all__ = ["Engine", "OfAnotherProcess", "Positions", "Reply", "TakenOver", "check_process"]

Positions = Callable[[int], Mapping[int, LanePosition]]
"""The positions of a host's lanes after all that was collected of it."""


@final
@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a task: ``made`` tells the position of it (a digest, a turn, or rows), ``batch`` is the data."""

    made: Any
    batch: Any


@final
class OfAnotherProcess(RuntimeError):
    """An engine was used in a process that was forked from its own."""


def check_process(owner: int) -> None:
    """Raises ``OfAnotherProcess`` where this is not the process of the owner."""
    if os.getpid() != owner:
        raise OfAnotherProcess("This iterator belongs to the process that made it; a forked process makes its own.")


@final
class TakenOver(RuntimeError):
    """An older iterator was used over persistent workers that a newer one has."""

    def __init__(self) -> None:
        super().__init__(
            "A newer iterator has taken over the persistent workers of this loader: only the newest one goes on.\n"
            "Use persistent_workers=False to have several iterators at a time."
        )


class Engine(ABC):
    """Runs tasks on hosts, numbered from 0. ``lookahead`` is how many undelivered tasks a host may have."""

    hosts: int
    lookahead: int
    meter: Meter = IDLE
    """That of this process, for what is done with batches here."""
    failed: int = 0
    """The id of the error that ``collect`` raised last because a task had failed. Others come from handlers of signals,
    and the task may still be collected.
    """

    @abstractmethod
    def open(self, epoch: int, dataset_epoch: int | None, starts: Mapping[int, LanePosition]) -> None:
        """Place lanes at their positions, on the hosts that own them."""

    @abstractmethod
    def submit(self, host: int, task: Any, lease: Any = None) -> int:
        """Give a task to a host; returns its ticket. ``lease`` is the shared place that the rows of a stream go to.

        Tasks for rows may wait for ``flush``, so that several go together.
        """

    @abstractmethod
    def collect(self, ticket: int) -> Reply:
        """Wait for a task. Raises what it raised, ``WorkerDied`` or ``WorkerTimeout``."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; may be called again."""

    @property
    def closed(self) -> bool:
        """Whether nothing more can be asked of it."""
        return False

    def go_on_at(self, positions: Positions) -> None:  # noqa: B027 - where no host is ever replaced
        """Of the feed that opened the lanes: where those of a host that is replaced go on. Kept weakly."""

    def flush(self) -> None:  # noqa: B027 - where none waits there is nothing to do
        """Send the tasks that wait."""

    def ready(self, ticket: int) -> bool:
        """Whether collecting a task would not wait for a worker."""
        return True

    def first_of(self, tickets: Sequence[int]) -> int:
        """The first of some tasks that is done, the earliest of them where several are; waits until one is.

        Raises ``WorkerDied`` or ``WorkerTimeout``.
        """
        return tickets[0]

    def has_room(self) -> bool:
        """Whether one more batch may be made ahead, by the memory that those which were not collected take."""
        return True

    def least_busy(self) -> int:
        """The host that has the least to do."""
        return 0

    def made_by(self, host: int) -> int:
        """How many tasks of a host are done and were not collected. May be asked from any thread."""
        return 0

    def share(self, nbytes: int) -> Any:
        """A place that several hosts can write rows into; None where there is no need of one."""
        return None
