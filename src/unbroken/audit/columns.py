"""The rows of a trial as columns of a picture, of which there are few.

A column that stands for several rows has a hole where any of them is a hole, and a double where any is a double:
nothing is averaged away.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

__all__ = ["Run", "runs", "spread"]


@final
@dataclass(frozen=True)
class Run:
    """Neighbouring columns ``first`` to ``last`` (not included) that look alike.

    They are the rows ``begin`` to ``end`` (not included) of the reference, of which ``missing`` never came and ``more``
    came more than once, ``most`` times at most.
    """

    first: int
    last: int
    begin: int
    end: int
    missing: int
    more: int
    most: int


def runs(counts: bytes, total: int, columns: int) -> list[Run]:
    """The columns of a trial, with neighbours of equal look joined.

    Column ``n`` begins at row ``n * total // columns``. A look is whether any row is missing and whether any came more
    than once. ``counts`` covers the first rows of ``total`` (at least one); a column beyond it belongs to no run.
    ``columns`` is from 1 to ``total``.
    """
    if not counts:
        return []
    seen = np.frombuffer(counts, dtype=np.uint8)
    edges = np.arange(columns + 1, dtype=np.int64) * total // columns
    starts = edges[:-1][edges[:-1] < len(seen)]
    missing = np.add.reduceat((seen == 0).astype(np.int64), starts)
    more = np.add.reduceat((seen > 1).astype(np.int64), starts)
    most = np.maximum.reduceat(seen, starts)
    return [
        Run(
            first,
            last,
            int(starts[first]),
            min(int(edges[last]), len(seen)),
            int(missing[first:last].sum()),
            int(more[first:last].sum()),
            int(most[first:last].max()),
        )
        for first, last in _alike((missing > 0) + 2 * (more > 0))
    ]


def spread(places: Sequence[int], total: int, columns: int) -> list[tuple[int, int]]:
    """The columns that hold any of ``places``, as runs ``(first, last (not included))``; a place beyond the end is in
    the last column.
    """
    marked = np.zeros(columns, dtype=np.int64)
    marked[np.minimum(np.asarray(places, dtype=np.int64) * columns // total, columns - 1)] = 1
    return [(first, last) for first, last in _alike(marked) if marked[first]]


def _alike(looks: npt.NDArray[np.int64]) -> itertools.pairwise[tuple[int, int]]:
    """Where runs of equal values begin and end."""
    return itertools.pairwise([0, *(np.flatnonzero(np.diff(looks)) + 1).tolist(), len(looks)])
