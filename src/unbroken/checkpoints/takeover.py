"""The state of another loader as a position of ours, for the loader that is to go on with it.

Exact is what the other loader would deliver next after a load of its own, up to the end of the epoch. What cannot be
made so is refused, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch.utils.data import RandomSampler

from unbroken.checkpoints.foreign import Foreign, OfOrder, OfWorkers, WorkerState
from unbroken.errors import InexactDataset, StateMismatch, UnbrokenError
from unbroken.lanes import LaneStream, Turns
from unbroken.loader import StatefulDataLoader
from unbroken.sampling import MapOrder
from unbroken.state import HEADER, parse_header, seal

__all__ = ["TakenOver", "take_over"]

_NOTES: tuple[str, ...] = (
    "Random numbers are in no state: what the dataset draws from the global generators is seeded anew from here on.",
    "The ledger counts from here on.",
)


@final
@dataclass(frozen=True)
class TakenOver:
    """The position, and what there is to know of it."""

    position: dict[str, str]
    notes: tuple[str, ...]


def take_over(foreign: Sequence[Foreign], loader: StatefulDataLoader[Any]) -> TakenOver:
    """The position at which ``loader`` goes on as the other one would have. Several states are those of ranks in order.

    It was loaded into ``loader``, which may have made a batch of each lane: make another one to go on with, or load the
    position into it again. Raises ``StateMismatch`` where the two do not fit together or what comes next
    cannot be known, with the reason; ``UnsealableState`` where a dataset's state holds what no position can carry.
    """
    ranks = [rank for each in foreign for rank in each.ranks]
    of_workers = [rank for rank in ranks if isinstance(rank, OfWorkers)]
    of_order = [rank for rank in ranks if isinstance(rank, OfOrder)]
    if isinstance(loader.dataset, LaneStream):
        _refuse(
            "the loader is over a stream of unbroken, and the state is that of a torch dataset",
            "Name a function that makes the loader over the dataset of then.",
        )
    if of_workers and of_order:
        _refuse("some ranks have a map-style dataset and others an iterable one", "Name the states of one run.")
    if of_workers:
        if loader._order is not None:
            _refuse("the state is of an iterable dataset, and the loader's is map-style", "Name the loader of then.")
        position, notes = _lanes(of_workers, loader), _NOTES
    else:
        if loader._order is None:
            _refuse("the state is of a map-style dataset, and the loader's is iterable", "Name the loader of then.")
        position, notes = (
            _place(of_order, loader._order, loader),
            (
                *_NOTES,
                "The order of later epochs is drawn by unbroken, as torch does, and not as torchdata does.",
            ),
        )
        if loader._order.kind == "distributed":
            notes += (
                "How many ranks there were, and whether they shuffled, is not in the state: as the sampler has it.",
            )
    if any(rank.size is None and rank.since and not rank.finished for rank in ranks):
        notes += (
            (
                f"The batch size of then is not in the state: batch_size={loader.batch_size} of the loader was counted "
                f"with, for the {max(rank.since for rank in ranks)} batches that were delivered after it was taken."
            ),
        )
    loader.load_state_dict(position)
    if of_workers and any(lane["delivered"] for lane in _lanes_in(position)):
        _check_made_again(loader, len(loader._mine()))
    return TakenOver(position, notes)


def _check_made_again(loader: StatefulDataLoader[Any], lanes: int) -> None:
    """Go on for a moment, so that every lane comes to its place: a batch that was short is in no state."""
    loader.num_workers = 0
    try:
        batches = iter(loader)
        for _ in range(lanes):
            next(batches, None)
    except InexactDataset as error:
        _refuse(
            f"what was delivered after the state of a worker was taken is not as many whole batches: {error}",
            "Use a state that was saved at another step, before a worker delivered its last batch.",
        )
    except UnbrokenError:
        raise
    except Exception as error:
        _refuse(
            f"what was delivered after the state of a worker was taken is made again, and "
            f"{type(loader.dataset).__qualname__} raised {type(error).__name__}: {error}",
            "Take it over where the dataset has its data, over the dataset of then.",
        )


def _lanes_in(position: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for name in position.keys() - {HEADER}:
        leaf = json.loads(position[name])
        yield from leaf.get("lanes") or [leaf["lane"]]


def _refuse(why: str, way_out: str) -> NoReturn:
    raise StateMismatch(f"this state cannot be taken over exactly: {why}.\n{way_out}")


# ---- iterable datasets


def _lanes(ranks: Sequence[OfWorkers], loader: StatefulDataLoader[Any]) -> dict[str, str]:
    """Worker ``w`` of rank ``r`` becomes lane ``w * ranks + r``: the lanes of rank ``r`` are its workers, in order."""
    template = loader.state_dict()
    header = parse_header(template)
    workers, world = len(ranks[0].workers), len(ranks)
    _check_ranks(ranks)
    by_lane = header["ranks"] is None
    if world > 1 and not by_lane:
        _refuse(
            f"there are states of {world} ranks, and the loader has a leaf for each rank alone",
            f"Pass it lanes={workers * world}, and dp_rank and dp_world_size: then any number of ranks goes on.",
        )
    if by_lane and header["lanes"] != workers * world:
        _refuse(
            f"there were {world} ranks with {workers} workers each, and the loader has {header['lanes']} lanes",
            f"Pass it lanes={workers * world}.",
        )
    if loader._options.prefetch.saved:
        _refuse("save_prefetched=True counts on batches in the position", "Leave it out for this load.")
    made = {w * world + r: lane for r, rank in enumerate(ranks) for w, lane in enumerate(_lanes_of(rank, loader))}
    name = next(name for name in sorted(template) if name != HEADER)
    leaf = json.loads(template[name])
    blank = leaf.get("lane") or leaf["lanes"][0]
    steps = ranks[0].steps + ranks[0].since
    epoch, inside = (1, 0) if ranks[0].finished else (0, steps)
    header |= {"lanes": workers * world, "at": [epoch, inside, steps]}
    leaf |= {"step": steps, "began": steps - inside}
    position = {HEADER: json.dumps(header)}
    if by_lane:
        for number in sorted(made):
            position[f"lane-{number:06d}"] = json.dumps({**leaf, "lane": {**blank, **made[number]}})
    else:
        position[name] = json.dumps({**leaf, "lanes": [{**blank, **made[number]} for number in sorted(made)]})
    return position


def _check_ranks(ranks: Sequence[OfWorkers]) -> None:
    for name, found in (
        ("workers", {len(rank.workers) for rank in ranks}),
        ("steps", {rank.steps + rank.since for rank in ranks}),
        ("epochs that are over", {rank.finished for rank in ranks}),
    ):
        if len(found) > 1:
            _refuse(
                f"the ranks have other {name}: {', '.join(map(str, sorted(found)))}", "Name the states of one save."
            )


def _lanes_of(rank: OfWorkers, loader: StatefulDataLoader[Any]) -> list[dict[str, Any]]:
    """The fields of the lanes of a rank.

    A lane begins at the state of its worker, as if that were the start of the epoch: the place of such an anchor is
    taken as it is, and what was delivered after it is made again. Where the dataset has no state, or it is not to be
    used, that is everything since the epoch began.
    """
    if rank.finished:
        alone = len(rank.workers) == 1 and not rank.workers[0].stateless
        return [{"epoch": 1, "carry": _state(rank.workers[0], loader) if alone else None} for _ in rank.workers]
    anew = all(worker.stateless for worker in rank.workers) or loader._options.resume == "replay"
    if anew and any(worker.ended for worker in rank.workers):
        _refuse(
            "everything has to be made again from the start of the epoch, and how many batches each worker had "
            "delivered before one of them ended is not in the state",
            "Use a state that was saved before a worker came to its end, or at the end of the epoch.",
        )
    if anew and rank.last != (rank.steps - 1) % len(rank.workers):
        _refuse(
            f"everything has to be made again from the start of the epoch, and {rank.steps} batches from there do not "
            f"end with worker {rank.last}, as the state says: it was saved by a loader that had been resumed, and "
            "torchdata refuses such a state itself",
            "Use a state of a run that was not resumed in this epoch, or one of the end of the epoch.",
        )
    taken, made = _turns(rank, anew)
    size = rank.size or loader.batch_size or 1
    lanes = []
    for number, worker in enumerate(rank.workers):
        after = None if anew else _state(worker, loader)
        anchor: dict[str, Any] = {"at": 0, "before": None, "after": after, "first_witness": 0, "witnesses": []}
        delivered = made[number] * size
        lanes.append(
            {
                "turns": taken[number],
                "delivered": delivered,
                "ended": worker.ended,
                "sizes": [[0, size]] if delivered else [],
                "anchor": anchor,
                "carry": after if worker.ended else None,
            }
        )
    return lanes


def _turns(rank: OfWorkers, anew: bool) -> tuple[dict[int, int], dict[int, int]]:
    """The turns that each worker has taken, and how many of them are to be made again.

    torchdata goes on with the worker after the last. Where one has ended, how many turns each took is not known, and
    only whose turn it is counts.
    """
    live = [number for number, worker in enumerate(rank.workers) if not worker.ended]
    rounds = (rank.steps - rank.last - 1) // len(rank.workers) if len(live) == len(rank.workers) else 0
    taken = {number: rounds + (number <= rank.last) for number in range(len(rank.workers))}
    made = dict.fromkeys(taken, 0)
    if anew:
        taken, rank_steps = dict.fromkeys(taken, 0), rank.steps + rank.since
    else:
        rank_steps = rank.since
    turns = Turns({number: taken[number] for number in live})
    for _ in range(rank_steps if live else 0):
        number = turns.take()
        taken[number] += 1
        made[number] += 1
    return taken, made


def _state(worker: WorkerState, loader: StatefulDataLoader[Any]) -> Any:
    """The state of a worker as an anchor has it, where the loader's dataset can take it."""
    dataset, state = loader.dataset, {}
    for name, value, holder in (
        ("dataset", worker.dataset, dataset),
        ("iterator", worker.iterator, dataset if worker.iterator is None else iter(dataset)),
    ):
        if value is None:
            continue
        if not (callable(getattr(holder, "state_dict", None)) and callable(getattr(holder, "load_state_dict", None))):
            of = "dataset" if name == "dataset" else "iterator of the dataset"
            _refuse(
                f"the {of} had a state, and {type(holder).__qualname__} has no state_dict and load_state_dict",
                "Name a function that makes the loader over the dataset of then.",
            )
        state[name] = value
    return json.loads(seal(state, "the state of the dataset"))


