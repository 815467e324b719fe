"""Datasets and samplers as people write them, well and badly. Each says in its docstring what is awkward about it.

Rows are numbers, so that a test says in a word what is missing. Iterable datasets share them out by worker info: lane
l of L has rows l, l + L, and so on; without lanes one iterator has them all.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


def my_share(n: int) -> range:
    """The rows of the lane that asks."""
    info = get_worker_info()
    return range(n) if info is None else range(info.id, n, info.num_workers)


def my_lane() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


class Sized:
    """A name for messages: the class and its number of rows."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.n})"


# Iterable, with the state on the dataset


class WellBehaved(Sized, IterableDataset):
    """Nothing awkward: the state moves before ``yield`` and starts over at the end."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        share = my_share(self.n)
        while self.done < len(share):
            self.done += 1
            yield self.row(share[self.done - 1])
        self.done = 0

    def row(self, number: int) -> Any:
        return number

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class WithLength(WellBehaved):
    """Tells its length, which torch's ``len(loader)`` believes."""

    def __len__(self) -> int:
        return self.n


class StaysAtEnd(WellBehaved):
    """The position stays at the end, so that a second pass over the same object yields nothing."""

    def __iter__(self) -> Iterator[Any]:
        share = my_share(self.n)
        while self.done < len(share):
            self.done += 1
            yield share[self.done - 1]


class Late(WellBehaved):
    """The state moves after ``yield``: while a row is out, it still describes the place before that row."""

    def __iter__(self) -> Iterator[Any]:
        share = my_share(self.n)
        while self.done < len(share):
            yield share[self.done]
            self.done += 1
        self.done = 0


class LateEntryPerWorker(Sized, IterableDataset):
    """Every worker has an entry of its own in a dict, moved after ``yield``; the dict is copied on its way out."""

    def __init__(self, n: int, workers: int = 64) -> None:
        super().__init__(n)
        self.done = dict.fromkeys(range(workers), 0)

    def __iter__(self) -> Iterator[int]:
        lane, share = my_lane(), my_share(self.n)
        while self.done[lane] < len(share):
            yield share[self.done[lane]]
            self.done[lane] += 1
        self.done[lane] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": copy.deepcopy(self.done)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = copy.deepcopy(state["done"])


