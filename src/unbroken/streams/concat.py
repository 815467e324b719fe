"""Concat: the rows of several streams, one stream after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.streams.arguments import read_state
from unbroken.streams.course import Course
from unbroken.streams.stage import Stage, StageIterator

__all__ = ["Concat", "concat"]


def concat(streams: Sequence[Stage]) -> Stage:
    """A stream of the rows of all ``streams``: on each lane those of the first, then those of the second, and so on.

    Lanes go on to the next stream each when it has come to an end. ``shuffle`` behind it orders the chunks of each
    stream, and mixes rows of two where a window lies across their border; ``mix`` is what mixes them all over.

    Raises ``TypeError`` where ``streams`` is no list of streams, ``ValueError`` where it is empty.
    """
    if isinstance(streams, Stage) or not isinstance(streams, Sequence):
        raise TypeError(
            f"concat: streams must be a list of streams, but got a {type(streams).__name__}.\nPass concat([a, b])."
        )
    for number, stream in enumerate(streams):
        if not isinstance(stream, Stage):
            raise TypeError(f"concat: item {number} of streams must be a stream, but is a {type(stream).__name__}.")
    if not streams:
        raise ValueError("concat: streams must be a list of at least one stream, but it is empty.")
    return Concat(tuple(streams))


@final
@dataclass(frozen=True, repr=False, eq=False)
class Concat(Stage):
    """The rows of several streams, one after another; ``concat`` makes it. Each is a numbered source: ``"0/"``."""

    NAME: ClassVar[str] = "concat"

    streams: tuple[Stage, ...]

    @property
    def sources(self) -> tuple[Stage, ...]:
        return self.streams

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return _ConcatIterator(self.streams, lane, course)

    def fields(self) -> dict[str, Any]:
        return {}

    def arguments(self) -> str:
        return f"{len(self.streams)} stream{'s' * (len(self.streams) != 1)}"

    def __repr__(self) -> str:
        return f"concat([{', '.join(map(repr, self.streams))}])"


@final
class _ConcatIterator(StageIterator):
    """Position: the number of the stream, and its own position.

    All are opened at once, which reads nothing: so the records of all are in every position, in the same order.
    """

    def __init__(self, streams: tuple[Stage, ...], lane: Lane, course: Course) -> None:
        self._open = [stream.begin(lane, course.into(str(number))) for number, stream in enumerate(streams)]
        self._number = 0

    def __next__(self) -> Any:
        while True:
            try:
                return next(self._open[self._number])
            except StopIteration:
                if self._number + 1 == len(self._open):
                    raise
            self._open[self._number].close()
            self._number += 1

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self._number, "source": self._open[self._number].state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        number, source = read_state(state, "concat", stream=int, source=dict)
        if number >= len(self._open):
            raise InvalidState(
                f"concat: a position in stream {number} (counted from 0), but there are {len(self._open)} streams.\n"
                "Put the streams together as they were when the position was saved."
            )
        self._open[number].load_state_dict(source)
        self._number = number

    def close(self) -> None:
        for rows in self._open:
            rows.close()

    def where(self) -> str:
        return self._open[self._number].where()

    def origin(self) -> tuple[Origin, ...]:
        return self._open[self._number].origin()
