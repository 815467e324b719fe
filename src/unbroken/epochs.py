"""What an epoch of a loader begins with and ends with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from unbroken.options import Options, say_once
from unbroken.position import LanesPosition, MapPosition, Position
from unbroken.sampling import MapOrder
from unbroken.seeding import key

__all__ = ["begin_afresh", "begin_pass", "draw_run", "end_pass", "epoch_holders", "is_next_due", "put_back_epochs"]


class _PutBack(int):
    """An epoch that a load put back, and no ``set_epoch`` of the user's has replaced since."""


def put_back_epochs(loader: DataLoader[Any], position: Position) -> None:
    """Give the user's objects the epochs that they had when the epoch of a position began."""
    for name, holder in epoch_holders(loader).items():
        if name in position.epochs:
            holder.set_epoch(_PutBack(position.epochs[name]))


def begin_afresh(position: Position, pristine: str | None) -> None:
    """Lanes that stand at the very beginning begin as the dataset did at first, whatever became of it since."""
    lanes = position.lanes.values() if isinstance(position, LanesPosition) else ()
    for lane in (position.cursor,) if isinstance(position, MapPosition) else lanes:
        if lane.anchor is None and lane.carry is None:
            lane.carry = pristine


def check_epochs(saved: Mapping[str, int], now: Mapping[str, int], *, over: bool) -> None:
    """Refuse another epoch of a sampler or dataset in the middle of one, and where it is ``over`` that very epoch.

    A loop that begins with the epoch that was going on would deliver the next one's rows in the order of the last.
    """
    for name in saved.keys() & now.keys() if over else ():
        if saved[name] == now[name] and not isinstance(now[name], _PutBack):
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


def is_next_due(
    position: Position,
    options: Options,
    order: MapOrder | None,
    epochs: Mapping[str, int],
    *,
    begun: bool,
    resumed: bool,
) -> bool:
    """Whether a new pass is of the next epoch: one was ``begun`` at this position, or it is over.

    ``epochs`` are those that the user's objects have now. Raises ``ValueError`` where they are not those of the
    position in the middle of an epoch.
    """
    goes_on = options.ends == "repeat" or options.prefetch.saved
    over = order is not None and isinstance(position, MapPosition) and order.at_end(position)
    moved_on = position.stopped and any(position.epochs.get(name, now) != now for name, now in epochs.items())
    if (resumed or goes_on) and position.mid_epoch and not moved_on:
        check_epochs(position.epochs, epochs, over=over)
    return (begun and not goes_on) or over or (resumed and moved_on)


def begin_pass(position: Position, options: Options, epochs: Mapping[str, int]) -> None:
    """Note in a position what a pass begins with."""
    position.stopped = False
    if not (options.ends == "repeat" or options.prefetch.saved) or not position.mid_epoch:
        position.epochs = {name: int(epoch) for name, epoch in epochs.items()}
    if options.ends == "repeat" and isinstance(position, LanesPosition) and position.noted is None:
        position.noted = position.epoch


def end_pass(position: Position, options: Options, order: MapOrder | None, *, waited: bool, going_on: bool) -> bool:
    """Say what there is to say at the end of a pass, and whether it stopped before rows that may do for a step on other
    ranks. ``waited``: this rank waits for others to end.
    """
    if options.ends == "alone" and options.share.world > 1 and not going_on:
        tell_of_own_ends()
    over = order is not None and isinstance(position, MapPosition) and order.at_end(position)
    if options.ends == "stop" and not waited and not over:
        tell_of_rest(position, order)
    return options.ends == "stop" and not over and not going_on


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


def epoch_holders(loader: DataLoader[Any]) -> dict[str, Any]:
    """The user's objects that count epochs by ``set_epoch``, as torch's DistributedSampler does, by what they are."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    holders = [("sampler", s) for s in (loader.batch_sampler, inner, loader.sampler)] + [("dataset", loader.dataset)]
    return {
        name: holder
        for name, holder in holders
        if callable(getattr(holder, "set_epoch", None)) and type(getattr(holder, "epoch", None)) in (int, _PutBack)
    }


def tell_of_own_ends() -> None:
    """Say what it means that ranks do not end an epoch together."""
    say_once(
        "Each rank ends an epoch with its own data: ranks may end at different steps, and a training loop on several "
        "ranks has to agree on the last one. Pass group= or mesh=, and they end together."
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
