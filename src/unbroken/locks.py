"""Locks that a forked process does not inherit locked: the thread that would unlock them is not in it."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

__all__ = ["new_lock"]

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> threading.RLock:
    """A lock that one thread may take several times."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _unlock() -> None:
    for lock in list(_locks):
        if not lock._is_owned():  # by the thread that forked, which may unlock it in both
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)
