"""What is different in two positions: header, fingerprint, and how far apart their lanes are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from rich.console import Group, RenderableType
from rich.markup import escape

from unbroken.checkpoints.ledgers import LedgerComparison, compare_positions
from unbroken.checkpoints.summary import LaneLine, Summary, summarize
from unbroken.checkpoints.tables import lanes_told, plain_table
from unbroken.streams.mix import Mix
from unbroken.streams.pack import Pack
from unbroken.streams.repeat import Repeat
from unbroken.streams.shuffle import Shuffle

__all__ = ["Comparison", "FieldChange", "LaneChange", "compare"]

# What another value of a field means at a load, where that does not depend on the pipeline; of stages their own word.
_MEANINGS = {"files": "data, held", "stages": "data, held", "save_prefetched": "data, held"}
_MEANINGS |= dict.fromkeys(("sampler", "seed", "seed_by"), "order")
_MEANINGS |= {**Mix.DIFFERENCES, **Pack.DIFFERENCES, **Repeat.DIFFERENCES, **Shuffle.DIFFERENCES}
_WORDS = {"cut": "safe where no later stage counts rows", "held": "safe between epochs", "safe": "safe"}
_HEADER = {
    "version": "a later one is refused by an older unbroken",
    "kind": "refused",
    "lanes": "refused, but by a loader without lanes and dp arguments",
    "ranks": "refused",
    "world": "safe",
    "at": "",
}
_HEAD = {"step": "", "began": "", "run": "another run", "epochs": "", "stopped": "", "passed": ""}
_BY_KIND = {
    "stream": "safe",
    "iterable": "order-changing where there are several lanes",
    "map": "safe, but order-changing for a batch sampler",
}


@final
@dataclass(frozen=True)
class FieldChange:
    """A field of the header or the fingerprint with another value, and what that means at a load where it is known."""

    field: str
    a: Any
    b: Any
    meaning: str = ""


@final
@dataclass(frozen=True)
class LaneChange:
    """A lane that stands elsewhere: B minus A in epochs, turns, samples of the epoch, and samples over all epochs.

    None where only one of them has it; ``a`` and ``b`` say which.
    """

    name: str
    a: bool
    b: bool
    epochs: int | None = None
    turns: int | None = None
    delivered: int | None = None
    count: int | None = None


@final
@dataclass(frozen=True)
class Comparison:
    """Two positions, held against each other. ``equal``: they are the same, to the last byte of each leaf."""

    equal: bool
    header: list[FieldChange]
    fingerprint: list[FieldChange]
    lanes: list[LaneChange]
    ledgers: LedgerComparison
    others: list[str]

    def to_json(self) -> str:
        """All of it as JSON."""
        verdict = {"verdict": self.ledgers.verdict, **asdict(self.ledgers)}
        return json.dumps({**asdict(self), "ledgers": verdict})

    def tables(self) -> Group:
        """The same for a terminal."""
        if self.equal:
            return Group("The positions are equal.")
        parts: list[RenderableType] = []
        for title, changes in (("Header", self.header), ("Fingerprint", self.fingerprint)):
            if changes:
                table = plain_table(title, "field", "A", "B", "at a load")
                for change in changes:
                    table.add_row(*map(escape, (change.field, _text(change.a), _text(change.b), change.meaning)))
                parts += [table, ""]
        if self.lanes:
            parts += [self._lanes(), ""]
        if self.others:
            parts += [f"Leaves that differ in what no table shows: {', '.join(self.others)}", ""]
        parts += ["Ledgers", escape(str(self.ledgers))]
        return Group(*parts)

    def _lanes(self) -> RenderableType:
        """Lanes that moved alike together."""
        right = ("epochs", "turns", "in the epoch", "samples in all")
        table = plain_table("Lanes: how much further B is than A", "lanes", *right, "", right=right)
        alike: dict[tuple[Any, ...], list[str]] = {}
        for change in self.lanes:
            numbers = change.epochs, change.turns, change.delivered, change.count
            told = "" if change.a and change.b else f"only in {'A' if change.a else 'B'}"
            key = (*("" if number is None else f"{number:+,}" for number in numbers), told)
            alike.setdefault(key, []).append(change.name)
        for cells, names in alike.items():
            table.add_row(lanes_told(names), *cells)
        return table


def compare(a: Mapping[str, str], b: Mapping[str, str], name_a: str, name_b: str) -> Comparison:
    """Hold two positions against each other. Raises ``InvalidState`` where one of them is cut short."""
    of_a, of_b = summarize(a), summarize(b)
    lanes = list(_lane_changes(of_a, of_b))
    shown = {change.name for change in lanes}
    leaves = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
    return Comparison(
        equal=not leaves,
        header=list(_header_changes(of_a, of_b)),
        fingerprint=list(_fingerprint_changes(of_a, of_b)),
        lanes=lanes,
        ledgers=compare_positions(a, b, name_a, name_b),
        others=[name for name in leaves if name != "unbroken" and not any(lane.startswith(name) for lane in shown)],
    )


def _header_changes(a: Summary, b: Summary) -> Iterator[FieldChange]:
    for part, fields in (("header", _HEADER), ("head", _HEAD)):
        for name, meaning in fields.items():
            found = getattr(getattr(a, part), name), getattr(getattr(b, part), name)
            if found[0] != found[1]:
                yield FieldChange(name, *found, meaning)
    for order_a, order_b in zip(a.orders, b.orders, strict=False):
        for name in ("epoch", "rows", "sampler", "cursor", "beyond", "skipped"):
            found = getattr(order_a, name), getattr(order_b, name)
            if found[0] != found[1]:
                yield FieldChange(f"{order_a.name}: {name}", *found)


def _fingerprint_changes(a: Summary, b: Summary) -> Iterator[FieldChange]:
    for name in {**a.fingerprint, **b.fingerprint}:
        found = a.fingerprint.get(name), b.fingerprint.get(name)
        if found[0] != found[1]:
            yield FieldChange(name, *found, _meaning(name, a, b))


def _meaning(name: str, a: Summary, b: Summary) -> str:
    if name == "batch_size":
        return _BY_KIND.get(a.header.kind, "")
    source, _, field = name.rpartition(": ")
    if source and not all(any(known.startswith(f"{source}: ") for known in side.fingerprint) for side in (a, b)):
        return "safe: the source came or went"
    kind = _MEANINGS.get(field.partition("[")[0], "data")
    if field == "seq_len" and "pack" not in str(a.fingerprint.get(f"{source}: stages" if source else "stages")):
        kind = "held"  # of read_tokens
    if kind in _WORDS:
        return _WORDS[kind]
    word, _, held = kind.partition(", ")
    return f"{word}-changing" + (", refused within an epoch" if held else "")


def _lane_changes(a: Summary, b: Summary) -> Iterator[LaneChange]:
    of_a, of_b = {lane.name: lane for lane in a.lanes}, {lane.name: lane for lane in b.lanes}
    for name in sorted({*of_a, *of_b}):
        lane_a, lane_b = of_a.get(name), of_b.get(name)
        if lane_a is None or lane_b is None:
            yield LaneChange(name, lane_a is not None, lane_b is not None)
        elif _place(lane_a) != _place(lane_b):
            yield LaneChange(name, True, True, *(y - x for x, y in zip(_place(lane_a), _place(lane_b), strict=True)))


def _place(lane: LaneLine) -> tuple[int, int, int, int]:
    return lane.epoch, lane.turns, lane.delivered, lane.count


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}…{text[-9:]}"
