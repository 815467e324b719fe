"""Workers as a crew, where something comes between: a fork, a signal, another thread, an end of all of it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.engine import crew as crew_module
from unbroken.engine import process as process_module
from unbroken.engine.process import WorkerProcess
from unbroken.errors import WorkerDied

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.timeout(30),
]
EXPECTED = [[i, i + 1] for i in range(0, 40, 2)]
KINDS = [ds.Numbers, ds.WellBehaved]


def loader_over(dataset: Any, **more: Any) -> StatefulDataLoader:
    arguments = {"batch_size": 2, "num_workers": 1, "multiprocessing_context": "fork", **more}
    return StatefulDataLoader(dataset, **arguments)


def workers() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


def rows(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def is_reaped(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


class Blocks(ds.Numbers):
    """Row 5 says so, and waits for what never comes."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.told, self.tell = os.pipe()
        self.never, self.write = os.pipe()

    def __getitem__(self, index: int) -> int:
        if index == 5:
            os.write(self.tell, b"x")
            os.read(self.never, 1)
        return index

    def close(self) -> None:
        for end in (self.told, self.tell, self.never, self.write):
            os.close(end)


@contextmanager
def blocked_loader(**more: Any) -> Iterator[tuple[StatefulDataLoader, Any]]:
    """A loader and an iterator whose next batch never comes."""
    dataset = Blocks(40)
    loader = loader_over(dataset, **more)
    iterator = iter(loader)
    assert rows([next(iterator), next(iterator)]) == EXPECTED[:2]
    os.read(dataset.told, 1)
    yield loader, iterator
    loader.close()
    dataset.close()


