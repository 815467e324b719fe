"""The weights of a mix: a plan of them over the rows of an epoch, and the history of plans over a run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, final

from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.seeding import key
from unbroken.state import whole
from unbroken.streams.arguments import read_state
from unbroken.streams.course import Record

__all__ = ["History", "Moment", "Plan", "Turns", "Weights", "plan_of"]

Weights: TypeAlias = Mapping[str, float]
# ``[row of the global order, weights from there on]``, in the order of rows
Plan: TypeAlias = list[list[Any]]
# A row of a lane: its epoch, and its number in the epoch
Moment: TypeAlias = tuple[int, int]

# Shares are quotients of weights, and of none may come a 0.
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-100, 1e100
# Ends are known for so many epochs: a window that rows are made again for may reach back into earlier ones.
_EPOCHS_OF_ENDS = 3


@final
class Turns(NamedTuple):
    """Who may have the turns of a lane: names in order, their weights added up, and their shares.

    It holds up to the row ``until``. Rows of those in ``gone`` are left out: they were taken out of the mix since.
    """

    names: list[str]
    sums: list[float]
    shares: list[float]
    until: float
    gone: frozenset[str]

    @staticmethod
    def of(weights: Weights, until: float = math.inf, gone: Iterable[str] = ()) -> Turns:
        """The order in which weights were written down does not count."""
        names = sorted(weights)
        sums = list(accumulate(weights[name] for name in names))
        return Turns(names, sums, [weights[name] / sums[-1] for name in names], until, frozenset(gone))

    def drawn(self, place: int, row: int) -> str:
        """The source drawn for a row, with the weights as probabilities; ``place`` is a 64-bit key."""
        if len(self.names) == 1:
            return self.names[0]
        point = key(place, row) / 2**64 * self.sums[-1]
        return self.names[min(bisect_right(self.sums, point), len(self.names) - 1)]

    def due(self, behind: Mapping[str, float], longest: int) -> str:
        """The source whose turn it is by tokens: ``behind`` is how many each is behind its share.

        Of those that are not ahead of it, the one that would be the ``longest`` document behind first. So none is ever
        further from its share than the longest document so far; where the one furthest behind comes next, others fall
        back by nearly two. It is the rule "earliest eligible virtual deadline first" (Stoica and Abdel-Wahab, 1995).
        """
        lags = [behind.get(name, 0.0) for name in self.names]
        drift = math.fsum(lags)  # not 0 where others ended, or wait
        even = [number for number, share in enumerate(self.shares) if lags[number] >= share * drift]
        if not even:  # but for what is lost in rounding
            even = [max(range(len(lags)), key=lags.__getitem__)]
        return self.names[min(even, key=lambda number: (longest - lags[number]) / self.shares[number])]


@final
class History(Record):
    """Which plan of weights held from which row of the lane on, how many rows were made, and where sources ended.

    Rows that were made are chosen again as they were, whatever the weights are now: windows and buffers of later stages
    count on them. So an end is kept too, that of a source and, under the empty name, that of the lane's epoch.
    """

    def __init__(self, plan: Plan, epoch: int) -> None:
        self._plan = plan
        self._entries: list[tuple[Moment, Plan]] = [((epoch, 0), plan)]
        self._reached = (epoch, 0)
        self._ends: dict[tuple[int, str], int] = {}  # (epoch, name) to the row that was asked of it in vain
        self._saved: tuple[list[Any], list[Any]] | None = None

    def turns_at(self, moment: Moment, lane: Lane, ended: Container[str]) -> Turns | None:
        """The turns that hold from a row on, and did when it was made first; ``None`` where the lane has none more.

        ``ended`` are sources that came to their end before; of those that are not in the mix it is known here.
        """
        if self._entries[-1][1] != self._plan:  # only now, for no row was made by it before
            begun = self._ends or self._reached > self._entries[0][0]
            self._entries = [*(self._entries if begun else ()), (self._reached, self._plan)]
            self._saved = None
        epoch, row = moment
        place = max(1, bisect_right(self._entries, moment, key=lambda entry: entry[0]))
        plan, later = self._entries[place - 1][1], self._entries[place:]
        step = bisect_right(plan, row * lane.count + lane.index, key=lambda entry: entry[0])
        ends = {name: end for (of, name), end in self._ends.items() if of == epoch}
        live = {
            name: weight
            for name, weight in plan[step - 1][1].items()
            if weight and name not in ended and (name in self._plan[0][1] or ends.get(name, math.inf) > row)
        }
        # Other weights could go on here, and the last window or batch would get rows that it did not have.
        stays = len(self._entries) > 1 and self._entries[-1][0] >= moment and ends.get("", math.inf) <= row
        if not live or stays:
            return None
        changes = [-(-(start - lane.index) // lane.count) for start, _ in plan[step : step + 1]]
        changes += [begin for (of, begin), _ in later[:1] if of == epoch]
        changes += [end for end in ends.values() if end > row]
        gone = {name for name in live for _, other in later if name not in other[0][1]}
        return Turns.of(live, min(changes, default=math.inf), gone)

    def made(self, moment: Moment) -> bool:
        """Whether a row was made here before, as far as that is known."""
        epoch, row = moment
        known = {of for of, _ in self._ends}
        if len(known) == _EPOCHS_OF_ENDS and epoch < min(known):
            return False
        return row < self._ends.get((epoch, ""), math.inf) and moment < self._reached

    def reach(self, moment: Moment) -> None:
        """All rows before this one were made."""
        if moment > self._reached:
            self._reached = moment

    def end(self, name: str, moment: Moment) -> None:
        """A source, or all of them, had no more rows when this row was asked for."""
        self.reach(moment)  # an epoch may be without any row
        epoch, row = moment
        if self._ends.setdefault((epoch, name), row) != row:
            return
        epochs = sorted({of for of, _ in self._ends})[-_EPOCHS_OF_ENDS:]
        self._ends = {end: at for end, at in self._ends.items() if end[0] in epochs}
        self._saved = None

    def state_dict(self) -> dict[str, Any]:
        if self._saved is None:
            history = [[*moment, plan] for moment, plan in self._entries]
            self._saved = history, [[epoch, row, name] for (epoch, name), row in self._ends.items()]
        epoch, row = self._reached
        return {"history": self._saved[0], "reached": {"epoch": epoch, "row": row, "ends": self._saved[1]}}

    def load_state_dict(self, state: Any) -> None:
        history, reached = read_state(state, "mix", history=list, reached=dict)
        epoch, row, ends = read_state(reached, "mix", epoch=int, row=int, ends=list)
        try:
            entries = [((whole(of), whole(begin)), _read_plan(plan)) for of, begin, plan in history]
            if not entries or entries != sorted(entries, key=lambda entry: entry[0]):
                raise ValueError("its rows are not in order")
            self._ends = {(whole(of), str(name)): whole(end) for of, end, name in ends}
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidState(f"mix: the history of weights in a position cannot be read: {error}.") from None
        self._reached, self._entries, self._saved = (epoch, row), entries, None


def plan_of(sources: Mapping[str, Any], weights: Any) -> Plan:
    """The schedule as JSON values. Raises ``TypeError`` and ``ValueError``."""
    if weights is None:
        return [[0, dict.fromkeys(sources, 1.0)]]
    if not isinstance(weights, Mapping) or not weights:
        raise TypeError(f"mix: weights must be a dict, but got {weights!r}.")
    scheduled = all(isinstance(row, int) and not isinstance(row, bool) for row in weights)
    schedule = weights if scheduled else {0: weights}
    if min(schedule) != 0:
        raise ValueError(f"mix: a schedule begins with row 0 and counts rows on from there, but got {list(weights)}.")
    return [[row, _checked_weights(sources, schedule[row])] for row in sorted(schedule)]


def _checked_weights(sources: Mapping[str, Any], weights: Any) -> dict[str, float]:
    if not isinstance(weights, Mapping) or set(weights) != set(sources):
        named = ", ".join(map(repr, weights)) if isinstance(weights, Mapping) else repr(weights)
        raise ValueError(
            f"mix: weights must name each source ({', '.join(map(repr, sources))}), but name {named or 'none'}.\n"
            "A source that is to wait has weight 0."
        )
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise TypeError(f"mix: the weight of {name!r} must be a number, but got {weight!r}.")
        if weight and not _LEAST_WEIGHT <= weight <= _MOST_WEIGHT:
            raise ValueError(
                f"mix: the weight of {name!r} must be 0, or from {_LEAST_WEIGHT} to {_MOST_WEIGHT}, but got {weight!r}."
            )
    if not any(weights.values()):
        raise ValueError("mix: at least one weight must be above 0.")
    return {name: float(weights[name]) for name in sources}


def _read_plan(plan: Any) -> Plan:
    """A plan as it was saved. Raises ``LookupError``, ``TypeError`` or ``ValueError`` on anything else."""
    return plan_of(plan[0][1], dict(plan))
