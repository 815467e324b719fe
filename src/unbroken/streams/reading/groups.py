"""Groups of rows: the plan of columnar files, and how it is cut into parts for lanes.

A group is what such a file is made of: a row group of Parquet, a record batch of Arrow. What is kept of each is the
number of its rows, so that the plan of very many files stays small.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from unbroken.errors import BadRow
from unbroken.streams.reading.files import SourceFile, is_local, one_line

__all__ = ["Groups", "Numbers", "Part", "Parts", "changed", "check_unchanged", "scan_files"]

Numbers: TypeAlias = npt.NDArray[np.int64]

_log = logging.getLogger("unbroken")
_SCAN_THREADS, _PATIENCE = 16, 2.0


@final
class Part(NamedTuple):
    """Rows ``start`` to ``stop`` - 1 of a group.

    ``file_number`` is that of the file in the plan, ``number`` that of the group there, ``group`` that of the group in
    its file; ``before`` counts the rows of the file before the group.
    """

    file: SourceFile
    file_number: int
    number: int
    group: int
    start: int
    stop: int
    before: int


@final
@dataclass(frozen=True, eq=False)
class Groups:
    """All groups of the files, in order: ``counts`` is how many each file has, ``rows`` how many rows each group has.

    Both are int64, of shapes [files] and [groups].
    """

    files: tuple[SourceFile, ...]
    counts: Numbers
    rows: Numbers

    def grain(self, lanes: int) -> int:
        """The most rows that a part has.

        With at least as many groups as lanes a group is cut only where it has more than twice a lane's share of the
        rows; with fewer, groups are cut as coarsely as gives every lane a part.
        """
        most = int(self.rows.max(initial=1))
        if np.count_nonzero(self.rows) >= lanes:
            return max(1, 2 * -(-int(self.rows.sum()) // lanes))
        low, high = 1, most + 1  # parts of `low` rows are enough for all lanes, or there are too few rows
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if int((-(-self.rows // middle)).sum()) >= lanes else (low, middle)
        return low

    def parts(self, grain: int) -> Parts:
        return _parts(self, min(grain, 1 << 62))  # which int64 holds, whatever a position says


@final
class Parts:
    """All parts of at most ``grain`` rows, in order, without a list of them. A group is cut into equal ones."""

    def __init__(self, groups: Groups, grain: int) -> None:
        self._files = groups.files
        self._file_ends = np.cumsum(groups.counts)
        self._row_ends = np.cumsum(groups.rows)
        self._ends = np.cumsum(-(-groups.rows // grain))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> Part:
        group = int(self._ends.searchsorted(number, side="right"))
        index = int(self._file_ends.searchsorted(group, side="right"))
        first = _before(self._file_ends, index)
        begin, rows_before = _before(self._ends, group), _before(self._row_ends, group)
        rows, pieces = int(self._row_ends[group]) - rows_before, int(self._ends[group]) - begin
        start, stop = rows * (number - begin) // pieces, rows * (number - begin + 1) // pieces
        before = rows_before - _before(self._row_ends, first)
        return Part(self._files[index], index, group, group - first, start, stop, before)


@lru_cache(maxsize=4)
def _parts(groups: Groups, grain: int) -> Parts:
    """All lanes of a process share one of these."""
    return Parts(groups, grain)


def _before(ends: Numbers, place: int) -> int:
    return int(ends[place - 1]) if place else 0


def changed(file: SourceFile, what: str) -> BadRow:
    """The error for a file that is not what it was; ``what`` it is now."""
    return BadRow(
        f"{file.path}: {what}, but had {file.size} bytes when the stream was made.\n"
        "Put the file back as it was, or make the stream again from the new one."
    )


def check_unchanged(file: SourceFile) -> None:
    """Raises ``BadRow`` where a local file has another size now, ``OSError`` where it is gone."""
    if is_local(file.path):
        size = os.stat(file.path).st_size
        if size != file.size:
            raise changed(file, f"has {size} bytes")


def scan_files(
    reader: str, files: Sequence[SourceFile], scan: Callable[[SourceFile], Any], *, skips: bool
) -> list[tuple[SourceFile, Any]]:
    """Each file with ``scan(file)``, made in threads. A bar shows on a terminal what takes longer than two seconds.

    Raises what ``scan`` raises. With ``skips`` a file for which that is ``BadRow`` is left out and logged as a
    warning; where all are, ``BadRow`` is raised.
    """
    found: list[tuple[SourceFile, Any]] = []
    with ThreadPoolExecutor(min(_SCAN_THREADS, len(files)), thread_name_prefix="unbroken-scan") as threads:
        jobs = [threads.submit(scan, file) for file in files]
        try:
            for file, job in zip(files, _watched(reader, jobs), strict=True):
                try:
                    found.append((file, job.result()))
                except BadRow as error:
                    if not skips:
                        raise
                    _log.warning('%s: left out, as on_error="skip" says: %s', reader, one_line(error))
        finally:
            for job in jobs:
                job.cancel()
    if not found:
        raise BadRow(f"{reader}: none of the {len(files)} files can be read. The log names each with the reason.")
    return found


def _watched(reader: str, jobs: Sequence[Any]) -> Iterator[Any]:
    """The jobs, one after another, with a bar on standard error for those who wait."""
    began = monotonic()
    bar: Any = None
    task: Any = None
    try:
        for done, job in enumerate(jobs):
            if bar is None and monotonic() - began >= _PATIENCE and sys.stderr.isatty():
                from rich.console import Console
                from rich.progress import Progress

                bar = Progress(console=Console(stderr=True), transient=True)
                task = bar.add_task(f"{reader}: looking into files", total=len(jobs))
                bar.start()
            if bar is not None:
                bar.update(task, completed=done)
            yield job
    finally:
        if bar is not None:
            bar.stop()
