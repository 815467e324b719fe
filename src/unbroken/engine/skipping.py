"""``on_error="skip"``: samples that fail are passed over where they are made, and counted where they are delivered."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

from torch.utils.data import Dataset

from unbroken.errors import TooManySkipped
from unbroken.position import LanesPosition, MapPosition
from unbroken.seeding import key, seed_globals
from unbroken.skipped import MOST_IN_A_ROW, LeftOut, Skipped, Skipping, gone, too_many

__all__ = ["Sound", "Watch", "pass_over"]

_log = logging.getLogger("unbroken")
_TOLD_EACH = 10
_MOST_TRIES = 1000


def pass_over(
    iterator: Iterator[Any],
    error: Exception,
    skipping: Skipping,
    leave_out: Callable[[Exception], LeftOut],
    end: Any,
) -> tuple[Any, list[LeftOut]]:
    """After an ``error`` of an iterator: its next sample, or ``end``; and what was left out before that.

    ``leave_out`` is told of each failure before the next sample is asked for. Raises ``TooManySkipped`` where that
    would never end, or lose all that a generator had.
    """
    left_out: list[LeftOut] = []
    while True:
        if inspect.isgenerator(iterator) and iterator.gi_frame is None:
            raise TooManySkipped(
                f"{iterator.__qualname__}() raised {type(error).__qualname__}: {error}\n"
                "It is a generator, and a generator cannot go on after an exception: all the rest would be left out.\n"
                "Write an iterator class with __next__, which can be asked again; or handle the error inside the "
                "generator."
            ) from error
        left_out.append(leave_out(error))
        if skipping.most is not None and len(left_out) > skipping.most:
            raise too_many(len(left_out), skipping.most, left_out)
        if len(left_out) >= MOST_IN_A_ROW:
            raise gone(left_out)
        try:
            sample = next(iterator, end)
        except Exception as another:
            error = another
            continue
        if sample is end:
            left_out[-1] = left_out[-1]._replace(error=f"{left_out[-1].error} (the lane ended right after it)")
        return sample, left_out


@final
class Sound:
    """The samples of a map-style dataset that do not fail; ``batched`` as in the plan of a host, ``run`` the run's key.

    Where ``__getitems__`` fails, each sample is asked for by itself, under the random numbers of the batch from their
    start on.
    """

    def __init__(self, dataset: Any, skipping: Skipping, run: int, *, batched: bool, by_sample: bool) -> None:
        self._dataset = dataset
        self._skipping = skipping
        self._run = run
        self._batched = batched
        self._by_sample = by_sample and batched
        self._together = getattr(dataset, "__getitems__", None) if batched else None

    def fetch(self, task: Any, indices: Iterable[Any]) -> tuple[Any, list[LeftOut]]:
        """The samples of a ``MapTask`` (the sample, unbatched; None where it failed), and those that were left out."""
        seed_globals(key(self._run, "map", task.epoch, task.place))
        if self._together is not None and not self._by_sample:
            try:
                return self._together(task.indices), []
            except Exception:  # of one of them: which one is seen below
                seed_globals(key(self._run, "map", task.epoch, task.place))
        samples, left_out = [], []
        for number, index in enumerate(indices if self._batched else [task.indices]):
            epoch, place = task.place_of(number)
            if self._by_sample:
                seed_globals(key(self._run, "sample", epoch, place))
            try:
                samples.append(self._one(index))
            except Exception as error:
                left_out.append(LeftOut.of(epoch, place, f"index {_short(index)} of epoch {epoch}", error))
        return samples if self._batched else samples[0] if samples else None, left_out

    def shape(self, left_out: Sequence[LeftOut]) -> Any:
        """A batch has no sample left: another sample (a list of it, batched) that shows what a batch looks like, or
        None where the batch can be passed over. Raises ``TooManySkipped`` where it cannot.
        """
        if self._skipping.whole == "pass":
            return None
        reason = (
            "No sample of a batch is left, and ranks have to take the same steps: without a batch this one would be "
            'at another step. Use larger batches, or at_end="pad", which has batches with no row in them.'
        )
        for index in range(min(len(self._dataset), _MOST_TRIES)) if self._skipping.whole == "empty" else ():
            try:
                sample = self._one(index)
            except Exception:
                continue
            return [sample] if self._batched else sample
        raise too_many(len(left_out), None, left_out, reason)

    def _one(self, index: Any) -> Any:
        # torch's own class has a __getitem__ that only says that there is none.
        alone = getattr(type(self._dataset), "__getitem__", None) not in (None, Dataset.__getitem__)
        if self._together is not None and (self._by_sample or not alone):
            return self._together([index])[0]
        return self._dataset[index]


def _short(index: Any) -> str:
    text = repr(index)
    return text if len(text) <= 60 else f"{text[:57]}..."


@final
class Watch:
    """What is left out of a run: counted ahead, as batches are made, and told of when they are delivered."""

    def __init__(self, position: LanesPosition | MapPosition, skipping: Skipping | None) -> None:
        self._position = position
        self._skipping = skipping
        self._ahead: list[LeftOut] = []
        self._in_a_row = 0

    @property
    def _counted(self) -> Skipped:
        return Skipped.of_position(self._position.skipped)

    def restart(self) -> None:
        """What was made ahead is forgotten."""
        self._ahead = []

    def expect(self, left_out: Sequence[LeftOut], *, nothing: bool = False) -> None:
        """This is left out of what was made next, of which ``nothing`` may be left. Raises ``TooManySkipped`` where
        that is more than may be.
        """
        self._ahead += left_out
        self._in_a_row = self._in_a_row + len(left_out) if nothing else 0
        if self._in_a_row >= MOST_IN_A_ROW:
            raise gone(self._ahead)
        most = None if self._skipping is None else self._skipping.most
        if most is not None and (count := self._counted.count + len(self._ahead)) > most:
            raise too_many(count, most, self._ahead)

    def deliver(self, left_out: Sequence[LeftOut], lane: int | None = None) -> None:
        """What this was left out of is delivered."""
        count = self._counted.count
        position = self._position
        if isinstance(position, MapPosition):
            position.skipped = position.skipped.plus(left_out)
        elif lane is not None:
            position.skipped = {**position.skipped, lane: position.skipped.get(lane, Skipped()).plus(left_out)}
        del self._ahead[: len(left_out)]
        for each in left_out:
            count += 1
            if count <= _TOLD_EACH or str(count).strip("0") == "1":
                _log.warning(f'on_error="skip" leaves out {each.where}: {each.error} ({count} in this run)')
