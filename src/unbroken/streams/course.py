"""What the stages of a stream share while one lane is open: the order of chunks, names of sources, and records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

from unbroken.meters import IDLE, Meter
from unbroken.seeding import Permutation, key

__all__ = ["ChunkOrder", "Course", "Journal", "Record", "epoch_of_pass"]

Kind = TypeVar("Kind", bound="Record")


def epoch_of_pass(epoch: int, number: int) -> int:
    """What a pass over a source, one of several within an epoch, is to that source: the epoch of a pass of its own.

    It grows with the pass, and does not depend on how many passes there are. Where many stages of passes lie within one
    another, and a number of 62 bits does not hold all of theirs, a hash of those outside stands for them.
    """
    outside = epoch << 10
    if outside >> 62:
        outside = key(0, "passes", epoch) & ((1 << 61) - 1024)
    return outside + number


@final
@dataclass(frozen=True)
class ChunkOrder:
    """That a source deals its chunks in a permuted order, another in every epoch. A shuffle tells its source so."""

    seed: int

    def of(self, chunks: int, epoch: int) -> Permutation:
        """The order of an epoch: place to chunk."""
        return Permutation(chunks, key(self.seed, "chunks", epoch))


class Record(ABC):
    """What a stage has to know on a resume about all that it did, also beyond the anchors of the stages after it.

    A position of a stage lies at an anchor, from which rows are made again. Where making them again could come out
    otherwise (a file that can be read now and could not then; other weights of a mix), it is done as the record says.
    """

    @abstractmethod
    def state_dict(self) -> Any:
        """The record as plain JSON values. No later step changes what was returned."""

    @abstractmethod
    def load_state_dict(self, state: Any) -> None:
        """Take the record of a position over. Raises ``InvalidState`` where it is none."""


@final
class Journal:
    """The records of one lane, by the names of the stages that keep them."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._unclaimed: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._records or self._unclaimed)

    def keep(self, name: str, make: Callable[[], Kind]) -> Kind:
        """The record of this name: made at the first call, and the same one at every later opening in this lane."""
        if name not in self._records:
            record = make()
            if name in self._unclaimed:
                record.load_state_dict(self._unclaimed[name])
                del self._unclaimed[name]
            self._records[name] = record
        return self._records[name]  # type: ignore[return-value]

    def state_dict(self) -> dict[str, Any]:
        return {**self._unclaimed, **{name: record.state_dict() for name, record in self._records.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Records of stages that are opened later wait for them; those of stages that are gone are kept."""
        for name, record in self._records.items():
            if name in state:
                record.load_state_dict(state[name])
        self._unclaimed = {name: value for name, value in state.items() if name not in self._records}


@final
@dataclass(frozen=True)
class Course:
    """How a lane was opened.

    ``order`` is the order of chunks (``None``: that of the files), ``lineage`` whether origins are asked for, ``path``
    the names of the sources on the way to this stage (``"web/"``), empty where none has one; ``journal`` and
    ``meter`` are shared by all stages.
    """

    order: ChunkOrder | None = None
    lineage: bool = False
    path: str = ""
    journal: Journal = field(default_factory=Journal)
    meter: Meter = IDLE

    def source_of(self, stages: Iterable[Any]) -> str:
        """The name by which a stage counts what comes of these ``stages``: of the source that it lies in, else of the
        only one that there is; empty where there are several.
        """
        below = list(stages)
        one = all(len(stage.sources) < 2 and not stage.named for stage in below)
        return self.path.rstrip("/") or (below[0].NAME if one else "")

    def shuffled(self, seed: int) -> Course:
        """The course for a source whose chunks are to come in a random order."""
        return replace(self, order=ChunkOrder(seed))

    def in_order(self) -> Course:
        """The course for a source whose first rows are to be the same in every epoch, whatever is shuffled later."""
        return replace(self, order=None)

    def into(self, name: str) -> Course:
        """The course for a source of this name."""
        return replace(self, path=f"{self.path}{name}/")
