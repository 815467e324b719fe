"""Where a run stands: what was delivered, and the anchors from which the rest can be made again.

These are the records of the consumer. Only a delivery moves them; what workers produced ahead is not in them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, final

import orjson

from unbroken.errors import InvalidState
from unbroken.lane_position import ROW, LanePosition, Mark
from unbroken.ledger import fold_one
from unbroken.made import Turn
from unbroken.prefetched import Held, held_of_lanes, held_to_json
from unbroken.skipped import Skipped
from unbroken.state import checked_sampler, whole
from unbroken.steps import Ranges, Steps, lies_in, read_beyond, read_steps

__all__ = ["LanesPosition", "MapPosition", "Position"]


class Position(ABC):
    """Where a rank stands in a run: ``step`` batches delivered over all epochs, ``began`` of them before this epoch.

    ``run`` is the run's key. Ranks may end an epoch at different steps, so they agree about the steps of an epoch only.
    ``epochs`` are the ``epoch`` attributes that the user's dataset and sampler had when the epoch began. ``stopped``:
    all ranks ended the epoch together, before the first step that some rank could not fill. ``passed`` are the steps
    that are left out, whether they are over or lie ahead.
    """

    step: int
    began: int
    run: int | None
    epochs: dict[str, int]
    stopped: bool
    passed: Steps
    skipped: Skipped | dict[int, Skipped]
    """What was left out, in all or of each lane."""

    @property
    def passing(self) -> bool:
        """Whether the next step is one that is left out."""
        return bool(self.passed) and lies_in(self.step, self.passed)

    @abstractmethod
    def ledgers(self) -> Any:
        """The ledgers as they are, for ``put_back``."""

    @abstractmethod
    def put_back(self, ledgers: Any) -> None:
        """A step was counted that is left out, and nothing of it was delivered."""

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

    @abstractmethod
    def mark(self) -> Mark:
        """This place, for ``back_at``. From now on it is kept what moves overwrite, until ``forget_marks``."""

    @abstractmethod
    def back_at(self, marks: Sequence[Mark]) -> Position:
        """As it was at the first of ``marks``, which are all since then: to be written, or to go on from where this one
        is given up. What did not move is shared with this position.
        """

    @abstractmethod
    def moved_since(self, mark: Mark) -> bool:
        """Whether it has moved, or begun to, since the last mark."""

    @abstractmethod
    def forget_marks(self) -> None:
        """None of them is gone back to any more."""


@final
@dataclass(slots=True)
class LanesPosition(Position):
    """The lanes of one rank. Where each goes on with its own epochs, ``noted`` is the one that ``epochs`` are of.

    ``skipped`` has the lanes of which samples were left out. It is not changed, but replaced. ``moved`` has what moves
    overwrote since the last mark, with the lane, in their order; the mark has it too. ``held`` are turns that were made
    and not delivered, of a source that cannot be read again.
    """

    lanes: dict[int, LanePosition]
    step: int = 0
    began: int = 0
    run: int | None = None
    epochs: dict[str, int] = field(default_factory=dict)
    stopped: bool = False
    noted: int | None = None
    passed: Steps = ()
    skipped: dict[int, Skipped] = field(default_factory=dict)
    moved: list[Mark] | None = field(default=None, init=False, repr=False, compare=False)
    held: dict[int, deque[Held]] = field(default_factory=dict, init=False, repr=False)

    def ledgers(self) -> dict[int, tuple[int, int]]:
        return {number: lane.ledger for number, lane in self.lanes.items()}

    def put_back(self, ledgers: dict[int, tuple[int, int]]) -> None:
        for number, ledger in ledgers.items():
            self.lanes[number].put_back(ledger)

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
        return any(lane.delivered or lane.ended for lane in self.lanes.values()) or any(self.held.values())

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
        other = replace(self, lanes={number: lane.copy() for number, lane in self.lanes.items()})
        other.held = {number: held.copy() for number, held in self.held.items()}
        return other

    def made(self, number: int) -> LanePosition:
        """Where the making of a lane goes on: after all that is held of it. It shares what does not move."""
        if not self.held.get(number):
            return replace(self.lanes[number])
        lane = self.lanes[number].copy()
        for held in self.held[number]:
            if held.made.ended:
                lane.end(held.made)
            elif held.failure is None:
                lane.deliver(held.made, held.made.number)
        return lane

    def moving(self, number: int) -> LanePosition:
        """A lane that is about to be moved by a delivery."""
        lane = self.lanes[number]
        if self.moved is not None:
            self.moved.append((number, *lane.mark()))
        return lane

    def deliver_row(self, number: int, turn: Turn) -> None:
        """Count a delivered row of a stream: the same as for other moves, and less is overwritten."""
        lane = self.lanes[number]
        if self.moved is not None:  # the first fields of lane.mark()
            self.moved.append((number, lane.turns, lane.delivered, lane.last, lane.ledger, lane.anchor))
        lane.deliver_row(turn)

    def mark(self) -> Mark:
        moved: list[Mark] = []
        self.moved = moved
        return _of_lanes(self), moved

    def back_at(self, marks: Sequence[Mark]) -> LanesPosition:
        moves = [move for _, moved in marks for move in moved]
        first = {number: mark for number, *mark in reversed(moves)}
        whole = {number: mark for number, *mark in reversed(moves) if len(mark) > ROW}
        before = {number: self.lanes[number].back_at((*mark,), whole.get(number)) for number, mark in first.items()}
        return LanesPosition(self.lanes | before, *marks[0][0])

    def moved_since(self, mark: Mark) -> bool:
        return bool(mark[1]) or _of_lanes(self) != mark[0]

    def forget_marks(self) -> None:
        self.moved = None

    def leaves(self) -> dict[int, str]:
        """The leaf of every lane: one head for all, and of each lane what it has kept since it moved last."""
        head = _leaf(self)[:-1]
        return {number: f'{head},"lane":{self._lane(number)}}}' for number in self.lanes}

    def leaf_of_all(self) -> str:
        """One leaf for all lanes of a plain loader."""
        return _leaf(self, lanes=[orjson.Fragment(self._lane(number)) for number in self.lanes])

    def _lane(self, number: int) -> str:
        lane, skipped, held = self.lanes[number].to_json(), self.skipped.get(number), self.held.get(number)
        if held:
            lane = f'{lane[:-1]},"prefetched":{held_to_json(held, number)}}}'
        return lane if skipped is None else f'{lane[:-1]},"skipped":{skipped.to_json()}}}'

    @staticmethod
    def from_leaves(leaves: Iterable[tuple[int, str, Mapping[str, Any]]], exact: bool) -> LanesPosition:
        """Read the leaves ``(lane, name, leaf)`` of one rank. Its step is that of the lane that came furthest.

        Raises ``InvalidState`` where a field is missing or of another type.
        """
        lanes, heads = {}, []
        skipped: dict[int, Skipped] = {}
        held: dict[int, deque[Held]] = {}
        for lane, name, leaf in leaves:
            position = lanes[lane] = LanePosition.from_json(leaf.get("lane"), name, exact)
            skipped |= Skipped.of_lanes([(lane, leaf["lane"])], name)
            held |= held_of_lanes([(lane, leaf["lane"])], name)
            head = _head_of(leaf, name)
            heads.append(((-position.epoch, head[0] - head[1], head[0]), head))
        whole_rank = LanesPosition(lanes, *max(heads, key=lambda found: found[0])[1], skipped)
        whole_rank.held = held
        return whole_rank


@final
@dataclass(slots=True)
class MapPosition(Position):
    """A map-style dataset: how many rows of the epoch's global order were delivered, by all ranks together.

    ``sampler`` is what makes the order again, ``cursor`` where a custom sampler stands (see ``sampling``). ``skipped``:
    what was left out on this rank. ``ranges`` are steps: those that are ``passed`` over, and those ``beyond`` the first
    that was not delivered that were, out of order: the first and the last of each range, counted from that one.
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
    skipped: Skipped = field(default_factory=Skipped)
    ranges: Ranges = field(default_factory=Ranges)

    @property
    def passed(self) -> Steps:
        return self.ranges.passed

    @passed.setter
    def passed(self, passed: Steps) -> None:
        self.ranges = self.ranges._replace(passed=passed)

    @property
    def beyond(self) -> Steps:
        return self.ranges.beyond

    @beyond.setter
    def beyond(self, beyond: Steps) -> None:
        self.ranges = self.ranges._replace(beyond=beyond)

    def ledgers(self) -> int:
        return self.ledger

    def put_back(self, ledgers: int) -> None:
        self.ledger = ledgers

    @property
    def mid_epoch(self) -> bool:
        return self.rows > 0 or bool(self.beyond)

    def deliver(self, rows: int, entry: int | None) -> None:
        """Count a delivered batch with its entry in the ledger; ``rows`` of the global order are done with it.

        A batch with no row in it has no entry.
        """
        self.rows = rows
        self.step += 1
        if entry is not None:
            self.ledger = fold_one(self.ledger, entry)

    def next_epoch(self, pristine: str | None) -> None:
        self.epoch += 1
        self.rows, self.began, self.stopped = 0, self.step, False
        self.sampler, self.ranges = None, self.ranges._replace(beyond=())
        self.cursor.next_epoch(pristine)

    def copy(self) -> MapPosition:
        return replace(self, cursor=self.cursor.copy())

    def mark(self) -> Mark:
        return _of_map(self), self.cursor.mark()

    def back_at(self, marks: Sequence[Mark]) -> MapPosition:
        position = MapPosition(*marks[0][0])
        position.cursor = self.cursor.back_at(marks[0][1], marks[0][1])
        return position

    def moved_since(self, mark: Mark) -> bool:
        return self.mark() != mark

    def forget_marks(self) -> None:
        """Nothing is kept for them."""

    def leaf(self, *, shared: bool) -> str:
        """The leaf of a rank; or, ``shared``, that of all of them, without what one rank alone was given."""
        seldom: dict[str, Any] = {"skipped": orjson.Fragment(self.skipped.to_json())} if self.skipped.count else {}
        if self.beyond:
            seldom["beyond"] = self.beyond
        return _leaf(
            self,
            epoch=self.epoch,
            rows=self.rows,
            ledger=None if shared else self.ledger,
            sampler=self.sampler,
            cursor=orjson.Fragment(self.cursor.to_json()),
            **seldom,
        )

    @staticmethod
    def from_leaf(leaf: Mapping[str, Any], name: str) -> MapPosition:
        """Read a leaf. Raises ``InvalidState`` where a field is missing or of another type."""
        try:
            step, began, run, epochs, stopped, _, passed = _head_of(leaf, name)
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
                skipped=Skipped.of(leaf, name),
                ranges=Ranges(passed, read_beyond(leaf.get("beyond", []))),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidState(f"The leaf {name!r} of this position is cut short or changed: {error!r}.") from None


