"""Loaders that are wrong about where data and epochs begin and end, or in none of it. Classes are the factories."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from tests.audit.victims import Loader


class Alike(Loader):
    """Exact: ten batches in the same order in each epoch, so that only its end tells one from the next."""

    resumed = False

    def order(self) -> list[int]:
        return list(range(self.rows))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.resumed = True


class NoEnd(Alike):
    """Resumed, its epoch never ends."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        while self.resumed:
            yield from super().__iter__()


class LongAgain(Alike):
    """Each pass is a whole epoch long, and wraps round where it began in the middle."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(10):
            first = self.done % self.rows
            self.done = first + 4
            yield torch.arange(first, first + 4)


class Split(Alike):
    """Resumed, the epoch ends after one batch, and goes on in the next pass."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            if self.resumed:
                self.resumed = False
                return


class OnePass(Alike):
    """Exact: twelve batches, and then nothing ever again."""

    def __iter__(self) -> Iterator[Any]:
        while self.done < 48:
            self.done += 4
            yield torch.arange(self.done - 4, self.done)


class OnceMore(OnePass):
    """Resumed, it gives all of its data again after their end."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        if self.resumed:
            self.resumed, self.done = False, 0
            yield from super().__iter__()


class LastLost(OnePass):
    """Saved before the last batch, it has come to its end."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.done = 48 if self.done == 44 else self.done


class WrongBetween(Loader):
    """The state that is taken when an epoch is over is that of a place in the first one."""

    between = False

    def __iter__(self) -> Iterator[Any]:
        self.between = False
        yield from super().__iter__()
        self.between = True

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 0, "done": 12} if self.between else super().state_dict()


class WrongFirst(Loader):
    """The state that is taken before the first batch is that of another place."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.epoch or self.done else {"epoch": 3, "done": 12}


class NoneFirst(Loader):
    """Exact: it has no state before the first batch, and says so."""

    def state_dict(self) -> dict[str, Any]:
        if not (self.epoch or self.done):
            raise RuntimeError("state_dict() before the first batch")
        return super().state_dict()


class SkipsAtEnd(Alike):
    """Saved after the last batch of an epoch, the first batch of the next one is lost."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.done == self.rows:
            self.epoch, self.done = self.epoch + 1, 4


class EmptyBetween(Loader):
    """Exact: of two epochs each second one is empty."""

    def __iter__(self) -> Iterator[Any]:
        if self.epoch % 2:
            self.epoch, self.done = self.epoch + 1, 0
            return
        yield from super().__iter__()


class Restarts(Alike):
    """Exact but for the next epoch's order, which is that of this one: what is loaded has no effect."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Eats(Loader):
    """Each state_dict() loses a batch."""

    def state_dict(self) -> dict[str, Any]:
        self.done += 4
        return super().state_dict()


class LateBatches(Loader):
    """It yields batches itself, and counts them when the next one is asked for."""

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        while self.done < self.rows:
            yield torch.tensor(order[self.done : self.done + 4])
            self.done += 4
        self.epoch, self.done = self.epoch + 1, 0


class OwnClose(Loader):
    """Exact: its close() takes an argument."""

    def close(self, hard: bool) -> None:
        raise AssertionError(hard)


class Threaded(Loader):
    """Exact: a thread of it waits for ever, and nothing joins it."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=threading.Event().wait).start()


class EndsItself(Loader):
    """It ends its process, with the exit code of success."""

    def row(self, number: int) -> Any:
        os._exit(0)


class Swallows(Loader):
    """Exact: it goes on whatever is raised in it."""

    def row(self, number: int) -> Any:
        with suppress(BaseException):
            return super().row(number)
        return {"row": -1, "value": 0.0}


class Wordy(Loader):
    """What it raises has a text that is no UTF-8."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("no file shard-\udc80")


class OfIterator:
    """Exact: the state lies on the iterator, and the dataset has one of its own, of something else."""

    class Dataset:
        def state_dict(self) -> dict[str, Any]:
            return {"opened": True}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(state)

    class Pass:
        done = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> torch.Tensor:
            self.done += 1
            return torch.tensor([self.done])

        def get_state(self) -> dict[str, Any]:
            return {"done": self.done}

        def set_state(self, state: dict[str, Any]) -> None:
            self.done = state["done"]

    def __init__(self) -> None:
        self.dataset = self.Dataset()

    def __iter__(self) -> Any:
        return self.Pass()


class Shares:
    """Rows in shares of ranks, where an end that does not come out even is left out: 60 rows, a row a rank."""

    def __init__(self, dp_rank: int = 0, dp_world_size: int = 1) -> None:
        self.rank, self.world, self.epoch, self.done = dp_rank, dp_world_size, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.done + 7 * self.world <= 60:
            first = self.epoch * 1000 + self.done + 7 * self.rank
            self.done += 7 * self.world
            yield torch.arange(first, first + 7) % 1000
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]
