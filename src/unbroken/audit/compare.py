"""A run that was ended and resumed, held against the run that was not: batch by batch, then row by row."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias, final

from unbroken.audit.crash import Reference, Run, Step, Stretch, digests
from unbroken.audit.findings import Difference, Trial
from unbroken.audit.records import Row
from unbroken.audit.stretch import Line

__all__ = ["Delivered", "delivered", "judge", "ran_beyond", "rows_in"]

Delivered: TypeAlias = "tuple[int, Row]"
"""A row and the epoch that it came in. Rows of different epochs are different deliveries."""

_MOST: Final = 255
_NOTHING: Final = "nothing: the data came to its end"


def rows_in(steps: Iterable[Step]) -> list[Delivered]:
    """All rows, step by step, rank by rank."""
    return [(line.epoch, row) for step in steps for line in step if line is not None for row in line.rows]


def delivered(stretch: Stretch, *, rolled_back: bool = False) -> list[Step]:
    """The batches that stayed (or those that were rolled back), with epochs counted as the reference does."""
    kept = len(stretch.kept)
    chosen = slice(kept, None) if rolled_back else slice(kept)
    return [
        tuple(
            None if line is None else Line(epoch, line.digest, line.brief, line.rows)
            for line, epoch in zip(step, epochs, strict=True)
        )
        for step, epochs in zip(stretch.steps[chosen], stretch.epochs[chosen], strict=True)
    ]


def judge(reference: Reference, run: Run, batches: int) -> Trial:
    """What a trial found, up to the reference's first ``batches`` batches."""
    plan = run.plan
    trial = {"number": plan.number + 1, "stops": tuple(run.stops)}
    topologies = tuple(stretch.arguments for stretch in run.stretches)
    if run.error:
        return Trial(**trial, topologies=topologies, verdict="failed", error=run.error)  # type: ignore[arg-type]
    found = _found(run)
    # What comes after the end of the data is one batch too many, wherever the comparison ends.
    limit = len(found) if reference.ended and len(found) > len(reference.steps) else batches
    rows = _Rows(reference, batches, _in_their_epochs(reference, found), run)
    if plan.changes_world:
        first, reordered = rows.first_difference(), 0
    else:
        first, reordered = _first_batch(reference.steps[:limit], found[:limit]), rows.reordered()
        first = _earlier(first, _first_rolled_back(reference.steps, run))
    exact = first is None
    return Trial(
        **trial,  # type: ignore[arg-type]
        topologies=topologies,
        verdict="exact" if exact else "inexact",
        lost=0 if exact else rows.lost,
        repeated=0 if exact else rows.repeated,
        reordered=0 if exact else reordered,
        altered=0 if exact else rows.altered,
        first=first,
        counts=rows.counts(),
        unknown=() if exact else rows.unknown_places(),
    )


def ran_beyond(reference: Reference, run: Run, batches: int) -> bool:
    """Whether rows came that are no rows of the reference so far, and may be such as it has after its end."""
    if reference.ended or run.error:
        return False
    return _Rows(reference, batches, _found(run), run).beyond()


def _found(run: Run) -> list[Step]:
    return [step for stretch in run.stretches for step in delivered(stretch)]


def _in_their_epochs(reference: Reference, found: list[Step]) -> list[Step]:
    """Batches that are all the same, and only their epochs end elsewhere, have no row that is lost or repeated."""
    known = reference.steps[: len(found)]
    contents = ([[line and line.digest for line in step] for step in steps] for steps in (known, found))
    return known if next(contents) == next(contents) else found


def _earlier(a: Difference | None, b: Difference | None) -> Difference | None:
    return min((each for each in (a, b) if each is not None), key=lambda each: each.batch, default=None)


def _first_batch(expected: Sequence[Step], found: Sequence[Step]) -> Difference | None:
    for number, (a, b) in enumerate(itertools.zip_longest(expected, found)):
        if a is None or b is None or digests(a) != digests(b):
            return _difference(expected, number, a, b)
    return None


def _first_rolled_back(steps: Sequence[Step], run: Run) -> Difference | None:
    """Batches after the last save must be the reference's too, though the run did not keep them."""
    found: Difference | None = None
    for stretch in run.stretches:
        first = stretch.start + len(stretch.kept)
        gone = delivered(stretch, rolled_back=True)
        if gone:
            known = [*steps[:first], *gone]
            here = _first_batch(steps[: first + len(gone)], known)
            found = _earlier(found, here)
    return found


def _difference(expected: Sequence[Step], number: int, a: Step | None, b: Step | None) -> Difference:
    line = next((line for line in a or b or () if line is not None), None)
    epoch = line.epoch if line else 0
    return Difference(number, epoch, _step(expected, number, epoch), *_side_by_side(a, b))


