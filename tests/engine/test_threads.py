"""Lanes of a stream in threads: what goes on at the same time, what is left alone, and what goes wrong.

That batches and positions are those of any other engine is shown in ``test_cases_threads.py``, and that nothing is left
of threads in ``test_threads_ends.py``.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from tests.engine.acts import (
    Acts,
    ActsRows,
    Gate,
    engine_over,
    gated,
    itself,
    loader_over,
    rows_of,
    threads,
    wait_until,
)
from unbroken import StatefulDataLoader
from unbroken.anchor import Anchor
from unbroken.engine.host import RowsTask
from unbroken.errors import WorkerTimeout
from unbroken.lane_position import LanePosition
from unbroken.lanes import Lane
from unbroken.seeding import read_globals

ROOT = Path(__file__).parent.parent.parent
# Torch's advice on a machine with few cores; and Python's, from 3.12 on, on forks where there are threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
    pytest.mark.timeout(60),
]


@pytest.fixture
def gates() -> Iterator[Callable[..., Gate]]:
    with gated() as gate:
        yield gate


# What goes on at the same time


def test_two_threads_are_in_a_read_at_the_same_time() -> None:
    """The point of it: a read, a tokenizer or a decoder of one lane does not wait for that of another."""
    both = threading.Barrier(2)

    def act(value: int) -> int:
        both.wait(20)  # raises where only one comes
        return value

    batches = [batch.tolist() for batch in loader_over(act, 8)]
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_threads_read_while_the_training_loop_is_busy(gates: Any) -> None:
    gate = gates(4)
    iterator = iter(loader_over(gate))
    assert next(iterator).tolist() == [0, 1]
    assert gate.waiting.acquire(timeout=20)  # row 4 is being made, and nobody has asked for it yet
    gate.opened.set()
    assert [batch.tolist() for batch in iterator] == [[i, i + 1] for i in range(2, 16, 2)]


@pytest.mark.parametrize(("num_workers", "prefetch_factor"), [(1, 1), (2, 1), (2, 3)])
def test_threads_run_no_further_ahead_than_worker_processes(num_workers: int, prefetch_factor: int) -> None:
    """Rows ahead take memory."""
    read: list[int] = []
    iterator = iter(
        loader_over(lambda i: read.append(i) or i, 200, num_workers=num_workers, prefetch_factor=prefetch_factor)
    )
    for batch in range(1, 10):
        next(iterator)
        assert len(read) <= 2 * (batch + prefetch_factor * num_workers**2)
    wait_until(lambda: len(read) > 2 * 9, "nothing is made ahead")


def test_rows_are_handed_over_as_they_are() -> None:
    """Nothing is pickled: a row may be what no process could send."""
    rows = [threading.Lock() for _ in range(4)]
    loader = loader_over(lambda i: rows[i], 4, batch_size=2, collate_fn=list)
    assert [row for batch in loader for row in batch] == rows


# What is left alone


def numbers() -> tuple[Any, ...]:
    torch_state, random_state, numpy_state = read_globals()
    return torch_state.numpy().tobytes(), random_state, numpy_state[1].tobytes(), *numpy_state[2:]


class Looks(Acts):
    """Notes in each thread what belongs to the process, when a lane is opened, resumed and read."""

    def __init__(self, n: int) -> None:
        self.seen: list[Any] = []
        super().__init__(n, self.look)

    def look(self, value: int = 0) -> int:
        self.seen.append((get_worker_info(), torch.get_num_threads(), numbers()))
        return value

    def open(self, lane: Lane) -> ActsRows:
        self.look()
        return super().open(lane)


@pytest.mark.parametrize("seed_by", ["batch", "sample"])
def test_nothing_that_belongs_to_the_process_changes_while_lanes_are_opened_and_read(seed_by: str) -> None:
    """Case 18: the training loop draws its own numbers meanwhile."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = get_worker_info(), torch.get_num_threads(), numbers()
    stream = Looks(40)
    arguments: Any = {"batch_size": 2, "num_workers": 2, "multiprocessing_context": "thread", "seed": 1}
    loader = StatefulDataLoader(stream, seed_by=seed_by, **arguments)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    resumed = StatefulDataLoader(stream, seed_by=seed_by, **arguments)
    resumed.load_state_dict(state)
    list(resumed)
    list(iterator)
    assert len(stream.seen) > 60
    assert all(seen == before for seen in stream.seen)
    assert (get_worker_info(), torch.get_num_threads(), numbers()) == before


# What goes wrong


class Odd(Exception):
    def __init__(self, number: int, more: str) -> None:
        super().__init__(number, more)


def fails_at(row: int) -> Callable[[int], int]:
    def read_badly(value: int) -> int:
        if value == row:
            raise Odd(value, "no row")
        return value

    return read_badly


