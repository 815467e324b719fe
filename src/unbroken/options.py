"""The arguments that torch's loader does not have: checked once, at construction, before anything is opened."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from unbroken.errors import LaneError
from unbroken.lanes import LaneStream, plan_lanes
from unbroken.position import LanesPosition, MapPosition, Position
from unbroken.sampling import MapOrder, Share, adoptable
from unbroken.seeding import key

__all__ = [
    "Options",
    "PutBack",
    "WatchedBatchSampler",
    "begin_afresh",
    "check_epochs",
    "check_options",
    "check_order",
    "distributed_rank",
    "draw_run",
    "epoch_holders",
    "fingerprint_of",
    "planned_lanes",
    "say_once",
    "tell_of_own_state",
    "tell_of_rest",
]

_log = logging.getLogger("unbroken")
_said: set[str] = set()


def say_once(text: str) -> None:
    """Tell the user something that is no fault, once a process, through the logger ``unbroken``."""
    if text not in _said:
        _said.add(text)
        _log.warning(text)


def distributed_rank() -> tuple[int, int]:
    """Rank and world size of torch.distributed where it is set up, else ``(0, 1)``."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


@final
@dataclass(frozen=True)
class Options:
    """What was asked for. ``share`` is the data-parallel rank and world; ``sharded`` whether it was given at all;
    ``group`` the process group of these ranks, or None.
    """

    seed: int | None
    seed_by: str
    lanes: int | None
    share: Share
    sharded: bool
    resume: str
    capture_every: int | None
    at_end: str
    group: Any
    lineage: bool

    @property
    def ends(self) -> str:
        """How an epoch ends: ``at_end``, or ``"alone"`` where there is no other rank to agree with."""
        agreed = self.share.world > 1 and self.group is not None
        return self.at_end if agreed or self.at_end == "repeat" else "alone"

    @property
    def seeded(self) -> bool:
        """Whether random numbers come from a seed: the one given, or 0 where ranks have to agree."""
        return self.seed is not None or self.sharded


def check_options(given: dict[str, Any]) -> Options:
    """Check the arguments beyond torch's. Raises ``ValueError``, ``TypeError`` or, for what is not there yet,
    ``NotImplementedError``."""
    for name, default in (("save_prefetched", False), ("in_order", True)):
        if given[name] != default:
            raise NotImplementedError(
                f"{name}={given[name]!r} is not available in this version; leave {name} at {default!r}."
            )
    _check_one_of("seed_by", given["seed_by"], ("batch", "sample"))
    _check_one_of("resume", given["resume"], ("checked", "trust", "replay"))
    _check_one_of("at_end", given["at_end"], ("stop", "pad", "repeat"))
    _check_whole("snapshot_every_n_steps", given["snapshot_every_n_steps"], 1)
    _check_whole("worker_restarts", given["worker_restarts"], 0)
    _check_whole("lanes", given["lanes"], 1)
    seed = given["seed"]
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be a whole number, but got seed={seed!r}.")
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed must fit 64 bits, but got seed={seed}.")
    if seed is not None and given["generator"] is not None:
        raise ValueError("seed and generator both say where random numbers come from: pass one of them.")
    share, sharded = _share(given["dp_rank"], given["dp_world_size"], given["mesh"])
    share, sharded = _adopt(given, share, sharded)
    group = given["group"]
    if group is not None:
        share, sharded = _check_group(group, share, sharded), True
    elif given["mesh"] is not None and share.world > 1:
        group = given["mesh"].get_group()
    if given["at_end"] == "pad" and share.world > 1 and group is None:
        raise ValueError(
            f'at_end="pad" on {share.world} ranks needs to know when the last of them is done: pass group= (the '
            "process group of the data-parallel ranks; gloo will do), or mesh=."
        )
    every = given["snapshot_every_n_steps"]
    return Options(
        seed, given["seed_by"], given["lanes"], share, sharded, given["resume"], every, given["at_end"], group,
        _check_lineage(given["lineage"], given["dataset"]),
    )  # fmt: skip


