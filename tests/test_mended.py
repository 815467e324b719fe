"""Faults that were found in whole runs, each with the values that are right. One test a kind."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from tests import datasets as ds
from unbroken import StatefulDataLoader, from_iterable
from unbroken.engine import process
from unbroken.errors import InexactDataset, InvalidState, WorkerDied

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def workers() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


# A fault that passes, while the place is looked for


class Faulty(ds.Late):
    """Its row number ``fault`` since it was made raises ``error``, once. Content repeats with a period."""

    def __init__(self, n: int, period: int, fault: int, error: Exception) -> None:
        super().__init__(n)
        self.period, self.fault, self.error, self.made = period, fault, error, 0

    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            self.made += 1
            if self.made == self.fault:
                raise self.error
            yield row % self.period


@pytest.mark.parametrize("error", [OSError("lost"), MemoryError(), ValueError("odd")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("period", [2, 3, 1000])
def test_a_passing_fault_at_a_resume_is_never_taken_for_a_state_that_does_not_fit(
    error: Exception, period: int
) -> None:
    """What is tried next might fit by chance. Errors of the machine are raised; any other is tried again."""
    reference = [row % period for row in range(30)]
    for taken in range(1, 20, 3):
        loader = StatefulDataLoader(Faulty(30, period, -1, error), 1, snapshot_every_n_steps=2, seed=0)
        iterator = iter(loader)
        for _ in range(taken):
            next(iterator)
        for fault in range(1, 8):
            again = StatefulDataLoader(Faulty(30, period, fault, error), 1, snapshot_every_n_steps=2, seed=0)
            again.load_state_dict(loader.state_dict())
            rows, found, raised = iter(again), [], 0
            while True:
                try:
                    found.append(next(rows).item())
                except StopIteration:
                    break
                except InexactDataset:  # refused for what it is: content that repeats
                    assert period < 1000
                    found = reference[taken:]
                    break
                except type(error):
                    raised += 1
                    assert raised == 1
            assert found == reference[taken:], (taken, fault)


# Random numbers of a collate_fn


def _drawing(rows: list[Any]) -> tuple[float, ...]:
    return float(torch.rand(())), float(np.random.rand())


def test_random_numbers_of_a_collate_fn_do_not_depend_on_how_the_epoch_before_ended() -> None:
    def epochs(steps: int | None) -> list[Any]:
        stream = from_iterable(lambda lane, lanes: range(lane, 40, lanes))
        loader = StatefulDataLoader(stream, 4, lanes=2, seed=0, collate_fn=_drawing)
        for number, _ in enumerate(loader, 1):
            if number == steps:
                break
        return list(loader)

    assert epochs(3) == epochs(None)


# Positions that were changed


def _position(loader: StatefulDataLoader, change: Callable[[dict[str, Any]], None]) -> dict[str, str]:
    state = dict(loader.state_dict())
    (name,) = [name for name in state if name != "unbroken"]
    leaf = json.loads(state[name])
    change(leaf)
    return {**state, name: json.dumps(leaf)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ended", "x"), ("ended", 1), ("ended", None), ("sizes", ""), ("sizes", {}), ("carry", ""), ("carry", True),
        ("anchor.after", ""), ("anchor.after", True), ("anchor.after", []), ("anchor.before", 1),
    ],
)  # fmt: skip
def test_a_field_of_another_type_in_a_lane_is_an_invalid_state(field: str, value: Any) -> None:
    loader = StatefulDataLoader(ds.WellBehaved(20), 2, snapshot_every_n_steps=1)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)

    def change(leaf: dict[str, Any]) -> None:
        inside, *names = leaf["lanes"][0], *field.split(".")
        for name in names[:-1]:
            inside = inside[name]
        assert names[-1] in inside
        inside[names[-1]] = value

    before = loader.state_dict()
    with pytest.raises(InvalidState, match="cut short or changed"):
        loader.load_state_dict(_position(loader, change))
    assert loader.state_dict() == before


@pytest.mark.parametrize("beyond", [[[0, 1]], [[1, 1], [2, 3]], [[3, 3], [1, 2]], [[2, 1]], "", {"1": 2}, [[1, 1, 1]]])
def test_ranges_that_cannot_be_are_an_invalid_state(beyond: Any) -> None:
    loader = StatefulDataLoader(ds.Numbers(20), 2, shuffle=True, seed=0)
    next(iter(loader))
    with pytest.raises(InvalidState, match="cut short or changed"):
        loader.load_state_dict(_position(loader, lambda leaf: leaf.update(beyond=beyond)))
    with pytest.raises(InvalidState, match="cut short or changed"):
        loader.load_state_dict(_position(loader, lambda leaf: leaf.update(sampler={})))


# Workers


@pytest.mark.timeout(20)
def test_a_handler_that_closes_the_loader_and_exits_is_what_the_loop_gets() -> None:
    class Slow(ds.Numbers):
        def __getitem__(self, index: int) -> int:
            if index > 3:
                threading.Event().wait(60)
            return index

    loader = StatefulDataLoader(Slow(8), batch_size=2, num_workers=1)

    def handler(*_: object) -> None:
        loader.close()
        raise SystemExit(7)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(SystemExit) as caught:
            next(iterator)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught.value.code == 7


@pytest.mark.timeout(20)
def test_where_there_is_no_memory_for_another_worker_the_end_of_the_first_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dies(ds.Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 21:
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    iterator = iter(StatefulDataLoader(Dies(40), batch_size=2, num_workers=1))
    next(iterator)

    def fails(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(process, "_start", fails)
    with pytest.raises(WorkerDied, match=r"SIGKILL.*\n.*memory.*\nAnother one could not be started: .*Cannot allocate"):
        list(iterator)


@pytest.mark.timeout(30)
def test_an_idle_worker_whose_child_holds_its_end_is_replaced(tmp_path: Path) -> None:
    """Its death is noticed while nothing is asked of it, and what is sent to it then would be taken by nobody."""
    read_end, write_end = os.pipe()

    class Forks(ds.Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 0 and not (tmp_path / "forked").exists():
                (tmp_path / "forked").touch()
                if os.fork() == 0:
                    os.close(write_end)
                    os.read(read_end, 1)
                    os._exit(0)
            return index

    loader = StatefulDataLoader(Forks(40), batch_size=10, num_workers=1, prefetch_factor=1, persistent_workers=True)
    try:
        whole = [batch.tolist() for batch in loader]
        (pid,) = workers()
        os.kill(pid, signal.SIGKILL)
        assert loader._engine is not None
        while pid in workers():
            loader._engine._crew.receive(0.05)  # type: ignore[attr-defined]
        assert [batch.tolist() for batch in loader] == whole
    finally:
        os.close(write_end)
        os.close(read_end)
        loader.close()


def test_a_worker_ended_by_a_real_time_signal_is_told_as_such(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Dies(ds.Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 3 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), int(signal.SIGRTMIN) + 3)
                threading.Event().wait(60)
            return index

    with caplog.at_level(logging.WARNING, "unbroken"):
        loader = StatefulDataLoader(Dies(8), batch_size=2, num_workers=1)
        assert [row for batch in loader for row in batch.tolist()] == list(range(8))
    assert f"ended by signal {int(signal.SIGRTMIN) + 3} (a real-time signal)" in caplog.text


# Batches that cannot be made again


class FailsFirst(IterableDataset[int]):
    """The first ``next()`` raises; the queue is what is left of the source."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.failed = False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.failed:
            self.failed = True
            raise ValueError("not yet")
        if not self.rows:
            raise StopIteration
        return self.rows.pop(0)


