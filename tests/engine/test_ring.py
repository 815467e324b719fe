"""Slots of shared memory: free only when nobody can see them any more, and without a name or a descriptor."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from unbroken.engine.ring import Ring, Slot, create_memory, map_memory

PAGE = mmap.PAGESIZE


class Workers:
    """What the workers know of arenas: they map each when it is announced, and forget it when it is retracted."""

    def __init__(self) -> None:
        self.arenas: dict[int, np.ndarray[Any, Any]] = {}
        self.retracted: list[int] = []

    def announce(self, arena: int, fd: int, size: int) -> None:
        assert arena not in self.arenas
        assert os.fstat(fd).st_size == size
        self.arenas[arena] = map_memory(fd, size)

    def retract(self, arena: int) -> None:
        del self.arenas[arena]
        self.retracted.append(arena)

    def write(self, slot: Slot, value: int) -> None:
        self.arenas[slot.arena][slot.offset : slot.offset + slot.size] = value


def ring_of(nbytes: int = 0) -> tuple[Ring, Workers]:
    workers = Workers()
    ring = Ring(workers.announce, workers.retract)
    if nbytes:
        ring.want(nbytes)
    return ring, workers


def acquired(ring: Ring) -> Slot:
    slot = ring.acquire()
    assert slot is not None
    return slot


def place(slot: Slot) -> tuple[int, int]:
    return slot.arena, slot.offset


def take_all(ring: Ring) -> list[Slot]:
    """Slots until the ring has to grow; all of one arena."""
    first = acquired(ring)
    slots = [first]
    while len(slots) < len(first.memory) // first.size:
        slots.append(acquired(ring))
    return slots


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# Sizes


def test_there_is_no_slot_while_nobody_knows_how_large_it_should_be() -> None:
    ring, workers = ring_of()
    assert ring.acquire() is None
    assert workers.arenas == {}


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 10 * PAGE, 40 << 20])
def test_a_slot_holds_what_was_wanted(nbytes: int) -> None:
    ring, _ = ring_of(nbytes)
    slot = acquired(ring)
    assert slot.size >= nbytes
    assert slot.offset % PAGE == 0
    assert len(slot.lease(nbytes)) == nbytes


def test_slots_do_not_overlap_and_the_workers_see_them() -> None:
    ring, workers = ring_of(PAGE)
    slots = [acquired(ring) for _ in range(100)]
    assert len({place(slot) for slot in slots}) == 100
    for number, slot in enumerate(slots):
        workers.write(slot, number)
    for number, slot in enumerate(slots):
        assert (slot.lease(PAGE) == number).all()


def test_small_slots_share_an_arena_so_that_few_regions_are_mapped() -> None:
    """A process may map 65 530 regions."""
    ring, workers = ring_of(100)
    kept = [acquired(ring) for _ in range(320)]
    assert len(workers.arenas) <= 10
    assert len(kept) == 320


def test_slots_grow_with_the_batches_and_small_ones_go() -> None:
    ring, workers = ring_of(PAGE)
    small = acquired(ring)
    lease = small.lease(PAGE)
    ring.want(3 * PAGE)
    large = acquired(ring)
    assert large.size >= 3 * PAGE
    assert large.arena != small.arena
    assert workers.retracted == []  # one of its slots is out
    del lease
    again = [acquired(ring) for _ in range(100)]
    assert all(slot.size >= 3 * PAGE for slot in again)
    assert workers.retracted == [small.arena]


def test_batches_that_get_smaller_or_grow_a_little_keep_their_slots() -> None:
    ring, workers = ring_of(100 * PAGE)
    ring.want(10 * PAGE)
    ring.want(101 * PAGE)
    first = acquired(ring)
    ring.want(110 * PAGE)
    ring.give_back(first)
    take_all(ring)
    assert len(workers.arenas) == 1


# Lives


VIEWS = {
    "the lease": lambda lease: lease,
    "an array": lambda lease: np.ndarray((2, 4), np.int64, lease, 8),
    "a slice of an array": lambda lease: np.ndarray((2, 4), np.int64, lease, 8)[1:, ::2].T,
    "an array of its buffer": lambda lease: np.frombuffer(lease, np.int64, 1, 8),
    "a slice of an array of its buffer": lambda lease: np.frombuffer(lease, np.int64, 4)[1:2],
    "another dtype": lambda lease: np.frombuffer(lease, np.int64, 4).view(np.uint8)[3:],
    "a memoryview": memoryview,
    "a tensor": lambda lease: torch.frombuffer(lease, dtype=torch.int64),
    "a part of a tensor": lambda lease: torch.frombuffer(lease, dtype=torch.int64)[1:],
    "a detached tensor": lambda lease: torch.frombuffer(lease, dtype=torch.float32)[0].detach(),
    "its storage": lambda lease: torch.frombuffer(lease, dtype=torch.int64).untyped_storage(),
    "an array of a tensor": lambda lease: torch.frombuffer(lease, dtype=torch.int64).numpy(),
    "a part of an array of a tensor": lambda lease: torch.frombuffer(lease, dtype=torch.int64).numpy()[1:2],
    "a tensor of an array": lambda lease: torch.from_numpy(np.ndarray((4,), np.int64, lease)),
    "a tensor of a part of an array": lambda lease: torch.from_numpy(np.ndarray((4,), np.int64, lease)[1:3]),
    "a dlpack tensor": lambda lease: torch.from_dlpack(np.frombuffer(lease, np.int64)),
    "a parameter": lambda lease: torch.nn.Parameter(torch.frombuffer(lease, dtype=torch.float32)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_slot_is_free_only_when_the_last_view_of_it_is_gone(name: str) -> None:
    """Case 37."""
    ring, _ = ring_of(PAGE)
    slot, *others = take_all(ring)
    view = VIEWS[name](slot.lease(PAGE))
    gc.collect()
    others += take_all(ring)
    assert place(slot) not in map(place, others), "the slot was given away while it could be seen"
    del view
    gc.collect()
    others += take_all(ring)
    assert place(slot) in map(place, others), "the slot is lost"


def test_a_view_keeps_the_memory_when_slot_and_ring_are_gone() -> None:
    ring, workers = ring_of(PAGE)
    slot = acquired(ring)
    workers.write(slot, 7)
    tensor = torch.frombuffer(slot.lease(PAGE), dtype=torch.uint8)
    del ring, workers, slot
    gc.collect()
    assert (tensor == 7).all()
    tensor.fill_(3)
    assert (tensor == 3).all()


def test_a_slot_that_was_given_back_unread_is_used_again() -> None:
    ring, workers = ring_of(PAGE)
    for _ in range(1000):
        ring.give_back(acquired(ring))
    assert len(workers.arenas) == 1


def test_a_slot_may_be_freed_in_any_thread() -> None:
    ring, workers = ring_of(PAGE)
    slots = [slot for _ in range(10) for slot in take_all(ring)]
    leases = [slot.lease(PAGE) for slot in slots]
    parts = [leases[number::4] for number in range(4)]
    del leases

    def drop(part: list[Any]) -> None:
        while part:
            part.pop()

    threads = [threading.Thread(target=drop, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = set(workers.arenas)
    assert {place(acquired(ring)) for _ in slots} == {place(slot) for slot in slots}
    assert set(workers.arenas) == known


class Model(RuleBasedStateMachine):
    """Any order of taking, keeping, giving back, growing, shrinking and forking: what is kept stays what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.ring, self.workers = ring_of()
        self.kept: dict[int, Any] = {}
        self.number = 0
        self.wanted = 0

    @rule(pages=st.integers(1, 40))
    def want(self, pages: int) -> None:
        self.ring.want(pages * PAGE)
        self.wanted = pages * PAGE

    @rule(pages=st.integers(1, 40), times=st.sampled_from([1, 10, 130, 300]))
    def want_often(self, pages: int, times: int) -> None:
        """So that slots shrink."""
        for _ in range(times):
            self.want(pages)
            self.ring.give_back(acquired(self.ring))

    @precondition(lambda self: self.wanted)
    @rule(times=st.integers(1, 40))
    def keep(self, times: int) -> None:
        for _ in range(times):
            slot = acquired(self.ring)
            assert slot.size >= self.wanted
            self.number += 1
            self.workers.write(slot, self.number % 251)
            self.kept[self.number] = torch.frombuffer(slot.lease(self.wanted), dtype=torch.uint8)

    @precondition(lambda self: self.wanted)
    @rule()
    def give_back(self) -> None:
        self.ring.give_back(acquired(self.ring))

    @rule(every=st.integers(1, 4), first=st.integers(0, 3))
    def let_go(self, every: int, first: int) -> None:
        for number in list(self.kept)[first::every]:
            del self.kept[number]

    @rule()
    def fork(self) -> None:
        self.ring.retire()

    @invariant()
    def what_is_kept_stays_what_it_was(self) -> None:
        for number, view in self.kept.items():
            assert view[0] == view[-1] == number % 251


