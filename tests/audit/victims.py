"""Loaders to audit: each is wrong in one way, or in none. The factories are named in the tests."""

from __future__ import annotations

import atexit
import itertools
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests import datasets

ROWS = 40


class Loader:
    """Exact: batches of four of numbered rows, in an order of each epoch."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows, self.epoch, self.done = rows, 0, 0

    def order(self) -> list[int]:
        return random.Random(f"order {self.epoch}").sample(range(self.rows), self.rows)

    def row(self, number: int) -> Any:
        return {"row": number, "value": number * 0.5}

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        while self.done < self.rows:
            self.done += 4
            rows = [self.row(number) for number in order[self.done - 4 : self.done]]
            yield {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        self.done = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]


class ForgetsEpoch(Loader):
    """The epoch, of which the order is a function, is not in the state."""

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Noisy(Loader):
    """A field of each row is drawn from the process's generator."""

    def row(self, number: int) -> Any:
        return {"row": number, "value": float(torch.rand(()))}


class Clock(Loader):
    """A field of each row differs whenever the program runs."""

    draw = random.SystemRandom()

    def row(self, number: int) -> Any:
        return {"row": number, "value": self.draw.random()}


class OnlyNoise(Loader):
    """Rows that are nothing but drawn numbers."""

    def row(self, number: int) -> Any:
        return {"value": float(torch.rand(()))}


class GlobalOrder(Loader):
    """The order of an epoch is drawn from the process's generator when it begins."""

    def order(self) -> list[int]:
        return torch.randperm(self.rows).tolist()  # type: ignore[no-any-return]


class NoEffect(Loader):
    """What is loaded is taken and never looked at."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Begun(Loader):
    """It has begun when it is handed out, so that what is loaded comes too late."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = self.passes()
        self.first = [next(self.begun)]

    def passes(self) -> Iterator[Any]:
        for place in itertools.count():
            rows = [place * 4 + row for row in range(4)]
            self.done = place
            yield torch.tensor(rows)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(self.first, self.begun)


class Ahead(Loader):
    """Reads a batch ahead and counts it as delivered."""

    def __iter__(self) -> Iterator[Any]:
        waiting: list[Any] = []
        for batch in super().__iter__():
            waiting.append(batch)
            if len(waiting) > 1:
                yield waiting.pop(0)
        yield from waiting


class LiveAhead(Ahead):
    """Not only is its state ahead: it is the very dict that moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        self.state.update(super().state_dict())
        return self.state

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.state_dict()
            yield batch


class Halves(Loader):
    """After a load it delivers rows that have nothing to do with anything."""

    loaded = False

    def row(self, number: int) -> Any:
        return {"row": -1 - number, "value": -1.0 - number} if self.loaded else super().row(number)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = True


class EmptyPass(Loader):
    """Saved after the last batch of an epoch and resumed, it first gives a pass without a batch."""

    at_end = False

    def __iter__(self) -> Iterator[Any]:
        if self.at_end:
            self.at_end, self.done = False, 0
            self.epoch += 1
            return
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.at_end = self.done == self.rows


class Opaque(Loader):
    """Its state is bytes."""

    def state_dict(self) -> Any:
        return repr((self.epoch, self.done)).encode()

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.done = eval(state)


class Refuses(Loader):
    """It raises when its own state is loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError(f"this state has {len(state)} keys, and three were expected")


class Bound(Loader):
    """It refuses the state of another number of workers, or of ranks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["count"] != self.count:
            raise ValueError(f"this state is of {state['count']}, and not of {self.count}")
        super().load_state_dict(state)


class Buffered(IterableDataset):  # type: ignore[type-arg]
    """Rows at random out of a buffer that is not in the state."""

    def __init__(self, rows: int = 400, size: int = 8) -> None:
        self.rows, self.size, self.read = rows, size, 0

    def __iter__(self) -> Iterator[int]:
        draw, buffer = random.Random(5), []
        while self.read < self.rows:
            buffer.append(self.read)
            self.read += 1
            if len(buffer) == self.size:
                yield buffer.pop(draw.randrange(self.size))
        self.read = 0
        yield from buffer

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


class Stateless:
    """A loader without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


