"""``StatefulDataLoader``: torch's signature, and a position.

It keeps the position, and sets up an engine and a feed for each epoch. How lanes are run is the engine's; what order
rows come in is ``sampling``'s and ``lanes``'; how a position is written is ``leaves``'.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from unbroken.engine.agree import Ballot, Group, Together, TorchGroup
from unbroken.engine.cursor import Rules
from unbroken.engine.custom import SamplerTurns
from unbroken.engine.engine import Engine
from unbroken.engine.epoch import Epoch, Run
from unbroken.engine.feeds import Feed, Lanes
from unbroken.engine.opening import TorchOpening
from unbroken.engine.setup import new_engine, new_lane_feed, new_map_feed
from unbroken.epochs import PutBack, begin_afresh, check_epochs, draw_run, epoch_holders, tell_of_rest
from unbroken.lanes import lanes_of_rank
from unbroken.leaves import Leaves
from unbroken.options import check_options, distributed_rank, say_once
from unbroken.ordering import WatchedBatchSampler, fingerprint_of, settle
from unbroken.position import LanePosition, LanesPosition, MapPosition, Position

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
    dp_rank, dp_world_size, or group (a process group of torch.distributed), or mesh (a one-dimensional
        ``DeviceMesh``): the data-parallel rank. With these the loader shards the data itself, and a position can be
        loaded on another number of ranks.
    at_end: how an epoch ends on the ranks of a ``group`` (gloo will do) or ``mesh``; without one, each ends with its
        own data. ``"stop"``: together, before the first step that some rank cannot fill. ``"pad"``: ranks that ran out
        yield batches with no row in them until the last is done. ``"repeat"``: never. Each lane (or a map-style dataset
        as a whole) goes on with its own next epoch, and ``iter()`` goes on where the last one stopped.
    resume: ``"checked"`` makes sure that a dataset's own state leads back to the place; ``"trust"`` takes the state at
        its word; ``"replay"`` ignores it and makes everything again from the start of the epoch.
    lineage: for streams, each batch has the stored rows behind it: a ``Lineage``, for each row a tuple of ``Origin``,
        in the field ``"lineage"`` of a batch that is a dict; of any other, ``(batch, lineage)`` is yielded.

    worker_restarts: how often in a row a worker process that died, or hung, is replaced before it made anything more;
        then ``WorkerDied`` is raised. Its lanes go on from the last delivered position: the batches are the same.
    on_timeout: after ``timeout`` seconds without a batch, ``"raise"`` raises ``WorkerTimeout``, which says where the
        worker is; ``"restart"`` replaces it.
    on_error: ``"skip"`` leaves out samples for which the dataset raises an exception, counts and names them, and keeps
        them in the position; more than ``max_skipped`` of them in a run raise ``TooManySkipped``.
    in_order: ``False`` delivers what is ready, and still nothing twice and everything once.
    save_prefetched: for data that cannot be read again (a queue, a socket): batches that were made ahead are put into
        the position, and are delivered first after a load.
    max_prefetch_bytes: the most shared memory for batches that are made ahead; batches that you hold do not count.

    Raises what torch raises for its own arguments, ``ValueError`` or ``TypeError`` for the others, and ``LaneError``.
    Where ranks end together, ``next()`` raises ``PeerFailed`` if another rank failed.
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
        on_timeout: str = "raise",
        on_error: str = "raise",
        max_skipped: int | None = None,
        max_prefetch_bytes: int | None = None,
        at_end: str = "stop",
        lineage: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device,
        )  # fmt: skip
        self._options = check_options(given)
        self._kind, self._lanes, self._order = settle(self, given, self._options)
        if type(self.batch_sampler) is BatchSampler and given["batch_sampler"] is None:
            watched = WatchedBatchSampler(self.batch_sampler.sampler, self.batch_sampler.batch_size, self.drop_last)
            object.__setattr__(self, "batch_sampler", watched)
        self._ballot = self._new_ballot()
        self._planned_lanes = self._lanes
        self._position = self._new_position()
        self._leaves: Leaves | None = None
        self._gone: dict[str, Any] = {}  # fields of sources that are out of a mix and keep their place
        self._pristine: str | None = None
        self._begun = self._resumed = False
        self._iterating: weakref.ref[Epoch] | None = None
        self._engine: Engine | None = None
        self._reported_length: int | None = None
        self._turns: SamplerTurns | None = None

    def _new_ballot(self) -> Ballot | None:
        """For the vote of ranks of lanes. Of a map-style dataset each rank knows what the others have."""
        if self._order is not None or self._options.ends not in ("stop", "pad"):
            return None
        group = self._options.group
        return Ballot(group if isinstance(group, Group) else TorchGroup(group), pads=self._options.ends == "pad")

    # ---- position

    def state_dict(self) -> dict[str, str]:
        """The position: a flat dict of text, valid JSON in each value.

        May be called at any time; it starts no process, draws no random number and consumes nothing.
        """
        if self._leaves is None or (self._leaves.rank, self._leaves.world) != distributed_rank():
            self._leaves = self._new_leaves(self._gone)
        return self._leaves.write(self._position)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Stand where a position says; the next ``iter()``, or the next batch of a live iterator, goes on there.

        ``{}`` resets. ``strict=False`` accepts a position of a pipeline with another order or other data, and says
        what it accepted. Raises ``InvalidState``, ``IncompleteState`` or ``StateMismatch``; nothing is changed then.
        """
        if isinstance(state, Mapping) and not state:
            self._lanes, self._leaves, self._gone = self._planned_lanes, None, {}
            self._stand_at(self._new_position(), resumed=False)
            return
        position, accepted, self._gone = self._new_leaves({}).read(state, strict)
        self._leaves = None
        for difference in accepted:
            say_once(f"A position of another pipeline was accepted:{str(difference)[1:]}")
        self._lanes = len(position.lanes) if isinstance(position, LanesPosition) and not self._shared else self._lanes
        self._stand_at(position, resumed=True)

    def _stand_at(self, position: Position, *, resumed: bool) -> None:
        if self._order is not None and isinstance(position, MapPosition):
            self._order.go_back(position)
        self._position, self._resumed, self._begun = position, resumed, False
        if self._ballot is not None:
            self._ballot = self._ballot.anew(resumed=resumed)
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
        return lanes_of_rank(self._lanes, self._options.share.rank, self._options.share.world)

    def _new_leaves(self, gone: dict[str, Any]) -> Leaves:
        rank, world = distributed_rank()
        if not self._shared and world > 1:
            say_once(
                "This loader has no dp arguments while torch.distributed has several ranks: each rank's position is "
                "its own, exact on the same number of ranks only. Pass dp_rank and dp_world_size (or mesh) to change "
                "it at a resume."
            )
        elif world > 1 and self._kind == "stream" and not self._options.sharded:
            say_once(
                "Each rank gets all rows of the stream: pass group=, mesh=, or dp_rank and dp_world_size to share them."
            )
        fingerprint, kinds = fingerprint_of(self.dataset, self._options, self._order, self._lanes, self.batch_size)
        return Leaves(
            self._kind, self._shared, rank, world, self._lanes, self._mine(), fingerprint | gone, kinds,
            self._options.resume == "trust", self._options.ends,
        )  # fmt: skip

    # ---- epochs

    def __iter__(self) -> Epoch:  # type: ignore[override]
        live = self._live()
        if live is not None and live.waiting:
            live.finished = True  # it was repositioned, and this iterator takes its place
        before = self._position, self._begun, self._resumed
        self._position = self._stand_for_pass(self._position.copy())
        if self._ballot is not None:
            self._ballot = self._ballot.anew(resumed=self._resumed)
        resumed, self._resumed, self._begun = self._resumed, False, True
        told = self._reported_length if self._options.ends != "repeat" else None
        length = None if told is None else (self.dataset, told)
        try:
            epoch = Epoch(self, resumed, self.persistent_workers, self.pin_memory, length)
        except BaseException:  # nothing was begun: another try is for the same epoch
            self._position, self._begun, self._resumed = before
            raise
        self._iterating = weakref.ref(epoch)
        return epoch

    def _stand_for_pass(self, position: Position) -> Position:
        """A position as a new pass begins with it: of the next epoch, where one was begun or is over."""
        endless = self._options.ends == "repeat"
        over = self._order is not None and isinstance(position, MapPosition) and self._order.at_end(position)
        epochs = {name: holder.epoch for name, holder in epoch_holders(self).items()}
        moved_on = position.stopped and any(position.epochs.get(name, now) != now for name, now in epochs.items())
        if (self._resumed or endless) and position.mid_epoch and not moved_on:
            check_epochs(position.epochs, epochs, over=over)
        if (self._begun and not endless) or over or (self._resumed and moved_on):
            self._to_next_epoch(position, ended=position.stopped)
        position.stopped = False
        if not endless or not position.mid_epoch:
            position.epochs = {name: int(epoch) for name, epoch in epochs.items()}
        if endless and isinstance(position, LanesPosition) and position.noted is None:
            position.noted = position.epoch
        return position

    def _to_next_epoch(self, position: Position, *, ended: bool) -> None:
        """``ended``: what a sampler of the user's had come to at the end is carried into the next epoch."""
        last = self._turns.last if self._turns is not None else None
        if ended and isinstance(position, MapPosition) and last is not None and last.ended:
            position.cursor.end(last)
        position.next_epoch(self._pristine)
        self._gone, self._leaves = {}, self._leaves if not self._gone else None
        if ended and self._order is not None and isinstance(position, MapPosition):
            self._order.note_end(position)

    def start(self, epoch: Epoch) -> tuple[Engine, Feed]:
        """For the iterator: an engine and a feed at the position of now."""
        position = self._position
        self._resumed = False
        self._begun = True
        draw_run(position, self._options, self.generator)
        rules = self._rules(position)
        if self._live() is epoch:  # it was begun before, so that the dataset is no longer what it was
            begin_afresh(position, self._pristine)
        engine = self._engine
        if engine is None or engine.closed:
            owned = None if self._order is not None else len(self._mine())
            engine = new_engine(self, self._kind, self._lanes, owned, rules)
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
        if not self.is_live(epoch):
            return  # a newer iterator has the loader's position
        position, ballot, ends = self._position, self._ballot, self._options.ends
        if ends == "alone" and self._options.share.world > 1 and not going_on:
            say_once(
                "Each rank ends an epoch with its own data: ranks may end at different steps, and a training loop on "
                "several ranks has to agree on the last one. Pass group= or mesh=, and they end together."
            )
        waited = ballot is not None and ballot.waits(position)
        over = self._order is not None and isinstance(position, MapPosition) and self._order.at_end(position)
        if ends == "stop" and not waited and not over:
            tell_of_rest(position, self._order)
        if ballot is not None:
            self._ballot = ballot.anew(resumed=False)
        if ends == "stop" and not over and not going_on:
            position.stopped = True  # on other ranks, what is left may do for a step
            return
        if not waited:
            self._to_next_epoch(position, ended=True)
        self._begun = False

    def _rules(self, position: Position) -> Rules:
        options = self._options
        every = options.capture_every or (1 if options.resume == "trust" else None)
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
            endless=options.ends == "repeat",
            lineage=options.lineage,
        )

    def _new_feed(self, engine: Engine, position: Position, rules: Rules) -> Feed:
        self._turns = None
        options = self._options
        if self._order is not None and isinstance(position, MapPosition):
            feed, self._turns = new_map_feed(engine, position, self._order, rules, options.seeded)
            return feed
        if not isinstance(position, LanesPosition):
            raise TypeError("a map-style dataset has a MapPosition, any other a LanesPosition")
        needed = options.share.world > 1 and options.ends != "pad"
        feed = new_lane_feed(self, self._kind, Lanes(engine, position, rules, needed=needed), lineage=rules.lineage)
        return feed if self._ballot is None else Together(feed, self._ballot, position)

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
        alone = dict.fromkeys(("_iterating", "_engine", "_turns")) | {"_ballot": self._new_ballot()}
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
