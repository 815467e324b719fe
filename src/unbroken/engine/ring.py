"""Reusable slots of anonymous shared memory.

The consumer owns the slots: it gives a free one with each task, a worker writes the batch there, and the consumer hands
out views of it. The slot is free again when the last view dies. memfd has no name to leak or to collide with and no
/dev/shm to fill; where there is none, an unlinked temporary file takes its place.
"""

from __future__ import annotations

import inspect
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Bytes", "Ring", "Slot", "create_memory", "map_memory"]

Bytes = npt.NDArray[np.uint8]

_PAGE = mmap.PAGESIZE
_ARENA_BYTES = 32 << 20
_ARENA_SLOTS = 32


def create_memory(size: int) -> int:
    """A descriptor of ``size`` bytes of anonymous shared memory; the caller closes it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("unbroken", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def map_memory(fd: int, size: int) -> Bytes:
    """The memory behind a descriptor as a writable array of bytes; it lives until the last view of it dies.

    Python's mmap keeps a descriptor open for each map, and a training job may keep thousands of batches: torch's
    ``from_file`` maps and closes.
    """
    path = f"/proc/self/fd/{fd}"
    if os.path.exists(path):
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8).numpy()
    return np.frombuffer(mmap.mmap(fd, size), np.uint8)


@final
class Slot:
    """A place for one batch. ``arena`` and ``offset`` name it to workers."""

    __slots__ = ("__weakref__", "_ring", "_watch", "arena", "memory", "offset", "retired", "size")

    def __init__(self, ring: Ring, arena: int, memory: Bytes, offset: int, size: int) -> None:
        self._ring = ring
        self._watch: weakref.ref[Bytes] | None = None
        self.arena = arena
        self.memory = memory
        self.offset = offset
        self.size = size
        self.retired = False

    def lease(self, nbytes: int) -> Bytes:
        """The first bytes of the slot. When the array and all that was made from it are gone, the slot is free.

        A memoryview lies between the lease and the arena: numpy lets a view of a view hold the array at the bottom, and
        of plain slices that would be the arena, so that the lease would die at once.
        """
        lease = np.frombuffer(memoryview(self.memory)[self.offset : self.offset + nbytes], np.uint8)  # type: ignore[arg-type]
        self._watch = weakref.ref(lease, self._died)
        return lease

    def _died(self, _: Any) -> None:
        if os.getpid() == self._ring.pid:  # a forked child has views of its own, and no say in this
            self._ring.give_back(self)


@final
class Ring:
    """The consumer's slots, all of one size that grows with the batches.

    ``announce(arena, fd, size)`` makes an arena known to the workers; ``retract(arena)`` lets them forget it.
    """

    def __init__(self, announce: Callable[[int, int, int], None], retract: Callable[[int], None]) -> None:
        self.pid = os.getpid()
        # Weakly: slots that a user holds keep their ring, and must not keep the workers.
        self._announce = _weakly(announce)
        self._retract = _weakly(retract)
        self._free: deque[Slot] = deque()
        self._out: set[Slot] = set()
        self._given_back: deque[Slot] = deque()
        self._alive: dict[int, int] = {}
        self._arenas = 0
        self._size = 0
        _rings.add(self)

    def want(self, nbytes: int) -> None:
        """Let slots given out from now on hold ``nbytes``."""
        if nbytes > self._size:
            room = nbytes if self._size == 0 else nbytes + nbytes // 4
            self._size = -(-room // _PAGE) * _PAGE

    def acquire(self) -> Slot | None:
        """A free slot; ``None`` while nobody knows how large it should be."""
        if self._size == 0:
            return None
        self._collect()
        while self._free:
            slot = self._free.popleft()
            if slot.size >= self._size:
                self._out.add(slot)
                return slot
            self._drop(slot)
        self._grow()
        return self.acquire()

    def give_back(self, slot: Slot) -> None:
        """A slot that nobody reads or writes any more. May be called from a finalizer, at any moment, in any thread."""
        self._given_back.append(slot)

    def retire(self) -> None:
        """Never write again to a slot that is out: a process forked now will share its pages."""
        for slot in list(self._out):
            slot.retired = True

    def _collect(self) -> None:
        while self._given_back:
            slot = self._given_back.popleft()
            self._out.discard(slot)
            if slot.retired:
                self._drop(slot)
            else:
                self._free.append(slot)

    def _drop(self, slot: Slot) -> None:
        self._alive[slot.arena] -= 1
        if not self._alive[slot.arena]:
            del self._alive[slot.arena]
            if (retract := self._retract()) is not None:
                retract(slot.arena)

    def _grow(self) -> None:
        number = max(1, min(_ARENA_SLOTS, _ARENA_BYTES // self._size))
        size, arena = number * self._size, self._arenas
        self._arenas += 1
        fd = create_memory(size)
        try:
            memory = map_memory(fd, size)
            if (announce := self._announce()) is not None:
                announce(arena, fd, size)
        finally:
            os.close(fd)
        self._alive[arena] = number
        self._free.extend(Slot(self, arena, memory, i * self._size, self._size) for i in range(number))


def _weakly(call: Callable[..., None]) -> Callable[[], Callable[..., None] | None]:
    return weakref.WeakMethod(call) if inspect.ismethod(call) else lambda: call


_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def _before_fork() -> None:
    for ring in list(_rings):
        if ring.pid == os.getpid():
            ring.retire()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