def test_an_error_is_the_stream_s_own_with_its_traceback_and_its_lane() -> None:
    """Case 35: also a type that no text can be made into again."""
    iterator = iter(loader_over(fails_at(5)))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(Odd) as caught:
        next(iterator)
    assert caught.value.args == (5, "no row")
    assert "read_badly" in [entry.name for entry in caught.traceback]
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["In thread 1 of the loader (lane 1, sample 1)."]


def test_after_an_error_the_next_try_goes_on_at_the_position_and_loses_nothing() -> None:
    """Case 31."""
    left = [3]

    def act(value: int) -> int:
        if value == 6 and left[0]:
            left[0] -= 1
            raise OSError("a fault that passes")
        return value

    loader = loader_over(act)
    iterator, got, failures = iter(loader), [], 0
    while True:
        try:
            got.append(next(iterator).tolist())
        except OSError:
            failures += 1
        except StopIteration:
            break
    assert got == [[i, i + 1] for i in range(0, 16, 2)]
    assert failures == 3


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_what_ends_a_program_inline_ends_it_here(error: BaseException) -> None:
    def act(value: int) -> int:
        raise error

    with pytest.raises(type(error)):
        next(iter(loader_over(act)))


def test_a_stop_iteration_where_no_row_was_asked_for_does_not_end_the_epoch_in_silence() -> None:
    class Stops(Acts):
        def open(self, lane: Lane) -> ActsRows:
            raise StopIteration

    loader = StatefulDataLoader(Stops(8, itself), num_workers=1, multiprocessing_context="thread")
    with pytest.raises(RuntimeError, match="raised StopIteration, which would end the epoch"):
        next(iter(loader))


def test_an_error_does_not_keep_what_it_passed_through(gates: Any) -> None:
    """Its traceback holds the frames of the stream; it must not be held by them in turn."""
    iterator = iter(loader_over(fails_at(0), num_workers=1))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(Odd):
            next(iterator)
        del iterator
        wait_until(lambda: not threads(), "the iterator is held")
    finally:
        gc.enable()


def test_a_batch_that_is_late_is_torchs_timeout_that_tells_where_and_it_may_still_come(gates: Any) -> None:
    gate = gates(5)
    iterator = iter(loader_over(gate, timeout=0.5))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    for _ in range(2):
        with pytest.raises(WorkerTimeout) as caught:
            next(iterator)
        first, second, *stack = str(caught.value).splitlines()
        assert first == "DataLoader timed out after 0.5 seconds"
        assert second.startswith("Thread 1 has rows of the lanes") and second.endswith("on lane 1, sample 1.")
        assert any("self.opened.wait()" in line for line in stack)
    gate.opened.set()
    assert [batch.tolist() for batch in iterator] == [[i, i + 1] for i in range(4, 16, 2)]


def test_making_rows_again_is_no_timeout() -> None:
    """As in a worker process: it is told, and may take its time."""
    engine = engine_over(lambda value: time.sleep(0.25) or value, timeout=1)
    start = LanePosition(anchor=Anchor(0, None, None), delivered=6, exact=True)
    engine.open(0, None, {0: start})
    ticket = engine.submit(0, RowsTask(((0, 0),), 1, None))
    assert rows_of(engine.collect(ticket)) == [6]
    engine.close()


def test_whether_rows_are_there_is_told_without_waiting_for_them(gates: Any) -> None:
    """Ranks that vote count only what is made."""
    gate = gates(1)
    engine = engine_over(gate)
    engine.open(0, None, {0: LanePosition(exact=True)})
    first, second = (engine.submit(0, RowsTask(((0, 0),), 1, None)) for _ in range(2))
    engine.flush()
    wait_until(lambda: engine.ready(first), "the first row does not come")
    assert not engine.ready(second)
    gate.opened.set()
    wait_until(lambda: engine.ready(second), "the second row does not come")
    assert [rows_of(engine.collect(ticket)) for ticket in (first, second)] == [[0], [1]]
    engine.close()
    assert engine.ready(99)  # there is nothing to wait for


# One after another


def test_persistent_threads_serve_all_epochs_and_the_newest_iterator() -> None:
    idents: set[int] = set()

    def act(value: int) -> int:
        idents.add(threading.get_ident())
        return value

    loader = loader_over(act, persistent_workers=True)
    for _ in range(3):
        assert [batch.tolist() for batch in loader] == [[i, i + 1] for i in range(0, 16, 2)]
    assert len(idents) == 2
    older = iter(loader)
    assert next(older).tolist() == [0, 1]
    newer = iter(loader)
    assert next(newer).tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="A newer iterator has taken over"):
        next(older)
    loader.close()
    assert threads() == []
