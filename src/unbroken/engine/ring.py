"""Reusable slots of anonymous shared memory.

The consumer owns the slots: it gives a free one with each task, a worker writes the batch there, and the consumer hands
out views of it. The slot is free again when the last view dies. memfd has no name to leak or to collide with and no
/dev/shm to fill; where there is none, an unlinked temporary file takes its place.

Slots grow as soon as a batch needs it, and shrink, in size and in number, once batches have needed less for a while.
What is not needed is given back to the system page by page, also in the middle of an arena that has a slot in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import mmap
import os
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Bytes", "Ring", "Slot", "create_memory", "map_memory"]

Bytes = npt.NDArray[np.uint8]

_PAGE = mmap.PAGESIZE
_ARENA_BYTES = 32 << 20
_ARENA_SLOTS = 32
_WINDOW = 128
"""After how many batches it is looked at what they needed."""


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

    __slots__ = ("__weakref__", "_watch", "arena", "memory", "offset", "retired", "ring", "size")

    def __init__(self, ring: Ring, arena: int, memory: Bytes, offset: int, size: int) -> None:
        self.ring = ring
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
        _leased.add(self)
        return lease

    def _died(self, _: Any) -> None:
        _leased.discard(self)
        if os.getpid() == self.ring.pid:  # a forked child has views of its own, and no say in this
            self.ring.give_back(self)


_leased: set[Slot] = set()  # or a slot would be forgotten with its ring, and its pages would stay while others are held


@final
class _Arena:
    """A region of slots of one ``size``. Those in ``cold`` are free and have no pages; ``lost`` ones were retired.

    The descriptor stays open, for workers that start later.
    """

    __slots__ = ("__weakref__", "_number", "_rest", "close", "cold", "fd", "lost", "memory", "nbytes", "size", "used")

    def __init__(self, number: int, slots: int, size: int) -> None:
        self._number = number
        self._rest = iter(range(slots))
        self.size = size
        self.nbytes = slots * size
        self.cold: list[Slot] = []
        self.used = self.lost = 0
        self.fd = create_memory(self.nbytes)
        self.close = weakref.finalize(self, os.close, self.fd)
        self.close.atexit = False
        self.memory = map_memory(self.fd, self.nbytes)

    def take(self, ring: Ring) -> Slot | None:
        """A slot that is free and has no pages."""
        if self.cold:
            return self.cold.pop()
        place = next(self._rest, None)
        if place is None:
            return None
        self.used += 1
        return Slot(ring, self._number, self.memory, place * self.size, self.size)

    @property
    def idle(self) -> bool:
        """Whether no slot is out, nor free with its pages."""
        return len(self.cold) + self.lost == self.used


@final
@dataclass(slots=True)
class _Needs:
    """What batches needed lately: how many ``came`` since the last look, the largest of them and of those before, and
    the fewest slots that were free; whether any was ``heard`` of at all.
    """

    heard: bool = False
    came: int = 0
    largest: int = 0
    before: int = 0
    fewest_free: int = sys.maxsize


@final
class Ring:
    """The consumer's slots, all of one size that follows that of the batches.

    ``announce(arena, fd, size)`` makes an arena known to the workers; ``retract(arena)`` lets them forget it. ``most``
    is how many bytes batches that are made ahead may take (None: any number). All but ``give_back`` is for one thread
    at a time.
    """

    def __init__(
        self, announce: Callable[[int, int, int], None], retract: Callable[[int], None], most: int | None = None
    ) -> None:
        self.pid = os.getpid()
        # Weakly: slots that a user holds keep their ring, and must not keep the workers.
        self._announce = _weakly(announce)
        self._retract = _weakly(retract)
        self._free: deque[Slot] = deque()  # those used last at the right
        self._out: set[Slot] = set()
        self._given_back: deque[Slot] = deque()
        self._arenas: dict[int, _Arena] = {}
        self._made = 0
        self._size = 0
        self._most = most
        self._needs = _Needs()
        self._closed = False
        _rings.add(self)

    def want(self, nbytes: int) -> None:
        """A batch needs ``nbytes``: let slots given out from now on hold that."""
        needs = self._needs
        needs.heard = True
        needs.came += 1
        if nbytes > needs.largest:
            needs.largest = nbytes
            if nbytes > self._size:
                self._size = _pages(nbytes if self._size == 0 else nbytes + nbytes // 4)

    def acquire(self) -> Slot | None:
        """A free slot; ``None`` while nobody knows how large it should be."""
        self._collect()
        needs, free = self._needs, self._free
        if needs.came >= _WINDOW:
            self._look_back()
        if self._size == 0:
            return None
        while free and free[0].size != self._size:
            self._cool(free.popleft())
        while (slot := free.pop() if free else self._take_cold()) is None:
            self._grow()
        self._out.add(slot)
        if len(free) < needs.fewest_free:
            needs.fewest_free = len(free)
        return slot

    def give_back(self, slot: Slot) -> None:
        """A slot that nobody reads or writes any more. May be called from a finalizer, at any moment, in any thread."""
        if self._closed:
            self._out.discard(slot)
            _empty(slot)
        else:
            self._given_back.append(slot)

    def retire(self) -> None:
        """Never write again to a slot that is out: a process forked now will share its pages."""
        for slot in list(self._out):
            slot.retired = True

    def arenas(self) -> list[tuple[int, int, int]]:
        """What a worker that starts now has to be told: of each arena its number, a descriptor that stays open as long
        as it lives, and its size. One that is just being announced is among them, and may be announced twice.
        """
        return [(number, arena.fd, arena.nbytes) for number, arena in list(self._arenas.items())]

    @property
    def bounded(self) -> bool:
        """Whether ``has_room`` is a question at all."""
        return self._most is not None

    def has_room(self, under_way: Iterable[Slot | Bytes | None]) -> bool:
        """Whether one more batch may be made beside those that are under way; always where none is.

        Of these it is told the places, ``None`` where none is known yet. While nobody knows how large batches are,
        there is room for one.
        """
        if self._most is None:
            return True
        places = list(under_way)
        known = {id(place): place.size for place in places if place is not None}
        taken = sum(place is None for place in places) * self._size + sum(known.values())
        self._collect()
        while self._free and taken + sum(slot.size for slot in self._free) > self._most:
            self._cool(self._free.popleft())  # so that those that are free are within the bound too
        if not places or not self._needs.heard:
            return not places
        return taken + self._size <= self._most

    def close(self) -> None:
        """Give back all memory that is free now, and what is out when it is given back; a slot that is out stays as it
        is. May be called again, and from a finalizer.
        """
        if os.getpid() != self.pid:
            return
        self._closed = True
        self._out &= _leased  # nobody gives the others back, and they hold this ring, as it would hold them
        for slots in (self._given_back, self._free):
            with contextlib.suppress(IndexError):
                while True:
                    _empty(slots.pop())
        for arena in list(self._arenas.values()):
            arena.close()
        self._arenas.clear()

    def _collect(self) -> None:
        while self._given_back:
            slot = self._given_back.popleft()
            self._out.discard(slot)
            if slot.retired or slot.size != self._size:
                self._cool(slot)
            else:
                self._free.append(slot)

    def _look_back(self) -> None:
        """Slots that the last batches left free go cold: half of them, or all that are more than were in use. Where the
        last two windows needed less than half of what slots hold, they shrink; where sizes alternate, they stay.
        """
        needs, free = self._needs, self._free
        surplus = min(needs.fewest_free, len(free))
        in_use = len(free) + len(self._out) - surplus
        for _ in range(max(surplus - in_use, surplus // 2)):
            self._cool(free.popleft())
        largest = max(needs.largest, needs.before)
        room = _pages(largest + largest // 4)
        if 2 * room <= self._size:
            self._size = room
        needs.came, needs.largest, needs.before, needs.fewest_free = 0, 0, needs.largest, sys.maxsize

    def _cool(self, slot: Slot) -> None:
        """Give back the pages of a slot that is free, and its arena with the last of them."""
        _empty(slot)
        arena = self._arenas.get(slot.arena)
        if arena is None:
            return
        if slot.retired:
            arena.lost += 1
        else:
            arena.cold.append(slot)
        if arena.idle:
            del self._arenas[slot.arena]
            arena.close()
            if (retract := self._retract()) is not None:
                retract(slot.arena)

    def _take_cold(self) -> Slot | None:
        for arena in self._arenas.values():
            if arena.size == self._size and (slot := arena.take(self)) is not None:
                return slot
        return None

    def _grow(self) -> None:
        """One more arena: of half as many slots as there are, once these are many, so that arenas stay few."""
        size = self._size
        there = sum(arena.used for arena in self._arenas.values() if arena.size == size)
        slots = max(1, min(_ARENA_SLOTS, _ARENA_BYTES // size), there // 2)
        number, self._made = self._made, self._made + 1
        arena = self._arenas[number] = _Arena(number, slots, size)
        try:
            if (announce := self._announce()) is not None:
                announce(number, arena.fd, arena.nbytes)
        except BaseException:
            self._arenas.pop(number, None)
            arena.close()
            raise


def _pages(nbytes: int) -> int:
    """Bytes, rounded up to whole pages."""
    return -(-nbytes // _PAGE) * _PAGE


def _empty(slot: Slot) -> None:
    """Give the pages of a slot back to the system, if nobody can see them: not even a process that was forked."""
    if not slot.retired and _madvise is not None and os.getpid() == slot.ring.pid:
        # It also takes them from processes that were forked, and have the arena mapped until they end.
        address = slot.memory.__array_interface__["data"][0]  # memory.ctypes would import, which fails at the very end
        _madvise(address + slot.offset, slot.size, _MADV_REMOVE)  # where it is refused, they stay


def _system_madvise() -> Any:
    try:
        call = ctypes.CDLL(None).madvise
    except (OSError, TypeError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


_MADV_REMOVE: int | None = getattr(mmap, "MADV_REMOVE", None)  # Linux
_madvise = None if _MADV_REMOVE is None else _system_madvise()


def _weakly(call: Callable[..., None]) -> Callable[[], Callable[..., None] | None]:
    return weakref.WeakMethod(call) if inspect.ismethod(call) else lambda: call


_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def _before_fork() -> None:
    for ring in list(_rings):
        if ring.pid == os.getpid():
            ring.retire()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
