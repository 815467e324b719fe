"""A position as tables for a terminal of 80 columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from unbroken.checkpoints.outline import SourcePlace
from unbroken.checkpoints.summary import LaneLine, OrderLine, Summary

__all__ = ["lanes_told", "plain_table", "tables_of"]

_MOST_LANES = 16
"""More lanes than these are shown in groups that stand alike, unless all are asked for."""
_MOST_NAMED = 8


def plain_table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines, with a title on the left; the columns in ``right`` hold numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def lanes_told(names: Sequence[str]) -> str:
    """Names of lanes in short: ``0-3, 7``; those that are no numbers as they are."""
    short = [_short(name) for name in names]
    others = [name for name in short if not name.isdecimal()]
    return ", ".join([*filter(None, [_numbered(sorted(int(name) for name in short if name.isdecimal()))]), *others])


def _numbered(numbers: Iterable[int]) -> str:
    """Whole numbers in order as ranges: ``0-3, 7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def tables_of(summary: Summary, where: str, *, every_lane: bool) -> Group:
    """Header, fingerprint, and the place of each lane and source. ``every_lane``: a line for each, however many."""
    parts: list[RenderableType] = [_header(summary, where), _fingerprint(summary)]
    if summary.orders:
        parts.append(_orders(summary))
    if summary.lanes:
        parts += _lanes(summary, every_lane)
    parts += [table for table in (_sources(summary), _weights(summary), _left_out(summary)) if table is not None]
    spaced = [part for each in parts for part in (each, "")]
    return Group(*spaced[:-1])


def _header(summary: Summary, where: str) -> Table:
    table = plain_table("Position", "", "")
    table.show_header = False
    rows: list[tuple[str, Any]] = [
        ("in", where),
        (
            "kind",
            {"map": "map-style", "iterable": "iterable", "stream": "stream"}.get(
                summary.header.kind, summary.header.kind
            ),
        ),
        ("format version", summary.header.version),
        ("steps", f"{summary.head.step:,}, of which {summary.head.step - summary.head.began:,} in this epoch"),
        ("header written at", _at(summary)),
        ("lanes", _lanes_told(summary)),
        ("ranks", _ranks_told(summary)),
        ("samples delivered", _samples_told(summary)),
        ("tokens delivered", None if summary.tokens is None else f"{summary.tokens:,}, with padding"),
        ("key of the run", "not drawn yet" if summary.head.run is None else f"{summary.head.run:016x}"),
        ("set_epoch", ", ".join(f"{name} {epoch}" for name, epoch in summary.head.epochs.items()) or None),
        ("stopped", "yes: all ranks ended the epoch together" if summary.head.stopped else None),
        ("steps left out", ", ".join(f"{first}-{after - 1}" for first, after in summary.head.passed) or None),
    ]
    for name, value in rows:
        if value is not None:
            table.add_row(name, escape(str(value)))
    return table


def _at(summary: Summary) -> str | None:
    """Where the header says something else than the leaves."""
    at, head = summary.header.at, summary.head
    if len(at) != 3 or at[1:] == [head.step - head.began, head.step]:
        return None
    return f"epoch {at[0]}, step {at[1]} of it, step {at[2]} in all"


def _samples_told(summary: Summary) -> str | None:
    if not summary.lanes:
        return None
    told = f"{summary.samples:,} over all epochs"
    if summary.samples or not summary.head.step or summary.head.passed or summary.missing:
        return told
    return f"{told}; the steps before are not in the ledger: taken over from another loader"


def _lanes_told(summary: Summary) -> str | None:
    if summary.header.lanes is None:
        return None
    missing = summary.missing
    return f"{summary.header.lanes}" + (f"; not here are {_numbered(missing)} (of other ranks)" if missing else "")


def _ranks_told(summary: Summary) -> str | None:
    if summary.header.ranks is not None:
        missing = summary.missing_ranks
        here = f"; not here are {_numbered(missing)}" if missing else ""
        return f"{summary.header.ranks}, of which each has its own leaf; the same number at a load{here}"
    return None if summary.header.world is None else f"saved on {summary.header.world}; any number at a load"


def _fingerprint(summary: Summary) -> Table:
    table = plain_table("Fingerprint", "field", "value")
    for name, value in summary.fingerprint.items():
        table.add_row(escape(name), escape(value if isinstance(value, str) else json.dumps(value)))
    return table


def _orders(summary: Summary) -> Table:
    right = ("step", "epoch", "rows")
    table = plain_table("Place in the order", "leaf", *right, "ledger", "order drawn from", right=right)
    for order in summary.orders:
        ledger = "none: shared" if order.digest is None else f"{order.digest:016x}"
        rows = f"{order.rows:,}"
        table.add_row(order.name, f"{order.step:,}", str(order.epoch), rows, ledger, escape(_order_told(order)))
    return table


def _order_told(order: OrderLine) -> str:
    told = {"seed": "a drawn seed"}.get(next(iter(order.sampler)), "a generator") if order.sampler else "seed and epoch"
    if order.cursor is not None:
        told = f"a sampler of its own, {order.cursor:,} indices in"
    if order.beyond:
        told += f"; delivered beyond the first step that was not: {', '.join(f'{a}-{b}' for a, b in order.beyond)}"
    return told


