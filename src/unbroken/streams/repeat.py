"""Repeat: several passes over a stream within one epoch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, ClassVar, final

from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.streams.arguments import check_whole, read_state
from unbroken.streams.course import Course, epoch_of_pass
from unbroken.streams.stage import Stage, StageIterator

__all__ = ["Repeat"]

# A lane ends after so many passes in a row without a row, for each lane that there is, and at least so many.
_EMPTY_PASSES_PER_LANE, _LEAST_EMPTY_PASSES = 8, 32
_PATIENCE = 10.0  # seconds of passes without a row, until that is told


@final
@dataclass(frozen=True, repr=False, eq=False)
class Repeat(Stage):
    """So many passes over the rows within one epoch; ``None``: without end.

    Each pass opens what stands before it with an epoch of its own (``epoch_of_pass``), so that chunks, windows and
    random numbers are others in every pass.

    A pass can be without a row on one lane and not on others: a small corpus on many lanes, shuffled, has its rows
    on other lanes in each pass. So a lane does not end with the first such pass, but with the last of a long run of
    them (8 for each lane, at least 32); where that takes more than ten seconds, a warning says so.

    Another number of ``epochs`` is accepted at a resume between epochs of the loader: within one, lanes that have come
    to their end would stay there. Loading it raises ``InvalidState`` where it lies
    beyond the last pass that there is now.

    Raises ``TypeError`` and ``ValueError`` where ``epochs`` is neither ``None`` nor a whole number of at least 1.
    """

    NAME: ClassVar[str] = "repeat"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"epochs": "held"}

    source: Stage
    epochs: int | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None:
            check_whole("repeat", "epochs", self.epochs, 1, (1 << 31) - 1)

    @property
    def sources(self) -> tuple[Stage, ...]:
        return (self.source,)

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return _RepeatIterator(self, lane, course)

    def fields(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def arguments(self) -> str:
        return "" if self.epochs is None else str(self.epochs)


@final
class _RepeatIterator(StageIterator):
    """Position: the number of the pass, its epoch, how many passes without a row there were in a row up to here, and
    the position of the source. A pass is opened when the one before has come to its end.
    """

    def __init__(self, stage: Repeat, lane: Lane, course: Course) -> None:
        self._stage = stage
        self._lane = lane
        self._course = course
        self._pass = 0
        self._epoch = epoch_of_pass(lane.epoch, 0)
        self._empty = 1  # 0 once this pass has yielded a row
        self._empty_since: float | None = None
        self._source = self._begin(self._epoch)

    def _begin(self, epoch: int) -> StageIterator:
        return self._stage.source.begin(replace(self._lane, epoch=epoch), self._course)

    def __next__(self) -> Any:
        while True:
            try:
                row = next(self._source)
            except StopIteration:
                if self._is_last():
                    raise
            else:
                self._empty = 0
                return row
            following = self._begin(self._epoch + 1)
            self._source.close()
            self._source, self._pass, self._epoch = following, self._pass + 1, self._epoch + 1
            self._empty += 1

    def _is_last(self) -> bool:
        if self._pass + 1 == self._stage.epochs:
            return True
        if not self._empty:
            self._empty_since = None
            return False
        if self._empty_since is None:
            self._empty_since = monotonic()
        elif monotonic() - self._empty_since > _PATIENCE:
            self._empty_since = float("inf")  # told once
            warnings.warn(
                f"repeat: the last {self._empty} passes yielded no row on lane {self._lane.index}.\n"
                f"If a filter takes all rows out, change it. The lane ends after {self._most_empty()} such passes.",
                stacklevel=3,
            )
        return self._empty >= self._most_empty()

    def _most_empty(self) -> int:
        return max(_LEAST_EMPTY_PASSES, _EMPTY_PASSES_PER_LANE * self._lane.count)

    def state_dict(self) -> dict[str, Any]:
        return {"pass": self._pass, "epoch": self._epoch, "empty": self._empty, "source": self._source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kinds: dict[str, type] = {"pass": int, "epoch": int, "empty": int, "source": dict}
        number, epoch, empty, source = read_state(state, "repeat", **kinds)
        if self._stage.epochs is not None and number >= self._stage.epochs:
            raise InvalidState(
                f"repeat: the position lies in pass {number + 1}, but now there are {self._stage.epochs}.\n"
                f"Pass repeat({number + 1}) or more, or begin a new run."
            )
        current = self._begin(epoch)
        current.load_state_dict(source)
        self._source.close()
        self._source, self._pass, self._epoch, self._empty = current, number, epoch, empty

    def close(self) -> None:
        self._source.close()

    def where(self) -> str:
        return self._source.where()

    def origin(self) -> tuple[Origin, ...]:
        return self._source.origin()
