"""How much memory slots take: it follows what batches need, up at once and down after a while."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from unbroken.engine import ring as ring_module
from unbroken.engine.ring import Ring, Slot, map_memory

PAGE = mmap.PAGESIZE
LARGE, SMALL = 256 * PAGE, 2 * PAGE


class Workers:
    """They map each arena that is announced, and keep a descriptor of their own to see what it holds."""

    def __init__(self) -> None:
        self.arenas: dict[int, np.ndarray[Any, Any]] = {}
        self.descriptors: dict[int, int] = {}

    def announce(self, arena: int, fd: int, size: int) -> None:
        self.arenas[arena] = map_memory(fd, size)
        self.descriptors[arena] = os.dup(fd)

    def retract(self, arena: int) -> None:
        del self.arenas[arena]
        os.close(self.descriptors.pop(arena))

    def write(self, slot: Slot, nbytes: int, value: int) -> None:
        self.arenas[slot.arena][slot.offset : slot.offset + nbytes] = value

    def pages(self) -> int:
        """Pages that the system holds for all arenas."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self.descriptors.values()) // PAGE

    def close(self) -> None:
        for fd in self.descriptors.values():
            os.close(fd)


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


def deliver(ring: Ring, workers: Workers, nbytes: int, batches: int = 1) -> list[Any]:
    """What the pool does for each batch; returned as they are."""
    leases = []
    for number in range(batches):
        ring.want(nbytes)
        slot = ring.acquire()
        assert slot is not None
        assert slot.size >= nbytes
        workers.write(slot, nbytes, number % 251)
        leases.append(slot.lease(nbytes))
    return leases


def run(ring: Ring, workers: Workers, nbytes: int, batches: int) -> None:
    for _ in range(batches):
        deliver(ring, workers, nbytes)


# After a peak


def test_slots_shrink_when_batches_have_been_small_for_a_while(workers: Workers) -> None:
    ring = Ring(workers.announce, workers.retract)
    run(ring, workers, LARGE, 10)
    assert workers.pages() >= 256
    (peak,) = workers.arenas
    run(ring, workers, SMALL, 500)
    assert peak not in workers.arenas, "the workers were not told to forget it"
    assert workers.pages() <= 4
    run(ring, workers, LARGE, 10)  # and they grow again


def test_one_huge_batch_takes_its_memory_along(workers: Workers) -> None:
    ring = Ring(workers.announce, workers.retract)
    run(ring, workers, SMALL, 10)
    run(ring, workers, 64 << 20, 1)
    run(ring, workers, SMALL, 500)
    assert workers.pages() <= 4
    assert len(workers.arenas) == 1


def test_sizes_that_alternate_change_no_slots(workers: Workers) -> None:
    """Each change would cost a new arena, and the first touch of its pages."""
    ring = Ring(workers.announce, workers.retract)
    run(ring, workers, LARGE, 10)
    known = set(workers.arenas)
    for _ in range(20):
        run(ring, workers, SMALL, 120)
        run(ring, workers, LARGE, 1)
    assert set(workers.arenas) == known


def test_sizes_within_a_half_change_no_slots(workers: Workers) -> None:
    ring = Ring(workers.announce, workers.retract)
    run(ring, workers, 100 * PAGE, 10)
    known = set(workers.arenas)
    run(ring, workers, 60 * PAGE, 2000)
    assert set(workers.arenas) == known


def test_a_batch_of_a_peak_that_is_kept_keeps_its_own_pages_only(workers: Workers) -> None:
    ring = Ring(workers.announce, workers.retract)
    leases = deliver(ring, workers, LARGE, 30)
    kept = leases.pop(7)
    assert workers.pages() >= 30 * 256
    leases.clear()
    run(ring, workers, SMALL, 500)
    assert workers.pages() <= 256 + 4
    assert (kept == 7).all()
    del kept
    run(ring, workers, SMALL, 1)
    assert workers.pages() <= 4


def test_slots_that_a_user_held_and_dropped_go(workers: Workers) -> None:
    ring = Ring(workers.announce, workers.retract)
    kept = deliver(ring, workers, SMALL, 5000)
    assert workers.pages() >= 10_000
    kept.clear()
    run(ring, workers, SMALL, 300)
    assert workers.pages() <= 300
    run(ring, workers, SMALL, 2000)
    assert workers.pages() <= 8
    assert len(workers.arenas) == 1


def test_slots_that_are_needed_now_and_then_stay(workers: Workers) -> None:
    """A user who holds 50 batches at a time, and drops them together."""
    ring = Ring(workers.announce, workers.retract)
    kept = deliver(ring, workers, SMALL, 50)
    slots = workers.pages()
    for _ in range(40):
        kept.clear()
        kept = deliver(ring, workers, SMALL, 50)
        assert workers.pages() == slots


def test_where_the_system_takes_no_pages_back_arenas_go_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    monkeypatch.setattr(ring_module, "_madvise", None)
    ring = Ring(workers.announce, workers.retract)
    run(ring, workers, LARGE, 10)
    run(ring, workers, SMALL, 500)
    assert workers.pages() <= 4


# The end


def test_an_end_gives_back_what_is_free_and_then_each_batch_that_dies(workers: Workers) -> None:
    ring = Ring(workers.announce, workers.retract)
    leases = deliver(ring, workers, LARGE, 30)
    first, second = leases[3], leases[4]
    leases.clear()
    ring.close()
    ring.close()
    assert workers.pages() == 2 * 256
    del ring
    gc.collect()
    assert (first == 3).all()
    del first
    assert workers.pages() == 256, "a kept batch holds the pages of another"
    assert (second == 4).all()


