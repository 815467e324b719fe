"""Whether two checkpoints saw the same data, by the ledgers in them: count and rolling digest of each lane.

Lanes are those of a run, whatever ranks and workers there were, so checkpoints of other topologies can be compared. A
digest is of all that a lane has delivered: two of them say something of one another where the counts are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, final

from unbroken.checkpoints.files import read_position
from unbroken.checkpoints.summary import Summary, summarize

__all__ = ["Finding", "LedgerComparison", "LedgerRow", "compare_ledgers", "compare_positions"]

Finding: TypeAlias = Literal["equal", "differs", "A is further", "B is further", "cannot be compared"]

_MOST_ROWS = 12
_ORDER_FIELDS = ("dataset", "length", "sampler", "seed")


@final
@dataclass(frozen=True)
class LedgerRow:
    """One lane (or rank, or the place of all ranks) in both: what was counted, and the digest of it.

    A lane counts samples over all epochs; of a map-style dataset a rank counts batches, and the place of all ranks has
    no digest. None where the checkpoint has no such lane.
    """

    name: str
    count_a: int | None
    digest_a: int | None
    count_b: int | None
    digest_b: int | None
    finding: Finding
    why: str = ""


@final
@dataclass(frozen=True)
class LedgerComparison:
    """What two checkpoints say of the data that was delivered before them.

    ``notes`` are what there is to know beside the rows: fields of the fingerprint that differ, what is not compared.
    ``whole``: whether all lanes or ranks of both are here.
    """

    a: str
    b: str
    unit: str
    rows: tuple[LedgerRow, ...]
    notes: tuple[str, ...] = ()
    whole: bool = True

    @property
    def verdict(self) -> Literal["same", "different", "unknown"]:
        """``"different"`` where lanes at the same place differ; ``"unknown"`` where none does, and not all could be
        held against each other, not all are here, there are no digests, or nothing was delivered yet.
        """
        findings = {row.finding for row in self.rows}
        if self._nothing:
            return "unknown"
        if "differs" in findings:
            return "different"
        return "same" if findings == {"equal"} and self.whole and self.unit != "rows" else "unknown"

    @property
    def same(self) -> bool:
        """Whether both saw the same data, all of it, and this was found by every lane."""
        return self.verdict == "same"

    @property
    def _nothing(self) -> bool:
        return self.unit != "rows" and all(row.count_a == row.count_b == 0 for row in self.rows)

    def __str__(self) -> str:
        return "\n".join([f"A  {self.a}", f"B  {self.b}", "", *_table(self), "", *self.notes, self._told()])

    def _told(self) -> str:
        number = len(self.rows)
        equal = sum(row.finding == "equal" for row in self.rows)
        if self.verdict == "same":
            return f"The same data: {number} of {number} {self._things(number)} agree."
        if self.unit == "rows":
            return self._told_of_places()
        if self.verdict == "different":
            differ = sum(row.finding == "differs" for row in self.rows)
            return f"Other data: {differ} of {number} {self._things(number)} differ at the same place."
        if self._nothing:
            return "Neither has delivered anything that its ledger counts: there is nothing to compare."
        if all(row.finding == "cannot be compared" for row in self.rows):
            return "It cannot be told: nothing in these two can be compared."
        if equal == number:
            return f"It cannot be told for all: the {number} {self._things(number)} that are here agree."
        return (
            f"It cannot be told for all: {equal} of {number} {self._things(number)} stand at the same place and agree. "
            "A digest is of all that was delivered before it, and can only be compared at the same place: compare "
            "checkpoints of the same step."
        )

    def _told_of_places(self) -> str:
        finding = self.rows[0].finding
        if finding == "differs":
            return "Other data: the place is the same, and what is delivered there is not."
        if finding == "equal":
            return (
                "It cannot be told: they stand at the same place of the same order, and no digest says what was read."
            )
        if finding == "cannot be compared":
            return "It cannot be told: nothing in these two can be compared."
        return "It cannot be told: they stand at other places, and no digest says what was read."

    def _things(self, number: int) -> str:
        return {"samples": "lane", "batches": "rank"}[self.unit] + "s" * (number != 1)


def compare_ledgers(a: Path, b: Path, key: str | None = None) -> LedgerComparison:
    """Hold the ledgers of two checkpoints against each other; ``key`` names the position in them (``read_position``).

    Raises ``InvalidState`` where there is no position in one of them.
    """
    return compare_positions(read_position(a, key), read_position(b, key), str(a), str(b))


def compare_positions(a: Mapping[str, str], b: Mapping[str, str], name_a: str, name_b: str) -> LedgerComparison:
    """The same for two positions, which the text calls by these names. Raises ``InvalidState``."""
    of_a, of_b = summarize(a), summarize(b)
    notes = _notes(of_a, of_b)
    why = _why_not(of_a, of_b)
    whole = not any((side.missing or side.missing_ranks) for side in (of_a, of_b))
    if any(order.digest is None for order in (*of_a.orders, *of_b.orders)):
        notes.append(
            "Ranks of a map-style dataset share one place in one order, and are given other batches: there is no "
            "digest of what they saw. Only rows, order and seed were compared."
        )
        return LedgerComparison(name_a, name_b, "rows", (_of_places(of_a, of_b, why),), tuple(notes), whole)
    entries_a, entries_b = _entries(of_a), _entries(of_b)
    rows = [_row(name, entries_a.get(name), entries_b.get(name), why) for name in sorted({*entries_a, *entries_b})]
    unit = "batches" if of_a.header.kind == "map" else "samples"
    return LedgerComparison(name_a, name_b, unit, tuple(rows), tuple(notes), whole)


def _entries(summary: Summary) -> dict[str, tuple[int, int]]:
    """Count and digest of each lane or rank. The lanes of a loader's only rank have the numbers that lanes have."""
    found = {order.name: (order.step, order.digest or 0) for order in summary.orders}
    for lane in summary.lanes:
        _, _, number = lane.name.partition(", lane ")
        name = f"lane-{int(number):06d}" if number and summary.header.ranks == 1 else lane.name
        found[name] = lane.count, lane.digest
    return found