# ---- map-style datasets


def _place(ranks: Sequence[OfOrder], order: MapOrder, loader: StatefulDataLoader[Any]) -> dict[str, str]:
    """The place in the order, and what draws the order again."""
    old, template = ranks[0], loader.state_dict()
    shared = order.kind == "distributed"
    world = order.share.world
    if len({(rank.rows, rank.steps, rank.since, rank.finished) for rank in ranks}) > 1:
        _refuse("the ranks stand at different places of their orders", "Name the states of one save.")
    if order.kind == "custom" or order.by_batch:
        _refuse("the loader has a sampler of its own, and where that stands is not in the state", "Begin a new epoch.")
    if old.kept:
        _refuse(
            "the dataset had a state of its own, which is no part of a position: a sample of a map-style dataset is to "
            "be a function of its index",
            "Take the state_dict out of the dataset, or begin a new epoch.",
        )
    if world > 1 and not shared:
        _refuse(
            f"the loader shares out rows among {world} ranks, and what each rank took there depends on its sampler",
            "Use torch's DistributedSampler in the loader, as with torchdata.",
        )
    if len(ranks) not in (1, world):
        _refuse(
            f"there are states of {len(ranks)} ranks, and the sampler of the loader is that of {world}",
            "Name the state of one rank, or those of all, and make the loader for as many ranks as there were.",
        )
    size = old.size or loader.batch_size or 1
    rows = 0 if old.finished else min((old.rows + old.since * size) * world, order.total())
    steps = old.steps + old.since
    name = next(name for name in sorted(template) if name != HEADER)
    leaf, header = json.loads(template[name]), parse_header(template)
    epoch, inside = (1, 0) if old.finished else (0, steps)
    header["at"] = [epoch, inside, steps]
    leaf |= {"epoch": epoch, "rows": rows, "step": steps, "began": steps - inside, "sampler": _draw(old, order)}
    return {HEADER: json.dumps(header), name: json.dumps(leaf)}