def test_an_end_leaves_alone_what_was_not_read_yet(workers: Workers) -> None:
    ring = Ring(workers.announce, workers.retract)
    ring.want(PAGE)
    slot = ring.acquire()
    assert slot is not None
    workers.write(slot, PAGE, 9)
    ring.close()
    assert (slot.lease(PAGE) == 9).all()


def test_a_forked_child_ends_nothing(workers: Workers) -> None:
    ring = Ring(workers.announce, workers.retract)
    deliver(ring, workers, LARGE, 2).clear()
    out = ring.acquire()
    assert out is not None
    pages = workers.pages()
    assert pages == 2 * 256
    child = os.fork()
    if child == 0:
        try:
            ring.close()
            ring.give_back(out)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert workers.pages() == pages


def test_what_a_forked_child_can_see_is_never_emptied(workers: Workers) -> None:
    """Case 37: the parent lets go of a batch, shrinks its slots and ends; the child still has it."""
    ring = Ring(workers.announce, workers.retract)
    kept = deliver(ring, workers, LARGE, 30)
    view = kept[5]
    go, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(go, 1)
            os._exit(0 if (view == 5).all() else 1)
        finally:
            os._exit(2)
    del view
    kept.clear()
    run(ring, workers, SMALL, 500)
    ring.close()
    os.write(say, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(go)
    os.close(say)


# For a worker that starts later


def test_a_worker_that_starts_later_can_map_all_arenas(workers: Workers) -> None:
    ring = Ring(workers.announce, workers.retract)
    kept = deliver(ring, workers, SMALL, 100)
    assert {number: size for number, _, size in ring.arenas()} == {n: len(a) for n, a in workers.arenas.items()}
    late = {number: map_memory(fd, size) for number, fd, size in ring.arenas()}
    assert all((late[number] == workers.arenas[number]).all() for number in late)
    assert len(kept) == 100


def test_an_arena_that_is_being_announced_is_among_those_to_be_told() -> None:
    """The worker that it is told may be a new one."""
    known = []

    class Told:
        def announce(self, arena: int, fd: int, size: int) -> None:
            known.append([number for number, _, _ in ring.arenas()])

        def retract(self, arena: int) -> None:
            known.append([number for number, _, _ in ring.arenas()])

    told = Told()
    ring = Ring(told.announce, told.retract)
    ring.want(PAGE)
    slot = ring.acquire()
    assert known == [[0]]
    ring.want(8 * PAGE)
    ring.acquire()
    assert slot is not None
    ring.give_back(slot)
    ring.acquire()
    assert known == [[0], [0, 1], [1]]


def test_an_arena_that_cannot_be_announced_is_none() -> None:
    class Gone:
        def announce(self, arena: int, fd: int, size: int) -> None:
            raise BrokenPipeError

        def retract(self, arena: int) -> None: ...

    gone = Gone()
    ring = Ring(gone.announce, gone.retract)
    ring.want(PAGE)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BrokenPipeError):
        ring.acquire()
    assert ring.arenas() == []
    assert len(os.listdir("/proc/self/fd")) == before


# A bound


def places(ring: Ring, number: int) -> list[Slot | None]:
    return [ring.acquire() for _ in range(number)]


def test_without_a_bound_there_is_room() -> None:
    ring = Ring(lambda *_: None, lambda _: None)
    assert ring.has_room([None] * 1000)


def test_one_batch_has_room_while_nobody_knows_how_large_they_are() -> None:
    ring = Ring(lambda *_: None, lambda _: None, 100 * PAGE)
    assert ring.has_room([])
    assert not ring.has_room([None])
    ring.want(PAGE)
    assert ring.has_room([None])


def test_batches_have_room_up_to_the_bound() -> None:
    ring = Ring(lambda *_: None, lambda _: None, 10 * PAGE)
    ring.want(2 * PAGE)
    assert ring.has_room(places(ring, 4))
    assert not ring.has_room(places(ring, 5))
    assert ring.has_room([None] * 4)
    assert not ring.has_room([None] * 5)
    assert ring.has_room([*places(ring, 2), np.empty(4 * PAGE, np.uint8)])
    assert not ring.has_room([*places(ring, 2), np.empty(4 * PAGE + 1, np.uint8)])


def test_a_place_that_several_write_to_counts_once() -> None:
    ring = Ring(lambda *_: None, lambda _: None, 10 * PAGE)
    ring.want(2 * PAGE)
    assert ring.has_room(places(ring, 1) * 20)


def test_a_batch_larger_than_the_bound_has_room_alone() -> None:
    ring = Ring(lambda *_: None, lambda _: None, PAGE)
    ring.want(100 * PAGE)
    assert ring.has_room([])
    assert not ring.has_room(places(ring, 1))


def test_batches_that_take_no_memory_have_room() -> None:
    ring = Ring(lambda *_: None, lambda _: None, 1)
    ring.want(0)
    assert ring.acquire() is None
    assert ring.has_room([None] * 100)


def test_slots_that_are_free_are_within_the_bound_too(workers: Workers) -> None:
    ring = Ring(workers.announce, workers.retract, 2 * LARGE)
    held = deliver(ring, workers, LARGE, 5)
    assert workers.pages() * PAGE == 5 * LARGE
    under_way = ring.acquire()
    held.clear()
    gc.collect()
    assert ring.has_room([under_way])
    assert workers.pages() * PAGE <= 2 * LARGE