def _row(name: str, a: tuple[int, int] | None, b: tuple[int, int] | None, why: str) -> LedgerRow:
    (count_a, digest_a), (count_b, digest_b) = a or (None, None), b or (None, None)
    numbers = count_a, digest_a, count_b, digest_b
    if why or a is None or b is None:
        return LedgerRow(name, *numbers, "cannot be compared", why or f"only {'A' if b is None else 'B'} has it")
    if a[0] != b[0]:
        return LedgerRow(name, *numbers, "A is further" if a[0] > b[0] else "B is further")
    return LedgerRow(name, *numbers, "equal" if a[1] == b[1] else "differs")


def _why_not(a: Summary, b: Summary) -> str:
    """Why no digest of the one says anything of the other; empty where they do."""
    if a.header.kind != b.header.kind:
        return f"the dataset of A is {a.header.kind}, that of B {b.header.kind}"
    if a.header.lanes != b.header.lanes:
        return f"A has {a.header.lanes} lanes and B {b.header.lanes}, and they are dealt other rows"
    if a.header.kind == "map" and a.header.ranks != b.header.ranks:
        ranks = a.header.ranks or "no", b.header.ranks or "no"
        return f"A has leaves of {ranks[0]} ranks and B of {ranks[1]}, which are given other batches"
    sizes = a.fingerprint.get("batch_size"), b.fingerprint.get("batch_size")
    if a.header.kind != "stream" and sizes[0] != sizes[1]:
        return f"digests are of batches, which have {sizes[0]} samples in A and {sizes[1]} in B"
    return ""


def _of_places(a: Summary, b: Summary, why: str) -> LedgerRow:
    """The places of a map-style dataset in its order."""
    orders = [*a.orders[:1], *b.orders[:1]]
    if len(orders) < 2 or (orders[0].digest is None) != (orders[1].digest is None):
        why = why or "one of them is of one rank alone"
        return LedgerRow("place", None, None, None, None, "cannot be compared", why)
    (epoch_a, rows_a), (epoch_b, rows_b) = ((order.epoch, order.rows) for order in orders)
    finding: Finding = "equal"
    told = f"epoch {epoch_a}, the same order and seed"
    if others := _other_order(a, b):
        finding, told = "differs", f"another order: {', '.join(others)}"
    elif (epoch_a, rows_a) != (epoch_b, rows_b):
        finding = "A is further" if (epoch_a, rows_a) > (epoch_b, rows_b) else "B is further"
        told = f"in epochs {epoch_a} and {epoch_b}, the same order and seed"
        if epoch_a != epoch_b and (orders[0].sampler or orders[1].sampler):
            told = f"in epochs {epoch_a} and {epoch_b}, of which the orders were drawn: only one of them is in each"
    elif left := _other_data(a, b):
        finding = "differs" if any(sure for _, sure in left) else "cannot be compared"
        told = "; ".join(told for told, _ in left)
    return LedgerRow("place", rows_a, None, rows_b, None, finding, told)


