"""From the arguments of a loader to the engine and the feed of a pass. torch's are read when a pass begins."""

from __future__ import annotations

from typing import Any

import torch.multiprocessing
from torch.utils.data import DataLoader, default_collate, default_convert

from unbroken.engine.cursor import Rules
from unbroken.engine.custom import SamplerTurns
from unbroken.engine.engine import Engine
from unbroken.engine.feeds import Feed, LaneFeed, Lanes, MapFeed
from unbroken.engine.host import Plan
from unbroken.engine.inline import Inline
from unbroken.engine.pool import Pool
from unbroken.engine.rows import Batching, RowFeed
from unbroken.position import MapPosition
from unbroken.sampling import MapOrder

__all__ = ["new_engine", "new_lane_feed", "new_map_feed"]


def new_engine(loader: DataLoader[Any], kind: str, lanes: int, owned: int | None, rules: Rules) -> Engine:
    """An engine for a dataset of a ``kind`` (see ``Plan``), of whose ``lanes`` this rank has ``owned``."""
    default = default_collate if loader.batch_sampler is not None else default_convert
    hosts = loader.num_workers if owned is None else min(loader.num_workers, owned)
    plan = Plan(
        dataset=loader.dataset,
        kind=kind,
        rules=rules,
        lanes=lanes,
        hosts=hosts,
        batched=loader.batch_sampler is not None,
        collate_fn=None if loader.collate_fn is default else loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
    )
    if hosts == 0:
        return Inline(plan)
    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    return Pool(plan, context, loader.prefetch_factor or 0, loader.timeout)


def new_lane_feed(loader: DataLoader[Any], kind: str, lanes: Lanes, *, lineage: bool) -> Feed:
    """Batches of lanes: a turn is a batch of a torch iterable dataset, or a row of a stream."""
    size = loader.batch_size or 1
    if kind != "stream":
        return LaneFeed(lanes, size)
    own = None if loader.collate_fn in (default_collate, default_convert) else loader.collate_fn
    return RowFeed(lanes, Batching(size, loader.batch_sampler is not None, loader.drop_last, own, lineage))


def new_map_feed(
    engine: Engine, position: MapPosition, order: MapOrder, rules: Rules, seeded: bool
) -> tuple[Feed, SamplerTurns | None]:
    """Batches of a map-style dataset, and what makes the turns of a sampler of the user's."""
    turns = SamplerTurns(order.base, position, rules, seeded) if order.kind == "custom" else None
    steps = order.steps(position, seeded, _no_turns if turns is None else turns.make)
    return MapFeed(engine, position, steps, order.share.world * (1 if order.by_batch else order.size)), turns


def _no_turns(size: int) -> Any:
    raise TypeError("only a custom sampler makes turns")
