"""From the arguments of a loader to the engine and the feed of a pass. torch's are read when a pass begins."""

from __future__ import annotations

from typing import Any

import torch.multiprocessing
from torch.utils.data import DataLoader, default_collate, default_convert

from unbroken.contexts import THREAD, check_threads
from unbroken.engine.agree import Ballot, Together
from unbroken.engine.crew import Patience
from unbroken.engine.cursor import Rules
from unbroken.engine.custom import SamplerTurns
from unbroken.engine.engine import Engine
from unbroken.engine.feeds import Feed, LaneFeed, MapFeed
from unbroken.engine.host import Plan
from unbroken.engine.inline import Inline
from unbroken.engine.pool import Pool
from unbroken.engine.rows import Batching, RowFeed
from unbroken.engine.stored import StoredFeed
from unbroken.engine.threads import Threads
from unbroken.engine.turns import Lanes
from unbroken.lanes import LaneStream
from unbroken.options import Options
from unbroken.position import LanesPosition, MapPosition, Position
from unbroken.sampling import MapOrder
from unbroken.stats import Stats

__all__ = ["new_engine", "new_feed", "new_rules"]


def new_rules(loader: DataLoader[Any], kind: str, position: Position, options: Options, pristine: str | None) -> Rules:
    """What a pass asks of the cursors of its lanes; ``pristine`` is the dataset's own state before it was opened."""
    return Rules(
        run=position.run or 0,
        seed_by=options.seed_by,
        resume=options.resume,
        capture_every=options.capture_every or (1 if options.resume == "trust" else None),
        drop_last=loader.drop_last and kind == "iterable",
        pristine=pristine,
        endless=options.ends == "repeat",
        lineage=options.lineage,
        skipping=options.skipping,
        once=options.prefetch.saved,
    )


def new_engine(
    loader: DataLoader[Any],
    kind: str,
    lanes: int,
    owned: int | None,
    rules: Rules,
    options: Options,
    stats: Stats,
) -> Engine:
    """An engine for a dataset of a ``kind`` (see ``Plan``), of whose ``lanes`` this rank has ``owned``."""
    default = default_collate if loader.batch_sampler is not None else default_convert
    hosts = loader.num_workers if owned is None else min(loader.num_workers, owned)
    context = loader.multiprocessing_context
    if context == THREAD:
        check_threads(loader.dataset, loader.worker_init_fn)
    plan = Plan(
        dataset=loader.dataset,
        kind=kind,
        rules=rules,
        lanes=lanes,
        hosts=hosts,
        batched=loader.batch_sampler is not None,
        collate_fn=None if loader.collate_fn is default else loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        in_threads=context == THREAD and hosts > 0,
    )
    engine: Engine
    if hosts == 0:
        engine = Inline(plan, stats.own)
    elif context == THREAD:
        engine = Threads(plan, loader.prefetch_factor or 0, loader.timeout, stats)
    else:
        engine = _new_pool(loader, plan, options, stats)
    engine.meter = stats.own
    return engine


def _new_pool(loader: DataLoader[Any], plan: Plan, options: Options, stats: Stats) -> Pool:
    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    faults = options.faults
    patience = Patience(
        loader.timeout, faults.restarts, restart_late=faults.on_timeout == "restart", again=not options.prefetch.saved
    )
    return Pool(plan, context, loader.prefetch_factor or 0, patience, options.prefetch.max_bytes, stats)


def new_feed(
    loader: DataLoader[Any],
    order: MapOrder | None,
    engine: Engine,
    position: Position,
    rules: Rules,
    options: Options,
    ballot: Ballot | None,
) -> tuple[Feed, SamplerTurns | None]:
    """The feed of a pass over a position, and what makes the turns of a sampler of the user's, where there is one."""
    if order is not None and isinstance(position, MapPosition):
        return _map_feed(engine, position, order, rules, options)
    if not isinstance(position, LanesPosition):
        raise TypeError("a map-style dataset has a MapPosition, any other a LanesPosition")
    needed = options.share.world > 1 and options.ends != "pad"
    feed = _lane_feed(loader, Lanes(engine, position, rules, needed=needed), options)
    return feed if ballot is None else Together(feed, ballot, position), None


def _lane_feed(loader: DataLoader[Any], lanes: Lanes, options: Options) -> Feed:
    """Batches of lanes: a turn is a batch of a torch iterable dataset, or a row of a stream."""
    size = loader.batch_size or 1
    if options.prefetch.saved:
        return StoredFeed(lanes, size, in_order=options.prefetch.in_order)
    if not isinstance(loader.dataset, LaneStream):
        return LaneFeed(lanes, size, in_order=options.prefetch.in_order)
    own = None if loader.collate_fn in (default_collate, default_convert) else loader.collate_fn
    return RowFeed(lanes, Batching(size, loader.batch_sampler is not None, loader.drop_last, own, options.lineage))


def _map_feed(
    engine: Engine, position: MapPosition, order: MapOrder, rules: Rules, options: Options
) -> tuple[Feed, SamplerTurns | None]:
    turns = SamplerTurns(order.base, position, rules, options.seeded) if order.kind == "custom" else None
    steps = order.steps(position, options.seeded, _no_turns if turns is None else turns.make)
    size = order.share.world * (1 if order.by_batch else order.size)
    feed = MapFeed(engine, position, steps, size, in_order=options.prefetch.in_order, skipping=rules.skipping)
    return feed, turns


def _no_turns(size: int) -> Any:
    raise TypeError("only a custom sampler makes turns")
