"""What runs have logged, compared. Nothing here knows how the runs were made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

__all__ = ["Check", "Line", "Log", "compare_digests", "compare_losses", "compare_rows", "read_log"]


@final
@dataclass(frozen=True)
class Line:
    """One step of one rank: the loss as hexadecimal (exact), a digest of the batch and one of each of its rows."""

    step: int
    loss_hex: str
    digest: str
    rows: tuple[str, ...]

    @property
    def loss(self) -> float:
        return float.fromhex(self.loss_hex)


Log: TypeAlias = dict[int, Line]


@final
@dataclass(frozen=True)
class Check:
    """One comparison: what was compared over how many steps, what was found, and whether all of it was equal."""

    what: str
    steps: str
    found: str
    passed: bool


def read_log(path: Path, start: int | None = None) -> Log:
    """The log of a rank, by step; only lines of the process that began at step ``start`` where that is given.

    A line that a killed process left unfinished is no line. A missing file is an empty log.
    """
    log: Log = {}
    if not path.exists():
        return log
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if start is None or line["start"] == start:
            log[line["step"]] = Line(line["step"], line["loss_hex"], line["digest"], tuple(line["rows"]))
    return log


def _compare(what: str, steps: Sequence[int], differs: Callable[[int], str | None], same: str) -> Check:
    """Ask each step how it differs. No steps at all is no proof, so it does not pass."""
    asked = [(step, differs(step)) for step in steps]
    found = [(step, difference) for step, difference in asked if difference is not None]
    span = f"{steps[0]} to {steps[-1]}" if steps else "none"
    if not steps:
        return Check(what, span, "nothing was compared", passed=False)
    if found:
        step, difference = found[0]
        return Check(what, span, f"{len(found)} of {len(steps)} differ; first, step {step}: {difference}", passed=False)
    return Check(what, span, f"{len(steps)} of {len(steps)} {same}", passed=True)


def _missing(step: int, **logs: Log) -> str | None:
    absent = [name for name, log in logs.items() if step not in log]
    return f"not in the log of {' and '.join(absent)}" if absent else None


def compare_losses(what: str, reference: Log, other: Log, steps: Sequence[int]) -> Check:
    """Losses equal to the last bit, step by step."""

    def differs(step: int) -> str | None:
        if missing := _missing(step, reference=reference, other=other):
            return missing
        was, now = reference[step], other[step]
        if was.loss_hex == now.loss_hex:
            return None
        return f"{now.loss:.6f} ({now.loss_hex}), not {was.loss:.6f} ({was.loss_hex})"

    return _compare(what, steps, differs, "equal, every bit")


def compare_digests(what: str, reference: Log, other: Log, steps: Sequence[int]) -> Check:
    """Batches equal in bytes and order of rows, step by step."""

    def differs(step: int) -> str | None:
        if missing := _missing(step, reference=reference, other=other):
            return missing
        was, now = reference[step], other[step]
        if (was.digest, was.rows) == (now.digest, now.rows):
            return None
        return f"digest {now.digest}, not {was.digest}"

    return _compare(what, steps, differs, "equal, every byte")


def compare_rows(what: str, reference: Log, ranks: Iterable[Log], steps: Sequence[int]) -> Check:
    """The rows of all ranks together are those of the reference: none missing, none twice, in any order."""
    logs = list(ranks)

    def differs(step: int) -> str | None:
        named = {f"rank {rank}": log for rank, log in enumerate(logs)}
        if missing := _missing(step, reference=reference, **named):
            return missing
        was = sorted(reference[step].rows)
        now = sorted(row for log in logs for row in log[step].rows)
        if was == now:
            return None
        return f"{len(set(was) & set(now))} of {len(was)} rows are those of the reference ({len(now)} rows in all)"

    return _compare(what, steps, differs, "hold the same rows")
