"""The arguments that torch's loader does not have: checked once, at construction, before anything is opened."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed
from torch.utils.data import BatchSampler, DistributedSampler

from unbroken.contexts import THREAD, check_threads
from unbroken.lanes import LaneStream
from unbroken.sampling import Share, adoptable
from unbroken.skipped import Skipping

__all__ = ["Faults", "Options", "Prefetch", "check_options", "distributed_rank", "say_once"]

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
class Faults:
    """What to do when something breaks. ``restarts``: how often in a row a worker is replaced that makes no progress;
    ``on_timeout``: ``"raise"`` or ``"restart"``; ``on_error``: ``"raise"`` or ``"skip"``, of samples of a dataset, and
    ``max_skipped`` of them in a run (None: any number).
    """

    restarts: int
    on_timeout: str
    on_error: str
    max_skipped: int | None


@final
@dataclass(frozen=True)
class Prefetch:
    """Of batches that are made ahead: whether they are delivered ``in_order``, whether they are ``saved`` in the
    position, and how many bytes they may take (None: any number).
    """

    in_order: bool
    saved: bool
    max_bytes: int | None


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
    faults: Faults
    prefetch: Prefetch

    @property
    def ends(self) -> str:
        """How an epoch ends: ``at_end``, or ``"alone"`` where there is no other rank to agree with."""
        agreed = self.share.world > 1 and self.group is not None
        return self.at_end if agreed or self.at_end == "repeat" else "alone"

    @property
    def seeded(self) -> bool:
        """Whether random numbers come from a seed: the one given, or 0 where ranks have to agree."""
        return self.seed is not None or self.sharded

    @property
    def skipping(self) -> Skipping | None:
        """How samples that fail are left out, if they are. Ranks that share a place have to take the same steps."""
        if self.faults.on_error != "skip":
            return None
        whole = "pass" if self.share.world == 1 else "empty" if self.ends == "pad" else "refuse"
        return Skipping(self.faults.max_skipped, whole)


def check_options(given: dict[str, Any]) -> Options:
    """Check the arguments beyond torch's. Raises ``ValueError`` or ``TypeError``."""
    _check_one_of("seed_by", given["seed_by"], ("batch", "sample"))
    _check_one_of("resume", given["resume"], ("checked", "trust", "replay"))
    _check_one_of("at_end", given["at_end"], ("stop", "pad", "repeat"))
    _check_whole("snapshot_every_n_steps", given["snapshot_every_n_steps"], 1)
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
    if given["multiprocessing_context"] == THREAD:
        check_threads(*(given[name] for name in ("dataset", "worker_init_fn", "on_timeout", "max_prefetch_bytes")))
    every, prefetch = given["snapshot_every_n_steps"], _check_prefetch(given)
    resume = "trust" if prefetch.saved else given["resume"]  # nothing that it could be checked by can be made again
    options = Options(
        seed, given["seed_by"], given["lanes"], share, sharded, resume, every, given["at_end"], group,
        _check_lineage(given["lineage"], given["dataset"]), _check_faults(given), prefetch,
    )  # fmt: skip
    if prefetch.saved and options.ends == "stop":
        raise ValueError(
            'at_end="stop" leaves what some rank cannot fill a step with, and save_prefetched=True is for sources that '
            'cannot be read again: it would be lost. Pass at_end="pad" or "repeat".'
        )
    return options


def _check_faults(given: Mapping[str, Any]) -> Faults:
    _check_one_of("on_timeout", given["on_timeout"], ("raise", "restart"))
    _check_one_of("on_error", given["on_error"], ("raise", "skip"))
    _check_whole("worker_restarts", given["worker_restarts"], 0)
    _check_whole("max_skipped", given["max_skipped"], 0)
    if given["max_skipped"] is not None and given["on_error"] != "skip":
        raise ValueError(f'max_skipped={given["max_skipped"]} is for on_error="skip"; by default no sample is skipped.')
    if given["on_error"] == "skip" and isinstance(given["dataset"], LaneStream):
        raise ValueError(
            'on_error="skip" of the loader is for datasets; a stream is told by its source, which knows the rows.\n'
            'Pass on_error="skip" to the read_* function, and leave it out here.'
        )
    if given["on_timeout"] == "restart" and not (given["num_workers"] and given["timeout"]):
        raise ValueError(
            'on_timeout="restart" replaces a worker that makes nothing for timeout seconds: pass num_workers and '
            "timeout too."
        )
    return Faults(given["worker_restarts"], given["on_timeout"], given["on_error"], given["max_skipped"])


def _check_prefetch(given: Mapping[str, Any]) -> Prefetch:
    for name in ("in_order", "save_prefetched"):
        if not isinstance(given[name], bool):
            raise TypeError(f"{name} must be True or False, but got {name}={given[name]!r}.")
    _check_whole("max_prefetch_bytes", given["max_prefetch_bytes"], 1)
    if given["save_prefetched"] and given["max_prefetch_bytes"] is not None:
        raise ValueError(
            "max_prefetch_bytes does not go with save_prefetched=True: each save moves what was made ahead into the "
            "position, where it stays until it is delivered.\nUse a smaller prefetch_factor."
        )
    if given["save_prefetched"]:
        _check_once(given)
    return Prefetch(given["in_order"], given["save_prefetched"], given["max_prefetch_bytes"])


def _check_once(given: Mapping[str, Any]) -> None:
    """Refuse what makes samples again, or leaves some out, of a source that cannot be read again."""
    for name, value, why in (
        ("resume", "replay", "makes everything again from the start of the epoch"),
        ("on_error", "skip", "leaves samples out, which are lost then"),
        ("on_timeout", "restart", "ends a worker with all that it has taken from the source"),
    ):
        if given[name] == value:
            raise ValueError(
                f'{name}="{value}" {why}, and save_prefetched=True is for sources that cannot be read again: pass one '
                "of them."
            )
    if given["snapshot_every_n_steps"] not in (None, 1):
        raise ValueError(
            "save_prefetched=True saves the state of the dataset after every sample, for nothing can be made again "
            "from an earlier one. Leave snapshot_every_n_steps out."
        )


def _check_lineage(asked: Any, dataset: Any) -> bool:
    if not isinstance(asked, bool):
        raise TypeError(f"lineage must be True or False, but got lineage={asked!r}.")
    if asked and not (isinstance(dataset, LaneStream) and "lineage" in inspect.signature(dataset.open).parameters):
        raise ValueError(
            f"lineage=True is for streams, whose rows come from files; nothing is known of those of a "
            f"{type(dataset).__qualname__}.\nLeave lineage out, or make a stream of it with from_map or from_iterable."
        )
    return asked


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