def _check_lineage(asked: Any, dataset: Any) -> bool:
    if not isinstance(asked, bool):
        raise TypeError(f"lineage must be True or False, but got lineage={asked!r}.")
    if asked and not (isinstance(dataset, LaneStream) and "lineage" in inspect.signature(dataset.open).parameters):
        raise ValueError(
            f"lineage=True is for streams, whose rows come from files; nothing is known of those of a "
            f"{type(dataset).__qualname__}.\nLeave lineage out, or make a stream of it with from_map or from_iterable."
        )
    return asked


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


def _adopt(given: Mapping[str, Any], share: Share, sharded: bool) -> tuple[Share, bool]:
    """The share of a DistributedSampler, where there is one."""
    sampler = given["sampler"]
    if type(given["batch_sampler"]) is BatchSampler:
        sampler = given["batch_sampler"].sampler
    if not isinstance(sampler, DistributedSampler):
        return share, sharded
    if not adoptable(sampler):
        if sharded or given["group"] is not None:
            raise ValueError(
                f"{type(sampler).__qualname__} shares out the rows itself, and dp_rank and dp_world_size would do it "
                "a second time. Leave the dp arguments out."
            )
        return share, sharded
    adopted = Share(sampler.rank, sampler.num_replicas)
    if sharded and share != adopted:
        raise ValueError(
            f"The DistributedSampler is for rank {adopted.rank} of {adopted.world}, but dp_rank={share.rank} and "
            f"dp_world_size={share.world} were given. Leave the dp arguments out: the sampler's are adopted."
        )
    return adopted, True


def _check_group(group: Any, share: Share, sharded: bool) -> Share:
    """The share of this rank in a process group, held against the one that was given otherwise."""
    if not callable(getattr(group, "rank", None)) or not callable(getattr(group, "size", None)):
        raise TypeError(
            f"group must be a process group of torch.distributed that this process is in, but got group={group!r}.\n"
            "Pass the group of the data-parallel ranks: torch.distributed.group.WORLD, or what new_group() returned."
        )
    found = Share(group.rank(), group.size())
    if sharded and share != found:
        raise ValueError(
            f"In the group this is rank {found.rank} of {found.world}, but it was said to be dp rank {share.rank} of "
            f"{share.world}. Pass the group of the data-parallel ranks; the rank is taken from it."
        )
    return found


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


def begin_afresh(position: Position, pristine: str | None) -> None:
    """Lanes that stand at the very beginning begin as the dataset did at first, whatever became of it since."""
    lanes = position.lanes.values() if isinstance(position, LanesPosition) else ()
    for lane in (position.cursor,) if isinstance(position, MapPosition) else lanes:
        if lane.anchor is None and lane.carry is None:
            lane.carry = pristine


class PutBack(int):
    """An epoch that a load put back, and no ``set_epoch`` of the user's has replaced since."""


def check_epochs(saved: Mapping[str, int], now: Mapping[str, int], *, over: bool) -> None:
    """Refuse another epoch of a sampler or dataset in the middle of one, and where it is ``over`` that very epoch.

    A loop that begins with the epoch that was going on would deliver the next one's rows in the order of the last.
    """
    for name in saved.keys() & now.keys() if over else ():
        if saved[name] == now[name] and not isinstance(now[name], PutBack):
            raise ValueError(
                f"The {name} was set to epoch {now[name]}, of which everything was delivered before the position was "
                f"saved: the next epoch is due. Call set_epoch({saved[name] + 1}), and let the loop begin there."
            )
    for name in saved.keys() & now.keys() if not over else ():
        if saved[name] != now[name]:
            raise ValueError(
                f"The {name} was set to epoch {now[name]} in the middle of its epoch {saved[name]}: what is left "
                "would be in another order. Call set_epoch only between epochs."
            )


