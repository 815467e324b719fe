"""A loader's position as a flat dict of text, and back.

::

    "unbroken"      the header: version, kind, lanes, fingerprint      the same on every rank
    "lane-000000"   one leaf a lane, that names no rank                iterable, with lanes or dp arguments; streams
    "place"         the same on every rank                             map-style, with dp arguments
    "rank-0000"     everything of one rank in one leaf                 otherwise
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import orjson

from unbroken.errors import IncompleteState, InvalidState, StateMismatch
from unbroken.lane_position import LanePosition
from unbroken.position import LanesPosition, MapPosition, Position
from unbroken.prefetched import held_of_lanes
from unbroken.skipped import Skipped
from unbroken.state import (
    HEADER,
    VERSION,
    Difference,
    check_fingerprint,
    counts_otherwise,
    fields_of_gone,
    parse_header,
    parse_leaf,
)

__all__ = ["Leaves"]


@final
@dataclass(frozen=True)
class Leaves:
    """How the position of one loader is laid out in leaves.

    ``kind`` is the dataset's (``"map"``, ``"iterable"``, ``"stream"``); ``shared`` whether leaves name no rank,
    else they are those of ``rank`` of ``world``; ``mine`` are this rank's lanes of ``lanes``; ``fingerprint`` and
    ``kinds`` (field: class of a difference) describe the pipeline; ``ends`` is how epochs end (see ``Options``).
    """

    kind: str
    shared: bool
    rank: int
    world: int
    lanes: int
    mine: range
    fingerprint: dict[str, Any]
    kinds: Mapping[str, str]
    trusted: bool
    ends: str = "alone"

    @property
    def _of_rank(self) -> str:
        return f"rank-{self.rank:04d}"

    @cached_property
    def _header(self) -> str:
        lanes = self.lanes if self.kind != "map" else None
        ranks = None if self.shared else self.world
        header = {
            "version": VERSION,
            "kind": self.kind,
            "lanes": lanes,
            "ranks": ranks,
            "world": self.mine.step if self.shared else None,  # only told: it may be another at a load
            "fingerprint": self.fingerprint,
        }
        return orjson.dumps(header).decode()

    def write(self, position: Position) -> dict[str, str]:
        """Every leaf of this rank, and the header."""
        # Where this rank stands is told in the header too, which one rank writes for all: it is held against each leaf.
        state = {
            HEADER: f'{self._header[:-1]},"at":[{position.epoch},{position.step - position.began},{position.step}]}}'
        }
        if isinstance(position, MapPosition):
            state["place" if self.shared else self._of_rank] = position.leaf(shared=self.shared)
        elif isinstance(position, LanesPosition) and self.shared:
            state |= {f"lane-{lane:06d}": leaf for lane, leaf in position.leaves().items()}
        elif isinstance(position, LanesPosition):
            state[self._of_rank] = position.leaf_of_all()
        return state

    def read(self, state: Mapping[str, Any], strict: bool) -> tuple[Position, list[Difference], dict[str, Any]]:
        """The position in a state, all of it checked, and the differences that ``strict=False`` accepted; and fields of
        sources that are gone and keep a place in the position, which belong in the fingerprint of what is saved next.

        Raises ``InvalidState``, ``IncompleteState`` or ``StateMismatch``.
        """
        header = parse_header(state)
        if header.get("kind") != self.kind:
            raise StateMismatch(
                "this position was saved for another kind of dataset.\n"
                f"  saved {header.get('kind')}   now {self.kind}\n"
                "Rebuild the loader over the dataset that the position was saved with."
            )
        position: Position
        if not self.shared and self._of_rank in state and header.get("ranks") != self.world:
            raise StateMismatch(
                "this position was saved by a loader without dp arguments on another number of ranks.\n"
                f"  ranks          saved {header.get('ranks')}   now {self.world}\n"
                "Start as many ranks again. To change their number, pass dp_rank and dp_world_size (or mesh) from "
                "the first run on."
            )
        if self.kind == "map":
            position = self._read_map(state)
            self._check_steps(position, header["fingerprint"])
        elif self.shared:
            self._check_lanes(header)
            position = self._read_lanes(state, header)
        else:
            position = self._read_all(state)
        saved, mid_epoch = header["fingerprint"], position.mid_epoch and not position.stopped
        accepted = check_fingerprint(saved, self.fingerprint, self.kinds, mid_epoch=mid_epoch, strict=strict)
        if position.stopped and counts_otherwise(saved, self.fingerprint, self.kinds):
            position.next_epoch(None)  # what the last one left is in the files, and among the rows, of then
        if isinstance(position, LanesPosition) and self.ends != "repeat":
            position.settle(None, alone=self.ends == "alone")
        return position, accepted, fields_of_gone(saved, self.fingerprint) if position.mid_epoch else {}

    def _read_map(self, state: Mapping[str, Any]) -> MapPosition:
        wanted, other = ("place", self._of_rank) if self.shared else (self._of_rank, "place")
        name = other if wanted not in state and other in state else wanted
        return MapPosition.from_leaf(parse_leaf(state, name), name)

    def _check_steps(self, position: MapPosition, saved: Mapping[str, Any]) -> None:
        """Where steps were delivered out of order, their numbers have to mean the same rows."""
        others = [name for name in ("batch_size", "sampler") if saved.get(name) != self.fingerprint.get(name)]
        if position.beyond and (others or self.shared):
            found = [f"{name:<14} saved {saved.get(name)}   now {self.fingerprint.get(name)}" for name in others]
            raise StateMismatch(
                "this position was saved with in_order=False in the middle of an epoch, and has holes: steps were "
                "delivered before others that come earlier. They are other rows now.\n  "
                + "\n  ".join(found or ["dp arguments   saved not given   now given"])
                + "\nRebuild the loader as it was for the rest of the epoch, or save without holes: between epochs, or "
                "with in_order=True."
            )

    def _check_lanes(self, header: Mapping[str, Any]) -> None:
        if type(header.get("lanes")) is not int:
            raise InvalidState("The header of this position has no number of lanes: it was cut short or changed.")
        if header["lanes"] != self.lanes:
            raise StateMismatch(
                "this position was saved for another number of lanes.\n"
                f"  lanes          saved {header.get('lanes')}   now {self.lanes}   (order-changing)\n"
                f"Lanes are fixed for a run, while ranks and workers may change: pass lanes={header.get('lanes')}."
            )

    def _read_lanes(self, state: Mapping[str, Any], header: Mapping[str, Any]) -> LanesPosition:
        exact = self.kind == "stream" or self.trusted
        wanted = [(lane, f"lane-{lane:06d}") for lane in self.mine]
        missing = [name for _, name in wanted if name not in state]
        if missing:
            raise IncompleteState(
                f"{len(missing)} of the {len(wanted)} lanes of this rank are missing from this position: "
                f"{missing[0]} and so "
                f"on (it has {len(state)} keys).\n"
                "Merge the states of all ranks with {**a, **b}, or load through torch.distributed.checkpoint, which "
                "deals "
                "the lanes to the ranks of now."
            )
        names = sorted(name for name in state if name.startswith("lane-"))
        leaves = {name: parse_leaf(state, name) for name in names}
        position = LanesPosition.from_leaves(((lane, name, leaves[name]) for lane, name in wanted), exact)
        _check_one_save(leaves, header.get("at"))
        return position

    def _read_all(self, state: Mapping[str, Any]) -> LanesPosition:
        name = self._of_rank
        if name not in state and any(key.startswith("lane-") for key in state):
            raise StateMismatch(
                "this position was saved by a loader with lanes or dp arguments, lane by lane.\n"
                f"  lanes          saved {parse_header(state).get('lanes')}   now not given\n"
                f"Pass lanes={parse_header(state).get('lanes')} (and dp_rank and dp_world_size on several ranks)."
            )
        leaf = parse_leaf(state, name)
        lanes = leaf.get("lanes")
        if not isinstance(lanes, list) or not lanes or not all(isinstance(lane, dict) for lane in lanes):
            raise InvalidState(f"The leaf {name!r} of this position has no lanes: it was cut short or changed.")
        position = LanesPosition.from_leaves([(0, name, {**leaf, "lane": lanes[0]})], exact=self.trusted)
        position.lanes = {number: LanePosition.from_json(lane, name, self.trusted) for number, lane in enumerate(lanes)}
        position.skipped = Skipped.of_lanes(enumerate(lanes), name)
        position.held = held_of_lanes(enumerate(lanes), name)
        return position


def _check_one_save(leaves: Mapping[str, Mapping[str, Any]], at: Any) -> None:
    """Refuse leaves that were saved at different steps, or by different runs; ``at`` is epoch and step of the
    header.
    """
    runs = {leaf.get("run") for leaf in leaves.values()}
    if len(runs) > 1:
        raise IncompleteState(
            "The lanes of this position come from different runs (their seeds differ). Merge only states that were "
            "saved together."
        )
    # Ranks may end an epoch at different steps, and some begin the next before the others: then either all have made as
    # many steps since the run began, or those in one epoch as many since that began.
    places = []
    for name, leaf in leaves.items():
        if not leaf["lane"].get("ended"):
            places.append((name, leaf["lane"]["epoch"], leaf["step"] - leaf["began"], leaf["step"]))
    if isinstance(at, list) and len(at) == 3 and all(type(number) is int for number in at):
        places.append(("the header", *at))
    if len({step for *_, step in places}) <= 1:
        return
    for epoch in {epoch for _, epoch, _, _ in places}:
        found: dict[int, str] = {}
        for name, _, inside, step in (place for place in places if place[1] == epoch):
            found.setdefault(inside, f"{name} at step {step}")
        if len(found) > 1:
            raise IncompleteState(
                f"The parts of this position were saved at different steps of epoch {epoch}: "
                f"{', '.join(list(found.values())[:4])}.\n"
                "Save on all ranks after the same step, and merge only states of one save."
            )
