"""The weights of a mix: a plan of them over the rows of an epoch, and the history of plans over a run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, final

from unbroken.errors import InvalidState
from unbroken.streams.arguments import read_state
from unbroken.streams.course import Record

__all__ = ["History", "Moment", "Plan", "Weights", "plan_of"]

Weights: TypeAlias = Mapping[str, float]
# ``[row of the global order, weights from there on]``, in the order of rows
Plan: TypeAlias = list[list[Any]]


@final
class Moment(NamedTuple):
    """A row of a lane: its number in the epoch."""

    epoch: int
    row: int


@final
class History(Record):
    """Which plan of weights held from which row of the lane on, how many rows were made, and where sources came to
    their end last.

    Rows that were made are chosen again as they were, whatever the weights are now: windows and buffers of later stages
    count on them.
    """

    def __init__(self, plan: Plan, epoch: int) -> None:
        self._plan = plan
        self._entries: list[tuple[Moment, Plan]] = [(Moment(epoch, 0), plan)]
        self._ends: dict[str, Moment] = {}
        self.reached = Moment(epoch, 0)
        self._saved: dict[str, Any] | None = None

    def plan_at(self, moment: Moment) -> Plan:
        """The plan that holds for a row, and did when it was made first."""
        place = bisect_right(self._entries, moment, key=lambda entry: entry[0]) - 1
        return self._entries[max(0, place)][1]

    def reach(self, moment: Moment) -> None:
        """All rows before this one were made."""
        if moment > self.reached:
            self.reached = moment

    def end(self, name: str, moment: Moment) -> None:
        """A source had no more rows when this row was asked of it."""
        if name not in self._ends or self._ends[name].epoch < moment.epoch:
            self._ends = {**self._ends, name: moment}
            self._saved = None

    def ended(self, name: str, moment: Moment) -> bool:
        """Whether a source that is not in the mix any more had come to its end when this row was made."""
        return name in self._ends and self._ends[name] <= moment

    def state_dict(self) -> dict[str, Any]:
        if self._saved is None:
            history = [[*moment, plan] for moment, plan in self._entries]
            self._saved = {"history": history, "ends": {name: list(moment) for name, moment in self._ends.items()}}
        return {"reached": list(self.reached), **self._saved}

    def load_state_dict(self, state: Any) -> None:
        reached, history, ends = read_state(state, "mix", reached=list, history=list, ends=dict)
        try:
            entries = [(Moment(int(epoch), int(row)), _read_plan(plan)) for epoch, row, plan in history]
            moments = {str(name): Moment(*map(int, moment)) for name, moment in ends.items()}
            self.reached = Moment(*map(int, reached))
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidState(f"mix: the history of weights in a position cannot be read: {error}.") from None
        if not entries or entries[-1][1] != self._plan:
            entries = [entry for entry in entries if entry[0] < self.reached] + [(self.reached, self._plan)]
        self._entries, self._ends, self._saved = entries, moments, None


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
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"mix: the weight of {name!r} must be a number of at least 0, but got {weight!r}.")
    if not any(weights.values()):
        raise ValueError("mix: at least one weight must be above 0.")
    return {name: float(weights[name]) for name in sources}


def _read_plan(plan: Any) -> Plan:
    return [[int(row), {str(name): float(weight) for name, weight in weights.items()}] for row, weights in plan]