TestAnyOrder = Model.TestCase
TestAnyOrder.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


# Forks


def test_a_slot_that_is_out_at_a_fork_is_never_written_again() -> None:
    """Case 37: the child shares its pages."""
    ring, workers = ring_of(PAGE)
    slots = take_all(ring)
    leases = [slot.lease(PAGE) for slot in slots[:2]]
    ring.retire()
    del leases
    for slot in slots[2:]:
        ring.give_back(slot)
    arena = slots[0].arena
    again = [acquired(ring) for _ in range(len(slots))]
    assert all(slot.arena != arena for slot in again)
    assert workers.retracted == [arena]


def test_every_fork_of_the_process_retires_what_is_out() -> None:
    """Case 37: ``os.fork``, by whomever."""
    ring, workers = ring_of(PAGE)
    slot, *others = take_all(ring)
    workers.write(slot, 1)
    view = slot.lease(PAGE)
    child = os.fork()
    if child == 0:
        try:
            right = bool((view == 1).all())
            del view
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del view
    for other in others:
        ring.give_back(other)
    assert acquired(ring).arena != slot.arena


def test_views_that_die_in_a_forked_child_free_nothing_there() -> None:
    """Case 37: the child has views of its own, and no say in what the parent's workers write."""
    ring, _ = ring_of(PAGE)
    slots = take_all(ring)
    views = [slot.lease(PAGE) for slot in slots]
    child = os.fork()
    if child == 0:
        try:
            taken = {place(slot) for slot in slots}
            views.clear()
            gc.collect()
            os._exit(1 if any(place(acquired(ring)) in taken for _ in slots) else 0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(len(view) == PAGE for view in views)


# Memory without a name and without a descriptor


def writable_both_ways(nbytes: int) -> None:
    fd = create_memory(nbytes)
    one, other = map_memory(fd, nbytes), map_memory(fd, nbytes)
    os.close(fd)
    one[:] = 5
    assert (other == 5).all()
    assert len(one) == nbytes
    other[0] = 1
    assert one[0] == 1


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 1 << 20])
def test_memory_is_shared_and_outlives_its_descriptor(nbytes: int) -> None:
    writable_both_ways(nbytes)


