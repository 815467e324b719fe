"""Hosts in this process, and the feeds over them, for the tests of feeds."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from unbroken.engine.cursor import Rules
from unbroken.engine.engine import Engine, Reply
from unbroken.engine.feeds import LaneFeed, MapFeed
from unbroken.engine.host import Plan
from unbroken.engine.inline import Inline
from unbroken.engine.opening import TorchOpening
from unbroken.engine.rows import Batching, RowFeed
from unbroken.engine.turns import Lanes
from unbroken.lane_position import LanePosition
from unbroken.position import LanesPosition, MapPosition
from unbroken.sampling import Step


class Hosts(Engine):
    """Several hosts in this process: each makes its tasks in the order it got them, and any may be ahead of another.

    ``trouble`` is asked before each collect and may raise; ``ahead`` is the most tasks that were ever out.
    """

    def __init__(self, plan: Plan, hosts: int, lookahead: int) -> None:
        self.hosts, self.lookahead = hosts, lookahead
        self.rules = plan.rules
        self.inner = [Inline(replace(plan, dataset=copy.deepcopy(plan.dataset))) for _ in range(hosts)]
        self.queues: list[deque[tuple[int, Any]]] = [deque() for _ in range(hosts)]
        self.replies: dict[int, Any] = {}
        self.tasks: list[tuple[int, Any]] = []
        self.collected = self.ahead = self.opened = 0
        self.trouble: Callable[[int], None] = lambda ticket: None

    def open(self, epoch: int, dataset_epoch: int | None, starts: Mapping[int, LanePosition]) -> None:
        self.opened += 1
        self.queues = [deque() for _ in range(self.hosts)]
        lanes = list(starts)
        for number, inner in enumerate(self.inner):
            inner.open(epoch, dataset_epoch, {lane: starts[lane] for lane in lanes[number :: self.hosts]})

    def submit(self, host: int, task: Any, lease: Any = None) -> int:
        self.tasks.append((host, task))
        self.queues[host].append((len(self.tasks), task))
        self.ahead = max(self.ahead, len(self.tasks) - self.collected)
        return len(self.tasks)

    def collect(self, ticket: int) -> Reply:
        self.trouble(ticket)
        for inner, queue in zip(self.inner, self.queues, strict=True):
            while queue and ticket not in self.replies:
                number, task = queue.popleft()
                try:
                    self.replies[number] = inner.collect(inner.submit(0, task))
                except Exception as error:
                    self.replies[number] = error
        self.collected += 1
        reply = self.replies.pop(ticket)
        if isinstance(reply, Exception):
            self.failed = id(reply)
            raise reply
        assert isinstance(reply, Reply)
        return reply

    def close(self) -> None: ...

    def least_busy(self) -> int:
        return min(range(self.hosts), key=lambda host: len(self.queues[host]))


def deliver(feed: Any) -> Any:
    """The next batch, made and counted as delivered."""
    batch, record = feed.make()
    feed.commit(record)
    return batch


def lane_feed(engine: Hosts, position: LanesPosition, size: int = 2) -> LaneFeed:
    return LaneFeed(Lanes(engine, position, engine.rules), size)


def row_feed(engine: Hosts, position: LanesPosition, size: int, drop_last: bool = False) -> RowFeed:
    return RowFeed(Lanes(engine, position, engine.rules), Batching(size, True, drop_last, None))


def hosts_over(dataset: Any, kind: str, hosts: int, lookahead: int, lanes: int = 1) -> Hosts:
    pristine = TorchOpening(dataset, use_state=True, what="").carry() if kind == "iterable" else None
    plan = Plan(dataset, kind, Rules(run=3, pristine=pristine), lanes, hosts, kind != "unbatched", None, None)
    return Hosts(plan, hosts, lookahead)


def all_of(feed: Any) -> list[Any]:
    found = []
    while True:
        try:
            found.append(deliver(feed))
        except StopIteration:
            return found


def map_feed(engine: Hosts, n: int = 12, size: int = 2, steps: Any = None) -> tuple[MapFeed, MapPosition]:
    position = MapPosition(run=3)
    plan = (Step(list(range(i, i + size)), i, 1, i + size) for i in range(0, n, size))
    return MapFeed(engine, position, iter(steps) if steps is not None else plan, size), position


def fails_once(failure: BaseException, at: int) -> Callable[[int], None]:
    raised: list[int] = []

    def trouble(ticket: int) -> None:
        if ticket == at and not raised:
            raised.append(ticket)
            raise failure

    return trouble


def naive_turns(lengths: dict[int, int], size: int) -> list[tuple[int, int, int]]:
    """(lane, first row, rows) of each turn: the live lane with the fewest turns taken, the lowest first."""
    turns, found = dict.fromkeys(lengths, 0), []
    live = set(lengths)
    while live:
        lane = min(live, key=lambda number: (turns[number], number))
        first = turns[lane] * size
        if first >= lengths[lane]:
            live.remove(lane)
            continue
        found.append((lane, first, min(size, lengths[lane] - first)))
        turns[lane] += 1
    return found


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)