def _side_by_side(a: Step | None, b: Step | None) -> tuple[str, str]:
    """Both batches in short, of the first rank that differs; with the first row that differs where they look alike."""
    width = max(len(a or ()), len(b or ()))
    pairs = enumerate(itertools.zip_longest(a or (), b or ()))
    rank, (one, other) = next(
        (r, (x, y)) for r, (x, y) in pairs if x is None or y is None or digests((x,)) != digests((y,))
    )
    ends = one is not None and other is not None and one.digest == other.digest
    texts = []
    place = _first_row(one, other)
    alike = one is not None and other is not None and one.brief == other.brief
    for line in (one, other):
        text = _NOTHING if line is None else line.brief
        if line is not None and (alike or place > 0):
            row = line.rows[place].brief if place < len(line.rows) else "nothing"
            text += f"\nrow {place}: {row}"
        if ends and line is not None and one is not None and other is not None:
            begins = line.epoch == max(one.epoch, other.epoch)
            text = f"{line.brief}\nepoch {line.epoch} {'begins with it' if begins else 'goes on'}"
        texts.append(f"rank {rank}: {text}" if width > 1 else text)
    return texts[0], texts[1]


def _first_row(a: Line | None, b: Line | None) -> int:
    pairs = itertools.zip_longest(a.rows if a else (), b.rows if b else ())
    return next((place for place, (one, other) in enumerate(pairs) if one != other), 0)


@final
class _Side:
    """The rows of a run, counted by epoch and content."""

    def __init__(self, rows: list[Delivered]) -> None:
        self.rows = rows
        self.keys = [(epoch, row.digest) for epoch, row in rows]
        self.counted = Counter(self.keys)

    def chosen(self, common: Counter[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """As many of each as there are in ``common``, the first ones, in order."""
        left = Counter(common)
        found = []
        for key in self.keys:
            if left[key] > 0:
                left[key] -= 1
                found.append(key)
        return found


@final
class _Rows:
    """Rows counted by epoch. What is compared ends with ``batches``; both runs go on, for rows that come late."""

    def __init__(self, reference: Reference, batches: int, found: Sequence[Step], run: Run) -> None:
        self.compared = reference.steps[:batches]
        self.expected, self.known = _Side(rows_in(self.compared)), _Side(rows_in(reference.steps))
        self.later = _Side(rows_in(found))
        too_many = reference.ended and len(self.later.rows) > len(self.known.rows)
        self.found = self.later if too_many else _Side(self.later.rows[: len(self.expected.rows)])
        # What the run without a stop delivers after the last row that this one came to is not lost, but yet to come.
        last = max((place for place, key in enumerate(self.known.keys) if key in self.later.counted), default=-1)
        short = len(self.later.rows) < len(self.expected.rows)
        reached = self.expected.counted if run.ended or short else Counter(self.expected.keys[: last + 1])
        self.missing = reached - self.later.counted
        self.surplus = self.found.counted - self.known.counted
        self.content = {row.digest for _, row in self.known.rows}
        # On another number of ranks an epoch may have rows that the reference left out of it.
        known = self.known.counted if run.plan.changes_world else None
        self.repeated = sum(
            count for key, count in self.surplus.items() if (key[1] in self.content if known is None else key in known)
        )
        self.altered = self.surplus.total() - self.repeated
        self.lost = max(0, self.missing.total() - self.altered)

    def beyond(self) -> bool:
        """The epoch that the reference was in at its end may have any row, and so may those that follow."""
        last = max((epoch for epoch, _ in self.known.rows), default=0)
        return any(key[0] >= last and key not in self.known.counted for key in self.surplus)

    def unknown_places(self) -> tuple[int, ...]:
        return tuple(place for place, row in self._first_rows() if row.digest not in self.content)

    def _first_rows(self) -> Iterator[tuple[int, Row]]:
        """As many as the reference has, with their places."""
        return enumerate(row for _, row in self.found.rows[: len(self.expected.rows)])

    def reordered(self) -> int:
        """How many rows of those that both runs have stand at another place among them."""
        common = self.expected.counted & self.found.counted
        one, other = self.expected.chosen(common), self.found.chosen(common)
        return sum(a != b for a, b in zip(one, other, strict=True))

    def counts(self) -> bytes:
        """How often each row of the reference came; of rows with equal content the last one has what is left."""
        left = self.later.counted - (self.known.counted - self.expected.counted)
        waiting = Counter(self.expected.counted)
        found = bytearray()
        for key in self.expected.keys:
            waiting[key] -= 1
            count = min(left[key], 1) if waiting[key] else left[key]
            left[key] -= count
            found.append(min(_MOST, count))
        return bytes(found)

    def first_difference(self) -> Difference | None:
        """The step of the first row that never came, or came once too often; None where each came once."""
        for number, step in enumerate(self.compared):
            for line in step:
                for row in () if line is None else line.rows:
                    if line is not None and self.missing[line.epoch, row.digest]:
                        place = _step(self.compared, number, line.epoch)
                        return Difference(number, line.epoch, place, row.brief, "this row never came")
        for place, (epoch, row) in enumerate(self.found.rows):
            if self.surplus[epoch, row.digest]:
                number = _step_of_row(self.compared, place)
                again = "this row once" if self.known.counted[epoch, row.digest] else "no row of this epoch, or another"
                return Difference(number, epoch, _step(self.compared, number, epoch), again, row.brief)
        return None


def _step(steps: Sequence[Step], number: int, epoch: int) -> int:
    return sum(1 for step in steps[:number] if any(line is not None and line.epoch == epoch for line in step))


def _step_of_row(steps: Sequence[Step], place: int) -> int:
    for number, step in enumerate(steps):
        place -= sum(len(line.rows) for line in step if line is not None)
        if place < 0:
            return number
    return max(0, len(steps) - 1)