def _lanes(summary: Summary, every_lane: bool) -> Iterator[RenderableType]:
    title = "Lanes" if summary.missing == [] else "Lanes that are here"
    if every_lane or len(summary.lanes) <= _MOST_LANES:
        right = ("epoch", "turns", "delivered", "samples in all", "anchor")
        table = plain_table(title, "lane", *right[:4], "digest", right[4], "", right=right)
        for lane in summary.lanes:
            anchor = "" if lane.anchor is None else f"{lane.anchor:,}"
            numbers = str(lane.epoch), f"{lane.turns:,}", f"{lane.delivered:,}", f"{lane.count:,}"
            table.add_row(_short(lane.name), *numbers, f"{lane.digest:016x}", anchor, _remarks(lane))
        yield table
        return
    table = plain_table(
        f"{title} (those that stand alike together; --lanes shows each)",
        "lanes", "epoch", "turns", "delivered", "samples in all", "", right=("epoch", "turns"),
    )  # fmt: skip
    alike = groupby(sorted(summary.lanes, key=_stands), key=_stands)
    for (epoch, turns, ended), group in alike:
        lanes = list(group)
        names = lanes_told([lane.name for lane in lanes])
        delivered, counts = _span(lane.delivered for lane in lanes), _span(lane.count for lane in lanes)
        table.add_row(names, str(epoch), f"{turns:,}", delivered, counts, "ended" if ended else "")
    yield table


def _stands(lane: LaneLine) -> tuple[int, int, bool]:
    return lane.epoch, lane.turns, lane.ended


def _short(name: str) -> str:
    """``lane-000012`` as ``12``; a lane in the only leaf of a rank as its number."""
    last = name.removeprefix("lane-").removeprefix("rank-0000, lane ")
    return str(int(last)) if last.isdecimal() else name


def _span(numbers: Iterable[int]) -> str:
    found = list(numbers)
    low, high = min(found), max(found)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _remarks(lane: LaneLine) -> str:
    remarks = ["ended"] if lane.ended else []
    if lane.prefetched:
        remarks.append(f"{lane.prefetched} made ahead")
    return ", ".join(remarks)


def _sources(summary: Summary) -> RenderableType | None:
    """Each source, over all lanes that have begun it."""
    places: dict[str, list[SourcePlace]] = {}
    for lane in summary.lanes:
        for place in lane.stream.places:
            places.setdefault(place.source, []).append(place)
    if not places:
        return None
    right = ("rows", "tokens", "passes", "lanes", "ended", "chunk", "place")
    shown = [name for name in right if name != "tokens" or any(p.tokens for each in places.values() for p in each)]
    if not any(p.rows is not None for each in places.values() for p in each):
        shown.remove("rows")
    table = plain_table("Sources, in this epoch", "source", *shown, "of", right=right)
    for name, of_source in places.items():
        first = of_source[0]
        chunks = [p.chunk for p in of_source if p.chunk is not None]
        stood = [p.place for p in of_source if p.place is not None]
        cells = {
            "rows": f"{sum(p.rows or 0 for p in of_source):,}" if first.rows is not None else "",
            "tokens": f"{sum(p.tokens or 0 for p in of_source):,}",
            "passes": _span(p.passes for p in of_source),
            "lanes": str(len(of_source)),
            "ended": str(sum(p.ended for p in of_source)),
            "chunk": _span(chunks) if chunks else "",
            "place": f"{first.unit} {_span(stood)}" if stood else "",
        }
        table.add_row(escape(name or first.format or "(the only one)"), *(cells[each] for each in shown), first.format)
    found = [place for of_source in places.values() for place in of_source]
    if any(place.counted_early for place in found):
        return Group(table, "[dim]Counted up to the anchor of each lane; more rows were taken since.[/]")
    if any(place.anchored for place in found):
        return Group(table, "[dim]Places are those of anchors, from which rows are made again; more were read.[/]")
    return table


def _weights(summary: Summary) -> RenderableType | None:
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for lane in summary.lanes:
        for weights in lane.stream.weights:
            found.setdefault((weights.mix, json.dumps(weights.plan)), []).append((weights.epoch, weights.row))
    if not found:
        return None
    table = plain_table("History of weights", "mix", "from epoch", "row of a lane", "on lanes", "weights", right=())
    for (name, plan), since in found.items():
        steps = [f"from row {row}: {_weights_told(weights)}" for row, weights in json.loads(plan)]
        told = "\n".join(steps) if len(steps) > 1 else _weights_told(json.loads(plan)[0][1])
        epochs, rows = _span(epoch for epoch, _ in since), _span(row for _, row in since)
        table.add_row(escape(name or "(the whole)"), epochs, rows, str(len(since)), escape(told))
    return table


def _weights_told(weights: dict[str, float]) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in weights.items())


def _left_out(summary: Summary) -> RenderableType | None:
    table = plain_table("Left out (the last of them by name)", "what", "how many", "where", "why", right=("how many",))
    holders: list[LaneLine | OrderLine] = [*summary.lanes, *summary.orders]
    samples, last = sum(each.skipped.count for each in holders), [why for each in holders for why in each.skipped.last]
    if samples:
        _add_named(table, "samples", samples, last)
    rows: dict[str, tuple[int, list[list[str]]]] = {}
    for lane in summary.lanes:
        for left_out in lane.stream.left_out:
            count, named = rows.get(left_out.source, (0, []))
            rows[left_out.source] = count + left_out.count, [*named, *left_out.named]
    for source, (count, named) in rows.items():
        _add_named(table, f"rows of {source}" if source else "rows", count, named)
    return table if table.row_count else None


def _add_named(table: Table, what: str, count: int, named: Sequence[Sequence[str]]) -> None:
    for number, (where, why) in enumerate(named[-_MOST_NAMED:] or [("", "")]):
        table.add_row(*((what, f"{count:,}") if not number else ("", "")), escape(where), escape(why))
