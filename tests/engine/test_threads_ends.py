"""Threads of a loader: nothing is left of them, whatever ends them, and forked processes do without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.acts import Gate, engine_over, gated, itself, loader_over, threads, wait_until
from unbroken import StatefulDataLoader
from unbroken.engine.host import RowsTask
from unbroken.engine.threads import _Thread
from unbroken.errors import WorkerDied
from unbroken.lane_position import LanePosition

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


# Nothing is left


@pytest.mark.parametrize("end", ["close", "garbage", "exhausted", "load"])
def test_no_thread_is_left(end: str) -> None:
    """Case 41."""
    loader = loader_over(itself)
    iterator = iter(loader)
    next(iterator)
    assert len(threads()) == 2
    if end == "close":
        loader.close()
    elif end == "exhausted":
        list(iterator)
    elif end == "load":
        loader.load_state_dict(loader.state_dict())
    else:
        del iterator, loader
    assert threads() == []


def test_a_constructor_that_fails_half_way_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuses(thread: threading.Thread) -> None:
        if thread.name == "unbroken thread 2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        iter(loader_over(itself, num_workers=3))
    assert threads() == []


def test_a_loader_is_closed_while_a_thread_is_blocked_in_a_read(gates: Any) -> None:
    """Case 41: within two seconds, and the thread ends once its read does, and reads no other row."""
    gate = gates(4)
    read: list[int] = []
    loader = loader_over(lambda value: read.append(value) or gate(value), 40)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    assert gate.waiting.acquire(timeout=20)
    began = time.monotonic()
    loader.close()
    loader.close()
    assert time.monotonic() - began < 2
    assert threads() == ["unbroken thread 0"]
    gate.opened.set()
    wait_until(lambda: not threads(), "the thread does not end")
    assert [value for value in read if value % 2 == 0] == [0, 2, 4]
    assert next(iterator).tolist() == [2, 3]  # with new threads
    loader.close()


def test_whoever_waits_when_a_loader_is_closed_is_told(gates: Any) -> None:
    gate = gates(0)
    engine = engine_over(gate)
    engine.open(0, None, {0: LanePosition(exact=True)})
    ticket = engine.submit(0, RowsTask(((0, 0),), 1, None))
    told: list[BaseException] = []

    def waits() -> None:
        try:
            engine.collect(ticket)
        except WorkerDied as error:
            told.append(error)

    waiting = threading.Thread(target=waits)
    waiting.start()
    assert gate.waiting.acquire(timeout=20)
    engine.close()
    waiting.join(20)
    assert "call iter() on the loader again" in str(told[0])
    for asked in (lambda: engine.submit(0, None), lambda: engine.open(0, None, {})):
        with pytest.raises(WorkerDied):
            asked()


def test_a_loader_may_be_closed_in_one_of_its_threads() -> None:
    """A cycle may hold it that is found there."""
    loaders: list[StatefulDataLoader] = []

    def act(value: int) -> int:
        if value == 4:
            loaders[0].close()
            closed.set()
        return value

    closed = threading.Event()
    loaders.append(loader_over(act))
    iterator = iter(loaders[0])
    with pytest.raises((WorkerDied, StopIteration)):
        for _ in range(20):
            next(iterator)
    assert closed.wait(20)
    loaders[0].close()
    wait_until(lambda: not threads(), "a thread is left")


SCRIPT = """
import sys, threading
sys.path.insert(0, {root!r})
from tests.engine.acts import Gate, itself, loader_over
held = [iter(loader_over(itself, persistent_workers=True)), iter(loader_over(itself)), iter(loader_over(Gate(5)))]
[next(iterator) for iterator in held]
{end}
"""


@pytest.mark.parametrize("end", ["", "raise KeyError('in the loop')"])
def test_a_program_that_ends_in_mid_epoch_says_nothing_of_threads(end: str) -> None:
    """Case 41: idle threads, and some that are blocked in a read."""
    script = SCRIPT.format(root=str(ROOT), end=end)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:This DataLoader will create", "-c", script],
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == bool(end) and done.stdout == ""
    if end:
        assert done.stderr.count("Traceback") == 1 and done.stderr.endswith("KeyError: 'in the loop'\n")
    else:
        assert done.stderr == ""


# Forks


def in_a_fork(act: Callable[[], None]) -> None:
    """Do it in a forked process, and say here how it failed."""
    child = os.fork()
    if not child:
        try:
            act()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("persistent", [False, True])
def test_a_forked_process_makes_an_iterator_of_its_own(persistent: bool) -> None:
    """Case 37."""
    loader = loader_over(itself, persistent_workers=persistent)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]

    def act() -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a forked process makes its own"):
                for _ in range(9):  # some may have been handed over before the fork
                    next(iterator)
        loader.load_state_dict(loader.state_dict())
        assert sum(len(batch) for batch in loader) in range(1, 15)
        loader.close()

    in_a_fork(act)
    assert [batch.tolist() for batch in iterator] == [[i, i + 1] for i in range(2, 16, 2)]


def test_ctrl_c_in_close_waits_until_all_threads_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that was begun would not be begun again."""
    loader = loader_over(itself, num_workers=2, lanes=2)
    iterator = iter(loader)
    next(iterator)
    assert len(threads()) == 2
    real = _Thread.join

    def interrupted(thread: Any, seconds: float) -> None:
        signal.raise_signal(signal.SIGINT)
        real(thread, seconds)

    monkeypatch.setattr(_Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    assert not threads()
