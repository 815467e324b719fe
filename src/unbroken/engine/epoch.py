"""One pass over the data: the iterator that ``iter(loader)`` returns."""

from __future__ import annotations

import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, final

from unbroken.engine.engine import Engine
from unbroken.engine.feeds import Feed, Prepared
from unbroken.engine.pinning import pin, should_pin

__all__ = ["Epoch", "Run"]


class Run(ABC):
    """What an epoch asks of the loader that it is a pass of."""

    @abstractmethod
    def start(self, epoch: Epoch) -> tuple[Engine, Feed]:
        """An engine and a feed at the position where this epoch stands now."""

    @abstractmethod
    def is_live(self, epoch: Epoch) -> bool:
        """Whether the loader's position is that of this pass: no newer one has been begun."""

    @abstractmethod
    def finish(self, epoch: Epoch, *, going_on: bool) -> None:
        """An epoch has come to its end: stand at the start of the next. ``going_on``: the same pass continues with
        it.
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
        self._pin = should_pin(pin_memory)
        self._length = length
        self._delivered = 0
        self._feed: Feed | None = None
        self._prepared: Prepared | None = None
        self._engine: Engine | None = None
        self._closer: weakref.finalize[Any, Any] | None = None
        self.finished = False
        self._lock = threading.RLock()
        self._start()

    def _start(self) -> None:
        engine, self._feed = self._run.start(self)
        if engine is not self._engine:
            self._engine = engine
            if not self._keep_engine:
                self._closer = weakref.finalize(self, engine.close)
                self._closer.atexit = False  # the engine sees to that itself

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        with self._lock:  # threads may share an iterator: each batch goes to one of them
            return self._next()

    def _next(self) -> Any:
        if self.finished:
            raise StopIteration
        if self._feed is None:
            self._start()
        while True:
            feed: Feed = self._feed  # type: ignore[assignment]
            try:
                if self._prepared is None:  # else it could not be pinned
                    self._prepared = feed.make()
                batch, record = self._prepared
                if self._pin:
                    batch = pin(batch)
                self._prepared = None
                feed.commit(record)
                break
            except Exception as error:
                if not isinstance(error, StopIteration):
                    raise
                feed.end()
                going_on = self._delivered == 0 and (self._resumed or feed.apart) and self._run.is_live(self)
                self._resumed = False
                self._run.finish(self, going_on=going_on)
                if not going_on:
                    self.finished = True
                    self._let_go()
                    raise
                if not self._keep_engine:
                    self._let_go()
                self._start()
            except BaseException:  # Ctrl-C, say: anything may be half done, so the next batch starts at the position
                self.finished = not self._run.is_live(self)
                self.close()
                raise
        self._delivered += 1
        if self._length is not None and self._delivered > self._length[1]:
            self._warn_of_length()
        return batch

    def __len__(self) -> int:
        """As ``len(loader)``."""
        return len(self._run)  # type: ignore[arg-type]

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
        if self._closer is not None:
            self._closer()
            self._closer = self._engine = None

    def close(self) -> None:
        """End the workers of this pass; the next batch would start new ones."""
        self._feed = self._prepared = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _warn_of_length(self) -> None:
        dataset, length = self._length or (None, 0)
        warnings.warn(
            f"Length of IterableDataset {dataset} was reported to be {length} (when accessing len(dataloader)), but "
            f"{self._delivered} samples have been fetched. ",
            stacklevel=4,
        )

    def __getstate__(self) -> Any:
        raise NotImplementedError("{} cannot be pickled", self.__class__.__name__)