def _other_order(a: Summary, b: Summary) -> list[str]:
    """What makes the order of the one another than that of the other."""
    others = [name for name in _ORDER_FIELDS if a.fingerprint.get(name) != b.fingerprint.get(name)]
    random = not str(a.fingerprint.get("sampler")).startswith("SequentialSampler")
    if random and a.head.run != b.head.run:
        others.append("the key of the run")
    if a.orders[0].epoch == b.orders[0].epoch:
        if a.orders[0].sampler != b.orders[0].sampler:
            others.append("the draw")
        if a.head.epochs != b.head.epochs:
            others.append(f"set_epoch ({_epochs_told(a)} and {_epochs_told(b)})")
    return others


def _other_data(a: Summary, b: Summary) -> list[tuple[str, bool]]:
    """What differs though place and order are the same, and whether the data that was delivered differs by it."""
    found = []
    order_a, order_b = a.orders[0], b.orders[0]
    alike = _dealt(a) == _dealt(b)
    passed_a, passed_b = (
        [[first, min(after, side.head.step)] for first, after in side.head.passed if first < side.head.step]
        for side in (a, b)
    )
    if passed_a != passed_b:
        told = f"steps left out: {_steps_told(passed_a)} in A, {_steps_told(passed_b)} in B"
        found.append((told, alike or not passed_a or not passed_b))
    if (order_a.cursor, order_a.drawn) != (order_b.cursor, order_b.drawn):
        found.append(("the sampler gave out other indices, or in batches of another size", alike))
    if order_a.skipped != order_b.skipped:
        counts = order_a.skipped.count, order_b.skipped.count
        found.append((f"samples left out on the rank that saved: {counts[0]} in A, {counts[1]} in B", False))
    return found


def _dealt(summary: Summary) -> tuple[int | None, object]:
    """How rows are dealt to batches."""
    return summary.header.world, summary.fingerprint.get("batch_size")


def _epochs_told(summary: Summary) -> str:
    return ", ".join(f"{name} {epoch}" for name, epoch in summary.head.epochs.items()) or "none"


def _steps_told(steps: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{first}-{after - 1}" for first, after in steps) or "none"


def _notes(a: Summary, b: Summary) -> list[str]:
    names = [name for name in {**a.fingerprint, **b.fingerprint} if a.fingerprint.get(name) != b.fingerprint.get(name)]
    notes = [f"The fingerprints differ in {', '.join(names)}."] if names else []
    if a.missing or b.missing or a.missing_ranks or b.missing_ranks:
        things = "lanes" if a.missing or b.missing else "ranks"
        notes.append(f"Not all {things} are here: a DCP folder of all ranks, or one file of them all, has every one.")
    return notes


def _table(comparison: LedgerComparison) -> list[str]:
    kept = _kept(comparison.rows)
    rows = [
        (row.name, _entry(row.count_a, row.digest_a), _entry(row.count_b, row.digest_b), _finding(row)) for row in kept
    ]
    head = ("lane" if comparison.unit == "samples" else "leaf", f"A: {comparison.unit}, digest")
    table = [(*head, f"B: {comparison.unit}, digest", ""), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=False)] for row in table]
    lines = ["  ".join([*three, row[3]]).rstrip() for three, row in zip(cells, table, strict=True)]
    left_out = Counter(row.finding for row in comparison.rows) - Counter(row.finding for row in kept)
    return [*lines, *(f"and {number} more: {finding}" for finding, number in left_out.items())]


def _kept(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """All rows; of very many those that differ first, and then those that cannot be compared."""
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    order: list[Finding] = ["differs", "cannot be compared", "A is further", "B is further", "equal"]
    first = sorted(rows, key=lambda row: order.index(row.finding))[:_MOST_ROWS]
    return sorted(first, key=lambda row: row.name)


def _entry(count: int | None, digest: int | None) -> str:
    if count is None:
        return "-"
    return f"{count:,}" if digest is None else f"{count:,}  {digest:016x}"


def _finding(row: LedgerRow) -> str:
    return f"{row.finding}: {row.why}" if row.why else row.finding