# The fields of a position but its lanes. Their values are not changed, but replaced: a mark keeps them as they are.
_of_lanes = attrgetter(*(part.name for part in fields(LanesPosition) if part.init and part.name != "lanes"))
_of_map = attrgetter(*(part.name for part in fields(MapPosition)))


def _head_of(
    leaf: Mapping[str, Any], name: str
) -> tuple[int, int, int | None, dict[str, int], bool, int | None, Steps]:
    """The fields of ``_leaf``. Those that are seldom needed may be missing."""
    try:
        epochs = {name: whole(epoch) for name, epoch in leaf["epochs"].items()}
        run = None if leaf["run"] is None else whole(leaf["run"])
        noted = None if leaf.get("noted") is None else whole(leaf["noted"])
        passed = read_steps(leaf.get("passed", []))
        return whole(leaf["step"]), whole(leaf["began"]), run, epochs, bool(leaf.get("stopped")), noted, passed
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidState(f"The leaf {name!r} of this position is cut short or changed: {error!r}.") from None


def _leaf(position: Position, **fields: Any) -> str:
    head: dict[str, Any] = {
        "step": position.step,
        "began": position.began,
        "run": position.run,
        "epochs": position.epochs,
    }
    if position.stopped:
        head["stopped"] = True
    if isinstance(position, LanesPosition) and position.noted is not None:
        head["noted"] = position.noted
    if position.passed:
        head["passed"] = position.passed
    return orjson.dumps(head | fields).decode()
