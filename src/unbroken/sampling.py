"""The order of a map-style dataset: which rows a rank takes, and what makes the rest of the order again.

There is one global order of rows per epoch. It is a function of the index (in sequence, or a permutation under a
seed), a list that a torch sampler draws, or what a sampler of the user's gives; the last is run through a cursor,
like any iterable, with anchor and count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from unbroken.ledger import digest
from unbroken.made import Made
from unbroken.position import MapPosition
from unbroken.seeding import Permutation, key
from unbroken.state import seal, unseal

__all__ = ["MapOrder", "Share", "Step", "adoptable"]

Block = Callable[[int, int, int], Sequence[int]]
MakeTurn = Callable[[int], Made]
_DRAWN = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
_ROWS_AT_ONCE = 4096


@final
@dataclass(frozen=True)
class Share:
    """The part of the global order that a rank takes: row (or batch) i where ``i mod world == rank``."""

    rank: int = 0
    world: int = 1


@final
@dataclass(frozen=True, slots=True)
class Step:
    """One batch to come: its indices (one, unbatched), the place of the first in the global order, the distance between
    them there, and the rows of the global order that are done with it. ``made`` is the turn of a custom sampler.

    ``empty``: this rank has no row left for the step, and the row it names is one of another rank, to show the shape of
    a batch. Where epochs follow one another without an end, ``epoch`` is that of the first index, ``length`` the rows
    of an epoch, and ``over`` how many epochs have ended with the step.
    """

    indices: Any
    place: int
    stride: int
    rows: int
    made: Made | None = None
    empty: bool = False
    epoch: int | None = None
    length: int = 0
    over: int = 0


@final
class MapOrder:
    """The order of a map-style dataset under torch's arguments.

    ``kind`` is ``"sequential"``, ``"permutation"`` (shuffled, with a seed), ``"drawn"`` (by torch's own random
    samplers), ``"distributed"`` or ``"custom"``. ``ends`` is the end of an epoch on several ranks: each ends
    ``"alone"``, all ``"stop"`` before the first step that some rank cannot fill, or those that ran out ``"pad"``; or
    epochs ``"repeat"``. The order is known to each rank, so none has to ask another.
    """

    def __init__(
        self,
        sampler: Any,
        batch_sampler: Any,
        batch_size: int | None,
        drop_last: bool,
        share: Share,
        shuffled_by: int | None,
        ends: str = "alone",
    ) -> None:
        self.by_batch = batch_size is None and batch_sampler is not None
        self.base = sampler if batch_sampler is None or not self.by_batch else batch_sampler
        if self.by_batch and type(batch_sampler) is BatchSampler and _kind_of(batch_sampler.sampler) != "custom":
            self.base, batch_size, drop_last = batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last
            # A DistributedSampler shares out rows, and each rank makes batches of its own.
            self.by_batch = _kind_of(self.base) != "distributed"
        self.batched = batch_sampler is not None
        self.size = batch_size or 1
        self.drop_last = drop_last
        self.share = share
        self.ends = ends
        self._shuffled_by = shuffled_by
        self.kind = _kind_of(self.base) if shuffled_by is None else "permutation"
        if self.kind == "distributed":
            self.share = Share(self.base.rank, self.base.num_replicas)

    @property
    def random_without_generator(self) -> bool:
        """Whether the order is drawn from the global generator, so that ranks would disagree about it."""
        return self.kind == "drawn" and getattr(self.base, "generator", None) is None

    def total(self) -> int:
        """The rows (custom batch samplers: batches) of an epoch. Raises TypeError where the sampler has no length."""
        return self.base.total_size if self.kind == "distributed" else len(self.base)

    def batches(self) -> int:
        """The batches of an epoch that this rank takes."""
        total, size = self.total(), self.size
        if self.by_batch:
            if self.kind != "custom":
                total = total // size if self.drop_last else -(-total // size)
            size = 1
        whole, left = divmod(total, size * self.share.world)
        if self.ends == "repeat":  # the last rows of an epoch are in a step with the first of the next
            return whole + (left > 0)
        return whole + (self._part(left, self.share.rank) != "none")

    @property
    def _least(self) -> int:
        """The fewest rows (or batches, of a batch sampler) that a rank makes a step of."""
        return self.size if self.drop_last and not self.by_batch else 1

    def _part(self, number: int, offset: int) -> str:
        """What a rank has of a step of ``number`` rows, the first of its own at ``offset``: ``"rows"``, an ``"empty"``
        batch, or ``"none"``, and the epoch is over.
        """
        world, least = self.share.world, self._least
        if self.ends == "stop":
            return "rows" if number // world >= least else "none"
        if -(-(number - offset) // world) >= least:
            return "rows"
        return "empty" if self.ends == "pad" and -(-number // world) >= least else "none"

    def describe(self) -> dict[str, Any]:
        """The fields of the fingerprint that are the order's."""
        if self.kind == "permutation":
            return {"sampler": "shuffle with a seed"}
        name = type(self.base).__qualname__
        if self.kind == "distributed":
            name += f"(shuffle={self.base.shuffle}, seed={self.base.seed})"
        elif isinstance(self.base, RandomSampler):
            name += f"(replacement={self.base.replacement}, num_samples={self.base.num_samples})"
        elif isinstance(self.base, WeightedRandomSampler):
            weights = digest(self.base.weights)
            name += (
                f"(replacement={self.base.replacement}, num_samples={self.base.num_samples}, weights={weights:016x})"
            )
        elif isinstance(self.base, SubsetRandomSampler):
            name += f"(indices={digest(list(self.base.indices)):016x})"
        return {"sampler": name}

    def at_end(self, position: MapPosition) -> bool:
        """Whether nothing of the epoch is left, where that can be told without drawing its order again."""
        return self.kind not in ("custom", "drawn") and 0 < self.total() <= position.rows

    def note_end(self, position: MapPosition) -> None:
        """At the start of an epoch's position: what a user's generator has come to, as the next draw goes on from
        it.
        """
        if self.kind == "drawn" and self.base.generator is not None:
            position.sampler = {"before": seal(self.base.generator.get_state())}

    def go_back(self, position: MapPosition) -> None:
        """After a load: put a user's generator back to where the last epoch had left it."""
        if self.kind == "drawn" and position.sampler is not None and "before" in position.sampler:
            self.base.generator.set_state(unseal(position.sampler["before"]))

    # ---- the steps of an epoch

    def steps(self, position: MapPosition, seeded: bool, make: MakeTurn) -> Iterator[Step]:
        """The steps from a position on. Drawing, where there is any, happens now and not at the first step.

        ``make`` makes a turn of a custom sampler's cursor.
        """
        if self.kind == "custom":
            size = self.share.world * (1 if self.by_batch else self.size)
            return self._custom_steps(position.rows, make(size), lambda: make(size))
        block, total = self._block(position, seeded), self.total()
        if self.ends == "repeat":
            return self._endless_steps(block, total, replace(position), seeded)
        if self.by_batch:
            return self._batch_steps(block, total, position.rows)
        return self._row_steps(block, total, min(position.rows, total))

    def _block(self, position: MapPosition, seeded: bool) -> Block:
        run, epoch, total = position.run or 0, position.epoch, self.total()
        if self.kind == "sequential":
            return lambda start, stop, step: range(start, stop, step)
        if self.kind == "permutation":
            permutation = Permutation(total, key(self._shuffled_by or 0, "shuffle", epoch))
            return lambda start, stop, step: permutation.block(start, stop, step).tolist()
        order = self._global_order() if self.kind == "distributed" else self._drawn(position, run, epoch, seeded)
        if not set(map(type, order)) <= {int}:  # a SubsetRandomSampler of names, say
            return lambda start, stop, step: order[start:stop:step]
        array = np.asarray(order, dtype=np.int64)
        return lambda start, stop, step: array[start:stop:step].tolist()

    def _global_order(self) -> list[int]:
        """What all replicas of a DistributedSampler take together, padded or cut for its number of replicas."""
        alone = copy.copy(self.base)
        alone.rank, alone.num_replicas, alone.drop_last = 0, 1, False
        alone.num_samples = alone.total_size = len(self.base.dataset)
        order = list(alone)
        while 0 < len(order) < self.base.total_size:
            order += order[: self.base.total_size - len(order)]
        return order[: self.base.total_size]

    def _drawn(self, position: MapPosition, run: int, epoch: int, seeded: bool) -> list[int]:
        """The order of one of torch's random samplers, and in the position what draws it again."""
        saved = position.sampler
        if self.base.generator is not None:
            if saved is not None and "generator" in saved:
                self.base.generator.set_state(unseal(saved["generator"]))
            position.sampler = {"generator": seal(self.base.generator.get_state())}
            return list(self.base)
        alone = copy.copy(self.base)
        alone.generator = torch.Generator()
        if saved is None and (seeded or epoch > 0):
            alone.generator.manual_seed(key(run, "sampler", epoch))
        elif type(self.base) is RandomSampler:  # the draw that torch makes
            seed = saved["seed"] if saved else int(torch.empty((), dtype=torch.int64).random_().item())
            position.sampler = {"seed": seed}
            alone.generator.manual_seed(seed)
        else:
            position.sampler = saved or {"state": seal(torch.default_generator.get_state())}
            alone.generator.set_state(unseal(position.sampler["state"]))
            if saved is None:  # torch would draw these numbers from the global generator
                order = list(alone)
                torch.default_generator.set_state(alone.generator.get_state())
                return order
        return list(alone)

    def _whole_steps(self, block: Block, start: int, stop: int) -> Iterator[Step]:
        """The steps of the rows from ``start`` to ``stop``, all of them full on every rank."""
        world, stride = self.share.world, self.size * self.share.world
        offset, ahead = (self.share.rank - start) % world, max(1, _ROWS_AT_ONCE // self.size) * stride
        for begin in range(start, stop, ahead):
            rows = block(begin + offset, min(begin + ahead, stop), world)
            for number in range(0, len(rows), self.size):
                done = begin + number * world + stride
                yield Step(
                    self._indices(rows[number : number + self.size]), begin + offset + number * world, world, done
                )

    def _indices(self, rows: Sequence[int]) -> Any:
        return list(rows) if self.batched else rows[0]

    def _row_steps(self, block: Block, total: int, start: int) -> Iterator[Step]:
        world, stride = self.share.world, self.size * self.share.world
        stop = start + (total - start) // stride * stride
        yield from self._whole_steps(block, start, stop)
        offset = (self.share.rank - stop) % world
        part = self._part(total - stop, offset)
        if part == "rows":
            yield Step(self._indices(block(stop + offset, total, world)), stop + offset, world, total)
        elif part == "empty":
            yield Step(self._indices(block(stop, stop + 1, 1)), stop, world, total, empty=True)

    def _endless_steps(self, block: Block, total: int, position: MapPosition, seeded: bool) -> Iterator[Step]:
        """One epoch after another: a step may hold the last rows of one and the first of the next."""
        rank, world, stride = self.share.rank, self.share.world, self.size * self.share.world
        epoch, stop = position.epoch, position.rows
        before, blocks = epoch, {epoch: block}

        def block_of(epoch: int) -> Block:
            if epoch not in blocks:
                blocks[epoch] = self._block(MapPosition(epoch=epoch, run=position.run), seeded)
            return blocks[epoch]

        while True:
            epoch, start = epoch + stop // total, stop % total
            for earlier in [number for number in blocks if number < epoch]:
                del blocks[earlier]
            stop = start + (total - start) // stride * stride
            for step in self._whole_steps(block_of(epoch), start, stop):
                over, rows = divmod(step.rows, total)
                yield replace(step, rows=rows, epoch=epoch, length=total, over=epoch + over - before)
                before = epoch + over
            if stop == total:
                continue
            indices: list[int] = []
            at = place = stop + (rank - stop) % world
            while len(indices) < self.size:
                later, inside = divmod(at, total)
                end = min(total, inside + (self.size - len(indices)) * world)
                indices += block_of(epoch + later)(inside, end, world)
                at = place + len(indices) * world
            stop += stride
            over, rows = divmod(stop, total)
            later, place = divmod(place, total)
            yield Step(
                self._indices(indices), place, world, rows, None, False, epoch + later, total, epoch + over - before
            )
            before = epoch + over

    def _batch_steps(self, block: Block, total: int, start: int) -> Iterator[Step]:
        rank, world, size = self.share.rank, self.share.world, self.size
        number = total // size if self.drop_last else -(-total // size)
        for begin in range(-(-start // size), number, world):
            offset = (rank - begin) % world
            part = self._part(min(world, number - begin), offset)
            if part == "none":
                return
            mine = begin + (offset if part == "rows" else 0)
            rows = block(mine * size, min((mine + 1) * size, total), 1)
            yield Step(list(rows), mine * size, 1, min(total, (begin + world) * size), empty=part == "empty")

    def _custom_steps(self, start: int, made: Made, make: Callable[[], Made]) -> Iterator[Step]:
        rank, world = self.share.rank, self.share.world
        while not made.ended:
            offset, number = (rank - start) % world, len(made.samples)
            part = self._part(number, offset)
            if part == "none":
                while not made.ended:  # its state at the end is carried into the next epoch
                    made = make()
                return
            offset = offset if part == "rows" else 0
            mine = made.samples[offset::world] if part == "rows" else made.samples[:1]
            indices = mine[0] if self.by_batch or not self.batched else mine
            place = start + offset
            if self.by_batch:  # batches are of any size: room for the places of their rows
                place <<= 32
            yield Step(indices, place, 1 if self.by_batch else world, start + number, made, empty=part == "empty")
            start += number
            made = make()


def _kind_of(sampler: Any) -> str:
    if type(sampler) is SequentialSampler:
        return "sequential"
    if type(sampler) in _DRAWN:
        return "drawn"
    return "distributed" if adoptable(sampler) else "custom"


def adoptable(sampler: Any) -> bool:
    """Whether this is torch's DistributedSampler, whose order is known for any number of replicas."""
    return isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__
