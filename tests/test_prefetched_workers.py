"""``save_prefetched=True``, and workers that wait, fail or die with something in hand."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from typing import Any

import pytest

from tests.queues import FromQueue, drop, make, queue_of, resumed, rows_in
from unbroken.errors import WorkerDied, WorkerTimeout
from unbroken.state import unseal

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
SECONDS = 30


def test_a_loader_that_was_never_iterated_takes_nothing_from_the_queue() -> None:
    """Case 5."""
    source = queue_of(6, 1)
    loader = make(source, batch_size=2, num_workers=1)
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.load_state_dict({})
    assert "prefetched" not in state["rank-0000"]
    assert [source.get(timeout=SECONDS) for _ in range(6)] == list(range(6))
    drop(source)


def test_a_save_waits_for_a_worker_that_waits_for_the_source() -> None:
    source = queue_of(3, 0)
    loader = make(source, batch_size=2, num_workers=1, prefetch_factor=1, timeout=0.2)
    batches = iter(loader)
    assert rows_in(batches, 1) == [0, 1]
    for _ in range(2):
        with pytest.raises(WorkerTimeout, match="Nothing is lost: try again"):
            loader.state_dict()
    source.put(3)
    with pytest.raises(WorkerTimeout):  # the one that was asked for after that
        while True:
            loader.state_dict()
            assert rows_in(batches, 1) == [2, 3]
    source.put(4)
    source.put(None)
    state = loader.state_dict()
    assert rows_in(resumed(state, source, batch_size=2)) == [4]
    assert rows_in(batches) == [4]
    loader.close()
    drop(source)


def test_an_interrupt_while_a_save_waits_loses_nothing() -> None:
    """Ctrl-C."""
    source = queue_of(2, 0)
    loader = make(source, batch_size=2, num_workers=1, prefetch_factor=1)
    batches = iter(loader)
    assert rows_in(batches, 1) == [0, 1]
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        loader.state_dict()
    for row in (2, 3, 4, None):
        source.put(row)
    state = loader.state_dict()
    loader.close()
    assert rows_in(resumed(state, source, batch_size=2)) == [2, 3, 4]
    drop(source)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_while_a_batch_is_waited_for_loses_nothing(workers: int) -> None:
    """Ctrl-C in this process comes after the samples that were read before it."""
    source = queue_of(5, 0)
    loader = make(source, batch_size=2, num_workers=workers)
    batches = iter(loader)
    assert rows_in(batches, 2) == [0, 1, 2, 3]
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    found: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        while True:
            found += rows_in(batches, 1)
    for row in (5, 6, None):
        source.put(row)
    state = loader.state_dict()
    found += rows_in(batches)
    assert found == [4, 5, 6]
    loader.close()
    if workers:
        assert rows_in(resumed(state, source, batch_size=2)) == [4, 5, 6]
    drop(source)


class Gated(FromQueue):
    """Row 7 tells who has it, and waits."""

    def __init__(self, source: Any, told: Any, gate: Any) -> None:
        super().__init__(source)
        self.told, self.gate = told, gate

    def row(self, row: Any) -> Any:
        if row == 7:
            self.told.send(os.getpid())
            self.gate.wait(SECONDS)
        return row


def test_a_worker_that_is_killed_ends_the_run_and_what_was_in_it_is_named() -> None:
    context = multiprocessing.get_context("fork")
    source, gate = queue_of(12, 0), context.Event()
    hear, tell = context.Pipe(duplex=False)
    loader = make(Gated(source, tell, gate), batch_size=2, num_workers=2, prefetch_factor=1, worker_restarts=3)
    batches = iter(loader)
    found = rows_in(batches, 2)  # with these, four batches were asked for, and one of them has row 7
    os.kill(hear.recv(), signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        while True:
            found += rows_in(batches, 1)
    assert "signal 9 (SIGKILL)" in str(caught.value)
    assert "What was asked of workers and did not come cannot be made again: up to" in str(caught.value)
    with pytest.raises(WorkerDied):
        next(batches)
    lanes = json.loads(loader.state_dict()["rank-0000"])["lanes"]
    found += [row for lane in lanes for turn in lane.get("prefetched", ()) for row in unsealed(turn["batch"])]
    assert sorted(found) == sorted(set(found)), "something is there twice"
    assert 7 not in found
    loader.close()
    drop(source)


def unsealed(batch: Any) -> list[int]:
    return unseal(json.dumps(batch)).tolist()  # type: ignore[no-any-return]


def test_a_save_that_finds_out_that_something_is_lost_says_so_once() -> None:
    context = multiprocessing.get_context("fork")
    source, gate = queue_of(20, 0), context.Event()
    hear, tell = context.Pipe(duplex=False)
    loader = make(Gated(source, tell, gate), batch_size=2, num_workers=1, prefetch_factor=2)
    batches = iter(loader)
    assert rows_in(batches, 2) == [0, 1, 2, 3]
    os.kill(hear.recv(), signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"up to 2 samples are lost, in 1 batches of up to 2 \(1 of lane 0\)"):
        loader.state_dict()
    (lane,) = json.loads(loader.state_dict()["rank-0000"])["lanes"]
    assert [turn["batch"]["v"] for turn in lane["prefetched"]] != []
    assert lane["delivered"] == 4
    drop(source)


class Fails(FromQueue):
    def row(self, row: Any) -> Any:
        if row == 4:
            raise OSError("not this one")
        return row


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_in_the_middle_of_a_batch_does_not_take_the_rest_with_it(workers: int) -> None:
    """What was read before it is delivered as a shorter batch; a generator is opened again where it stands."""
    source = queue_of(12, 4)
    loader = make(Fails(source), batch_size=3, num_workers=workers)
    found: list[int] = []
    failed = 0
    batches = iter(loader)
    while True:
        try:
            found += rows_in([next(batches)])
        except OSError:
            failed += 1
        except StopIteration:
            break
    assert failed == 1
    assert sorted(found) == [row for row in range(12) if row != 4]
    drop(source)


def test_closing_a_loader_says_what_its_workers_had_in_hand() -> None:
    source = queue_of(3, 0)
    loader = make(source, batch_size=2, num_workers=1, prefetch_factor=1)
    batches = iter(loader)
    assert rows_in(batches, 1) == [0, 1]
    with pytest.warns(UserWarning, match="up to 2 samples are lost, in 1 batches"):
        loader.close()
    drop(source)