def in_a_thread(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def in_a_fork(act: Callable[[], Any]) -> None:
    """Do it in a forked process, which has to come to an end."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def closing(iterator: Any) -> Iterator[Any]:
    """Up to the end of the workers."""
    with contextlib.suppress(WorkerDied):
        yield from iterator


# Closed meanwhile


def test_a_thread_that_waits_for_a_batch_is_told_that_the_loader_was_closed() -> None:
    with blocked_loader() as (loader, iterator):
        thread = threading.Timer(0.05, loader.close)
        thread.start()
        with pytest.raises(WorkerDied, match="have been shut down"):
            next(iterator)
        thread.join()
    assert not workers()


def test_a_handler_of_signals_may_close_the_loader_that_is_waited_for() -> None:
    with blocked_loader() as (loader, iterator):
        before = signal.signal(signal.SIGUSR1, lambda *_: loader.close())
        try:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(WorkerDied, match="have been shut down"):
                next(iterator)
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert not workers()


def test_ctrl_c_in_close_waits_until_the_workers_are_ended() -> None:
    with blocked_loader() as (loader, _):
        (pid,) = workers()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            loader.close()
        assert is_reaped(pid)


@pytest.mark.parametrize("dataset", KINDS)
def test_a_loader_that_another_thread_closes_during_a_replacement_leaves_no_worker(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is just being started is nobody's but the thread's that starts it."""
    loader = loader_over(dataset(40))
    iterator = iter(loader)
    next(iterator)
    (old,) = workers()
    started: list[int] = []

    def start(*args: Any) -> WorkerProcess:
        worker = WorkerProcess(*args)
        started.append(worker.pid)
        in_a_thread(loader.close).join()
        return worker

    monkeypatch.setattr("unbroken.engine.pool.WorkerProcess", start)
    os.kill(old, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="have been shut down"):
        rows(iterator)
    assert len(started) == 1
    assert all(map(is_reaped, [old, *started]))


# Replacements that fail


@pytest.mark.parametrize("dataset", KINDS)
def test_a_replacement_that_cannot_be_started_is_an_error_and_no_hang(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_over(dataset(40))
    iterator = iter(loader)
    seen = rows([next(iterator)])
    with monkeypatch.context() as patch:

        def refuse(*_: Any) -> Any:
            raise OSError("no more processes")

        patch.setattr("unbroken.engine.pool.WorkerProcess", refuse)
        os.kill(next(iter(workers())), signal.SIGKILL)
        with pytest.raises(WorkerDied, match="could not be started: no more processes"):
            for batch in iterator:
                seen.append(batch.tolist())
    assert not workers()
    loader.load_state_dict(loader.state_dict())
    assert seen + rows(loader) == rows(loader_over(dataset(40)))


def test_a_worker_that_everybody_lost_sight_of_is_ended() -> None:
    """Whatever came between its start and the note of its number."""
    from unbroken.engine.cursor import Rules
    from unbroken.engine.host import Plan

    plan = Plan(ds.Numbers(4), "map", Rules(run=1), 0, 1, True, None, None)
    open_before = len(os.listdir("/proc/self/fd"))
    worker = WorkerProcess(plan, multiprocessing.get_context("fork"), 0)
    pid = worker.pid
    assert pid in workers()
    del worker
    gc.collect()
    assert is_reaped(pid)
    assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.mark.parametrize("kept", [False, True], ids=["forgotten", "kept by its traceback"])
def test_ctrl_c_while_a_worker_starts_leaves_none(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised once the worker has started, and nobody gets to know that one."""
    started: list[int] = []
    start = process_module._start

    def start_and_interrupt(*args: Any) -> Any:
        process = start(*args)
        started.append(process.pid)
        signal.raise_signal(signal.SIGINT)
        return process

    open_before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(process_module, "_start", start_and_interrupt)
    loader = loader_over(ds.Numbers(40), num_workers=2)
    errors: list[BaseException] = []
    try:
        iter(loader)
    except KeyboardInterrupt as error:
        errors += [error] if kept else []
    assert len(started) == 1
    assert all(map(is_reaped, started))
    assert len(errors) == kept
    errors.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_worker_may_be_let_go_twice_and_ended_after_that() -> None:
    from unbroken.engine.cursor import Rules
    from unbroken.engine.host import Plan

    plan = Plan(ds.Numbers(4), "map", Rules(run=1), 0, 1, True, None, None)
    worker = WorkerProcess(plan, multiprocessing.get_context("fork"), 0)
    worker.kill()
    assert worker.ended(5)
    for _ in range(2):
        worker.let_go()
    worker.hang_up()
    worker.kill()
    assert worker.ended(0)
    assert worker.bury()[0] == "was let go"


# Forks


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("more", [{}, {"in_order": False}])
@pytest.mark.parametrize("dataset", KINDS)
def test_a_forked_process_takes_nothing_from_its_parent(dataset: Any, more: Any, persistent: bool) -> None:
    """Right after ``iter``, when nothing was asked for yet: what the child asked for would come to the parent."""
    loader = loader_over(dataset(40), num_workers=2, persistent_workers=persistent, **more)
    expected = sorted(rows(loader_over(dataset(40), num_workers=2)))
    iterator = iter(loader)

    def act() -> None:
        assert not workers()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a forked process makes its own"):
                next(iterator)
        loader.load_state_dict(loader.state_dict())
        assert sorted(rows(loader)) == expected
        loader.close()

    in_a_fork(act)
    assert sorted(rows(iterator)) == expected
    loader.close()


def test_a_process_that_is_forked_while_another_thread_waits_can_take_the_state() -> None:
    """That thread holds the locks of the iterator, and is not in the child."""
    with blocked_loader() as (loader, iterator):
        expected = loader.state_dict()
        thread = in_a_thread(lambda: list(closing(iterator)))
        while not iterator._lock._is_owned() and iterator._lock.acquire(blocking=False):
            iterator._lock.release()
            time.sleep(0.001)

        def act() -> None:
            assert loader.state_dict() == expected
            with pytest.raises(RuntimeError, match="a forked process makes its own"):
                next(iterator)

        in_a_fork(act)
        loader.close()
        thread.join()


# Signals to the group


SIGNALLED = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_the_consumer_handles_is_not_handled_in_workers(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A handler that saves a checkpoint must not do that in every worker too; nor does the signal end one."""
    came: list[tuple[int, int]] = []

    def note(number: int, _: Any) -> None:
        came.append((os.getpid(), number))
        os.write(2, b"handled\n")

    before = {number: signal.signal(number, note) for number in SIGNALLED}
    try:
        loader = loader_over(ds.Numbers(40), num_workers=2, multiprocessing_context=method)
        iterator = iter(loader)
        seen = rows([next(iterator)])
        pids = workers()
        for number in SIGNALLED:
            for pid in [os.getpid(), *pids]:
                os.kill(pid, number)
        seen += rows(iterator)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == EXPECTED
    assert came == [(os.getpid(), number) for number in SIGNALLED]
    assert capfd.readouterr().err == "handled\n" * 3


# What is kept


@pytest.mark.parametrize("persistent", [False, True])
def test_interrupts_leave_no_memory_behind(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the loader nor in an iterator that goes on: what was on its way is given up with its workers."""

    def maps() -> int:
        return len(re.findall("memfd:unbroken", Path("/proc/self/maps").read_text()))

    gc.collect()
    before, open_before = maps(), len(os.listdir("/proc/self/fd"))
    loader = loader_over(ds.Numbers(400), num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    most, seen = 0, []
    for number, batch in enumerate(iterator):
        seen.append(batch.tolist())
        if number % 10 == 9:
            with monkeypatch.context() as patch:
                patch.setattr(crew_module.Crew, "receive", interrupt)
                try:
                    while (batch := next(iterator, None)) is not None:
                        seen.append(batch.tolist())
                except KeyboardInterrupt:
                    pass
        most = max(most, maps() - before)
    del batch
    assert seen == [[i, i + 1] for i in range(0, 400, 2)]
    assert most <= 6  # two of them are the notes of the workers of now
    loader.close()
    del loader, iterator
    gc.collect()
    assert maps() == before
    assert len(os.listdir("/proc/self/fd")) == open_before


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt
