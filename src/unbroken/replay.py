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

from unbroken.errors import ReplayError
from unbroken.factories import accepted
from unbroken.lineage import Origin
from unbroken.loader import StatefulDataLoader
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
    return int(parse_header(position)["at"][2])


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
        position: of the run, at that step or before it; ``None``: the start of the run (which needs its ``seed``).
        step: of the run, from 0: the batch that was delivered after so many others, on each rank. A step that
            ``loader.skip()`` left out is made all the same.
        ranks: how many dp ranks there were at that step. Default: as many as saved the position.
        report: called with rank, steps made, and steps to make.

    Raises:
        ReplayError: the step lies before the position, the loader is none of this library, or there are not so many
            ranks or steps.
        StateError: the position does not fit the loader.
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
    for rank in chosen:
        loader = _made(make_loader, rank, world, shared=header.get("ranks") is None)
        if position is not None:
            loader.load_state_dict(_of_rank(position, rank, header))
        found.append(_batch_of(loader, step, rank, world, report))
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
    loader = make_loader(**taken)
    if not isinstance(loader, StatefulDataLoader):
        raise ReplayError(
            f"The function made a {type(loader).__module__}.{type(loader).__qualname__}, and only batches of an "
            "unbroken.StatefulDataLoader can be made again from a position."
        )
    loader.num_workers = 0
    if loader._kind == "stream":
        loader._options = replace(loader._options, lineage=True)
    return loader


def _of_rank(position: Mapping[str, Any], rank: int, header: Mapping[str, Any]) -> dict[str, Any]:
    """The position for one rank, in one process, with no step left out."""
    found = {name: text if name == HEADER else _with_all_steps(text) for name, text in position.items()}
    if header.get("ranks") is None:
        return found
    leaf = f"rank-{rank:04d}"
    if leaf not in found:
        raise ReplayError(
            f"The position has no leaf {leaf!r}: it was saved by {header['ranks']} ranks, each its own, and is not "
            "that of all.\nMerge the states of all ranks with {**a, **b}, or name the rank that you have."
        )
    return {HEADER: json.dumps({**header, "ranks": 1}), "rank-0000": found[leaf]}


def _with_all_steps(text: Any) -> Any:
    if isinstance(text, str) and '"passed"' in text:
        leaf = json.loads(text)
        return json.dumps({name: value for name, value in leaf.items() if name != "passed"})
    return text


def _batch_of(loader: StatefulDataLoader[Any], step: int, rank: int, world: int, report: Report | None) -> Replayed:
    first = now = step_of(loader.state_dict())
    if loader._kind == "map" and loader.in_order:  # of which what is left out is not made
        loader.skip(range(now, step))
        now = step
    batches: Iterator[Any] = iter(loader)
    batch = None
    for number in range(now, step + 1):
        if report is not None:
            report(rank, number - first, step - first)
        batch, batches = _next(loader, batches, number)
    epoch = json.loads(loader.state_dict()[HEADER])["at"][0]
    batch, rows = _rows_behind(loader, batches, batch)
    return Replayed(rank, world, step, epoch, batch, rows, loader)


def _next(loader: StatefulDataLoader[Any], batches: Iterator[Any], number: int) -> tuple[Any, Iterator[Any]]:
    for _ in range(3):  # the rest of an epoch, one that is left out as a whole, and one more
        found = next(batches, _END)
        if found is not _END:
            return found, batches
        batches = iter(loader)
    raise ReplayError(
        f"There is no step {number}: the epochs of this loader have no batch on this rank.\n"
        "Was the run made with other data, or with other ranks (ranks=)?"
    )


_END = object()


def _rows_behind(
    loader: StatefulDataLoader[Any], batches: Iterator[Any], batch: Any
) -> tuple[Any, tuple[tuple[Origin, ...], ...]]:
    if loader._kind == "stream":
        if isinstance(batch, dict):
            return {name: value for name, value in batch.items() if name != "lineage"}, tuple(batch["lineage"])
        return batch[0], tuple(batch[1])
    task = getattr(getattr(batches, "_engine", None), "task", None)
    if loader._kind != "map" or task is None:
        return batch, ()
    indices = task.indices if loader.batch_sampler is not None else [task.indices]
    name = type(loader.dataset).__qualname__
    return batch, tuple((Origin(name, "", index),) for index in indices)
