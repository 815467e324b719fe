"""What an audit found: plain data, for a table, a page, or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

__all__ = ["Cause", "Difference", "Findings", "Stop", "Trial", "Verdict"]

Verdict: TypeAlias = Literal["exact", "inexact", "failed"]
"""``"failed"``: an error came instead of batches, so that the loader refused or broke."""


@final
@dataclass(frozen=True)
class Stop:
    """Where a run was ended: ``saved`` batches were delivered when its position was saved, ``ended`` when it ended.

    ``how`` is in words: ``"between batches"``, ``"in the middle of a fetch"``, ``"during a save"``.
    """

    saved: int
    ended: int
    how: str


@final
@dataclass(frozen=True)
class Difference:
    """The first batch that differs: its number in the run and in its ``epoch`` (from 0), and both in short."""

    batch: int
    epoch: int
    step: int
    expected: str
    found: str


@final
@dataclass(frozen=True)
class Cause:
    """A known reason that the evidence speaks for: its name, what was seen, and what to do."""

    name: str
    evidence: str
    remedy: str


@final
@dataclass(frozen=True)
class Trial:
    """One run that was ended and resumed, once or several times, held against the run without a stop.

    ``number`` counts the trials of an audit from 1.
    ``topologies`` are the arguments of the factory in each stretch. ``lost``, ``repeated``, ``reordered`` and
    ``altered`` count rows. ``counts`` has, for each row of the reference in the order of delivery, how often the trial
    delivered it (255: that often or more); ``unknown`` the places (numbers of rows in the trial's own order) where a
    row came that the reference does not have.
    """

    number: int
    stops: tuple[Stop, ...]
    topologies: tuple[Mapping[str, Any], ...]
    verdict: Verdict
    lost: int = 0
    repeated: int = 0
    reordered: int = 0
    altered: int = 0
    first: Difference | None = None
    counts: bytes = b""
    unknown: tuple[int, ...] = ()
    error: str = ""


@final
@dataclass(frozen=True)
class Findings:
    """An audit: what was judged, the run without a stop (``batches``, ``rows``, where each epoch begins among the
    rows), the trials, and the causes that they speak for.
    """

    factory: str
    loader: str
    versions: Mapping[str, str]
    batches: int
    rows: int
    epochs: tuple[int, ...]
    trials: tuple[Trial, ...]
    causes: tuple[Cause, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> Verdict:
        """That of the worst trial."""
        found = {trial.verdict for trial in self.trials}
        return "inexact" if "inexact" in found else "failed" if "failed" in found else "exact"

    def errors(self) -> list[tuple[tuple[int, ...], str]]:
        """Each error once, with the numbers of the trials that it ended. Those with the same first line are one."""
        trials: dict[str, list[Trial]] = {}
        for trial in self.trials:
            if trial.error:
                trials.setdefault(trial.error.partition("\n")[0], []).append(trial)
        return [(tuple(trial.number for trial in each), each[0].error) for each in trials.values()]
