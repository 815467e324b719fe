"""What an audit does: the loader, the trials, and where each of them is ended. A function of the seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, final

from unbroken.audit.saves import Format
from unbroken.audit.stretch import Halt, Kill, Where

__all__ = [
    "LEAST_BATCHES",
    "Audit",
    "Place",
    "Topology",
    "TrialPlan",
    "extra_batches",
    "first_topologies",
    "plan_trials",
]

Topology: TypeAlias = "tuple[int | None, int]"
"""The number of workers, None where the factory decides it, and of ranks."""

LEAST_BATCHES: Final = 4
_AFTER_SAVE: Final = 5  # batches that a run goes on for after a save, at most
_AT_EPOCH_END: Final = 0.3  # how often a save that may lie anywhere lies at the end of an epoch, or beside it
_AT_ENDS: Final = ("over", "end", "before", "after")
_SOUGHT: Final = (*_AT_ENDS, "first", "last")
_EARLIER_SAVES: Final = 2
_CHAINED: Final = 3  # every third trial is ended twice


@final
@dataclass(frozen=True)
class Audit:
    """What is asked for. ``workers`` and ``ranks`` are None where the factory alone decides."""

    factory: str
    batches: int = 100
    trials: int = 10
    kill: Kill = "sigkill"
    workers: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    save: Format = "torch"
    seed: int = 0
    timeout: float = 120.0
    jobs: int | None = None

    def arguments(self, workers: int | None, rank: int, world: int) -> dict[str, Any]:
        """What the factory is called with in one process."""
        given: dict[str, Any] = {} if workers is None else {"num_workers": workers}
        return given if self.ranks is None else {**given, "dp_rank": rank, "dp_world_size": world}


@final
@dataclass(frozen=True)
class Place:
    """A stop: the run is saved after ``saved`` batches (and ``earlier``), and halts later.

    ``over``: the save is made when the pass is over with its last batch, as many trainers save.
    """

    saved: int
    halt: Halt
    earlier: tuple[int, ...] = ()
    over: bool = False


@final
@dataclass(frozen=True)
class TrialPlan:
    """The stops of a trial, and the topology of each stretch: one more than there are stops."""

    number: int
    places: tuple[Place, ...]
    topologies: tuple[Topology, ...]

    @property
    def first(self) -> Topology:
        return self.topologies[0]

    @property
    def changes_world(self) -> bool:
        return len({world for _, world in self.topologies}) > 1


def extra_batches(batches: int) -> int:
    """How far runs go on beyond what is compared, so that a row that comes late is not taken for a lost one."""
    return max(8, batches // 2)


def plan_trials(
    audit: Audit, epoch_ends: Mapping[Topology, Sequence[int]], batches: int, *, whole: bool = False
) -> list[TrialPlan]:
    """The trials, over the first ``batches`` batches.

    ``epoch_ends``: the numbers of batches after which an epoch ended, in the reference of each first topology.
    ``whole``: the data have no more than these batches, so that saves after the last of them can be resumed from.
    """
    draw = random.Random(f"unbroken audit {audit.seed}")
    sought = _Sought(draw)
    ends = [epoch_ends.get(_first(audit, number), ()) for number in range(audit.trials)]
    return [_plan(audit, draw, sought, number, each, batches, whole) for number, each in enumerate(ends)]


@final
class _Sought:
    """Places where loaders are wrong most often, given out in turn: about the ends of epochs, first and last."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.left = draw, list(_SOUGHT)

    def take(self, first: int, last: int, epoch_ends: Sequence[int]) -> tuple[int, bool] | None:
        """The next one from ``first`` to ``last``, and whether the epoch is to be over; None where there is none."""
        ends = list(epoch_ends)
        for kind in self.left:
            places = {
                "before": [end - 1 for end in ends],
                "after": [end + 1 for end in ends],
                "first": [0],
                "last": [last],
            }.get(kind, ends)
            fitting = [place for place in places if first <= place <= last]
            if fitting:
                self.left.remove(kind)
                self.left += _AT_ENDS if not set(_AT_ENDS) & set(self.left) else ()
                return self.draw.choice(fitting), kind == "over"
        return None


def _plan(
    audit: Audit,
    draw: random.Random,
    sought: _Sought,
    number: int,
    epoch_ends: Sequence[int],
    batches: int,
    whole: bool,
) -> TrialPlan:
    stops = 2 if number % _CHAINED == _CHAINED - 1 and batches >= 2 * LEAST_BATCHES else 1
    first = _first(audit, number)
    worlds = _topologies(draw, audit.ranks or (1,), first[1], stops + 1, change=number // 2 % 2 == 0)
    workers = _topologies(draw, audit.workers or (None,), first[0], stops + 1, change=number % 2 == 0)
    # Where ranks change, a step has another number of rows, and the run another number of steps.
    last = batches - 2 if len(set(worlds)) == 1 else max(LEAST_BATCHES - 2, batches // 2)
    at_end = whole and len(set(worlds)) == 1
    places: list[Place] = []
    start = 0
    for stop in range(stops):
        bound = last * (stop + 1) // stops
        where: Where = ("between", "fetch", "save")[(number + stop) % 3] if audit.kill != "none" else "between"
        taken = None
        if number % 2:
            # Where a stop comes after this one, it has room.
            furthest = last - 2 if stop + 1 < stops else batches if at_end else last
            taken = sought.take(start + 1 if stop else 0, furthest, epoch_ends)
        if taken is not None:
            bound = max(bound, furthest)
            where = where if taken[0] < bound else "between"  # there is no later save, and may be no later batch
        in_save = where == "save"  # of a later step than the save that the run goes back to
        saved, over = taken or (_saved(draw, start + 1, bound - in_save, epoch_ends), False)
        after = draw.randint(max(1, saved + in_save), max(1, min(saved + _AFTER_SAVE, bound)))
        where = "between" if at_end and after == batches and where == "fetch" else where
        earlier = sorted({draw.randint(start + 1, saved) for _ in range(_EARLIER_SAVES if saved > start else 0)})
        places.append(
            Place(saved, Halt(after, where, draw.random()), tuple(each for each in earlier if each != saved), over)
        )
        start = after
    return TrialPlan(number, tuple(places), tuple(zip(workers, worlds, strict=True)))


def first_topologies(audit: Audit) -> list[Topology]:
    """The topologies that trials begin under: each of them has a reference of its own.

    The order of a loader may depend on the number of its workers and ranks; what counts is that a run goes on as it
    began.
    """
    return list(dict.fromkeys(_first(audit, number) for number in range(audit.trials)))


def _first(audit: Audit, number: int) -> Topology:
    workers, ranks = audit.workers or (None,), audit.ranks or (1,)
    return workers[number % len(workers)], ranks[number % len(ranks)]


def _saved(draw: random.Random, first: int, last: int, epoch_ends: Sequence[int]) -> int:
    near = [end + beside for end in epoch_ends for beside in (-1, 0, 0, 1) if first <= end + beside <= last]
    if near and draw.random() < _AT_EPOCH_END:
        return draw.choice(near)
    return draw.randint(first, last)


_T = TypeVar("_T")


def _topologies(draw: random.Random, choices: Sequence[_T], first: _T, count: int, *, change: bool) -> list[_T]:
    """One for each stretch. Half of the trials change it at every stop, the others keep it."""
    found = [first]
    while len(found) < count:
        others = [each for each in choices if each != found[-1]]
        found.append(draw.choice(others) if change and others else found[-1])
    return found
