"""Shared memory of a whole loader: it follows the sizes of batches, has a bound, and returns after a peak."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from unbroken import StatefulDataLoader, from_map
from unbroken.testing import assert_resumes_exactly

KB, MB = 1 << 10, 1 << 20


class Sized(Dataset[torch.Tensor]):
    """Samples of given sizes in bytes, each full of its index; ``begun`` counts those that workers were asked for."""

    def __init__(self, sizes: Callable[[int], int], number: int) -> None:
        self.sizes = sizes
        self.number = number
        self.begun = multiprocessing.get_context("fork").Value("q", 0)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.begun.get_lock():
            self.begun.value += 1
        return torch.full((self.sizes(index),), index % 251, dtype=torch.uint8)

    def check(self, index: int, batch: torch.Tensor) -> None:
        assert batch.shape == (1, self.sizes(index))
        assert batch[0, 0] == batch[0, -1] == index % 251


def loader_of(dataset: Any, **given: Any) -> StatefulDataLoader:
    return StatefulDataLoader(dataset, **{"num_workers": 2, "multiprocessing_context": "fork", **given})


@pytest.fixture(autouse=True)
def no_rest() -> None:
    """Loaders of earlier tests are gone, and their memory with them."""
    gc.collect()
    gc.collect()


def held() -> int:
    """Bytes that the system holds for the slots of this process, whoever has them mapped."""
    return sum(os.fstat(fd).st_blocks * 512 for fd in descriptors())


def descriptors() -> list[int]:
    """Of all arenas."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            if "memfd:unbroken" in os.readlink(link):
                found.append(int(link.name))
    return found


def mapped(field: str) -> int:
    """Bytes of this process and its workers, shared ones divided among those that share them."""
    total = 0
    for process in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith(f"{field}:"):
                total += int(line.split()[1]) * KB
    return total


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    until = monotonic() + seconds
    while not condition():
        if monotonic() > until:
            return False
        sleep(0.01)
    return True


# Growth and shrinkage


def test_memory_returns_after_a_phase_of_large_batches() -> None:
    dataset = Sized(lambda index: 2 * MB if index < 100 else KB, 1500)
    most = 0
    for index, batch in enumerate(loader_of(dataset)):
        dataset.check(index, batch)
        most = max(most, held())
    assert most > 4 * MB
    assert index == 1499
    loader = loader_of(dataset)
    batches = iter(loader)
    for _ in range(1400):
        next(batches)
    assert held() < MB
    loader.close()


def test_memory_returns_after_a_user_held_many_batches() -> None:
    dataset = Sized(lambda index: 16 * KB, 5000)
    loader = loader_of(dataset)
    batches = iter(loader)
    kept = [next(batches) for _ in range(2000)]
    assert held() > 1900 * 16 * KB
    for index, batch in enumerate(kept):
        dataset.check(index, batch)
    del batch
    kept.clear()
    for _ in range(2000):
        next(batches)
    assert held() < MB
    loader.close()


def test_a_batch_that_is_kept_after_the_end_keeps_only_its_own_memory() -> None:
    dataset = Sized(lambda index: MB, 40)
    loader = loader_of(dataset, persistent_workers=True)
    kept = list(loader)
    own = [os.dup(fd) for fd in descriptors()]
    loader.close()
    assert held() > 30 * MB
    one = kept[30]
    kept.clear()
    assert MB <= held() < MB + 64 * KB
    dataset.check(30, one)
    for fd in own:
        os.close(fd)