class Hangs(Loader):
    """After a load no batch ever comes."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        signal.pause()


class Ranked(Loader):
    """Rows shared out to ranks by number; the place counts those of all ranks, so that ranks may change."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        while self.done < self.rows:
            rows = order[self.done : self.done + 4 * self.world]
            self.done += 4 * self.world
            yield torch.tensor(rows[self.rank :: self.world])
        self.done = 0
        self.epoch += 1


class KeepsRank(Ranked):
    """The rows that are done are counted by rank: after a change of ranks they are others."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "done": self.done // self.world}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.done = state["epoch"], state["done"] * self.world


class OwnRank(Ranked):
    """Each rank has a state of its own, which does not go together with those of others."""

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, **super().state_dict()}


def torchdata(dataset: Any, num_workers: int = 0) -> Any:
    return StatefulDataLoader(dataset, batch_size=4, num_workers=num_workers)


def exact() -> Any:
    return Loader()


def forgets_epoch() -> Any:
    return ForgetsEpoch()


def noisy() -> Any:
    return Noisy()


def clock() -> Any:
    return Clock()


def only_noise() -> Any:
    return OnlyNoise()


def much_noise() -> Any:
    return OnlyNoise(4000)


def global_order() -> Any:
    return GlobalOrder()


def no_effect() -> Any:
    return NoEffect()


def begun() -> Any:
    return Begun()


def ahead() -> Any:
    return Ahead()


def live_ahead() -> Any:
    return LiveAhead()


def halves() -> Any:
    return Halves()


def empty_pass() -> Any:
    return EmptyPass()


def opaque() -> Any:
    return Opaque()


def refuses() -> Any:
    return Refuses()


def bound_refuses(num_workers: int = 0) -> Any:
    return Refuses()


def stateless() -> Any:
    return Stateless()


def hangs() -> Any:
    return Hangs()


def nothing() -> Any:
    return Loader(0)


def short() -> Any:
    return torchdata(datasets.StaysAtEnd(20))


def number() -> Any:
    return 7


def raises() -> Any:
    raise OSError("the corpus is not mounted")


def dies() -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


def late(num_workers: int = 0) -> Any:
    return torchdata(datasets.Late(400), num_workers)


def well_behaved(num_workers: int = 0) -> Any:
    return torchdata(datasets.WellBehaved(400), num_workers)


def live(num_workers: int = 0) -> Any:
    return torchdata(datasets.LiveBuffer(900), num_workers)


def buffered(num_workers: int = 0) -> Any:
    return torchdata(Buffered(), num_workers)


def buffered_far() -> Any:
    return torchdata(Buffered(size=80))


def bound(num_workers: int = 0, dp_world_size: int = 1) -> Any:
    return Bound(100 * num_workers + dp_world_size)


def coarse(num_workers: int = 0) -> Any:
    return torchdata(datasets.CoarseEntering(400), num_workers)


def document_ahead(num_workers: int = 0) -> Any:
    return torchdata(datasets.DocumentAhead(400), num_workers)


def ranked(dp_rank: int = 0, dp_world_size: int = 1) -> Any:
    return Ranked(dp_rank, dp_world_size)


def keeps_rank(dp_rank: int = 0, dp_world_size: int = 1) -> Any:
    return KeepsRank(dp_rank, dp_world_size)


def own_rank(dp_rank: int = 0, dp_world_size: int = 1) -> Any:
    return OwnRank(dp_rank, dp_world_size)


def in_fifo() -> Any:
    """Writes its process into a FIFO, and waits for ever."""
    Path(os.environ["UNBROKEN_TEST_FIFO"]).write_text(str(os.getpid()))
    signal.pause()


def lives_on() -> Any:
    """A handler of SIGTERM that does not end the process; what is done at its exit is told in a file."""
    told = Path(os.environ["UNBROKEN_TEST_TOLD"])
    signal.signal(signal.SIGTERM, lambda *_: told.with_suffix(".term").touch())
    atexit.register(told.with_suffix(".exit").touch)
    return Loader()


class Exits(Loader):
    """After a load it ends the program, with the exit code of success; ``hard``: with nothing that could stop it."""

    def __init__(self, hard: bool) -> None:
        super().__init__()
        self.hard, self.loaded = hard, False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = True

    def __iter__(self) -> Any:
        if self.loaded:
            if self.hard:
                os._exit(0)
            sys.exit(0)
        return super().__iter__()


def exits() -> Any:
    return Exits(hard=False)


def exits_hard() -> Any:
    return Exits(hard=True)