def test_a_lane_whose_first_sample_fails_has_a_position_that_loads() -> None:
    rows = list(range(10))
    loader = StatefulDataLoader(FailsFirst(rows), batch_size=2, save_prefetched=True)
    iterator = iter(loader)
    with pytest.raises(ValueError, match="not yet"):
        next(iterator)
    found = [next(iterator).tolist(), next(iterator).tolist()]
    again = StatefulDataLoader(FailsFirst(rows), batch_size=2, save_prefetched=True)
    again.dataset.failed = True  # type: ignore[attr-defined]
    again.load_state_dict(loader.state_dict())
    assert found + [batch.tolist() for batch in again] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


class Queued(IterableDataset[int]):
    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def __iter__(self) -> Iterator[int]:
        while (item := self.queue.get()) is not None:
            yield item


@pytest.mark.timeout(30)
@pytest.mark.parametrize("then", ["save", "next"])
def test_ctrl_c_while_a_worker_waits_for_its_source_loses_nothing(then: str) -> None:
    queue = multiprocessing.get_context("fork").Queue()
    for item in range(2):
        queue.put(item)
    loader = StatefulDataLoader(Queued(queue), batch_size=2, num_workers=1, save_prefetched=True)
    iterator = iter(loader)
    found = next(iterator).tolist()
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        if then == "save":
            loader.state_dict()
        else:
            next(iterator)
    for item in [*range(2, 8), None]:
        queue.put(item)
    assert loader.state_dict()
    assert found + [row for batch in iterator for row in batch.tolist()] == list(range(8))
