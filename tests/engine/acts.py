"""A stream of rows that do something, and loaders and engines that run it in threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.engine.cursor import Rules
from unbroken.engine.host import Plan
from unbroken.engine.threads import Threads
from unbroken.lanes import Lane


class Acts(IterableDataset[Any]):
    """A stream of the rows 0 to n - 1: row i is what ``act(i)`` gives, in lane i mod ``default_lanes``."""

    def __init__(self, n: int, act: Callable[[int], Any], lanes: int = 4) -> None:
        self.n, self.act, self.default_lanes = n, act, lanes

    def open(self, lane: Lane) -> ActsRows:
        return ActsRows(range(lane.index, self.n, lane.count), self.act)

    def __iter__(self) -> Iterator[Any]:
        return self.open(Lane(0, 1))

    def describe(self) -> dict[str, Any]:
        return {}

    def difference_class(self, field: str) -> str:
        return "data"


class ActsRows(ds.RowIterator):
    def __init__(self, share: range, act: Callable[[int], Any]) -> None:
        super().__init__(share)
        self.act = act

    def __next__(self) -> Any:
        return self.act(super().__next__())


def loader_over(act: Callable[[int], Any], n: int = 16, lanes: int = 4, **arguments: Any) -> StatefulDataLoader:
    given = {"batch_size": 2, "num_workers": 2, "multiprocessing_context": "thread", "seed": 1, **arguments}
    return StatefulDataLoader(Acts(n, act, lanes), **given)


def engine_over(act: Callable[[int], Any], hosts: int = 1, timeout: float = 0, lanes: int = 1) -> Threads:
    plan = Plan(Acts(100, act, lanes), "stream", Rules(run=1), lanes, hosts, True, None, None, in_threads=True)
    return Threads(plan, 2, timeout)


def rows_of(reply: Any) -> list[Any]:
    return list(reply.batch)


def itself(value: int) -> int:
    return value


def threads() -> list[str]:
    """The threads of loaders that are alive."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("unbroken thread"))


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class Gate:
    """Rows that wait until it is opened; ``waiting`` tells how many do."""

    def __init__(self, *rows: int) -> None:
        self.rows = rows
        self.opened = threading.Event()
        self.waiting = threading.Semaphore(0)

    def __call__(self, value: int) -> int:
        if value in self.rows:
            self.waiting.release()
            self.opened.wait()
        return value


@contextlib.contextmanager
def gated() -> Iterator[Callable[..., Gate]]:
    """Makes gates, which are open in the end; no thread is left then."""
    made: list[Gate] = []

    def gate(*rows: int) -> Gate:
        made.append(Gate(*rows))
        return made[-1]

    try:
        yield gate
    finally:
        for one in made:
            one.opened.set()
    wait_until(lambda: not threads(), "a thread is left")