def draw_run(position: Position, options: Options, generator: torch.Generator | None) -> None:
    """Fix the run's key, by the draw that torch makes for its workers' seeds where no seed is given.

    torch draws from a user's generator in every epoch, and so does this, to leave it as torch would.
    """
    anew = isinstance(position, MapPosition) and (position.sampler is None or "before" in position.sampler)
    if position.run is None and options.seeded:
        position.run = key(options.seed or 0, "run")
    elif position.run is None or (generator is not None and position.epoch > 0 and anew):
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        position.run = drawn if position.run is None else position.run


def fingerprint_of(
    dataset: Any, options: Options, order: MapOrder | None, lanes: int, batch_size: int | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields that a position is held against, and the class of a difference in each (``"data"`` if unnamed)."""
    fields: dict[str, Any] = {"dataset": type(dataset).__qualname__, "seed": options.seed, "seed_by": options.seed_by}
    kinds = {"seed": "order", "seed_by": "order", "batch_size": "safe", "sampler": "order"}
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
    return fields, kinds


def epoch_holders(loader: DataLoader[Any]) -> dict[str, Any]:
    """The user's objects that count epochs by ``set_epoch``, as torch's DistributedSampler does, by what they are."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    holders = [("sampler", s) for s in (loader.batch_sampler, inner, loader.sampler)] + [("dataset", loader.dataset)]
    return {
        name: holder
        for name, holder in holders
        if callable(getattr(holder, "set_epoch", None)) and type(getattr(holder, "epoch", None)) in (int, PutBack)
    }


def tell_of_own_state(dataset: Any) -> None:
    """Say that a map-style dataset's own state, where it has one, is no part of the position."""
    if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        say_once(
            f"{type(dataset).__qualname__} is map-style, and has a state of its own. It is not part of the position: "
            "a sample has to be a function of its index (and of the random numbers of its place)."
        )


def tell_of_rest(position: Position, order: MapOrder | None) -> None:
    """Say what an epoch leaves that all ranks end together."""
    if isinstance(position, LanesPosition):
        lanes = sorted(position.turns())
        some = ", ".join(map(str, lanes[:8])) + (", ..." if len(lanes) > 8 else "")
        left = f"lanes of this rank that had not come to their end are {some}" if lanes else ""
    elif order is None or order.kind == "custom" or not isinstance(position, MapPosition):
        return
    else:
        rows = order.total() - position.rows
        left = f"of {order.total()} rows they are the last {rows}" if rows > 0 else ""
    if left:
        say_once(
            f'At the end of an epoch at_end="stop" leaves the rows of a step that some rank cannot fill: {left}.\n'
            'A position that is saved then and loaded on other ranks delivers them; at_end="pad" leaves none.'
        )


def _share(rank: Any, world: Any, mesh: Any) -> tuple[Share, bool]:
    if mesh is not None:
        if rank is not None or world is not None:
            raise ValueError("mesh and dp_rank/dp_world_size both name the data-parallel rank: pass one of them.")
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh must have one dimension, the data-parallel one, but has {mesh.mesh_dim_names or mesh.ndim}: "
                "pass a "
                'part of it, such as mesh["dp"].'
            )
        return Share(mesh.get_local_rank(), mesh.size()), True
    if rank is None and world is None:
        return Share(), False
    if rank is None or world is None:
        raise ValueError(f"dp_rank and dp_world_size go together, but got dp_rank={rank!r}, dp_world_size={world!r}.")
    _check_whole("dp_world_size", world, 1)
    _check_whole("dp_rank", rank, 0)
    if rank >= world:
        raise ValueError(f"dp_rank must be below dp_world_size, but got dp_rank={rank}, dp_world_size={world}.")
    return Share(rank, world), True


def _check_one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, but got {name}={value!r}.")


def _check_whole(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, but got {name}={value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, but got {name}={value}.")


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
