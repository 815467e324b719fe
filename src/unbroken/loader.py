"""``StatefulDataLoader``: torch's signature, and a position.

This file is the door: it keeps the position, and sets up an engine and a feed for each epoch. How lanes are run is the
engine's; what order rows come in is ``sampling``'s and ``lanes``'; how a position is written is ``leaves``'.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
import torch.multiprocessing
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    default_convert,
)

from unbroken.engine.cursor import Rules
from unbroken.engine.custom import SamplerTurns
from unbroken.engine.engine import Engine
from unbroken.engine.epoch import Epoch, Run
from unbroken.engine.feeds import Batching, Feed, LaneFeed, MapFeed, RowFeed
from unbroken.engine.host import Plan
from unbroken.engine.inline import Inline
from unbroken.engine.opening import TorchOpening
from unbroken.engine.pool import Pool
from unbroken.lanes import LaneStream, lanes_of_rank, plan_lanes
from unbroken.leaves import Leaves
from unbroken.options import (
    PutBack,
    WatchedBatchSampler,
    begin_afresh,
    check_epochs,
    check_options,
    check_order,
    distributed_rank,
    draw_run,
    epoch_holders,
    fingerprint_of,
    say_once,
    tell_of_own_state,
)
from unbroken.position import LanePosition, LanesPosition, MapPosition, Position
from unbroken.sampling import MapOrder

__all__ = ["StatefulDataLoader"]


@final
class StatefulDataLoader(DataLoader[Any], Run):
    """torch's ``DataLoader``, which never loses its place.

    The arguments up to ``in_order`` are torch's, and mean what they mean there; ``snapshot_every_n_steps`` is
    torchdata's. The others:

    seed: a whole number from which all random numbers come, by place. No global random number is drawn then, and the
        global generators of torch, numpy and random are left as they are.
    seed_by: ``"batch"`` seeds the global generators once a batch; ``"sample"`` before every sample, which makes random
        numbers independent of the batch size and of ranks too.
    lanes: the number of logical workers of an iterable dataset, fixed for a run while processes and ranks come and go.
        By default one a worker (and rank), and 64 for streams.
    dp_rank, dp_world_size, or mesh (a one-dimensional ``DeviceMesh``): the data-parallel rank. With these the loader
        shards the data itself, and a position can be loaded on another number of ranks.
    resume: ``"checked"`` makes sure that a dataset's own state leads back to the place; ``"trust"`` takes the state at
        its word; ``"replay"`` ignores it and makes everything again from the start of the epoch.

    ``save_prefetched``, ``group``, ``at_end`` other than ``"stop"`` and ``in_order=False`` raise
    ``NotImplementedError`` in this version, and ``worker_restarts`` is not yet in effect: a worker that dies ends the
    run with ``WorkerDied``.

    Raises what torch raises for its own arguments, ``ValueError`` or ``TypeError`` for the others, and ``LaneError``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = None,
        seed: int | None = None,
        seed_by: str = "batch",
        lanes: int | None = None,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        group: Any = None,
        mesh: Any = None,
        resume: str = "checked",
        save_prefetched: bool = False,
        worker_restarts: int = 3,
        at_end: str = "stop",
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device,
        )  # fmt: skip
        self._options = check_options(given)
        self._settle_order(given)
        self._planned_lanes = self._lanes
        self._position = self._new_position()
        self._leaves: Leaves | None = None
        self._pristine: str | None = None
        self._begun = self._resumed = False
        self._iterating: weakref.ref[Epoch] | None = None
        self._engine: Engine | None = None
        self._reported_length: int | None = None
        self._turns: SamplerTurns | None = None

    def _settle_order(self, given: dict[str, Any]) -> None:
        """Decide what kind of dataset this is, and the plan of its order: lanes, or a sampler's."""
        options, dataset = self._options, given["dataset"]
        self._lanes = 0
        self._order: MapOrder | None = None
        if isinstance(dataset, IterableDataset):
            self._kind = "stream" if isinstance(dataset, LaneStream) else "iterable"
            default = max(1, self.num_workers) * options.share.world
            if isinstance(dataset, LaneStream):
                default = max(default, dataset.default_lanes)
            self._lanes = plan_lanes(options.lanes, default, self.num_workers, options.share.world)
            if self._lanes % options.share.world:
                say_once(
                    f"{self._lanes} lanes do not divide evenly among {options.share.world} ranks: nothing is lost or "
                    "repeated, but the rows of a global step differ from those on another number of ranks."
                )
        else:
            self._kind = "map"
            if options.lanes is not None:
                raise ValueError(
                    f"lanes={options.lanes} was given with a map-style dataset, which has no lanes: any worker takes "
                    "its next batch. Leave lanes out."
                )
            shuffled_by = options.seed if given["shuffle"] else None
            own = given["batch_sampler"] is None
            batch_sampler = self.batch_sampler if given["batch_size"] is not None or not own else None
            size = given["batch_size"] if own else None
            tell_of_own_state(dataset)
            self._order = MapOrder(
                self.sampler if own else None, batch_sampler, size, self.drop_last, options.share, shuffled_by
            )
            check_order(self._order, options)
        if type(self.batch_sampler) is BatchSampler and given["batch_sampler"] is None:
            watched = WatchedBatchSampler(self.batch_sampler.sampler, self.batch_sampler.batch_size, self.drop_last)
            object.__setattr__(self, "batch_sampler", watched)

    # ---- position

    def state_dict(self) -> dict[str, str]:
        """The position: a flat dict of text, valid JSON in each value.

        May be called at any time; it starts no process, draws no random number and consumes nothing.
        """
        if self._leaves is None or (self._leaves.rank, self._leaves.world) != distributed_rank():
            self._leaves = self._new_leaves()
        return self._leaves.write(self._position)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Stand where a position says; the next ``iter()``, or the next batch of a live iterator, goes on there.

        ``{}`` resets. ``strict=False`` accepts a position of a pipeline with another order or other data, and says
        what it accepted. Raises ``InvalidState``, ``IncompleteState`` or ``StateMismatch``; nothing is changed then.
        """
        if isinstance(state, Mapping) and not state:
            self._lanes, self._leaves = self._planned_lanes, None
            self._stand_at(self._new_position(), resumed=False)
            return
        self._leaves = self._new_leaves()
        position, accepted = self._leaves.read(state, strict)
        for difference in accepted:
            say_once(f"A position of another pipeline was accepted:{str(difference)[1:]}")
        if isinstance(position, LanesPosition) and not self._shared:
            self._lanes = len(position.lanes)
            self._leaves = None
        self._stand_at(position, resumed=True)

    def _stand_at(self, position: Position, *, resumed: bool) -> None:
        if self._order is not None and isinstance(position, MapPosition):
            self._order.go_back(position)
        self._position, self._resumed, self._begun = position, resumed, False
        begin_afresh(position, self._pristine)
        for name, holder in epoch_holders(self).items():
            if name in position.epochs:
                holder.set_epoch(PutBack(position.epochs[name]))
        self._close_engine()
        if (live := self._live()) is not None and not live.finished:
            live.reposition()

    def _new_position(self) -> Position:
        if self._order is not None:
            return MapPosition()
        exact = self._kind == "stream" or self._options.resume == "trust"
        return LanesPosition({lane: LanePosition(exact=exact) for lane in self._mine()})

    @property
    def _shared(self) -> bool:
        """Whether leaves name no rank."""
        return self._kind == "stream" or self._options.lanes is not None or self._options.sharded

    def _mine(self) -> range:
        share = self._order.share if self._order is not None else self._options.share
        return lanes_of_rank(self._lanes, share.rank, share.world)

    def _new_leaves(self) -> Leaves:
        rank, world = distributed_rank()
        if not self._shared and world > 1:
            say_once(
                "This loader has no dp arguments while torch.distributed has several ranks: each rank's position is "
                "its own, exact on the same number of ranks only. Pass dp_rank and dp_world_size (or mesh) to change "
                "it at a resume."
            )
        fingerprint, kinds = fingerprint_of(self.dataset, self._options, self._order, self._lanes, self.batch_size)
        return Leaves(
            self._kind, self._shared, rank, world, self._lanes, self._mine(), fingerprint, kinds,
            self._options.resume == "trust",
        )  # fmt: skip

    # ---- epochs

    def __iter__(self) -> Epoch:  # type: ignore[override]
        live = self._live()
        if live is not None and live.waiting:
            live.finished = True  # it was repositioned, and this iterator takes its place
        before = self._position, self._begun, self._resumed
        position = self._position.copy()
        over = self._order is not None and isinstance(position, MapPosition) and self._order.at_end(position)
        epochs = {name: holder.epoch for name, holder in epoch_holders(self).items()}
        if self._resumed and position.mid_epoch:
            check_epochs(position.epochs, epochs, over=over)
        if self._begun or over:
            position.next_epoch(self._pristine)
        position.epochs = {name: int(epoch) for name, epoch in epochs.items()}
        resumed, self._resumed = self._resumed, False
        self._position, self._begun = position, True
        length = None if self._reported_length is None else (self.dataset, self._reported_length)
        try:
            epoch = Epoch(self, resumed, self.persistent_workers, self.pin_memory, length)
        except BaseException:  # nothing was begun: another try is for the same epoch
            self._position, self._begun, self._resumed = before
            raise
        self._iterating = weakref.ref(epoch)
        return epoch

    def start(self, epoch: Epoch) -> tuple[Engine, Feed]:
        """For the iterator: an engine and a feed at the position of now."""
        position = self._position
        self._resumed = False
        self._begun = True
        draw_run(position, self._options, self.generator)
        rules = self._rules(position)
        engine = self._engine
        if engine is None or engine.closed:
            engine = self._new_engine(rules)
        try:
            feed = self._new_feed(engine, position, rules)
        except BaseException:
            engine.close()
            raise
        if self.persistent_workers and engine is not self._engine:
            self._engine = engine
            weakref.finalize(self, engine.close).atexit = False  # the engine sees to that itself
        return engine, feed

    def _live(self) -> Epoch | None:
        return self._iterating() if self._iterating is not None else None

    def is_live(self, epoch: Epoch) -> bool:
        """For the iterator: whether it is the newest."""
        return self._live() is epoch

    def finish(self, epoch: Epoch, *, going_on: bool) -> None:
        """For the iterator: its epoch is over."""
        if not going_on and not self.is_live(epoch):
            return  # a newer iterator has the loader's position
        if self._options.share.world > 1 and not going_on:
            say_once(
                "Each rank ends an epoch with its own data: ranks may end at different steps, and a training loop on "
                "several ranks has to agree on the last one."
            )
        position = self._position
        last = self._turns.last if self._turns is not None else None
        if isinstance(position, MapPosition) and last is not None and last.ended:
            position.cursor.end(last)
        position.next_epoch(self._pristine)
        if self._order is not None and isinstance(position, MapPosition):
            self._order.note_end(position)
        self._begun = False

    def _rules(self, position: Position) -> Rules:
        options = self._options
        every = options.capture_every
        if every is None and options.resume == "trust":
            every = 1
        subject = self._order.base if self._order is not None and self._order.kind == "custom" else self.dataset
        if self._pristine is None and (self._kind == "iterable" or subject is not self.dataset):
            what = f"the state_dict() of {type(subject).__qualname__}"
            self._pristine = TorchOpening(subject, use_state=True, what=what).carry()
        return Rules(
            run=position.run or 0,
            seed_by=options.seed_by,
            resume=options.resume,
            capture_every=every,
            drop_last=self.drop_last and self._kind == "iterable",
            pristine=self._pristine,
        )

    def _new_engine(self, rules: Rules) -> Engine:
        default = default_collate if self.batch_sampler is not None else default_convert
        hosts = min(self.num_workers, len(self._mine())) if self._order is None else self.num_workers
        plan = Plan(
            dataset=self.dataset,
            kind=self._kind,
            rules=rules,
            lanes=self._lanes,
            hosts=hosts,
            batched=self.batch_sampler is not None,
            collate_fn=None if self.collate_fn is default else self.collate_fn,
            worker_init_fn=self.worker_init_fn,
        )
        if hosts == 0:
            return Inline(plan)
        context = self.multiprocessing_context or torch.multiprocessing.get_context()
        return Pool(plan, context, self.prefetch_factor or 0, self.timeout)

    def _new_feed(self, engine: Engine, position: Position, rules: Rules) -> Feed:
        self._turns = None
        size = self.batch_size or 1
        if isinstance(position, LanesPosition) and self._kind == "stream":
            own = None if self.collate_fn in (default_collate, default_convert) else self.collate_fn
            batching = Batching(size, self.batch_sampler is not None, self.drop_last, own, self._options.share.world)
            return RowFeed(engine, position, batching)
        if isinstance(position, LanesPosition):
            return LaneFeed(engine, position, size, self._options.share.world)
        if not isinstance(position, MapPosition) or self._order is None:
            raise TypeError("a map-style dataset has a MapPosition")
        order = self._order
        if order.kind == "custom":
            self._turns = SamplerTurns(order.base, position, rules, self._options.seeded)
        make = self._turns.make if self._turns is not None else _no_turns
        steps = order.steps(position, self._options.seeded, make)
        return MapFeed(engine, position, steps, order.share.world * (1 if order.by_batch else order.size))

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def close(self) -> None:
        """End the worker processes, within two seconds; may be called again. Batches already handed out stay."""
        if (live := self._live()) is not None:
            live.close()
        self._close_engine()

    # ---- the rest of torch's interface

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the loader (by copy or pickle) goes on from its position, with workers of its own."""
        alone = dict.fromkeys(("_iterating", "_engine", "_turns"))
        going_on = {"_position": self._position.copy(), "_resumed": self._begun or self._resumed, "_begun": False}
        return {**self.__dict__, **alone, **going_on}

    def __len__(self) -> int:
        """Batches of an epoch on this rank; for iterable datasets torch's estimate from ``len(dataset)``."""
        if self._order is not None:
            return self._order.batches()
        length = self._reported_length = len(self.dataset)  # type: ignore[arg-type]
        if self.batch_size is None:
            return length
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)


def _no_turns(size: int) -> Any:
    raise TypeError("only a custom sampler makes turns")