def test_where_there_is_no_memfd_an_unlinked_file_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    writable_both_ways(PAGE)
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_proc_memory_is_mapped_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    writable_both_ways(PAGE)


def test_memory_has_no_name_in_dev_shm() -> None:
    """Cases 38 and 39."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    ring, _ = ring_of(PAGE)
    kept = [acquired(ring).lease(PAGE) for _ in range(100)]
    maps = Path("/proc/self/maps").read_text()
    names = [line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count(" ") >= 5 and "unbroken" in line]
    assert names
    assert not any(name.startswith("/dev/shm") for name in names)
    if before:
        assert {name for name in os.listdir("/dev/shm") if "unbroken" in name} == set()
    assert len(kept) == 100


@contextmanager
def few_descriptors(most: int) -> Iterator[None]:
    """As under ``ulimit -n``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_batches_can_be_kept_with_few_descriptors() -> None:
    """Case 37: 20 000 of them under ``ulimit -n 256``: none of them holds one, and arenas get larger."""
    gc.collect()  # of earlier tests: the last views, and then the rings
    gc.collect()
    before = descriptors()
    with few_descriptors(max(256, before + 20)):
        ring, workers = ring_of(PAGE)
        kept = [acquired(ring).lease(PAGE) for _ in range(20_000)]
        alone = []
        for _ in range(1000):  # batches that came before anybody knew how large a slot should be
            fd = create_memory(PAGE)
            alone.append(map_memory(fd, PAGE))
            os.close(fd)
        assert descriptors() - before == len(workers.arenas) <= 20
    assert len(kept) + len(alone) == 21_000
    kept.clear()
    workers.arenas.clear()


def test_memory_that_nobody_sees_any_more_is_given_back() -> None:
    def regions() -> int:
        return Path("/proc/self/maps").read_text().count("unbroken")

    gc.collect()
    before = regions()
    ring, workers = ring_of(PAGE)
    kept = [acquired(ring).lease(PAGE) for _ in range(200)]
    assert regions() > before
    kept.clear()
    workers.arenas.clear()
    del ring, workers
    gc.collect()
    assert regions() == before
