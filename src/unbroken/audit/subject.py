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
from typing import Any, TypeAlias, final

from unbroken.errors import AuditError

__all__ = ["Subject", "state_methods"]

Methods: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any]]
_NAMES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


def state_methods(thing: Any) -> Methods | None:
    """How the state of a thing is taken and put back; None where it has no such methods."""
    for take, put in _NAMES:
        if callable(getattr(thing, take, None)) and callable(getattr(thing, put, None)):
            return getattr(thing, take), getattr(thing, put)
    return None


@final
class Subject:
    """A loader, at most one pass over it, and the number of the pass (``epoch``, from 0)."""

    def __init__(self, loader: Any, epoch: int = 0) -> None:
        self.loader, self.epoch = loader, epoch
        self.iterator: Any = None
        self._methods = state_methods(loader) or state_methods(getattr(loader, "dataset", None))
        self._reset: Callable[[Any], Any] | None = None
        self._on_iterator = False
        reset, take = getattr(loader, "reset", None), getattr(loader, "state_dict", None)
        if self._methods is None and callable(reset) and callable(take):
            self._methods, self._reset = (take, reset), reset
        if not callable(getattr(type(loader), "__iter__", None)):
            raise AuditError(
                f"The factory returned a {_kind(loader)}, which is no loader: it cannot be iterated.\n"
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
        """Begin a pass; find out whether the state lies on it, where that is not known yet.

        Raises ``AuditError`` where there is no state at all.
        """
        self.iterator = iter(self.loader)
        if self._methods is None or self._on_iterator:
            self._methods, self._on_iterator = state_methods(self.iterator), True
        if self._methods is None:
            raise AuditError(
                f"The {self.name} that the factory returned has no state: there is no state_dict and load_state_dict, "
                f"nor get_state and set_state, on it, on its iterator ({_kind(self.iterator)}), or on its dataset "
                f"({_kind(getattr(self.loader, 'dataset', None))}).\n"
                "A loader without a state cannot be resumed in the middle of an epoch, so there is nothing to audit."
            )

    def load(self, state: Any) -> None:
        """Put a state back, as early as this loader allows: before the pass begins, unless it lies on the iterator."""
        if self._methods is None or self._on_iterator:
            self.open()
        if self._methods is not None:
            self._methods[1](state)

    def state(self) -> Any:
        """The state, as it is handed out."""
        if self._methods is None:
            self.open()
        return self._methods[0]() if self._methods is not None else None

    def fetch(self) -> Any:
        """The next batch, over the end of passes. Raises ``StopIteration`` after two passes without a batch."""
        for _ in range(3):
            if self.iterator is None:
                self.open()
            try:
                return next(self.iterator)
            except StopIteration:
                self.iterator = None
                self.epoch += 1
                if self._reset is not None:
                    self._reset(None)
        raise StopIteration

    def close(self) -> None:
        """Let go of the pass, and close the loader where it can be closed."""
        self.iterator = None
        getattr(self.loader, "close", lambda: None)()


def _kind(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")
