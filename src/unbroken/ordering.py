"""What kind of dataset a loader has, and what fixes the order of its rows: lanes, or a sampler."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, final

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe

from unbroken.errors import LaneError
from unbroken.lanes import LaneStream, plan_lanes
from unbroken.options import Options, distributed_rank, say_once
from unbroken.sampling import MapOrder

__all__ = ["Ordering", "WatchedBatchSampler", "fingerprint_of", "length_in_batches", "settle", "tell_of_ranks"]


@final
class Ordering(NamedTuple):
    """``kind`` of the dataset (``"map"``, ``"iterable"`` or ``"stream"``), its ``lanes`` (a map-style one has none),
    and the ``order`` of the rows of a map-style one.
    """

    kind: str
    lanes: int
    order: MapOrder | None


def settle(loader: DataLoader[Any], given: dict[str, Any], options: Options) -> Ordering:
    """What the arguments of a loader make of its dataset.

    Raises ``ValueError`` and ``LaneError`` where they do not go together.
    """
    dataset = given["dataset"]
    if options.prefetch.saved and (isinstance(dataset, LaneStream) or not isinstance(dataset, IterableDataset)):
        kind = "a stream" if isinstance(dataset, LaneStream) else "map-style"
        raise ValueError(
            f"save_prefetched=True is for iterable datasets that cannot be read again, such as a queue. A "
            f"{type(dataset).__qualname__} is {kind}: what was made ahead is made again after a load, and need not be "
            "saved.\nLeave save_prefetched out."
        )
    if isinstance(dataset, LaneStream) and isinstance(dataset, IterableDataset):
        return Ordering("stream", planned_lanes(dataset, loader.num_workers, options), None)
    if isinstance(dataset, IterDataPipe) and not options.sharded and (world := distributed_rank()[1]) > 1:
        raise ValueError(
            f"torch's loader shares out a datapipe among the {world} ranks by itself. Here the ranks have to be named: "
            "pass dp_rank and dp_world_size, group=, or mesh=."
        )
    if isinstance(dataset, IterableDataset):
        return Ordering("iterable", planned_lanes(dataset, loader.num_workers, options), None)
    if options.lanes is not None:
        raise ValueError(
            f"lanes={options.lanes} was given with a map-style dataset, which has no lanes: any worker takes "
            "its next batch. Leave lanes out."
        )
    if not options.prefetch.in_order and options.sharded:
        raise ValueError(
            "in_order=False was given with a map-style dataset that is shared out among ranks: they have one place in "
            "its order together, and each would deliver its part of it in another order.\nLeave in_order out, or the "
            "arguments that share it out."
        )
    shuffled_by = options.seed if given["shuffle"] else None
    own = given["batch_sampler"] is None
    batch_sampler = loader.batch_sampler if given["batch_size"] is not None or not own else None
    size = given["batch_size"] if own else None
    tell_of_own_state(dataset)
    order = MapOrder(
        loader.sampler if own else None, batch_sampler, size, loader.drop_last, options.share, shuffled_by, options.ends
    )
    check_order(order, options)
    return Ordering("map", 0, order)


def planned_lanes(dataset: Any, num_workers: int, options: Options) -> int:
    """The lanes of an iterable dataset: those asked for, or one a worker and rank, and 64 at least for a stream.

    Raises ``LaneError`` where an owner would have none.
    """
    world = options.share.world
    default = max(1, num_workers) * world
    if isinstance(dataset, LaneStream):
        default = max(default, dataset.default_lanes)
    lanes = plan_lanes(options.lanes, default, num_workers, world)
    if lanes % world:
        say_once(
            f"{lanes} lanes do not divide evenly among {world} ranks: nothing is lost or repeated, but the rows of a "
            "global step differ from those on another number of ranks."
        )
    return lanes


def check_order(order: MapOrder, options: Options) -> None:
    """Refuse an order that ranks would not share or that cannot repeat, and ranks that would have no part in it."""
    rank, world = order.share.rank, order.share.world
    drawn_by_user = order.kind == "drawn" and not order.random_without_generator
    if options.at_end == "repeat" and (order.by_batch or drawn_by_user or order.kind in ("distributed", "custom")):
        raise ValueError(
            'at_end="repeat" needs an order that each epoch has by itself, and a sampler, a batch sampler or a '
            "generator of your own has not: its next order follows from the last.\n"
            'Use shuffle=True with a seed, or at_end="stop" or "pad".'
        )
    if world > 1 and options.seed is None and order.random_without_generator:
        raise ValueError(
            f"{world} ranks would each draw an order of their own: a random order on several ranks needs seed=, the "
            "same on every rank."
        )
    try:
        total = order.total()
    except TypeError:  # a sampler without a length
        return
    if world > 1 and total <= rank and order.ends != "pad":
        raise LaneError(
            f"Rank {rank} of {world} has no data: an epoch has {total} {'batches' if order.by_batch else 'rows'}.\n"
            f"Use at most {total} ranks, or more data."
        )


def fingerprint_of(
    dataset: Any, options: Options, order: MapOrder | None, lanes: int, batch_size: int | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields that a position is held against, and the class of a difference in each (``"data"`` if unnamed)."""
    fields: dict[str, Any] = {"dataset": type(dataset).__qualname__, "seed": options.seed, "seed_by": options.seed_by}
    kinds = {"seed": "order", "seed_by": "order", "batch_size": "safe", "sampler": "order"}
    kinds["save_prefetched"] = "data, held"  # of the ones nothing is made again, of the others everything
    if order is not None:
        fields |= order.describe() | {"length": len(dataset) if hasattr(dataset, "__len__") else None}
        fields["batch_size"] = order.size
        kinds["batch_size"] = "order" if order.by_batch else "safe"
        return fields, kinds
    fields["batch_size"] = batch_size
    if isinstance(dataset, LaneStream):
        described = dataset.describe()
        return fields | described, kinds | {name: dataset.difference_class(name) for name in described}
    kinds["batch_size"] = "order" if lanes > 1 else "safe"
    if options.prefetch.saved:
        fields["save_prefetched"] = True
    return fields, kinds


