"""What is in a position, as data: for the tables of ``unbroken state show``, for its JSON, and for comparisons."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

from unbroken.checkpoints.outline import (
    LeftOutRows,
    SourcePlace,
    Weights,
    documents_of,
    left_out_rows,
    places_of,
    weights_of,
)
from unbroken.errors import InvalidState
from unbroken.state import HEADER, checked_sampler, parse_header, parse_leaf, whole

__all__ = ["Head", "Header", "LaneLine", "LeftOut", "OrderLine", "StreamLine", "Summary", "summarize"]


@final
@dataclass(frozen=True)
class LeftOut:
    """Samples that were left out of a lane or rank: how many, and the last, ``[where, what was raised]`` each."""

    count: int
    last: list[list[str]]


@final
@dataclass(frozen=True)
class StreamLine:
    """What the state of a lane of a stream says: documents that ``pack`` has read, sources, weights, rows left out."""

    documents: int | None
    places: list[SourcePlace]
    weights: list[Weights]
    left_out: list[LeftOutRows]


@final
@dataclass(frozen=True)
class LaneLine:
    """One lane: what was delivered of it, and where its sources stand.

    ``delivered`` is of this epoch; ``count`` and ``digest`` are the ledger, over all epochs. ``anchor`` is the sample
    of the epoch from which the rest is made again; None at the start of an epoch.
    """

    name: str
    step: int
    epoch: int
    turns: int
    delivered: int
    ended: bool
    count: int
    digest: int
    anchor: int | None
    prefetched: int
    skipped: LeftOut
    stream: StreamLine


@final
@dataclass(frozen=True)
class OrderLine:
    """The order of a map-style dataset: ``rows`` of the epoch were delivered. ``digest`` is the ledger, of a rank.

    ``sampler`` is what draws the order again; None where it follows from seed and epoch. ``cursor``: indices taken of a
    sampler of the user's; ``drawn``: count and digest of them over all epochs.
    """

    name: str
    step: int
    epoch: int
    rows: int
    digest: int | None
    sampler: dict[str, Any] | None
    cursor: int | None
    drawn: list[int]
    beyond: list[list[int]]
    skipped: LeftOut


@final
@dataclass(frozen=True)
class Header:
    """The header but its fingerprint: ``lanes`` in all, ``ranks`` that have leaves of their own, the ``world`` that
    saved, ``at``: epoch, steps of it, and steps in all. None where it has no such field.
    """

    kind: str
    version: int
    lanes: int | None
    ranks: int | None
    world: int | None
    at: list[int]


@final
@dataclass(frozen=True)
class Head:
    """The fields that each leaf begins with, as in the one that came furthest. ``passed``: steps that were left out, as
    ``[first, after the last]``.
    """

    step: int
    began: int
    run: int | None
    epochs: dict[str, int]
    stopped: bool
    passed: list[list[int]]


@final
@dataclass(frozen=True)
class Summary:
    """A position, read."""

    header: Header
    fingerprint: dict[str, Any]
    head: Head
    lanes: list[LaneLine] = field(default_factory=list)
    orders: list[OrderLine] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        """The lanes that the header counts and that are not here: a position of one rank has its own only."""
        if self.header.lanes is None or self.header.ranks is not None:
            return []
        here = {lane.name for lane in self.lanes}
        return [number for number in range(self.header.lanes) if f"lane-{number:06d}" not in here]

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks that the header counts and that are not here, where each has a leaf of its own."""
        names = [*(lane.name for lane in self.lanes), *(order.name for order in self.orders)]
        here = {name.partition(", ")[0] for name in names}
        return [number for number in range(self.header.ranks or 0) if f"rank-{number:04d}" not in here]

    @property
    def samples(self) -> int:
        """What was delivered over all epochs, by the ledgers of the lanes that are here."""
        return sum(lane.count for lane in self.lanes)

    @property
    def tokens(self) -> int | None:
        """Tokens delivered, where rows have a fixed length; what is padding counts."""
        length = self.fingerprint.get("seq_len")
        return self.samples * length if self.header.kind == "stream" and isinstance(length, int) else None

    def to_json(self) -> str:
        """All of it as JSON."""
        more = {"samples": self.samples, "tokens": self.tokens}
        return json.dumps({**asdict(self), **more, "missing": self.missing, "missing_ranks": self.missing_ranks})