def _draw(old: OfOrder, order: MapOrder) -> dict[str, Any] | None:
    """What has the loader draw the order that torchdata's random sampler drew."""
    if old.generator is None:
        if order.kind in ("sequential", "distributed"):
            return None
        _refuse(
            "the loader shuffles, and there is no generator in the state: the order was in sequence, or drawn by a "
            "sampler that torchdata cannot save",
            "Name the loader of then; where it shuffled by such a sampler, begin a new epoch.",
        )
    if order.kind == "permutation":
        _refuse(
            "the loader shuffles by its seed, and the order of torchdata was drawn by a generator",
            "Leave seed out and pass generator=torch.Generator(), at least until the epoch ends.",
        )
    if type(order.base) is not RandomSampler:
        _refuse(
            f"the order was drawn by torchdata's RandomSampler, and the loader has a {type(order.base).__qualname__}",
            "Pass shuffle=True and generator=torch.Generator().",
        )
    if old.finished and old.workers:
        _refuse(
            "it is that of an epoch's end, and what torchdata draws before the next order depends on whether its "
            "workers were persistent and whether it had a generator of its own, which the state does not tell",
            "Begin a new epoch without the state, or use one that was saved within an epoch.",
        )
    drawn = torch.Generator()
    drawn.set_state(old.generator)
    if old.finished:
        _draw_epoch(drawn, order.base)
    if order.base.generator is not None:
        return {"generator": seal(drawn.get_state())}
    first = torch.Generator().manual_seed(drawn.initial_seed())
    if not torch.equal(first.get_state(), drawn.get_state()):
        _refuse(
            "the order is not that of the generator's first epoch, and a loader without a generator of its own can "
            "draw no other",
            "Pass it generator=torch.Generator(); its state is put in at the load.",
        )
    return {"seed": drawn.initial_seed()}


def _draw_epoch(generator: torch.Generator, sampler: RandomSampler) -> None:
    """What torchdata's random sampler draws for a whole epoch (torchdata/stateful_dataloader/sampler.py, 0.11)."""
    length, number = len(sampler.data_source), sampler.num_samples
    at_once = 32 if sampler.replacement else length
    for _ in range(max(1, -(-number // at_once))):
        if sampler.replacement:
            torch.randint(high=length, size=(at_once,), dtype=torch.int64, generator=generator)
        else:
            torch.randperm(length, generator=generator)
