"""What the feeds ask of an engine, whether it runs lanes inline or on worker processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from unbroken.position import LanePosition

__all__ = ["Engine", "Reply"]


@final
@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a task: ``made`` tells the position of it (a digest, a turn, or rows), ``batch`` is the data."""

    made: Any
    batch: Any


class Engine(ABC):
    """Runs tasks on hosts, numbered from 0. ``lookahead`` is how many undelivered tasks a host may have."""

    hosts: int
    lookahead: int

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

    def flush(self) -> None:  # noqa: B027 - where none waits there is nothing to do
        """Send the tasks that wait."""

    def ready(self, ticket: int) -> bool:
        """Whether collecting a task would not wait for a worker."""
        return True

    def least_busy(self) -> int:
        """The host that has the least to do."""
        return 0

    def share(self, nbytes: int) -> Any:
        """A place that several hosts can write rows into; None where there is no need of one."""
        return None
