"""One pass over the data: the iterator that ``iter(loader)`` returns."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

from unbroken.engine.engine import Engine, OfAnotherProcess, TakenOver
from unbroken.engine.feeds import Feed, Prepared
from unbroken.engine.pinning import pin, should_pin
from unbroken.errors import UnbrokenError
from unbroken.locks import new_lock
from unbroken.stats import Stats
from unbroken.trail import Trail

__all__ = ["Epoch", "Run"]

_OURS = UnbrokenError | OfAnotherProcess | TakenOver


class Run(ABC):
    """What an epoch asks of the loader that it is a pass of; ``measured`` is told how long it took."""

    measured: Stats

    @property
    @abstractmethod
    def trail(self) -> Trail:
        """Which deliveries have moved the position. Its lock is held while they do, so that other threads may ask."""

    @abstractmethod
    def take_back(self, epoch: Epoch) -> None:
        """The position goes back to where it was after the last batch that has reached the user."""

    @abstractmethod
    def start(self, epoch: Epoch) -> tuple[Engine, Feed]:
        """An engine and a feed at the position where this epoch stands now."""

    @abstractmethod
    def is_live(self, epoch: Epoch) -> bool:
        """Whether the loader's position is that of this pass: no newer one has been begun."""

    @abstractmethod
    def delivered(self, epoch: Epoch, batch: Any) -> None:
        """A batch is handed out, and the position is the one after it."""

    @abstractmethod
    def pass_over(self, epoch: Epoch, commit: Callable[[], None]) -> None:
        """Count a batch that is left out, by ``commit``."""

    @abstractmethod
    def finish(self, epoch: Epoch, *, going_on: bool) -> None:
        """An epoch has come to its end: stand at the start of the next. ``going_on``: the same pass continues with
        it; else it is ``finished``.
        """


@final
class Epoch(Iterator[Any]):
    """The batches of an epoch from the loader's position on.

    A pass that was resumed after the last batch of an epoch goes on with the whole of the next one, so it is never
    empty.
    """

    def __init__(
        self, run: Run, resumed: bool, keep_engine: bool, pin_memory: bool, length: tuple[Any, int] | None
    ) -> None:
        self._run = run
        self._resumed = resumed
        self._keep_engine = keep_engine
        self._pin = should_pin(pin_memory, getattr(run, "pin_memory_device", ""))
        self._length = length
        self._delivered = 0
        self._taker = 0  # the thread that was the last to ask for a batch
        self._feed: Feed | None = None
        self._prepared: Prepared | None = None
        self._engine: Engine | None = None
        self.finished = False
        self._lock = new_lock()
        self._start()

    def _start(self) -> None:
        self._engine, self._feed = self._run.start(self)

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        before: int | None = None
        measured = self._run.measured
        began = measured.clock()
        try:
            with self._lock:  # threads may share an iterator: each batch goes to one of them
                self._run.trail.hand_out()
                self._taker, before = threading.get_ident(), self._delivered
                batch = self._next()
                measured.delivered(began)
                return batch
        except StopIteration:
            measured.pause()
            raise
        except BaseException as error:
            if before is not None and self._taker == threading.get_ident() and self._is_foreign(error):
                self._interrupted(before)
            measured.pause()
            raise

    def _is_foreign(self, error: BaseException) -> bool:
        """Whether an error is Ctrl-C, or of another handler of signals, which may have come anywhere."""
        if not isinstance(error, Exception) or self._run.trail.unsure:
            return True
        if isinstance(error, _OURS) or self._feed is None or self._engine is None:
            return False
        return self._engine.closed or not self._feed.knows(error)

    def _interrupted(self, before: int) -> None:
        """Anything may be half done, and what was to be delivered did not reach the user: the next batch starts at the
        position after the last that did, and it was number ``before`` of this pass.
        """
        feed, live = self._feed, self._run.is_live(self)
        self._delivered = before
        self.finished |= not live
        if feed is not None and feed.keeps:
            self._prepared = None
            feed.again()
            return
        if self._keep_engine and not live:
            return  # it is a newer iterator's
        self.close()
        self._run.take_back(self)

    def _next(self) -> Any:
        if self.finished:
            raise StopIteration
        if self._keep_engine and not self._run.is_live(self):
            raise TakenOver
        if self._feed is None:
            self._start()
        while True:
            feed: Feed = self._feed  # type: ignore[assignment]
            try:
                if self._prepared is None:  # else it could not be pinned
                    self._prepared = feed.make()
                batch, record = self._prepared
                if feed.passing:
                    self._prepared = None
                    self._run.pass_over(self, partial(feed.commit, record))
                    continue
                if self._pin:
                    batch = pin(batch)
                self._prepared = None
                with self._run.trail.lock:
                    feed.commit(record)
                    self._run.delivered(self, batch)
                break
            except Exception as error:
                if not isinstance(error, StopIteration):
                    raise
                with self._run.trail.lock:
                    feed.end()
                    going_on = self._delivered == 0 and (self._resumed or feed.apart) and self._run.is_live(self)
                    self._run.finish(self, going_on=going_on)
                    self._resumed = False
                if not going_on:
                    self.finished = True
                    self._let_go()
                    raise
                if not self._keep_engine:
                    self._let_go()
                self._start()
        self._delivered += 1
        if self._length is not None and self._delivered > self._length[1]:
            self._warn_of_length()
        return batch

    def __len__(self) -> int:
        """As ``len(loader)``."""
        return len(self._run)  # type: ignore[arg-type]

    def ahead(self) -> tuple[int, int]:
        """How many batches are ready, and how many may be made ahead. May be asked from any thread."""
        feed, engine = self._feed, self._engine
        if feed is None or engine is None or engine.closed:
            return 0, 0
        return feed.depth(), engine.hosts * engine.lookahead

    @property
    def waiting(self) -> bool:
        """Whether it was repositioned, and has not gone on yet."""
        return self._feed is None and not self.finished

    def reposition(self) -> None:
        """The loader stands elsewhere now: go on from there at the next batch."""
        self.close()
        self._resumed, self._delivered = True, 0

    def _let_go(self) -> None:
        self._feed = self._prepared = None
        if not self._keep_engine:
            self.close()

    def close(self) -> None:
        """End the workers of this pass; the next batch would start new ones."""
        self._run.measured.pause()
        self._feed = self._prepared = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _warn_of_length(self) -> None:
        dataset, length = self._length or (None, 0)
        of_workers = (
            "For multiprocessing data-loading, this could be caused by not properly configuring the IterableDataset "
            "replica at each worker. Please see "
            "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
        )
        warnings.warn(
            f"Length of IterableDataset {dataset} was reported to be {length} (when accessing len(dataloader)), but "
            f"{self._delivered} samples have been fetched. {of_workers if self._run.num_workers else ''}",  # type: ignore[attr-defined]
            stacklevel=4,
        )

    def __getstate__(self) -> Any:
        raise NotImplementedError("{} cannot be pickled", self.__class__.__name__)
