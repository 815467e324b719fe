"""Ranks in this process, each in a thread of its own, that vote as a process group would; and what they should do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, final

from tests import datasets as ds
from unbroken.engine.agree import Group
from unbroken.lanes import Lane

T = TypeVar("T")
SECONDS = 30


@final
class Words(ds.Sized, ds.IterableDataset):
    """A stream: lane l has ``lengths[l]`` rows, 100 l and on, each made by ``row``."""

    def __init__(self, lengths: list[int], row: Callable[[int], Any] = lambda number: number) -> None:
        super().__init__(sum(lengths))
        self.lengths, self.row = lengths, row
        self.default_lanes = len(lengths)

    def open(self, lane: Lane) -> Any:
        return Rows(range(100 * lane.index, 100 * lane.index + self.lengths[lane.index]), self.row)

    def describe(self) -> dict[str, Any]:
        return {"files": sum(self.lengths)}

    def difference_class(self, field: str) -> str:
        return "data, held"

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a stream is opened lane by lane")


class Rows(ds.RowIterator):
    def __init__(self, share: range, row: Callable[[int], Any]) -> None:
        super().__init__(share)
        self.row = row

    def __next__(self) -> Any:
        return self.row(super().__next__())


@final
class Meeting:
    """Where the threads of all ranks meet. A rank that stays away makes the others fail, after a while."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._places: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=SECONDS)

    def meet(self, rank: int, what: str, value: Any) -> list[Any]:
        """What each rank brought, by rank. All of them have to be here for the same."""
        self._places[rank] = what, value
        self._barrier.wait()
        found = list(self._places)
        self._barrier.wait()
        assert {kind for kind, _ in found} == {what}, f"ranks are at different places: {found}"
        return [value for _, value in found]

    def leave(self) -> None:
        """Somebody will not come any more: whoever waits fails at once."""
        self._barrier.abort()


@final
class Peer(Group):
    """One rank of a meeting. ``votes`` are the words that it gave, ``exchanges`` how often data was asked for, and
    ``on_answer`` is called before it gets an answer.
    """

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._meeting = meeting
        self._rank = rank
        self.votes: list[list[int]] = []
        self.exchanges = 0
        self.on_answer: Callable[[], None] = lambda: None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._meeting.size

    def announce(self, words: list[int]) -> Callable[[], list[int]]:
        self.votes.append(list(words))
        found = [min(column) for column in zip(*self._meeting.meet(self._rank, "vote", words), strict=True)]

        def answer() -> list[int]:
            self.on_answer()
            return found

        return answer

    def exchange(self, data: bytes) -> list[bytes]:
        self.exchanges += 1
        return self._meeting.meet(self._rank, "exchange", data)

    def train(self) -> None:
        """A step of training: it needs every rank."""
        self._meeting.meet(self._rank, "train", None)


def alone(rank: int = 0, world: int = 1) -> Peer:
    """A rank whose group is never asked for a vote."""
    return Peer(rank, Meeting(world))


def on_ranks(world: int, act: Callable[[Peer], T]) -> list[T]:
    """What each rank makes of it. Raises the first error, by rank, that is not only of one who waited in vain."""
    meeting = Meeting(world)
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = act(Peer(rank, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results


def trained(peer: Peer, loader: Any) -> list[Any]:
    """The batches of a pass; every step needs all ranks."""
    found = []
    for batch in loader:
        peer.train()
        found.append(batch)
    return found


def merged(states: list[Mapping[str, str]]) -> dict[str, str]:
    return {name: leaf for state in states for name, leaf in state.items()}


Step = list[list[int]]
"""The rows of each rank."""


class NoData(Exception):
    """An epoch without a step, or a rank without rows: the loader refuses, or has nothing to show."""


@final
class Model:
    """What ranks should deliver of lanes of these lengths, worked out the plain way.

    ``by_rows``: a turn is a row, as in streams; else a batch of one lane. Row i of lane l is ``100 * l + i``.
    """

    def __init__(self, lengths: list[int], by_rows: bool, at_end: str, drop_last: bool) -> None:
        self.lengths = lengths
        self.by_rows = by_rows
        self.at_end = at_end
        self.drop_last = drop_last
        self.taken = [0] * len(lengths)
        self.turns = [0] * len(lengths)
        self.over = False

    def _next_epoch(self) -> None:
        self.taken = [0] * len(self.lengths)
        self.turns = [0] * len(self.lengths)

    def _left(self, lane: int, size: int) -> int:
        """The rows that a lane still makes turns of."""
        left = self.lengths[lane] - self.taken[lane]
        return left // size * size if self.drop_last and not self.by_rows else left

    def _batch(self, rank: int, world: int, size: int) -> list[int]:
        """The next batch of a rank; empty where it has none."""
        rows: list[int] = []
        mine = range(rank, len(self.lengths), world)
        while len(rows) < size:
            if self.at_end == "repeat":
                for lane in mine:
                    if not self._left(lane, size):
                        self.taken[lane] = 0
            live = [lane for lane in mine if self._left(lane, size)]
            if not live:
                break
            lane = min(live, key=lambda lane: (self.turns[lane], lane))
            number = 1 if self.by_rows else min(size, self._left(lane, size))
            rows += range(100 * lane + self.taken[lane], 100 * lane + self.taken[lane] + number)
            self.taken[lane] += number
            self.turns[lane] += 1
            if not self.by_rows:
                break
        return rows

    def _whole_batch(self, rank: int, world: int, size: int) -> list[int]:
        """The same, but rows that are too few to be delivered stay where they are."""
        before = list(self.taken), list(self.turns)
        rows = self._batch(rank, world, size)
        if self.by_rows and self.drop_last and len(rows) < size:
            self.taken, self.turns = before
            return []
        return rows

    def _step(self, world: int, size: int) -> Step | None:
        """The next step of all ranks; None, and nothing has changed, where there is none."""
        before = list(self.taken), list(self.turns)
        batches = [self._whole_batch(rank, world, size) for rank in range(world)]
        if all(batches) if self.at_end == "stop" else any(batches):
            if self.at_end == "repeat" and not all(batches):
                raise NoData
            return batches
        self.taken, self.turns = before
        return None

    def play(self, world: int, size: int, number: int, *, resumed: bool, past_end: bool) -> list[Step | None]:
        """The next ``number`` steps, and None where an epoch ends; ``past_end``: also where it ends after the last.

        Raises ``NoData``.
        """
        if self.at_end == "stop" and not all(any(self.lengths[rank::world]) for rank in range(world)):
            raise NoData
        found: list[Step | None] = []
        steps, inside = 0, 0
        if self.over and not resumed:
            self._next_epoch()
        self.over = False
        while steps < number or (past_end and inside):
            before = list(self.taken), list(self.turns)
            step = self._step(world, size)
            if step is not None and steps == number:
                self.taken, self.turns = before
                break
            if step is not None:
                found.append(step)
                steps, inside = steps + 1, inside + 1
            elif resumed and not inside:
                self._next_epoch()  # never an empty epoch
            elif not inside:
                raise NoData
            else:
                found.append(None)
                inside = 0
                # On several ranks what is left may do for a step on others, so the next epoch waits for the next pass.
                self.over = self.at_end == "stop" and world > 1 and steps == number
                if not self.over:
                    self._next_epoch()
            resumed = False
        return found
