"""Where one lane stands: what of it was delivered, and the anchor from which the rest can be made again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, final

import orjson

from unbroken.anchor import Anchor
from unbroken.errors import InvalidState
from unbroken.ledger import fold_one
from unbroken.made import Made, Turn
from unbroken.state import fragment, list_of, resealed, whole

__all__ = ["ROW", "LanePosition", "Mark"]

ROW = 5

Mark = tuple[Any, ...]
"""The fields of a position that are saved, as they were at a place. Nothing in it is changed later."""


@final
@dataclass(slots=True)
class LanePosition:
    """The position of one lane: epoch, turns and samples delivered in it, and how to make the rest.

    Where lanes go on with epochs of their own, ``turns`` counts on over them: whose turn it is must not start anew.

    ``sizes`` lists ``[first sample, batch size]`` wherever the batch size changed in this epoch: random numbers
    are seeded per batch, so samples that are made again need the bounds of the batches they were in. A batch in which
    samples failed and were left out is ``[first sample, how many with those, *the numbers of those]``: ``delivered``
    and all numbers of samples count what was asked of the dataset.
    ``ledger`` is the count of samples over all epochs, and a rolling digest of all turns (see ``entry_of``).
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
        out = [each.number for each in made.left_out if each.epoch == self.epoch] if made.left_out else []
        self.turns += 1
        self.delivered += number + len(out)
        self.last = made.digests[-1]
        entry = self.last if made.entry is None else made.entry
        self.ledger = (self.ledger[0] + number, fold_one(self.ledger[1], entry))
        if made.opened is not None:
            self.anchor = Anchor(0, None, made.opened[1])
        if out:
            self.sizes.append([start, number + len(out), *out])
        elif not self.sizes or self.sizes[-1][1] != size:
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
        self.ledger = count + 1, fold_one(rolling, turn.digest)
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

    def put_back(self, ledger: tuple[int, int]) -> None:
        """What was counted last was left out, and is in no ledger."""
        if self.ledger != ledger:
            self.ledger, self._json = ledger, None

    @property
    def dropped(self) -> bool:
        """Whether its epoch has ended without yielding anything. Where lanes go on, such a one does not."""
        return self.ended and not self.delivered

    def copy(self) -> LanePosition:
        """Another one at the same place, which moves on its own."""
        newer = [replace(anchor, witnesses=list(anchor.witnesses)) for anchor in self.newer]
        return replace(self, newer=newer, sizes=[list(size) for size in self.sizes])

    def mark(self) -> Mark:
        """This place, for ``back_at``. Made before every move, so it copies nothing: of ``sizes``, which only grow,
        their number is kept. The first ``ROW`` fields are all that ``deliver_row`` overwrites.
        """
        return (
            self.turns, self.delivered, self.last, self.ledger, self.anchor,
            self.epoch, self.ended, self.carry, self.sizes, len(self.sizes),
        )  # fmt: skip

    def back_at(self, mark: Mark, whole: Mark | None) -> LanePosition:
        """The lane as it was at a mark. What is not an anchor yet, and is not saved, is not in it.

        ``whole`` is the first mark since then with all fields; without one, only rows came.
        """
        turns, delivered, last, ledger, anchor = mark[:ROW]
        epoch, ended, carry, sizes, number = (whole or self.mark())[ROW:]
        sizes = [*sizes[:number]]
        return LanePosition(self.exact, epoch, turns, delivered, ended, ledger, last, carry, anchor, sizes=sizes)

    def starts_batch(self, sample: int) -> bool:
        """Whether a delivered sample was the first of its batch."""
        for first, size, *_ in reversed(self.sizes):
            if sample >= first:
                return (sample - first) % size == 0
        return True

    @property
    def last_place(self) -> int:
        """The number of the sample delivered last."""
        place, out = self.delivered - 1, self.left_out()
        while place in out:
            place -= 1
        return place

    def left_out(self) -> frozenset[int]:
        """The numbers of the samples of this epoch that failed and were left out."""
        return frozenset(number for _, _, *out in self.sizes for number in out)

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
                before, after = _sealed(a["before"]), _sealed(a["after"])
                anchor = Anchor(
                    whole(a["at"]), before, after, 0, whole(a["first_witness"]), [whole(d) for d in a["witnesses"]]
                )
            return LanePosition(
                exact=exact,
                epoch=whole(leaf["epoch"]),
                turns=whole(leaf["turns"]),
                delivered=whole(leaf["delivered"]),
                ended=_truth(leaf["ended"]),
                ledger=(whole(leaf["ledger"][0]), whole(leaf["ledger"][1])),
                last=None if leaf["last"] is None else whole(leaf["last"]),
                carry=_sealed(leaf["carry"]),
                anchor=anchor,
                sizes=[
                    [whole(first), whole(size, 1), *map(whole, out)] for first, size, *out in list_of(leaf["sizes"])
                ],
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InvalidState(f"The leaf {name!r} of this position is cut short or changed: {error!r}.") from None


def _sealed(value: Any) -> str | None:
    """A state of a dataset or stream, which is a JSON object."""
    if value is not None and type(value) is not dict:
        raise ValueError(f"expected a state, found {value!r}")
    return resealed(value)


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected true or false, found {value!r}")
    return value
