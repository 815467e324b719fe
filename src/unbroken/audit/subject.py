"""A loader of any make behind one small interface: opened, fetched from, its state taken and put back.

Nothing is imported of the loaders; what they are is told by the methods that they have.

=====================================================  =============================================================
``state_dict`` and ``load_state_dict`` on the loader   torchdata's ``StatefulDataLoader`` and ``nodes.Loader``, ours,
                                                       MosaicML's ``StreamingDataLoader``, an ``IterableDataset`` of
                                                       ``datasets``
``state_dict`` and ``reset`` on the loader             a node of ``torchdata.nodes`` by itself
``state_dict`` and ``load_state_dict`` on its          torch's ``DataLoader`` without workers over a dataset that has a
``dataset``                                            state
``get_state`` and ``set_state``, or ``state_dict``     Grain's ``DataLoader`` and ``IterDataset``; the state is loaded
and ``load_state_dict``, on its iterator               into an iterator that was just made
=====================================================  =============================================================
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias, final

from unbroken.errors import AuditError

__all__ = ["Subject", "state_methods"]

Methods: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]
_OVER: Final = object()  # in the place of a batch, where a pass is over
_PASSES: Final = 4  # the one that ends, and so many without a batch but one, until the data is taken to be over
_NAMES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


def state_methods(thing: Any) -> Methods | None:
    """How the state of a thing is taken and put back; None where it has no such methods."""
    for take, put in _NAMES:
        if callable(getattr(thing, take, None)) and callable(getattr(thing, put, None)):
            return getattr(thing, take), getattr(thing, put)
    return None


@final
class Subject:
    """A loader, at most one pass over it, and the number of the pass (``epoch``, from 0).

    Passes without a batch are not counted, but for the first one: where it is empty, the epoch that a resumed run was
    in is over. ``state_of`` says whose state is taken: ``"loader"``, ``"iterator"`` or ``"dataset"``; it is empty
    until that is known. Where it is given, the state of that one is loaded.
    """

    def __init__(self, loader: Any, epoch: int = 0, state_of: str = "") -> None:
        self.loader, self.epoch, self.state_of = loader, epoch, state_of
        self.iterator: Any = None
        self._waiting: list[Any] = []
        self._empty = False  # the pass has no batch so far, and is not the first one
        self._reset: Callable[[Any], Any] | None = None
        self._methods = state_methods(loader)
        reset, take = getattr(loader, "reset", None), getattr(loader, "state_dict", None)
        if self._methods is None and callable(reset) and callable(take):
            self._methods, self._reset = (take, reset), reset
        if self._methods is not None:
            self.state_of = "loader"
        if not callable(getattr(type(loader), "__iter__", None)):
            raise AuditError(
                f"The factory returned an object of type {_kind(loader)}, which is no loader: it cannot be iterated.\n"
                "Let it return an object with __iter__, and with state_dict and load_state_dict (or get_state and "
                "set_state) on it, on its iterator or on its dataset."
            )

    @property
    def name(self) -> str:
        """Module and class of the loader."""
        return _kind(self.loader)

    @property
    def iterates_itself(self) -> bool:
        """Whether the loader is its own iterator, so that it may have begun before a state is loaded."""
        return callable(getattr(self.loader, "__next__", None))

    def open(self) -> None:
        """Begin a pass; find out whether the state lies on it, where the loader itself has none.

        Raises ``AuditError`` where there is no state at all.
        """
        self.iterator = iter(self.loader)
        if self.state_of == "loader":
            return
        self._methods, self.state_of = state_methods(self.iterator), "iterator"
        if self._methods is None:
            self._methods, self.state_of = state_methods(self._dataset), "dataset"
        if self._methods is None:
            raise AuditError(
                f"The {self.name} that the factory returned has no state: there is no state_dict and load_state_dict, "
                f"nor get_state and set_state, on it, on its iterator ({_kind(self.iterator)}), or on its dataset "
                f"({_kind(self._dataset)}).\n"
                "A loader without a state cannot be resumed in the middle of an epoch, so there is nothing to audit."
            )

    @property
    def _dataset(self) -> Any:
        return getattr(self.loader, "dataset", None)

    def load(self, state: Any) -> None:
        """Put a state back, as early as this loader allows: before the pass begins, unless it lies on the iterator."""
        if self._methods is None and self.state_of == "dataset":
            self._methods = state_methods(self._dataset)
        elif self._methods is None:
            self.open()
        if self._methods is not None:
            self._methods[1](state)

    def state(self) -> Any:
        """The state, as it is handed out."""
        if self.iterator is None and self.state_of != "loader":
            self.open()
        return self._methods[0]() if self._methods is not None else None

    def fetch(self) -> Any:
        """The next batch, over the end of passes. Raises ``StopIteration`` after three passes without a batch."""
        if self._waiting:
            return self._waiting.pop()
        for _ in range(_PASSES):
            batch = self._next()
            if batch is not _OVER:
                return batch
        raise StopIteration

    def comes_to_an_end(self) -> bool:
        """Whether the pass has no more batch; one that it has is kept for ``fetch``."""
        batch = self._next()
        if batch is not _OVER:
            self._waiting.append(batch)
        return batch is _OVER

    def _next(self) -> Any:
        if self.iterator is None:
            self.open()
        try:
            batch = next(self.iterator)
        except StopIteration:
            self.iterator = None
            self.epoch += not self._empty
            self._empty = True
            if self._reset is not None:
                self._reset(None)
            return _OVER
        self._empty = False
        return batch

    def close(self) -> None:
        """Let go of the pass, and close the loader where it can be closed. What that raises is nobody's batch."""
        self.iterator = None
        with suppress(Exception):
            getattr(self.loader, "close", lambda: None)()


def _kind(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")
