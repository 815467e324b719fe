"""The batch of any step, made again from a position before it, with the rows behind it.

::

    position = torch.load("step-1000.pt", weights_only=True)["loader"]
    for part in replay(make_loader, position, step=1017):
        print(part.rank, part.batch["input_ids"].shape, part.rows[0])

One process makes the batches of all ranks, one after another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from unbroken.epochs import epoch_holders
from unbroken.errors import InvalidState, ReplayError
from unbroken.factories import accepted, call_factory, needed
from unbroken.lineage import Origin
from unbroken.loader import StatefulDataLoader
from unbroken.skipped import Fetched
from unbroken.state import HEADER, parse_header
from unbroken.streams.tokenize import tokenizer_of

__all__ = ["Replayed", "decoded", "nearest", "replay", "step_of"]

Report = Callable[[int, int, int], None]


@final
@dataclass(frozen=True)
class Replayed:
    """What one rank was given at a step.

    ``rows`` has for each row of the batch the stored rows behind it: of a stream all of them, of a map-style dataset
    its index, and nothing of any other. ``loader`` made the batch.
    """

    rank: int
    ranks: int
    step: int
    epoch: int
    batch: Any
    rows: tuple[tuple[Origin, ...], ...]
    loader: StatefulDataLoader[Any]


def step_of(position: Mapping[str, Any]) -> int:
    """How many batches were delivered or left out when a position was saved. Raises ``InvalidState``."""
    at = parse_header(position).get("at")
    if not isinstance(at, list) or len(at) != 3 or not all(type(number) is int for number in at):
        raise InvalidState("The header of this position does not say at which step it was saved: it was changed.")
    return int(at[2])


def nearest(positions: Mapping[str, Mapping[str, Any]], step: int) -> str:
    """The name of the latest of some positions from which a step can be made. Raises ``ReplayError`` without one."""
    steps = {name: step_of(position) for name, position in positions.items()}
    before = {name: at for name, at in steps.items() if at <= step}
    if not before:
        found = ", ".join(f"{name} at step {at}" for name, at in sorted(steps.items(), key=lambda item: item[1])[:4])
        raise ReplayError(
            f"Step {step} lies before every position there is ({found or 'there is none'}), and a run is made again "
            "forwards only.\nName an earlier checkpoint, or none: then it is made from the start of the run."
        )
    return max(before, key=lambda name: before[name])


def replay(
    make_loader: Callable[..., StatefulDataLoader[Any]],
    position: Mapping[str, Any] | None,
    step: int,
    *,
    ranks: int | None = None,
    only: Sequence[int] | None = None,
    report: Report | None = None,
) -> list[Replayed]:
    """Make the batch of a step again, on every rank or on those named by ``only``.

    Args:
        make_loader: makes the loader of the run; called with ``dp_rank`` and ``dp_world_size`` if it takes them. Its
            batches are made in this process, whatever its ``num_workers``.
        position: of the run, at that step or before it; ``None``: the start of the run, which needs a ``seed``.
        step: of the run, from 0: the batch that was delivered after so many others, on each rank. A step that
            ``loader.skip()`` left out is made all the same.
        ranks: how many dp ranks there were at that step. Default: as many as saved the position.
        only: the ranks whose batches are wanted. Default: all.
        report: called with rank, steps made, and steps to make.

    Raises:
        ReplayError: the step lies before the position, the loader is none of this library, or there are not so many
            ranks or steps. Or an epoch has to be crossed on the way whose end depended on more than is known here: that
            of lanes on several ranks, or where the run called ``set_epoch``.
        StateError: the position does not fit the loader.
        FactoryError: ``make_loader`` raised, or ended the program.

    What is not in the position is not known here: a batch of a map-style dataset that raised in the run, which went on
    after it (it took no step there), and what ``worker_init_fn`` did in worker processes.
    """
    header = {} if position is None else parse_header(position)
    world = ranks or header.get("world") or header.get("ranks") or 1
    at = 0 if position is None else step_of(position)
    if step < at:
        raise ReplayError(
            f"The position is at step {at}, and step {step} lies before it: a run is made again forwards only.\n"
            "Name a position that was saved before that step."
        )
    chosen = range(world) if only is None else only
    if outside := [rank for rank in chosen if not 0 <= rank < world]:
        raise ReplayError(f"There is no rank {outside[0]} among {world}, which are numbered from 0.")
    found = []
    for rank in range(world):
        loader = _made(make_loader, rank, world, shared=header.get("ranks") is None)
        # Where ranks have lanes, one that comes to its end before the step may have ended the epoch of all.
        if rank in chosen or (world > 1 and loader._order is None and header.get("ranks") is None):
            _place(loader, position, rank, header, step)
            part = _batch_of(loader, step, rank, world, report)
            found += [part] if rank in chosen else []
    return found


def decoded(part: Replayed, tokenizer: Any = None) -> list[list[str]]:
    """The text of each row of a batch of token ids, cut where the stored rows behind it meet.

    ``tokenizer`` has a method ``decode(ids)``; default: that of the stream. Raises ``ReplayError`` without one, or
    where the batch has no ``input_ids``.
    """
    if tokenizer is None and part.loader._kind == "stream":
        tokenizer = tokenizer_of(part.loader.dataset)  # type: ignore[arg-type]
    if not hasattr(tokenizer, "decode"):
        raise ReplayError(
            "Nothing says how these ids become text: the loader's stream has no tokenizer that decodes.\n"
            "Name one: --tokenizer tokenizer.json, or a name at the Hugging Face Hub."
        )
    ids = part.batch.get("input_ids") if isinstance(part.batch, dict) else None
    if ids is None:
        raise ReplayError("The batch has no input_ids to decode. Leave decoding out, and it is shown as it is.")
    behind = part.rows or ((),) * len(ids)
    return [[tokenizer.decode(span) for span in _spans(list(map(int, row)), of)] for row, of in zip(ids, behind)]  # noqa: B905


def _spans(ids: list[int], behind: Sequence[Origin]) -> list[list[int]]:
    """The ids of a row by the stored rows behind it; in one, where these do not say which are whose."""
    lengths = [origin.stop - origin.start for origin in behind]
    if not lengths or any(origin.start < 0 for origin in behind) or sum(lengths) > len(ids):
        return [ids]
    spans, start = [], 0
    for length in lengths:
        spans.append(ids[start : start + length])
        start += length
    return spans


def _made(make_loader: Callable[..., Any], rank: int, world: int, *, shared: bool) -> StatefulDataLoader[Any]:
    places = {"dp_rank": rank, "dp_world_size": world} if shared else {}
    taken = accepted(make_loader, places)
    if shared and world > 1 and len(taken) < len(places):
        raise ReplayError(
            f"The position was saved by {world} ranks, and the function that makes the loader takes no dp_rank and "
            "dp_world_size.\nLet it take both and pass them on to the loader, or say ranks=1 for the rows of the "
            "global order."
        )
    given = {**needed(make_loader, {"num_workers": 0}), **taken}
    loader = call_factory(make_loader, given, "The function that makes the loader")
    if not isinstance(loader, StatefulDataLoader):
        raise ReplayError(
            f"The function made an object of type {type(loader).__module__}.{type(loader).__qualname__}, and only "
            "batches of an unbroken.StatefulDataLoader can be made again from a position."
        )
    loader.num_workers = 0
    return loader


def _place(
    loader: StatefulDataLoader[Any], position: Mapping[str, Any] | None, rank: int, header: Mapping[str, Any], step: int
) -> None:
    """Stand at the position, with all that was left out but the step itself."""
    if position is not None:
        state = _of_rank(position, rank, header)
        if epoch_holders(loader) and not header["at"][1]:
            raise _unknown_epoch("the position was saved between two epochs")
        if any(isinstance(text, str) and '"stopped":true' in text for text in state.values()):
            raise ReplayError(
                "The position was saved where all ranks had ended an epoch together, with rows left in it, and which "
                "of them come next was for the ranks to agree on.\nName a checkpoint that was saved within an epoch."
            )
    elif loader._options.seeded or (loader._order is not None and loader._order.kind == "sequential"):
        state = loader.state_dict()
    else:
        raise ReplayError(
            "Without a position the run is made from its start, and this loader has no seed: each run has another "
            "order.\nName a checkpoint of the run."
        )
    state = {name: text if name == HEADER else _with_step(text, step) for name, text in state.items()}
    if position is not None or any('"passed"' in text for text in state.values()):
        loader.load_state_dict(state)


def _of_rank(position: Mapping[str, Any], rank: int, header: Mapping[str, Any]) -> dict[str, Any]:
    """The position for one rank, in one process."""
    if header.get("ranks") is None:
        return dict(position)
    leaf = f"rank-{rank:04d}"
    if leaf not in position:
        raise ReplayError(
            f"The position has no leaf {leaf!r}: it was saved by {header['ranks']} ranks, each its own, and is not "
            "that of all.\nName the files of all ranks, or the rank that you have."
        )
    return {HEADER: json.dumps({**header, "ranks": 1}), "rank-0000": position[leaf]}


def _with_step(text: Any, step: int) -> Any:
    """A leaf in which a step is not left out. What else is left out took a step each, and stays."""
    if not isinstance(text, str) or '"passed"' not in text:
        return text
    leaf = json.loads(text)
    passed = [
        part
        for first, stop in leaf.pop("passed", [])
        for part in ((first, min(stop, step)), (max(first, step + 1), stop))
    ]
    ranges = [part for part in passed if part[0] < part[1]]
    return json.dumps({**leaf, "passed": ranges} if ranges else leaf)


def _batch_of(loader: StatefulDataLoader[Any], step: int, rank: int, world: int, report: Report | None) -> Replayed:
    own = loader._options.lineage
    if loader._kind == "stream":
        loader._options = replace(loader._options, lineage=True)
    first, began = step_of(loader.state_dict()), _epoch_of(loader)
    if loader._kind == "map" and loader.in_order and loader._options.skipping is None:  # what is left out is not made
        loader.skip(range(first, step))
    batches: Iterator[Any] = iter(loader)
    batch, epoch = None, began
    while (now := step_of(loader.state_dict())) <= step:
        if report is not None:
            report(rank, now - first, step - first)
        batch, batches, epoch = _next(loader, batches, step, rank, world)
    if epoch != began and epoch_holders(loader):
        raise _unknown_epoch(f"step {step} lies in a later epoch than the position")
    batch, rows = _rows_behind(loader, batches, batch, own=own)
    return Replayed(rank, world, step, epoch, batch, rows, loader)


def _epoch_of(loader: StatefulDataLoader[Any]) -> int:
    return int(json.loads(loader.state_dict()[HEADER])["at"][0])


def _unknown_epoch(why: str) -> ReplayError:
    return ReplayError(
        f"The dataset or sampler has set_epoch, which the loop of the run calls, and {why}: which epoch was set for "
        "the step is not known here.\nName a checkpoint that was saved within the epoch of the step."
    )


def _next(
    loader: StatefulDataLoader[Any], batches: Iterator[Any], step: int, rank: int, world: int
) -> tuple[Any, Iterator[Any], int]:
    """The next batch, the pass that it is of, and the epoch."""
    before, empty = -1, 0
    while empty < 2:  # the rest of an epoch may have nothing any more; a whole one may be left out
        epoch = _epoch_of(loader)
        found = next(batches, _END)
        if found is not _END:  # a pass may have gone on with the next epoch; without ends, a batch lies in both
            return found, batches, epoch if loader._options.ends == "repeat" else _epoch_of(loader)
        now = step_of(loader.state_dict())
        if world > 1 and loader._order is None:
            raise ReplayError(
                f"Rank {rank} of {world} comes to the end of its data after step {now - 1}, and where all of them "
                f"ended the epoch is not known here: step {step} may be another one.\n"
                "Name a checkpoint that was saved later, in the epoch of the step."
            )
        before, empty = now, empty + (now == before)
        batches = iter(loader)
    raise ReplayError(
        f"There is no step {step}: the epochs of this loader have no batch on this rank.\n"
        "Was the run made with other data, or with other ranks (ranks=)?"
    )


_END = object()


def _rows_behind(
    loader: StatefulDataLoader[Any], batches: Iterator[Any], batch: Any, *, own: bool
) -> tuple[Any, tuple[tuple[Origin, ...], ...]]:
    """The batch, with its lineage where the loader gives it, and the rows behind it."""
    if loader._kind == "stream":
        if isinstance(batch, dict):
            alone = {name: value for name, value in batch.items() if name != "lineage"}
            return batch if own else alone, tuple(batch["lineage"])
        return batch if own else batch[0], tuple(batch[1])
    task, made = getattr(getattr(batches, "_engine", None), "last", (None, None))
    if loader._kind != "map" or task is None:
        return batch, ()
    indices = task.indices if loader.batch_sampler is not None else [task.indices]
    name = type(loader.dataset).__qualname__
    out = {(each.epoch, each.number) for each in made.left_out} if isinstance(made, Fetched) else ()
    chosen = [index for number, index in enumerate(indices) if task.place_of(number) not in out]
    return batch, tuple((Origin(name, "", index),) for index in chosen)