class CoarseEntering(Sized, IterableDataset):
    """The state is the shard only, set on entering it: three rows share one state."""

    shard_rows = 3

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.shard = 0

    def __iter__(self) -> Iterator[int]:
        share = my_share(self.n)
        for shard in range(self.shard, self.shards(share)):
            self.shard = shard
            yield from (self.row(number) for number in share[shard * self.shard_rows : (shard + 1) * self.shard_rows])
        self.shard = 0

    def shards(self, share: range) -> int:
        return -(-len(share) // self.shard_rows)

    def row(self, number: int) -> int:
        return number

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self.shard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shard = state["shard"]


class CoarseLeaving(CoarseEntering):
    """The state is the shard only, set on leaving it: it moves when the next shard's first row is asked for."""

    def __iter__(self) -> Iterator[int]:
        share = my_share(self.n)
        while self.shard < self.shards(share):
            rows = share[self.shard * self.shard_rows : (self.shard + 1) * self.shard_rows]
            yield from (self.row(number) for number in rows)
            self.shard += 1
        self.shard = 0


class ConstantContent(WellBehaved):
    """Every row is the same, so that no content tells one place from another."""

    def row(self, number: int) -> int:
        return 7


class ConstantLate(Late):
    """Every row is the same, and the state moves after ``yield``."""

    def __iter__(self) -> Iterator[int]:
        return (7 for _ in super().__iter__())


class ConstantCoarse(CoarseEntering):
    """Every row is the same, and three of them share one state."""

    def row(self, number: int) -> int:
        return 7


class RepeatingContent(Late):
    """Every row comes twice in a row, and the state moves after ``yield``."""

    def __iter__(self) -> Iterator[int]:
        return (row // 2 for row in super().__iter__())


class LiveBuffer(Sized, IterableDataset):
    """Packs documents into rows of four tokens; hands out its live token buffer by reference and changes it in place.

    Document d has ``d % 7`` tokens, so some are empty and some leave several rows behind.
    """

    row_tokens = 4

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.document = 0
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        share = my_share(self.n)
        while self.document < len(share):
            document = share[self.document]
            self.document += 1
            self.buffer.extend(100 * document + i for i in range(document % 7))
            while len(self.buffer) >= self.row_tokens:
                row = self.buffer[: self.row_tokens]
                del self.buffer[: self.row_tokens]
                yield row
        self.document = 0
        self.buffer.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"document": self.document, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.document = state["document"]
        self.buffer = state["buffer"]


class LiveState(WellBehaved):
    """Hands out the very dict that it changes in place, and keeps the one that it is given."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.state = {"done": 0}

    def __iter__(self) -> Iterator[int]:
        share = my_share(self.n)
        while self.state["done"] < len(share):
            self.state["done"] += 1
            yield share[self.state["done"] - 1]
        self.state["done"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class DocumentAhead(Sized, IterableDataset):
    """The index moves when a document is read, before its five rows: the state after any of them skips the others."""

    document_rows = 5

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.document = 0

    def __iter__(self) -> Iterator[int]:
        share = my_share(self.n)
        while self.document * self.document_rows < len(share):
            rows = share[self.document * self.document_rows : (self.document + 1) * self.document_rows]
            self.document += 1
            yield from rows
        self.document = 0

    def state_dict(self) -> dict[str, Any]:
        return {"document": self.document}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.document = state["document"]


class PeriodicAhead(DocumentAhead):
    """The same over content that comes again every few rows, so that a jump of that many looks like none."""

    def __init__(self, n: int, period: int) -> None:
        super().__init__(n)
        self.period = period

    def __iter__(self) -> Iterator[int]:
        return (row % self.period for row in super().__iter__())


class PeriodicCoarse(CoarseEntering):
    """A state for every three rows, over content that comes again every three."""

    def row(self, number: int) -> int:
        return number % 3


class OpeningsCounted(WellBehaved):
    """Its openings are counted in the state, which therefore differs between equal places."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.openings = 0

    def __iter__(self) -> Iterator[Any]:
        self.openings += 1
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {"openings": self.openings, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.openings, self.done = state["openings"], state["done"]


class OrderByOpenings(OpeningsCounted):
    """The order depends on how often it was opened, and a resume opens it once more."""

    def row(self, number: int) -> int:
        return 1000 * self.openings + number


class EpochCounting(WellBehaved):
    """The order is a function of the epoch, which it counts itself, at the end of each, and keeps in its state."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        share = my_share(self.n)
        order = np.random.default_rng([11, self.epoch]).permutation(len(share))
        while self.done < len(share):
            self.done += 1
            yield share[int(order[self.done - 1])]
        self.epoch += 1
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]


class Looping(EpochCounting):
    """Has no end: after the last row of a loop comes the first of the next, in another order."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from super().__iter__()


class EpochSet(WellBehaved):
    """The order is a function of the epoch, which the training loop sets; the state does not hold it."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def row(self, number: int) -> int:
        return 1000 * self.epoch + number


DRAWS: dict[str, Callable[[int], list[int]]] = {
    "torch": lambda n: torch.randperm(n).tolist(),
    "numpy": lambda n: np.random.permutation(n).tolist(),
    "random": lambda n: random.sample(range(n), n),
}


class PermutationOnOpening(WellBehaved):
    """A permutation is drawn from a global generator in ``__iter__`` and is not in the state."""

    def __init__(self, n: int, source: str = "torch") -> None:
        super().__init__(n)
        self.source = source

    def __iter__(self) -> Iterator[int]:
        share = my_share(self.n)
        return self.in_order(share, DRAWS[self.source](len(share)))

    def in_order(self, share: range, order: list[int]) -> Iterator[int]:
        while self.done < len(share):
            self.done += 1
            yield share[order[self.done - 1]]
        self.done = 0


class PermutationOnFirstRow(PermutationOnOpening):
    """The same in a generator function: the permutation is drawn when the first row is asked for."""

    def __iter__(self) -> Iterator[int]:
        share = my_share(self.n)
        yield from self.in_order(share, DRAWS[self.source](len(share)))


class PermutationWithoutState(Sized, IterableDataset):
    """A permutation drawn from a global generator in ``__iter__``, and no state at all."""

    def __init__(self, n: int, source: str = "torch") -> None:
        super().__init__(n)
        self.source = source

    def __iter__(self) -> Iterator[int]:
        share = my_share(self.n)
        return (share[i] for i in DRAWS[self.source](len(share)))


class GeneratorOnOpening(PermutationOnOpening):
    """A generator is made in ``__iter__`` from a drawn seed, and the order from it."""

    def __iter__(self) -> Iterator[int]:
        share = my_share(self.n)
        n = len(share)
        if self.source == "torch":
            order = torch.randperm(n, generator=torch.Generator().manual_seed(int(torch.randint(2**31, ())))).tolist()
        elif self.source == "numpy":
            order = np.random.default_rng(np.random.randint(2**31)).permutation(n).tolist()
        else:
            order = random.Random(random.getrandbits(32)).sample(range(n), n)
        return self.in_order(share, order)


class DrawsInFlight(WellBehaved):
    """Content comes from a generator made in ``__iter__`` that moves with every row, and the state does not hold it."""

    def __iter__(self) -> Iterator[float]:
        generator = random.Random(random.getrandbits(32))
        return (row + generator.random() for row in super().__iter__())


class RandomContent(WellBehaved):
    """Adds noise from a global generator to every row."""

    def __init__(self, n: int, source: str = "torch") -> None:
        super().__init__(n)
        self.source = source

    def row(self, number: int) -> Any:
        return number + NOISE[self.source]()


NOISE: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),
    "random": lambda: random.random(),
    "none": lambda: 0.0,
}


class HiddenBuffer(WellBehaved):
    """Shuffles through a buffer of four rows that its state does not hold: a resume cannot know what was in it."""

    def __iter__(self) -> Iterator[int]:
        share = my_share(self.n)
        buffer: list[int] = []
        draw = random.Random(5)
        while self.done < len(share):
            self.done += 1
            buffer.append(share[self.done - 1])
            if len(buffer) == 4:
                yield buffer.pop(draw.randrange(4))
        self.done = 0
        yield from buffer


class UnseededNoise(WellBehaved):
    """Its noise comes from a generator of its own without a seed: made again, a row has another content."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.generator = np.random.default_rng()

    def row(self, number: int) -> tuple[int, float]:
        return number, float(self.generator.random())


class Uneven(WellBehaved):
    """Lane l has ``lengths[l % len(lengths)]`` rows, 100 l and on: some lanes end long before others."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(sum(lengths))
        self.lengths = lengths

    def __iter__(self) -> Iterator[int]:
        lane = my_lane()
        length = self.lengths[lane % len(self.lengths)]
        while self.done < length:
            self.done += 1
            yield 100 * lane + self.done - 1
        self.done = 0


class Files(WellBehaved):
    """Files of different lengths, dealt to the lanes whole: lanes beyond the last file have nothing."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(sum(lengths))
        self.lengths = lengths

    def __iter__(self) -> Iterator[int]:
        rows = [1000 * file + i for file in my_share(len(self.lengths)) for i in range(self.lengths[file])]
        while self.done < len(rows):
            self.done += 1
            yield rows[self.done - 1]
        self.done = 0


class LargeState(WellBehaved):
    """Its state holds a buffer of many rows, and a new one for every row."""

    def __init__(self, n: int, size: int = 10_000) -> None:
        super().__init__(n)
        self.buffer = list(range(size))

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "buffer": [*self.buffer[1:], self.done]}


# Iterable, with the state elsewhere or nowhere


class Stateless(Sized, IterableDataset):
    """A generator without any state: the only way back is to drop what was delivered."""

    def __iter__(self) -> Iterator[int]:
        yield from my_share(self.n)


class UnawareOfWorkers(Sized, IterableDataset):
    """Knows nothing of workers: each of them yields everything."""

    def __iter__(self) -> Iterator[int]:
        yield from range(self.n)


class OwnIterator(Sized, IterableDataset):
    """Is its own iterator, with one state, and ``iter`` starts it over."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.done = 0

    def __iter__(self) -> OwnIterator:
        self.done = 0
        return self

    def __next__(self) -> int:
        share = my_share(self.n)
        if self.done == len(share):
            raise StopIteration
        self.done += 1
        return share[self.done - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class OwnIteratorGoingOn(OwnIterator):
    """Is its own iterator, and ``iter`` leaves the place as it is; only the end starts it over."""

    def __iter__(self) -> OwnIteratorGoingOn:
        return self

    def __next__(self) -> int:
        try:
            return super().__next__()
        except StopIteration:
            self.done = 0
            raise


class RowIterator:
    """An iterator over the rows of a lane, with its own state."""

    def __init__(self, share: range, first: int = 0) -> None:
        self.share = share
        self.first = first
        self.done = 0

    def __iter__(self) -> RowIterator:
        return self

    def __next__(self) -> int:
        if self.done == len(self.share):
            raise StopIteration
        self.done += 1
        return self.first + self.share[self.done - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class StateOnIterator(Sized, IterableDataset):
    """The dataset has no state, its iterator has."""

    def __iter__(self) -> RowIterator:
        return RowIterator(my_share(self.n))


class StateOnBoth(Sized, IterableDataset):
    """The dataset's state is the epoch, counted when its iterator ends; the iterator's is the place in it."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.epoch = 0

    def __iter__(self) -> RowIterator:
        dataset = self

        class Ending(RowIterator):
            def __next__(self) -> int:
                try:
                    return super().__next__()
                except StopIteration:
                    dataset.epoch += 1
                    raise

        return Ending(my_share(self.n), 1000 * self.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


# Map-style


class Numbers(Sized, Dataset):
    """Nothing awkward: row i is the number i."""

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return torch.tensor(index)


class Augmented(Numbers):
    """Adds noise from a global generator to every row."""

    def __init__(self, n: int, source: str = "torch") -> None:
        super().__init__(n)
        self.source = source

    def __getitem__(self, index: int) -> Any:
        return index + NOISE[self.source]()


class FetchedTogether(Augmented):
    """Is asked for all rows of a batch at once, and draws once for all of them."""

    def __getitems__(self, indices: list[int]) -> list[float]:
        noise = NOISE[self.source]()
        return [index + noise for index in indices]

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("__getitems__ was there to be called")


class AskedForBatches(Numbers):
    """Its index is a list: a whole batch."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)


class Pair(NamedTuple):
    image: Any
    label: Any


SHAPES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: torch.arange(3, dtype=torch.int32) + i,
    "dict": lambda i: {"x": torch.full((2,), float(i)), "y": i, "name": f"row {i}"},
    "tuple": lambda i: (torch.tensor([i]), i),
    "namedtuple": lambda i: Pair(torch.full((2, 2), i, dtype=torch.uint8), float(i)),
    "str": lambda i: f"row {i}",
    "bytes": lambda i: bytes([i % 256]),
    "ndarray": lambda i: np.arange(4, dtype=np.float32) * i,
    "float": lambda i: float("nan") if i % 3 == 0 else i / 7,
    "nested": lambda i: {"a": [np.int16(i), {"b": (torch.tensor(i, dtype=torch.bfloat16), "c")}]},
}


class Shaped(Numbers):
    """Rows of one of the shapes that default collation knows; NaN among the floats."""

    def __init__(self, n: int, shape: str = "tensor") -> None:
        super().__init__(n)
        self.shape = shape

    def __getitem__(self, index: int) -> Any:
        return SHAPES[self.shape](index)


class Ragged(Numbers):
    """Rows of different lengths, which default collation refuses."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 + index % 3,), index)


def as_list(batch: list[Any]) -> list[Any]:
    return batch


def padded(batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-1)


# Samplers


class SamplerWithState(Sized, Sampler):
    """Keeps its place on itself, and starts over at the end."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.done = 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        while self.done < self.n:
            self.done += 1
            yield self.n - self.done
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class SamplerWithStateOnIterator(Sized, Sampler):
    """Keeps its place on its iterator."""

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> RowIterator:
        return RowIterator(range(self.n)[::-1])


class SamplerWithoutState(Sized, Sampler):
    """Draws an order from torch's global generator when it is opened, and keeps no state."""

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n).tolist())


class UnseededSampler(SamplerWithoutState):
    """Draws its order from a source that nobody can seed: made again, it is another."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(self.n), self.n))


class BatchesWithoutState(Sized, Sampler):
    """Batches of different sizes, without a state."""

    def __len__(self) -> int:
        return len(self.batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())

    def batches(self) -> list[list[int]]:
        ends = np.cumsum([0, *([1, 3, 2] * self.n)])
        return [list(range(a, min(b, self.n))) for a, b in itertools.pairwise(ends) if a < self.n]


class BatchesWithState(BatchesWithoutState):
    """Batches of different sizes, with the place kept on the sampler."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.done = 0

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.batches()
        while self.done < len(batches):
            self.done += 1
            yield batches[self.done - 1]
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
