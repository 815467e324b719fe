"""``StatefulDataLoader``: torch's signature, and a position.

It keeps the position, and sets up an engine and a feed for each epoch. How lanes are run is the engine's; what order
rows come in is ``sampling``'s and ``lanes``'; how a position is written is ``leaves``'.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, final

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from unbroken.contexts import Context
from unbroken.engine.agree import new_ballot
from unbroken.engine.custom import SamplerTurns
from unbroken.engine.engine import Engine
from unbroken.engine.epoch import Epoch
from unbroken.engine.feeds import Feed
from unbroken.engine.measured import Measured, new_stats
from unbroken.engine.opening import pristine_of
from unbroken.engine.setup import new_engine, new_feed, new_rules
from unbroken.engine.stored import Kept
from unbroken.epochs import begin_afresh, begin_pass, draw_run, end_pass, epoch_holders, is_next_due, put_back_epochs
from unbroken.lane_position import LanePosition
from unbroken.lanes import lanes_of_rank
from unbroken.leaves import Leaves
from unbroken.options import check_options, distributed_rank, say_once
from unbroken.ordering import WatchedBatchSampler, fingerprint_of, length_in_batches, settle, tell_of_ranks
from unbroken.position import LanesPosition, MapPosition, Position
from unbroken.skipped import Skipped
from unbroken.steps import joined, to_leave_out
from unbroken.trail import Trail, check_made_again

__all__ = ["StatefulDataLoader"]

_T_co = TypeVar("_T_co", covariant=True)


@final
class StatefulDataLoader(DataLoader[_T_co], Measured):
    """torch's ``DataLoader``, which never loses its place.

    The arguments up to ``in_order`` are torch's, and mean what they mean there; ``snapshot_every_n_steps`` is
    torchdata's. Besides, ``multiprocessing_context="thread"`` has threads of this process run the lanes of a stream.
    The others:

    seed: a whole number from which all random numbers come, by place. The global generators of torch, numpy and random
        are left as they are then.
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
        the position, and are delivered first after a load. ``iter()`` goes on where the last one stopped.
    max_prefetch_bytes: the most shared memory for batches that worker processes make ahead, without those that you
        hold. One is always made; one that is larger than those before it is counted once it is made.
    progress: show a line with the numbers of ``stats()`` on a terminal while it runs; elsewhere, log it.

    Raises what torch raises for its own arguments, ``ValueError`` or ``TypeError`` for the others, and ``LaneError``.
    Where ranks end together, ``next()`` raises ``PeerFailed`` if another rank failed.
    """

    multiprocessing_context = Context()
    _pristine: str | None  # the sealed state of the dataset before it was ever opened

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
        progress: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        self._options = options = check_options(given)
        self.measured = new_stats(progress, options.share.rank)
        self._kind, self._lanes, self._order = settle(self, given, options)
        if type(self.batch_sampler) is BatchSampler and given["batch_sampler"] is None:
            watched = WatchedBatchSampler(self.batch_sampler.sampler, self.batch_sampler.batch_size, self.drop_last)
            object.__setattr__(self, "batch_sampler", watched)
        self._ballot, self._planned_lanes = new_ballot(options, self._order), self._lanes
        self._position, self._trail, self._kept = self._new_position(), Trail(), Kept()
        self._leaves: Leaves | None = None
        self._gone: dict[str, Any] = {}  # fields of sources that are out of a mix and keep their place
        self._pristine, self._begun, self._resumed = None, False, False
        self._iterating: weakref.ref[Epoch] | None = None
        self._engine: Engine | None = None
        self._reported_length: int | None = None
        self._turns: SamplerTurns | None = None

    # ---- position

    def state_dict(self) -> dict[str, str]:
        """The position: a flat dict of text, valid JSON in each value.

        May be called at any time; it starts no process, draws no random number and consumes nothing. With
        ``save_prefetched`` it waits for what workers have begun, and raises ``WorkerTimeout``, ``WorkerDied``, or
        ``UnsealableState`` for a batch that cannot be saved.
        """
        with self._trail.lock, self._kept.settled():
            return self._write(self._position, self._gone)

    def state_after(self, batch: Any) -> dict[str, str]:
        """What ``state_dict()`` was right after a batch, one of the last 16, was delivered: for loops that take batches
        before they train on them. A load begins anew.

        ``batch`` is the object that ``next()`` returned, not a copy, nor what was made of it. Batches are not kept
        alive for this, but those without a tensor, an array or an object of the user's in them.

        Raises ``ValueError`` where it is none of the last, where the same object was delivered several times among
        them (one buffer for every batch, a small number), and with ``save_prefetched``.
        """
        check_made_again(saved=self._options.prefetch.saved)
        with self._trail.lock:
            position, gone = self._trail.find(batch)
            return self._write(position, self._gone if gone is None else gone)

    def _write(self, position: Position, gone: dict[str, Any]) -> dict[str, str]:
        if gone != self._gone:
            return self._new_leaves(gone).write(position)
        if self._leaves is None or (self._leaves.rank, self._leaves.world) != distributed_rank():
            self._leaves = self._new_leaves(gone)
        return self._leaves.write(position)

    @property
    def skipped(self) -> Skipped:
        """What ``on_error="skip"`` left out in this run, on this rank: a ``count``, and the ``last`` by name."""
        return Skipped.of_position(self._position.skipped)

    def skip(self, batches: int | range) -> None:
        """Leave out the next ``batches``; or, as a ``range``, those steps of the run, which count what was delivered or
        left out on this rank, from 0. Call it on all ranks at the same step.

        It is kept in the position: resumed anywhere, the same steps are left out, and the rest is as it would have
        been; to ask for the same again changes nothing. Batches of a map-style dataset are not made, those of others
        are made and let go. A load replaces what was to be left out. Raises ``ValueError`` for what was delivered.
        """
        first, stop = to_leave_out(batches, self._position.step, self._position.passed)
        self._trail.leave_out(joined(self._position.passed, first, stop), self._position, self._gone)

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
        self._trail.clear()
        self._position, self._resumed, self._begun = position, resumed, False
        if self._ballot is not None:
            self._ballot = self._ballot.anew(resumed=resumed)
        begin_afresh(position, self._pristine)
        put_back_epochs(self, position)
        self._kept.forget()
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
        tell_of_ranks(world, self._kind, shared=self._shared, sharded=self._options.sharded)
        fingerprint, kinds = fingerprint_of(self.dataset, self._options, self._order, self._lanes, self.batch_size)
        return Leaves(
            self._kind, self._shared, rank, world, self._lanes, self._mine(), fingerprint | gone, kinds,
            self._options.resume == "trust", self._options.ends,
        )  # fmt: skip

    # ---- epochs

    def __iter__(self) -> Epoch:  # type: ignore[override]
        self._put_aside()
        live = self._live()
        if live is not None and (live.waiting or self._options.prefetch.saved):
            live.finished = True  # it was repositioned, or what it has ahead is in the position; this one takes over
        self._trail.settle(self._gone)
        before = self._position, self._begun, self._resumed, self._gone
        try:
            position = self._position.copy()
            epochs = {name: holder.epoch for name, holder in epoch_holders(self).items()}
            if is_next_due(position, self._options, self._order, epochs, begun=self._begun, resumed=self._resumed):
                self._to_next_epoch(position, ended=position.stopped)
            begin_pass(position, self._options, epochs)
            self._position = position
            if self._ballot is not None:
                self._ballot = self._ballot.anew(resumed=self._resumed)
            resumed, self._resumed, self._begun = self._resumed, False, True
            told = self._reported_length if self._options.ends != "repeat" else None
            length = None if told is None else (self.dataset, told)
            keep = self.persistent_workers or self._options.prefetch.saved
            epoch = Epoch(self, resumed, keep, self.pin_memory, length)
        except BaseException:  # nothing was begun: another try is for the same epoch
            self._position, self._begun, self._resumed, self._gone = before
            raise
        self._iterating = weakref.ref(epoch)
        self._show(epoch)
        return epoch

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
        self._put_aside()
        self._trail.settle(self._gone)
        self._resumed = False
        self._begun = True
        draw_run(position, self._options, self.generator)
        subject = self._order.base if self._order is not None and self._order.kind == "custom" else self.dataset
        if self._pristine is None and (self._kind == "iterable" or subject is not self.dataset):
            self._pristine = pristine_of(subject)
        rules = new_rules(self, self._kind, position, self._options, self._pristine)
        if self._live() is epoch:  # it was begun before, so that the dataset is no longer what it was
            begin_afresh(position, self._pristine)
        engine = self._engine
        if engine is None or engine.closed:
            owned = None if self._order is not None else len(self._mine())
            engine = new_engine(self, self._kind, self._lanes, owned, rules, self._options, self.measured)
        try:
            feed, self._turns = new_feed(self, self._order, engine, position, rules, self._options, self._ballot)
        except BaseException:
            engine.close()
            raise
        self._kept.keep(feed)
        self._trail.begin(position)
        if (self.persistent_workers or feed.keeps) and engine is not self._engine:
            self._engine = engine  # it ends with the loader
        return engine, feed

    def _put_aside(self) -> None:
        if self._kept.put_aside() and not self.persistent_workers:
            self._close_engine()

    def _live(self) -> Epoch | None:
        return self._iterating() if self._iterating is not None else None

    def is_live(self, epoch: Epoch) -> bool:
        """For the iterator: whether it is the newest."""
        return self._live() is epoch

    @property
    def trail(self) -> Trail:
        """For the iterator: which deliveries have moved the position."""
        return self._trail

    def take_back(self, epoch: Epoch) -> None:
        """For the iterator: what it had begun to count did not reach the user."""
        if self.is_live(epoch) and (position := self._trail.take_back(self._gone)) is not None:
            self._position = position

    def delivered(self, epoch: Epoch, batch: Any) -> None:
        """For the iterator: a batch is handed out."""
        if self.is_live(epoch):
            self._trail.note(batch, self._position)

    def pass_over(self, epoch: Epoch, commit: Callable[[], None]) -> None:
        """For the iterator: a batch is left out. That of an older one moves a position of its own."""
        if self.is_live(epoch):
            self._trail.pass_over(self._position, self._gone, commit)
        else:
            commit()

    def finish(self, epoch: Epoch, *, going_on: bool) -> None:
        """For the iterator: its epoch is over. Done at once, with the last statement: no interrupt parts it."""
        if not self.is_live(epoch):
            return  # a newer iterator has the loader's position
        self._put_aside()
        self._trail.settle(self._gone)
        position, ballot = self._position.copy(), self._ballot
        waited = ballot is not None and ballot.waits(position)
        stopped = end_pass(position, self._options, self._order, waited=waited, going_on=going_on)
        ballot = None if ballot is None else ballot.anew(resumed=False)
        position.stopped = stopped
        if not waited and not stopped:
            self._to_next_epoch(position, ended=True)
        self._position, self._ballot, self._begun, epoch.finished = position, ballot, position.stopped, not going_on

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def close(self) -> None:
        """End the worker processes, within two seconds; may be called again. Batches already handed out stay."""
        self._kept.let_go()
        if (live := self._live()) is not None:
            live.close()
        self._close_engine()

    # ---- the rest of torch's interface

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the loader (by copy or pickle) goes on from its position, with workers of its own."""
        alone = dict.fromkeys(("_iterating", "_engine", "_turns"))
        alone |= {"_ballot": new_ballot(self._options, self._order), "_trail": Trail(), "_kept": Kept()}
        alone["measured"] = self.measured.anew()
        going_on = {"_position": self._position.copy(), "_resumed": self._begun or self._resumed, "_begun": False}
        return {**self.__dict__, **alone, **going_on}

    def __len__(self) -> int:
        """Batches of an epoch on this rank; for iterable datasets torch's estimate from ``len(dataset)``."""
        if self._order is not None:
            return self._order.batches()
        self._reported_length = len(self.dataset)  # type: ignore[arg-type]
        return length_in_batches(self._reported_length, self.batch_size, self.drop_last)
