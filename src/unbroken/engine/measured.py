"""``loader.stats()``: what a loader tells of its own running."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Any

from unbroken.display import LoaderView, is_shown
from unbroken.engine.epoch import Epoch, Run
from unbroken.position import Position
from unbroken.sampling import MapOrder
from unbroken.skipped import Skipped
from unbroken.stats import Stats

__all__ = ["Measured", "new_stats"]


def new_stats(progress: Any, rank: int) -> Stats:
    """For a loader of this data-parallel rank. Raises ``TypeError`` where ``progress`` is no bool."""
    if not isinstance(progress, bool):
        raise TypeError(f"progress must be True or False, but got progress={progress!r}.")
    return Stats(progress=progress and is_shown(rank))


class Measured(Run):
    """A loader, of which there is something to tell."""

    _position: Position
    _order: MapOrder | None

    @property
    @abstractmethod
    def skipped(self) -> Skipped:
        """What was left out in this run."""

    @abstractmethod
    def _live(self) -> Epoch | None:
        """The newest iterator."""

    def stats(self) -> dict[str, float]:
        """How the loading goes: a flat dict of numbers, for any tracker.

        ========================== =============================================================================
        ``batches``                batches that were delivered since this loader was made
        ``batches_per_second``     recently: over the last 100 batches
        ``wait_seconds``           seconds that the training loop has spent in ``next()``, all together
        ``wait_seconds_per_batch`` the same a batch, recently
        ``wait_share``             of all the time between batches, the part spent in ``next()``, recently: 0 to 1
        ``queue_depth``            batches that are ready and were not yet delivered
        ``prefetch``               how many of them there may be: 0 where batches are made in ``next()``
        ``step``, ``epoch``        of the position; ``step`` counts all epochs of the run
        ``step_in_epoch``          batches delivered in this epoch of the run
        ``restarts``               worker processes that were replaced
        ``skipped``                samples that ``on_error="skip"`` left out: of a dataset in the run so far, of
                                   a stream as they were met by this loader
        ``seconds/read``           reading, or waiting for what is read ahead; unpacking and Parquet's pages too
        ``seconds/decode``         making rows of what was read
        ``seconds/dataset``        in a dataset or iterable of yours
        ``seconds/map``            in functions that you gave to ``map``, ``filter`` and ``flat_map``
        ``seconds/tokenize``       in the tokenizer
        ``seconds/pack``           laying out packed rows
        ``seconds/collate``        putting batches together, and writing them to shared memory
        ``rows``, ``rows/NAME``    rows read, and of each source
        ``tokens``, ``bytes``      the same of tokens and bytes, where they are known
        ========================== =============================================================================

        ``NAME`` is the name of a source in a mix, or of the function that reads (``dataset`` for a torch dataset).
        Seconds are by the clock, added up over all workers; of rows that take less than 20 µs one in 16 is timed, for
        all.
        What was read counts from when this loader was made, also what is not delivered yet, or is read again after a
        resume; bytes and the tokens of files count once they are read, bytes of compressed files as they are unpacked.

        May be called at any time, from any thread. It waits for nothing and changes nothing.
        """
        live, position = self._live(), self._position
        depth, most = (0, 0) if live is None else live.ahead()
        return self.measured.numbers(
            {
                "queue_depth": depth,
                "prefetch": most,
                "step": position.step,
                "epoch": position.epoch,
                "step_in_epoch": position.step - position.began,
                "skipped": self.skipped.count,
            }
        )

    def _show(self, epoch: Epoch) -> None:
        """Show how a new pass goes, where that was asked for."""
        if self.measured.progress:
            try:
                length = None if self._order is None else self._order.batches()
            except TypeError:  # a sampler without a length
                length = None
            self.measured.show_on(LoaderView(weakref.WeakMethod(self.stats), length))
            weakref.finalize(epoch, self.measured.pause)
