"""What the tests of ``state_after`` share: a loop that looks ahead, and what is held against what was saved."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.streams.runs import write_jsonl
from unbroken import StatefulDataLoader, read_jsonl
from unbroken.trail import LENGTH


class LooksAhead:
    """A loop that takes batches from a loader before it trains on them, as frameworks do to overlap copies; and saves
    the position after the batch that it trained on last.
    """

    def __init__(self, loader: StatefulDataLoader, ahead: int = 1) -> None:
        self.loader, self.ahead, self.trained = loader, ahead, None
        self.dataset, self.close = loader.dataset, loader.close

    def __iter__(self) -> Iterator[Any]:
        return self.steps(iter(self.loader))

    def steps(self, batches: Iterator[Any]) -> Iterator[Any]:
        taken: deque[Any] = deque()
        for batch in batches:
            taken.append(batch)
            if len(taken) > self.ahead:
                self.trained = taken.popleft()
                yield self.trained
        for self.trained in taken:  # the loader is at the end of its epoch, and may be in the next
            yield self.trained

    def state_dict(self) -> dict[str, str]:
        return self.loader.state_dict() if self.trained is None else self.loader.state_after(self.trained)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self.trained = None


def follow(loader: StatefulDataLoader, steps: int = 10_000, epochs: int = 2) -> int:
    """Hold what was saved after each of the last batches against what is told of it later: after every batch, at the
    end of an epoch, and after the next has begun. Returns the number of batches.
    """
    known: deque[tuple[Any, dict[str, str]]] = deque(maxlen=LENGTH)

    def check() -> None:
        now = loader.state_dict()
        for batch, state in known:
            assert loader.state_after(batch) == state
        assert loader.state_dict() == now

    number = 0
    for _ in range(epochs):
        batches = iter(loader)
        check()
        for batch in itertools.islice(batches, steps):
            number += 1
            known.append((batch, loader.state_dict()))
            check()
        check()
    return number


def jsonl(folder: Path, rows: int = 40) -> Any:
    path = write_jsonl(folder / "rows.jsonl", [{"x": number} for number in range(rows)])
    return read_jsonl(path).shuffle(window=12)