def summarize(position: Mapping[str, str]) -> Summary:
    """What a position says. Raises ``InvalidState`` where it is cut short, or of a later version."""
    found = parse_header(position)
    fingerprint = found["fingerprint"]
    lanes: list[LaneLine] = []
    orders: list[OrderLine] = []
    heads = [Head(0, 0, None, {}, False, [])]
    with _reading(HEADER):
        header = _header(found)
    for name in sorted(position.keys() - {HEADER}):
        leaf = parse_leaf(position, name)
        with _reading(name):
            lanes += [_lane_line(of, leaf, lane, fingerprint) for of, lane in _lanes_in(name, leaf)]
            if "rows" in leaf:
                orders.append(_order_line(name, leaf))
            heads.append(_head(leaf))
    furthest = max(heads, key=lambda head: head.step)
    stopped = any(head.stopped for head in heads)
    return Summary(header, fingerprint, replace(furthest, stopped=stopped), lanes, orders)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InvalidState(f"The leaf {name!r} of this position is cut short or changed: {error!r}.") from None


def _header(leaf: Mapping[str, Any]) -> Header:
    return Header(
        kind=str(leaf["kind"]),
        version=whole(leaf["version"]),
        lanes=_or_none(leaf.get("lanes")),
        ranks=_or_none(leaf.get("ranks")),
        world=_or_none(leaf.get("world")),
        at=[whole(number) for number in leaf.get("at") or ()],
    )


def _head(leaf: Mapping[str, Any]) -> Head:
    return Head(
        step=whole(leaf["step"]),
        began=whole(leaf["began"]),
        run=_or_none(leaf["run"]),
        epochs={name: whole(epoch) for name, epoch in leaf["epochs"].items()},
        stopped=bool(leaf.get("stopped")),
        passed=[[whole(first), whole(after)] for first, after in leaf.get("passed") or ()],
    )


def _or_none(value: Any) -> int | None:
    return None if value is None else whole(value)


def _lanes_in(name: str, leaf: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The lanes of a leaf: the one, or all of a rank's."""
    if "lane" in leaf:
        yield name, leaf["lane"]
    for number, lane in enumerate(leaf.get("lanes") or ()):
        yield f"{name}, lane {number}", lane


def _lane_line(name: str, leaf: Mapping[str, Any], lane: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> LaneLine:
    anchor = lane["anchor"]
    state = None if anchor is None else anchor["after"]
    return LaneLine(
        name=name,
        step=whole(leaf["step"]),
        epoch=whole(lane["epoch"]),
        turns=whole(lane["turns"]),
        delivered=whole(lane["delivered"]),
        ended=bool(lane["ended"]),
        count=whole(lane["ledger"][0]),
        digest=whole(lane["ledger"][1]),
        anchor=None if anchor is None else whole(anchor["at"]),
        prefetched=len(lane.get("prefetched") or ()),
        skipped=_left_out(lane),
        stream=StreamLine(documents_of(state), places_of(state, fingerprint), weights_of(state), left_out_rows(state)),
    )


def _order_line(name: str, leaf: Mapping[str, Any]) -> OrderLine:
    cursor = leaf["cursor"]
    return OrderLine(
        name=name,
        step=whole(leaf["step"]),
        epoch=whole(leaf["epoch"]),
        rows=whole(leaf["rows"]),
        digest=_or_none(leaf["ledger"]),
        sampler=checked_sampler(leaf["sampler"]),
        cursor=whole(cursor["delivered"]) if cursor["delivered"] or cursor["anchor"] else None,
        drawn=[whole(number) for number in cursor["ledger"]],
        beyond=[[whole(first), whole(last)] for first, last in leaf.get("beyond") or ()],
        skipped=_left_out(leaf),
    )


def _left_out(fields: Mapping[str, Any]) -> LeftOut:
    skipped = fields.get("skipped") or {"count": 0, "last": []}
    return LeftOut(whole(skipped["count"]), [[str(where), str(why)] for where, why in skipped["last"]])
