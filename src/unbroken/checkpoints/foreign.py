"""States of other loaders, as they were saved: torchdata's ``StatefulDataLoader``, and torchtitan's of several ranks.

The structure of torchdata's is that of torchdata/stateful_dataloader/stateful_dataloader.py, version 0.11. Without
workers it is one flat dict (``_num_yielded``, ``dataset_state``, ``fetcher_state``, ...); with workers it has a
``_snapshot`` of the main process and of each worker, and ``_steps_since_snapshot``, the batches that were delivered
after it. torchtitan saved ``{"dp_rank_0": pickle.dumps(torchdata's state), ..., "world_size": n}``
(torchtitan/components/dataloader.py, ``ParallelAwareDataloader``); of the pickles only plain values are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from unbroken.checkpoints.files import Checkpoint, Place
from unbroken.checkpoints.inert import read_plain_pickle
from unbroken.errors import InvalidState

__all__ = ["Foreign", "OfOrder", "OfWorkers", "WorkerState", "find_foreign"]

_RANK = re.compile(r"dp_rank_(\d+)")


@final
@dataclass(frozen=True)
class WorkerState:
    """What one worker of torchdata had: the states of dataset and iterator (None: it has none), and whether its data
    had come to an end.
    """

    dataset: Any
    iterator: Any
    ended: bool

    @property
    def stateless(self) -> bool:
        """Whether there is nothing to load: torchdata makes everything again from the start then."""
        return self.dataset is None and self.iterator is None


@final
@dataclass(frozen=True)
class OfWorkers:
    """An iterable dataset. ``steps`` batches of the epoch were delivered when the states of the workers were taken, the
    last of them by worker ``last``; ``since`` more were delivered after that. ``size`` is their batch size, None where
    the state does not tell it.
    """

    workers: tuple[WorkerState, ...]
    last: int
    steps: int
    since: int
    size: int | None
    finished: bool


@final
@dataclass(frozen=True)
class OfOrder:
    """A map-style dataset: ``rows`` of this rank's order were delivered in ``steps`` batches, then ``since`` batches
    more.

    ``generator`` is the state of torchdata's random sampler when the epoch was drawn; None where there is none.
    ``kept`` is whether the dataset had a state of its own; ``workers`` whether there were any.
    """

    rows: int
    steps: int
    since: int
    size: int | None
    generator: torch.Tensor | None
    kept: bool
    workers: bool
    finished: bool


@final
@dataclass(frozen=True)
class Foreign:
    """States of another loader (``"torchdata"`` or ``"torchtitan"``): one for each rank, in their order."""

    origin: str
    ranks: tuple[OfWorkers | OfOrder, ...]


def find_foreign(checkpoint: Checkpoint, origin: str | None = None, key: str | None = None) -> Foreign:
    """The state of another loader in a checkpoint. ``origin`` and ``key`` say which, where there are several.

    Raises ``InvalidState`` where there is none, or several, or its structure is not known.
    """
    found: dict[str, tuple[str, Place]] = {}
    for place in checkpoint.places():
        if (lies := _lies_in(place)) is not None and origin in (None, lies[0]):
            found.setdefault(".".join(map(str, lies[1])), lies)
    outer = {name: lies for name, lies in found.items() if not any(_inside(lies[1], of) for _, of in found.values())}
    wanted = [name for name in outer if key is None or name == key or name.split(".")[-1] == key]
    if len(wanted) != 1:
        what = origin or "torchdata's StatefulDataLoader or torchtitan"
        if not outer and checkpoint.found:
            names = ", ".join(name or "(the whole)" for name in checkpoint.found)
            raise InvalidState(
                f"{checkpoint.path} has a position of unbroken already ({names}), and no state of {what}.\n"
                "Load it as it is: there is nothing to take over."
            )
        if not outer:
            raise InvalidState(
                f"There is no state of {what} in {checkpoint.path}: {checkpoint.told()}.\n"
                "It is told by the keys '_snapshot' or '_num_yielded' (torchdata) and 'dp_rank_0' (torchtitan)."
            )
        names = ", ".join(repr(name) if name else "(the whole)" for name in outer)
        if key is None:
            raise InvalidState(f"The states of loaders in {checkpoint.path} are {names}.\nSay which with --key.")
        none = f"no state of a loader {key!r}" if not wanted else f"{len(wanted)} states of loaders {key!r}"
        raise InvalidState(
            f"There is {none} in {checkpoint.path}; there is {', '.join(map(repr, wanted)) if wanted else names}.\n"
            "Name one of them in full; where there is only one, --key can be left out."
        )
    kind, place = outer[wanted[0]]
    where = f"{checkpoint.path}{f', {wanted[0]}' if wanted[0] else ''}"
    state = checkpoint.at(place)
    if kind == "torchdata":
        return Foreign(kind, (_torchdata(state, where),))
    return Foreign(kind, _torchtitan(state, where))


def _lies_in(place: Place) -> tuple[str, Place] | None:
    """The state that a value belongs to, by its place."""
    for depth, name in enumerate(place):
        if name in ("_num_yielded", "_steps_since_snapshot") and depth == len(place) - 1:
            return "torchdata", place[:-1]
        if isinstance(name, str) and _RANK.fullmatch(name):
            return "torchtitan", place[:depth]
    return None


def _inside(place: Place, other: Place) -> bool:
    return len(place) > len(other) and place[: len(other)] == other


def _torchtitan(state: Mapping[str, Any], where: str) -> tuple[OfWorkers | OfOrder, ...]:
    ranks = {int(found[1]): name for name in state if (found := _RANK.fullmatch(str(name)))}
    world = state.get("world_size", len(ranks))
    if sorted(ranks) != list(range(world)):
        here = ", ".join(map(str, sorted(ranks)))
        raise InvalidState(f"{where}: it was saved by {world} ranks, and of these only {here} are here.")
    read = []
    for rank in range(world):
        data, name = state[ranks[rank]], f"{where}: {ranks[rank]}"
        read.append(_torchdata(read_plain_pickle(data, name) if isinstance(data, bytes) else data, name))
    return tuple(read)


def _torchdata(state: Any, where: str) -> OfWorkers | OfOrder:
    try:
        return _with_workers(state) if "_snapshot" in state else _alone(state)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InvalidState(
            f"{where}: this is not the structure of torchdata 0.11 ({type(error).__name__}: {error}): it was cut "
            "short, changed, or saved by another version."
        ) from None


def _alone(state: Mapping[str, Any]) -> OfWorkers | OfOrder:
    """A loader without workers."""
    steps, finished = int(state["_num_yielded"]), bool(state["_iterator_finished"])
    rows, generator = _sampled(state)
    if (fetcher := state["fetcher_state"]) is None:
        kept = state["dataset_state"] is not None
        return OfOrder(rows, steps, 0, _size(state), generator, kept, workers=False, finished=finished)
    worker = WorkerState(state["dataset_state"], fetcher["dataset_iter_state"], bool(fetcher["fetcher_ended"]))
    return OfWorkers((worker,), 0, steps, 0, _size(state), finished)


def _with_workers(state: Mapping[str, Any]) -> OfWorkers | OfOrder:
    snapshot, since = state["_snapshot"], int(state["_steps_since_snapshot"])
    main, steps = snapshot["_main_snapshot"], int(snapshot["_snapshot_step"])
    workers = [snapshot["_worker_snapshots"][f"worker_{number}"] for number in range(main["_num_workers"])]
    finished = bool(state["_iterator_finished"])
    if workers[0]["fetcher_state"] is None:
        kept = any(worker["dataset_state"] is not None for worker in workers)
        rows, generator = _sampled(main)
        return OfOrder(rows, steps, since, _size(main), generator, kept, workers=True, finished=finished)
    read = tuple(
        WorkerState(
            worker["dataset_state"],
            worker["fetcher_state"]["dataset_iter_state"],
            bool(worker["fetcher_state"]["fetcher_ended"]),
        )
        for worker in workers
    )
    return OfWorkers(read, int(snapshot["_last_yielded_worker_id"]), steps, since, _size(main), finished)


def _sampled(main: Mapping[str, Any]) -> tuple[int, torch.Tensor | None]:
    """The rows that the sampler has given out, and the generator's state when its order was drawn."""
    of_iterator = main["_sampler_iter_state"]
    if of_iterator is None:  # a sampler without a state, and no batches
        return int(main["_sampler_iter_yielded"]), None
    inner = of_iterator.get("sampler_iter_state", of_iterator)
    generator = inner.get("generator")
    if generator is not None and not isinstance(generator, torch.Tensor):
        raise ValueError(f"the generator's state is a {type(generator).__name__}")
    return int(
        of_iterator["samples_yielded"] if "samples_yielded" in of_iterator else of_iterator["yielded"]
    ), generator


def _size(main: Mapping[str, Any]) -> int | None:
    """The batch size, by what was asked of the sampler; None where nothing was, and 1 where there are no batches."""
    of_iterator, batches = main["_sampler_iter_state"], int(main["_sampler_iter_yielded"])
    if of_iterator is None or "samples_yielded" not in of_iterator:
        return 1
    return -(-int(of_iterator["samples_yielded"]) // batches) if batches else None