def length_in_batches(samples: int, size: int | None, drop_last: bool) -> int:
    """torch's estimate of the batches in so many samples of an iterable dataset."""
    if size is None:
        return samples
    return samples // size if drop_last else -(-samples // size)


def tell_of_own_state(dataset: Any) -> None:
    """Say that a map-style dataset's own state, where it has one, is no part of the position."""
    if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        say_once(
            f"{type(dataset).__qualname__} is map-style, and has a state of its own. It is not part of the position: "
            "a sample has to be a function of its index (and of the random numbers of its place)."
        )


def tell_of_ranks(world: int, kind: str, *, shared: bool, sharded: bool) -> None:
    """Say what several ranks of torch.distributed mean for a loader that was not told of them."""
    if not shared and world > 1:
        say_once(
            "This loader has no dp arguments while torch.distributed has several ranks: each rank's position is "
            "its own, exact on the same number of ranks only. Pass dp_rank and dp_world_size (or mesh) to change "
            "it at a resume."
        )
    elif world > 1 and kind == "stream" and not sharded:
        say_once(
            "Each rank gets all rows of the stream: pass group=, mesh=, or dp_rank and dp_world_size to share them."
        )


@final
class WatchedBatchSampler(BatchSampler):
    """The loader's own batch sampler, as torch shows it. The loader never iterates it, so who does has taken it
    away.
    """

    def __iter__(self) -> Iterator[list[int]]:
        warnings.warn(
            "The batch sampler of an unbroken StatefulDataLoader is iterated by something else: has a trainer "
            "rebuilt the loader as another class? Its position is not kept there.\n"
            "Tell the trainer to take the loader as it is (for instance, do not let it replace samplers).",
            stacklevel=2,
        )
        return super().__iter__()
