"""A resume after which other rows came than were expected, and rows compared in the ways that patterns ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from unbroken.audit.compare import Delivered

__all__ = ["FEW", "Resume", "contents", "counted", "epoch_starts", "matches"]

FEW: Final = 2  # rows that must agree before a pattern is taken for more than chance


@final
@dataclass(frozen=True)
class Resume:
    """The first resume of a trial whose batches differ: ``after`` came where ``expected`` was to come.

    ``rows``: all of the reference. ``place``: the number of rows before the resume. ``window``: the rows of a step.
    ``workers``: those of the run that saved.
    """

    trial: int
    place: int
    rows: Sequence[Delivered]
    after: Sequence[Delivered]
    window: int
    workers: int

    @property
    def expected(self) -> Sequence[Delivered]:
        return self.rows[self.place :]

    @property
    def same(self) -> int:
        """How many rows came as expected before the first that differs."""
        pairs = enumerate(zip(self.after, self.expected, strict=False))
        return next((number for number, (a, b) in pairs if a[1] != b[1]), min(len(self.after), len(self.expected)))


def epoch_starts(rows: Sequence[Delivered]) -> dict[int, int]:
    starts: dict[int, int] = {}
    for place, (epoch, _) in enumerate(rows):
        starts.setdefault(epoch, place)
    return starts


def matches(found: Sequence[Delivered], rows: Sequence[Delivered], most: int) -> bool:
    """Whether the first rows are the same: at least a few, and ``most`` where there are as many."""
    count = min(len(found), len(rows), max(most, FEW))
    return count >= FEW and all(a[1] == b[1] for a, b in zip(found[:count], rows[:count], strict=True))


def contents(rows: Sequence[Delivered]) -> Counter[bytes]:
    return Counter(row.digest for _, row in rows)


def counted(rows: Sequence[Delivered]) -> Counter[tuple[int, bytes]]:
    return Counter((epoch, row.digest) for epoch, row in rows)
