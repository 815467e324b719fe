"""Where a run stands: what was delivered, and the anchors from which the rest can be made again.

These are the records of the consumer. Only a delivery moves them; what workers produced ahead is not in them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import orjson

from unbroken.anchor import Anchor
from unbroken.errors import InvalidState
from unbroken.ledger import fold
from unbroken.made import Made, Turn
from unbroken.state import checked_sampler, fragment, resealed, whole

__all__ = ["LanePosition", "LanesPosition", "MapPosition", "Position"]


@final
@dataclass(slots=True)
class LanePosition:
    """The position of one lane: epoch, turns and samples delivered in it, and how to make the rest.

    Where lanes go on with epochs of their own, ``turns`` counts on over them: whose turn it is must not start anew.

    ``sizes`` lists ``[first sample, batch size]`` wherever the batch size changed in this epoch: random numbers
    are seeded per batch, so samples that are made again need the bounds of the batches they were in.
    ``ledger`` is the count of samples over all epochs, and a rolling digest of the last sample of each turn.
    ``exact`` says that states are exact by construction (a stream's, or trusted ones): no witness is needed.
    """

    exact: bool = False
    epoch: int = 0
    turns: int = 0
    delivered: int = 0
    ended: bool = False
    ledger: tuple[int, int] = (0, 0)
    last: int | None = None
    carry: str | None = None
    anchor: Anchor | None = None
    newer: list[Anchor] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    _json: str | None = None

    def deliver(self, made: Made, size: int) -> None:
        """Count a delivered turn of up to ``size`` samples."""
        self._json = None
        if made.rolled:
            self.roll(made.carry)
        start, number = self.delivered, made.number
        self.turns += 1
        self.delivered += number
        self.last = made.digests[-1]
        self.ledger = (self.ledger[0] + number, fold(self.ledger[1], [self.last]))
        if made.opened is not None:
            self.anchor = Anchor(0, None, made.opened[1])
        if not self.sizes or self.sizes[-1][1] != size:
            self.sizes.append([start, size])
        if self.newer:
            self._promote(self.delivered - len(made.digests), made.digests)
        if made.capture is not None:
            at, before, after = made.capture
            anchor = Anchor(at, before, after, wait=int(at == self.delivered and not self.exact))
            if self.exact:
                self.anchor = anchor
            else:
                self.newer[1:] = [anchor]

    def deliver_row(self, turn: Turn) -> None:
        """Count a delivered row of a stream that is under way: the same as ``deliver``, and less to look at."""
        self._json = None
        self.turns += 1
        self.delivered = turn.at
        self.last = turn.digest
        count, rolling = self.ledger
        self.ledger = count + 1, fold(rolling, [turn.digest])
        self.anchor = Anchor(turn.at, None, turn.state)

    def _promote(self, first: int, digests: list[int]) -> None:
        for candidate in self.newer:
            candidate.witness(first, digests)
        for number in reversed(range(len(self.newer))):
            if self.newer[number].fixed:
                self.anchor = self.newer[number]
                del self.newer[: number + 1]
                return

    def end(self, made: Made) -> None:
        """The lane has no more turns in this epoch."""
        self._json = None
        if made.rolled:
            self.roll(made.carry)
        self.ended = True
        self.carry = made.carry

    def next_epoch(self, pristine: str | None) -> None:
        """Stand at the start of the next epoch; what the dataset's state was at the end is carried into it.

        A lane that was left before its end begins again as it began: at its last carry, or at the ``pristine`` state.
        """
        self._json = None
        if not self.ended and self.carry is None:
            self.carry = pristine
        self.epoch += 1
        self.turns = self.delivered = 0
        self.ended = False
        self.last = self.anchor = None
        self.newer, self.sizes = [], []

    def roll(self, carry: str | None) -> None:
        """Go on with the next epoch while other lanes are in theirs; ``turns`` counts on."""
        turns = self.turns
        self.ended, self.carry = True, carry
        self.next_epoch(None)
        self.turns = turns

    @property
    def dropped(self) -> bool:
        """Whether its epoch has ended without yielding anything. Where lanes go on, such a one does not."""
        return self.ended and not self.delivered

    def copy(self) -> LanePosition:
        """Another one at the same place, which moves on its own."""
        newer = [replace(anchor, witnesses=list(anchor.witnesses)) for anchor in self.newer]
        return replace(self, newer=newer, sizes=[list(size) for size in self.sizes])

    def starts_batch(self, sample: int) -> bool:
        """Whether a delivered sample was the first of its batch."""
        for first, size in reversed(self.sizes):
            if sample >= first:
                return (sample - first) % size == 0
        return True

    def to_json(self) -> str:
        """The fields of this lane as JSON, made anew only where the lane has moved."""
        if self._json is None:
            self._json = orjson.dumps(self._fields()).decode()
        return self._json

    def _fields(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "turns": self.turns,
            "delivered": self.delivered,
            "ended": self.ended,
            "ledger": self.ledger,
            "last": self.last,
            "sizes": self.sizes,
            "carry": fragment(self.carry),
            "anchor": None if self.anchor is None else self.anchor.fields(),
        }

    @staticmethod
    def from_json(leaf: Any, name: str, exact: bool) -> LanePosition:
        """Read the fields of a lane in a leaf. Raises ``InvalidState`` where a field is missing or of another type."""
        try:
            anchor = None
            if (a := leaf["anchor"]) is not None:
                before, after = resealed(a["before"]), resealed(a["after"])
                anchor = Anchor(
                    whole(a["at"]), before, after, 0, whole(a["first_witness"]), [whole(d) for d in a["witnesses"]]
                )
            return LanePosition(
                exact=exact,
                epoch=whole(leaf["epoch"]),
                turns=whole(leaf["turns"]),
                delivered=whole(leaf["delivered"]),
                ended=bool(leaf["ended"]),
                ledger=(whole(leaf["ledger"][0]), whole(leaf["ledger"][1])),
                last=None if leaf["last"] is None else whole(leaf["last"]),
                carry=resealed(leaf["carry"]),
                anchor=anchor,
                sizes=[[whole(first), whole(size, 1)] for first, size in leaf["sizes"]],
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InvalidState(f"The leaf {name!r} of this position is cut short or changed: {error!r}.") from None


class Position(ABC):
    """Where a rank stands in a run: ``step`` batches delivered over all epochs, ``began`` of them before this epoch.

    ``run`` is the run's key. Ranks may end an epoch at different steps, so they agree about the steps of an epoch only.
    ``epochs`` are the ``epoch`` attributes that the user's dataset and sampler had when the epoch began. ``stopped``:
    all ranks ended the epoch together, before the first step that some rank could not fill.
    """

    step: int
    began: int
    run: int | None
    epochs: dict[str, int]
    stopped: bool

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch that is going on, or comes next."""

    @abstractmethod
    def next_epoch(self, pristine: str | None) -> None:
        """Stand at the start of the next epoch."""

    @property
    @abstractmethod
    def mid_epoch(self) -> bool:
        """Whether something of the epoch was delivered."""

    @abstractmethod
    def copy(self) -> Position:
        """Another one at the same place, which moves on its own."""


@final
@dataclass(slots=True)
class LanesPosition(Position):
    """The lanes of one rank. Where each goes on with its own epochs, ``noted`` is the one that ``epochs`` are of."""

    lanes: dict[int, LanePosition]
    step: int = 0
    began: int = 0
    run: int | None = None
    epochs: dict[str, int] = field(default_factory=dict)
    stopped: bool = False
    noted: int | None = None

    @property
    def epoch(self) -> int:
        return min(lane.epoch for lane in self.lanes.values())

    def turns(self, *, endless: bool = False) -> dict[int, int]:
        """The turns taken by each lane that has more in this epoch. A lane that is ahead waits for the others.

        ``endless``: each goes on with its own next epoch, but one that yielded nothing in a whole epoch.
        """
        if endless:
            return {n: lane.turns for n, lane in self.lanes.items() if not lane.dropped}
        epoch = self.epoch
        return {n: lane.turns for n, lane in self.lanes.items() if lane.epoch == epoch and not lane.ended}

    @property
    def mid_epoch(self) -> bool:
        return any(lane.delivered or lane.ended for lane in self.lanes.values())

    def settle(self, pristine: str | None, *, alone: bool = True) -> None:
        """After a load: where no lane has more in this epoch, go on with the next, if this rank is to do so ``alone``.

        A lane that yielded nothing stayed behind while the others went on with epochs of their own: it rejoins them.
        """
        others = [lane.epoch for lane in self.lanes.values() if not lane.dropped]
        for lane in self.lanes.values():
            if others and lane.dropped and lane.epoch < min(others) - 1:
                lane.epoch = min(others) - 2
                lane.roll(lane.carry)
                lane.ended = True
        if alone and not self.turns():
            self.next_epoch(pristine)

    def next_epoch(self, pristine: str | None) -> None:
        epoch, self.began, self.stopped, self.noted = self.epoch, self.step, False, None
        for lane in self.lanes.values():
            if lane.epoch == epoch:  # others came from a rank that had begun the next already
                lane.next_epoch(pristine)

    def copy(self) -> LanesPosition:
        return replace(self, lanes={number: lane.copy() for number, lane in self.lanes.items()})

    def leaves(self) -> dict[int, str]:
        """The leaf of every lane: one head for all, and of each lane what it has kept since it moved last."""
        head = _leaf(self)[:-1]
        return {number: f'{head},"lane":{lane.to_json()}}}' for number, lane in self.lanes.items()}

    def leaf_of_all(self) -> str:
        """One leaf for all lanes of a plain loader."""
        return _leaf(self, lanes=[orjson.Fragment(lane.to_json()) for lane in self.lanes.values()])

    @staticmethod
    def from_leaves(leaves: Iterable[tuple[int, str, Mapping[str, Any]]], exact: bool) -> LanesPosition:
        """Read the leaves ``(lane, name, leaf)`` of one rank. Its step is that of the lane that came furthest.

        Raises ``InvalidState`` where a field is missing or of another type.
        """
        lanes, heads = {}, []
        for lane, name, leaf in leaves:
            position = lanes[lane] = LanePosition.from_json(leaf.get("lane"), name, exact)
            head = _head_of(leaf, name)
            heads.append(((-position.epoch, head[0] - head[1], head[0]), head))
        return LanesPosition(lanes, *max(heads, key=lambda found: found[0])[1])


@final
@dataclass(slots=True)
class MapPosition(Position):
    """A map-style dataset: how many rows of the epoch's global order were delivered, by all ranks together.

    ``sampler`` is what makes the order again, ``cursor`` where a custom sampler stands (see ``sampling``).
    """

    epoch: int = 0
    rows: int = 0
    step: int = 0
    began: int = 0
    run: int | None = None
    ledger: int = 0
    sampler: dict[str, Any] | None = None
    epochs: dict[str, int] = field(default_factory=dict)
    cursor: LanePosition = field(default_factory=LanePosition)
    stopped: bool = False

    @property
    def mid_epoch(self) -> bool:
        return self.rows > 0

    def deliver(self, rows: int, digest: int | None) -> None:
        """Count a delivered batch, whose last sample has this digest; ``rows`` of the global order are done with it.

        A batch with no row in it has no digest.
        """
        self.rows = rows
        self.step += 1
        if digest is not None:
            self.ledger = fold(self.ledger, [digest])

    def next_epoch(self, pristine: str | None) -> None:
        self.epoch += 1
        self.rows, self.began, self.stopped = 0, self.step, False
        self.sampler = None
        self.cursor.next_epoch(pristine)

    def copy(self) -> MapPosition:
        return replace(self, cursor=self.cursor.copy())

    def leaf(self, *, shared: bool) -> str:
        """The leaf of a rank; or, ``shared``, that of all of them, without what one rank alone was given."""
        return _leaf(
            self,
            epoch=self.epoch,
            rows=self.rows,
            ledger=None if shared else self.ledger,
            sampler=self.sampler,
            cursor=orjson.Fragment(self.cursor.to_json()),
        )

    @staticmethod
    def from_leaf(leaf: Mapping[str, Any], name: str) -> MapPosition:
        """Read a leaf. Raises ``InvalidState`` where a field is missing or of another type."""
        try:
            step, began, run, epochs, stopped, _ = _head_of(leaf, name)
            return MapPosition(
                epoch=whole(leaf["epoch"]),
                rows=whole(leaf["rows"]),
                step=step,
                began=began,
                run=run,
                ledger=whole(leaf["ledger"] or 0),
                sampler=checked_sampler(leaf["sampler"]),
                epochs=epochs,
                cursor=LanePosition.from_json(leaf["cursor"], name, exact=False),
                stopped=stopped,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidState(f"The leaf {name!r} of this position is cut short or changed: {error!r}.") from None


def _head_of(leaf: Mapping[str, Any], name: str) -> tuple[int, int, int | None, dict[str, int], bool, int | None]:
    """The fields of ``_leaf``. Those that are seldom needed may be missing."""
    try:
        epochs = {name: whole(epoch) for name, epoch in leaf["epochs"].items()}
        run = None if leaf["run"] is None else whole(leaf["run"])
        noted = None if leaf.get("noted") is None else whole(leaf["noted"])
        return whole(leaf["step"]), whole(leaf["began"]), run, epochs, bool(leaf.get("stopped")), noted
    except (KeyError, ValueError, AttributeError) as error:
        raise InvalidState(f"The leaf {name!r} of this position is cut short or changed: {error!r}.") from None


def _leaf(position: Position, **fields: Any) -> str:
    head = {"step": position.step, "began": position.began, "run": position.run, "epochs": position.epochs}
    if position.stopped:
        head["stopped"] = True
    if isinstance(position, LanesPosition) and position.noted is not None:
        head["noted"] = position.noted
    return orjson.dumps(head | fields).decode()