def assert_steady(batches: int) -> None:
    """Two workers, random sizes: the memory of all is bounded, and does not grow."""
    chance = random.Random(7)
    sizes = [
        chance.randrange(1, 200 * KB) if chance.random() < 0.998 else chance.randrange(MB, 4 * MB) for _ in range(997)
    ]
    dataset = Sized(lambda index: sizes[index % 997], batches)
    loader = loader_of(dataset, max_prefetch_bytes=16 * MB)
    shared, private = [], []
    for index, batch in enumerate(loader):
        dataset.check(index, batch)
        if index % (batches // 50) == 0:
            shared.append(max(mapped("Pss_Shmem"), held()))
            private.append(mapped("Pss_Anon"))
    assert index == batches - 1
    # The bound, the batch at hand, and those that were larger than slots then were.
    assert max(shared) < (16 + 3 * 4) * MB
    assert private[-1] - private[10] < 8 * MB


def test_many_batches_of_random_sizes_take_bounded_memory() -> None:
    assert_steady(5_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_batches_of_random_sizes_take_bounded_memory() -> None:
    assert_steady(100_000)


# The bound


def test_no_more_is_made_ahead_than_has_room() -> None:
    dataset = Sized(lambda index: 64 * KB, 400)
    loader = loader_of(dataset, prefetch_factor=20, max_prefetch_bytes=5 * 64 * KB)
    for index, batch in enumerate(loader):
        dataset.check(index, batch)
        assert dataset.begun.value <= index + 1 + 5
    assert index == 399


def test_what_has_room_is_made_ahead() -> None:
    dataset = Sized(lambda index: 64 * KB, 400)
    batches = iter(loader_of(dataset, prefetch_factor=20, max_prefetch_bytes=5 * 64 * KB))
    for _ in range(50):
        next(batches)
    assert within(30, lambda: dataset.begun.value == 50 + 5)


def test_without_a_bound_prefetch_factor_alone_counts() -> None:
    dataset = Sized(lambda index: 64 * KB, 400)
    batches = iter(loader_of(dataset, prefetch_factor=20))
    for _ in range(50):
        next(batches)
    assert within(30, lambda: dataset.begun.value == 50 + 40)


def test_batches_that_the_user_holds_do_not_count() -> None:
    dataset = Sized(lambda index: 64 * KB, 200)
    kept = list(loader_of(dataset, prefetch_factor=20, max_prefetch_bytes=5 * 64 * KB))
    for index, batch in enumerate(kept):
        dataset.check(index, batch)
    assert index == 199


@pytest.mark.parametrize("most", [1, 100 * KB])
def test_batches_larger_than_the_bound_come_one_at_a_time(most: int) -> None:
    dataset = Sized(lambda index: MB if index % 3 else 10, 100)
    for index, batch in enumerate(loader_of(dataset, max_prefetch_bytes=most, prefetch_factor=10)):
        dataset.check(index, batch)
    assert index == 99


def test_batches_without_arrays_take_no_room() -> None:
    words = ["a", "b", "c"] * 100
    dataset: Any = words
    loader = loader_of(dataset, batch_size=None, max_prefetch_bytes=1, prefetch_factor=10)
    assert list(loader) == words


class Numbers(IterableDataset[torch.Tensor]):
    """Lanes of unequal length, of tensors of 4 kB."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        lane = get_worker_info().id
        for number in range(30 + 17 * lane):
            yield torch.full((1000,), 1000 * lane + number, dtype=torch.int32)


def rows(number: int) -> dict[str, torch.Tensor]:
    return {"row": torch.full((1000,), number, dtype=torch.int32)}


def kept_in_list(values: list[Any]) -> Any:
    return torch.stack([value["row"] for value in values])


LOADERS: dict[str, Callable[..., StatefulDataLoader]] = {
    "map": lambda **given: loader_of(Sized(lambda index: 4000, 203), batch_size=5, **given),
    "map, shuffled": lambda **given: loader_of(Sized(lambda index: 4000, 203), batch_size=5, shuffle=True, **given),
    "iterable": lambda **given: loader_of(Numbers(), batch_size=4, lanes=5, **given),
    "stream": lambda **given: loader_of(from_map(range(200)).map(rows), batch_size=7, lanes=6, **given),
    "stream with a collate_fn": lambda **given: loader_of(
        from_map(range(200)).map(rows), batch_size=7, lanes=6, collate_fn=kept_in_list, **given
    ),
    "stream of rows": lambda **given: loader_of(from_map(range(50)).map(rows), batch_size=None, lanes=6, **given),
}


@pytest.mark.parametrize("most", [1, 50 * KB, 10 * MB])
@pytest.mark.parametrize("name", LOADERS)
def test_a_bound_changes_neither_the_batches_nor_the_position(name: str, most: int) -> None:
    free, bound = LOADERS[name](seed=1), LOADERS[name](seed=1, max_prefetch_bytes=most)
    number = 0
    for one, other in zip(free, bound, strict=True):
        number += 1
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert free.state_dict() == bound.state_dict()
    assert number > 20


@pytest.mark.parametrize("name", ["map", "iterable", "stream"])
def test_a_bound_keeps_the_law(name: str) -> None:
    bounds = [{"max_prefetch_bytes": most} for most in (40 * KB, 1, None)]
    assert_resumes_exactly(LOADERS[name], topologies=bounds, restore_points=[0, 1, 7, 20, (3, 9, 25)], epochs=1)
