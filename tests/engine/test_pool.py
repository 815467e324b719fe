"""Lanes in worker processes: what users do to them and in them, and that nothing is left of them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.engine.crew import Patience
from unbroken.engine.cursor import Rules
from unbroken.engine.host import MapTask, Plan
from unbroken.engine.pool import Pool
from unbroken.errors import UnbrokenError, WorkerDied, WorkerTimeout

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

ROOT = Path(__file__).parent.parent.parent
within_10_s = pytest.mark.timeout(10)


class Does(ds.Numbers):
    """Row i is what ``act(i)`` gives."""

    def __init__(self, n: int, act: Callable[[int], Any]) -> None:
        super().__init__(n)
        self.act = act

    def __getitem__(self, index: int) -> Any:
        return self.act(index)


def loader_over(act: Callable[[int], Any], n: int = 12, **arguments: Any) -> StatefulDataLoader:
    return StatefulDataLoader(Does(n, act), **{"batch_size": 2, "num_workers": 1, **arguments})


def workers() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


def is_reaped(pid: int) -> bool:
    """Whether nothing is left of a child: no process, and no zombie."""
    return not Path(f"/proc/{pid}").exists()


def is_gone(pid: int) -> bool:
    """Whether a process that is not our child has ended; its zombie is another's to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def few_descriptors(most: int) -> Iterator[None]:
    """As under ``ulimit -n``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Nothing is left


@pytest.mark.parametrize("end", ["close", "garbage", "exhausted"])
@pytest.mark.parametrize("dataset", [ds.Numbers, ds.WellBehaved])
def test_no_process_no_zombie_and_no_descriptor_is_left(dataset: Any, end: str) -> None:
    """Case 41."""
    list(StatefulDataLoader(dataset(4), num_workers=1))  # what is opened once is open now
    gc.collect()
    before, open_before = workers(), descriptors()
    loader = StatefulDataLoader(dataset(12), batch_size=2, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    pids = workers() - before
    assert len(pids) == 2
    if end == "close":
        loader.close()
    elif end == "exhausted":
        list(iterator)
    del iterator, loader
    gc.collect()
    assert all(map(is_reaped, pids))
    assert descriptors() == open_before


def test_a_constructor_that_fails_half_way_leaves_nothing() -> None:
    before, open_before = workers(), descriptors()
    started: list[Any] = []
    context = multiprocessing.get_context("fork")

    class Refuses(context.Process):  # type: ignore[misc,name-defined]
        def start(self) -> None:
            if len(started) == 2:
                raise OSError("no more processes")
            super().start()
            started.append(self)

    loader = StatefulDataLoader(ds.Numbers(8), num_workers=3, multiprocessing_context="fork")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(context), "Process", Refuses)
        with pytest.raises(OSError, match="no more processes"):
            iter(loader)
    gc.collect()
    assert workers() == before
    assert descriptors() == open_before


# Scripts of their own; ``pids`` prints the workers.
HEAD = """
import weakref
class Kept: ...
kept = Kept()
weakref.finalize(kept, len, "")  # a finalizer that is older than anything of multiprocessing's
import json, multiprocessing, os, signal, sys, threading, time
from tests import datasets as ds
from unbroken import StatefulDataLoader

class Blocks(ds.Numbers):
    def __getitem__(self, index):
        if index == 5:
            threading.Event().wait()
        return index

def loaders():
    yield StatefulDataLoader(ds.Numbers(1000), num_workers=1)
    yield StatefulDataLoader(ds.WellBehaved(1000), num_workers=1, persistent_workers=True)
    yield StatefulDataLoader(Blocks(8), num_workers=1)

def tell(**more):
    print(json.dumps({"pids": [p.pid for p in multiprocessing.active_children()], **more}), flush=True)
"""


def script(text: str, **arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", HEAD + text],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **arguments,
    )


def told(process: subprocess.Popen[str]) -> Any:
    line = process.stdout.readline()  # type: ignore[union-attr]
    assert line, process.communicate(timeout=60)[1]
    return json.loads(line)


@pytest.mark.timeout(60)
def test_a_program_that_ends_in_mid_epoch_leaves_nothing_and_says_nothing() -> None:
    """Case 41: idle workers, persistent ones, and one that is blocked in a read."""
    with script("held = [iter(l) for l in loaders()]\n[next(i) for i in held]\ntell()") as process:
        pids = told(process)["pids"]
        out, err = process.communicate(timeout=40)
        assert (process.returncode, out, err) == (0, "", "")
    assert len(pids) == 3
    assert all(map(is_gone, pids))


@pytest.mark.timeout(60)
def test_a_program_that_ends_by_an_error_shows_that_error_alone() -> None:
    """Case 41."""
    text = "for loader in loaders():\n    for batch in loader:\n        tell()\n        raise KeyError('in the loop')"
    with script(text) as process:
        pids = told(process)["pids"]
        _, err = process.communicate(timeout=40)
        assert process.returncode == 1
        assert err.startswith("Traceback (most recent call last):")
        assert err.endswith("KeyError: 'in the loop'\n")
        assert err.count("Traceback") == 1
    assert all(map(is_gone, pids))


@pytest.mark.timeout(60)
def test_workers_end_with_a_parent_that_is_killed() -> None:
    """Case 36: those that a thread started, too."""
    text = """
held = [iter(l) for l in loaders()]
thread = threading.Thread(target=lambda: held.extend(iter(l) for l in loaders()))
thread.start()
thread.join()
[next(i) for i in held]
tell()
sys.stdin.readline()
"""
    with script(text) as process:
        pids = told(process)["pids"]
        assert len(pids) == 6
        assert not any(map(is_gone, pids)), "workers outlive the thread that started them"
        process.kill()
    wait_until(lambda: all(map(is_gone, pids)), "a worker outlived its parent")


SIGNALLED = """
def make():
    return StatefulDataLoader(ds.Numbers(400), batch_size=2, shuffle=True, seed=3, num_workers=2)

class Stop(Exception):
    pass

def stop(*_):
    raise Stop

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
loader, seen = make(), []
iterator = iter(loader)
try:
    for batch in iterator:
        seen.append(batch.tolist())
        if len(seen) == 5:
            tell()
        time.sleep(0.02)
except Stop:
    state = loader.state_dict()
    pids = [p.pid for p in multiprocessing.active_children()]
    other = make()
    other.load_state_dict(state)
    rest = [batch.tolist() for batch in other]
    tell(seen=len(seen), exact=seen + rest == [batch.tolist() for batch in make()], alive=pids)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_after_a_signal_to_the_group_the_state_can_be_taken_and_is_exact(name: str) -> None:
    """Case 36: the workers are not taken down before the consumer."""
    with script(SIGNALLED, start_new_session=True) as process:
        pids = told(process)["pids"]
        os.killpg(process.pid, getattr(signal, name))
        answer = told(process)
        _, err = process.communicate(timeout=40)
    assert err == ""
    assert set(answer["alive"]) == set(pids)
    assert answer["exact"]
    assert 5 <= answer["seen"] < 200
    assert all(map(is_gone, pids))


# Deaths


@within_10_s
@pytest.mark.parametrize(
    ("die", "how", "cause"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "by signal 9 (SIGKILL)", "ran out of memory"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "by signal 11 (SIGSEGV)", "a library crashed"),
        (lambda: os.kill(os.getpid(), signal.SIGABRT), "by signal 6 (SIGABRT)", "something sent it this signal"),
        (lambda: os._exit(7), "with exit code 7", "ended the process"),
    ],
    ids=["SIGKILL", "SIGSEGV", "SIGABRT", "exit"],
)
def test_a_worker_that_dies_is_named_with_its_signal_and_the_likely_cause(
    die: Callable[[], None], how: str, cause: str
) -> None:
    """Case 33: within ten seconds, and what was delivered is not lost."""

    def act(index: int) -> Any:
        if index == 5:
            die()
        return index

    loader = loader_over(act, worker_restarts=1)
    got = []
    with pytest.raises(WorkerDied) as caught:
        for batch in loader:
            got.append(batch.tolist())
    text = str(caught.value)
    assert got == [[0, 1], [2, 3]]
    assert text.startswith("DataLoader worker 0 (pid ")
    assert f"ended {how}" in text
    assert cause in text
    assert "indices [4, 5]" in text
    other = loader_over(lambda index: index)
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == [[4, 5], [6, 7], [8, 9], [10, 11]]


@within_10_s
@pytest.mark.parametrize("dataset", [ds.Numbers, ds.WellBehaved])
def test_a_worker_killed_from_outside_while_nobody_waits_is_noticed(dataset: Any) -> None:
    """Case 33."""
    before = workers()
    loader = StatefulDataLoader(dataset(4000), batch_size=2, num_workers=2, worker_restarts=0)
    iterator = iter(loader)
    first = next(iterator).tolist()
    victim = min(workers() - before)
    os.kill(victim, signal.SIGKILL)
    got = 0
    with pytest.raises(WorkerDied, match="SIGKILL"):
        for _ in iterator:
            got += 1
    assert got < 1999
    for _ in range(2):  # and again, without waiting for anybody
        with pytest.raises(WorkerDied, match="have been shut down"):
            next(iterator)
    assert workers() == before
    assert next(iter(StatefulDataLoader(dataset(4000), batch_size=2, num_workers=2))).tolist() == first


@pytest.mark.timeout(30)
def test_a_death_is_noticed_while_a_process_of_the_dataset_s_lives_on() -> None:
    """Case 33: a grandchild holds all that the worker held."""
    read_end, write_end = os.pipe()

    def act(index: int) -> Any:
        if index == 3:
            child = os.fork()
            if child == 0:
                ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # should this test fail, it ends with the worker's parent
                os.read(read_end, 1)
                os._exit(0)
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    watchdog = threading.Timer(20, lambda: os.write(write_end, b"x"))
    watchdog.start()
    try:
        began = time.monotonic()
        with pytest.raises(WorkerDied, match="SIGKILL"):
            list(loader_over(act))
        took = time.monotonic() - began
    finally:
        watchdog.cancel()
        os.write(write_end, b"x")
        os.close(read_end)
        os.close(write_end)
    assert took < 15, "the death was noticed when the grandchild had ended"


@within_10_s
def test_a_loader_whose_worker_died_can_be_iterated_again() -> None:
    marks = multiprocessing.get_context("fork").Value("i", 0)

    def act(index: int) -> Any:
        if index == 5 and not marks.value:
            marks.value = 1
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    loader = loader_over(act, worker_restarts=0)
    with pytest.raises(WorkerDied):
        list(loader)
    loader.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7], [8, 9], [10, 11]]


# Errors


class Stubborn:
    """Can be sent, and refuses to be made again."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


@within_10_s
def test_a_batch_that_cannot_be_made_again_here_is_named() -> None:
    """Case 34: which batch it was, and that it is the batch that is at fault."""
    loader = loader_over(lambda index: Stubborn(), collate_fn=list)
    with pytest.raises((UnbrokenError, ValueError)) as caught:
        list(loader)
    assert "indices [0, 1]" in str(caught.value)


@within_10_s
def test_an_index_that_cannot_be_sent_is_an_error_and_the_rest_still_comes() -> None:
    """Case 34."""

    class Odd(Sampler[Any]):
        def __init__(self) -> None: ...

        def __iter__(self) -> Iterator[Any]:
            return iter([0, (lambda: 0), 2])

        def __len__(self) -> int:
            return 3

    loader = StatefulDataLoader(ds.Numbers(4), batch_size=None, sampler=Odd(), num_workers=1)
    with pytest.raises((UnbrokenError, AttributeError, TypeError), match="lambda"):
        list(loader)
    loader.close()


@within_10_s
@pytest.mark.parametrize(
    "act",
    [
        lambda index: lambda: None,
        lambda index: (i for i in ()),
        lambda index: threading.Lock(),
        lambda index: torch.ones(2, requires_grad=True) * 2,
    ],
    ids=["lambda", "generator", "lock", "part of a graph"],
)
def test_a_batch_that_cannot_be_sent_is_named_with_its_place(act: Callable[[int], Any]) -> None:
    """Case 34."""
    loader = loader_over(act, collate_fn=list)
    with pytest.raises((UnbrokenError, RuntimeError), match=r"pickle|serialize"):
        list(loader)


@within_10_s
@pytest.mark.parametrize("kind", [sys.exit, StopIteration])
def test_what_would_end_the_loop_in_silence_is_an_error(kind: Any) -> None:
    """Case 35."""

    def act(index: int) -> Any:
        if index == 3:
            raise kind() if kind is StopIteration else SystemExit(3)
        return index

    got = []
    with pytest.raises(RuntimeError, match=r"Caught (SystemExit|StopIteration) in DataLoader worker process 0"):
        for batch in loader_over(act):
            got.append(batch.tolist())
    assert got == [[0, 1]]


@within_10_s
def test_a_map_style_error_names_its_indices_and_the_epoch_goes_on_after_it() -> None:
    """Case 35."""

    def act(index: int) -> Any:
        if index == 3:
            raise KeyError("row 3")
        return index

    iterator = iter(loader_over(act, 8, num_workers=2))
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(KeyError, match=r"in DataLoader worker process \d \(indices \[2, 3\] .*(?s:.)*row 3"):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[4, 5], [6, 7]]


# Waiting


def test_a_batch_that_is_late_is_torchs_timeout_and_may_still_come() -> None:
    read_end, write_end = os.pipe()

    def act(index: int) -> Any:
        if index == 2:
            os.read(read_end, 1)
        return index

    texts = []
    for kind in (DataLoader, StatefulDataLoader):
        loader = kind(Does(6, act), batch_size=2, num_workers=1, timeout=1)
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        with pytest.raises(RuntimeError) as caught:
            next(iterator)
        texts.append(str(caught.value))
        os.write(write_end, b"x")
    assert texts[1].splitlines()[0] == texts[0]
    assert isinstance(caught.value, WorkerTimeout)
    assert [batch.tolist() for batch in iterator] == [[2, 3], [4, 5]]
    os.close(read_end)
    os.close(write_end)


def test_batches_that_come_in_time_are_no_timeout() -> None:
    assert len(list(loader_over(lambda index: index, 40, timeout=60, num_workers=2))) == 20


def test_whether_a_batch_is_there_is_told_without_waiting_for_it(tmp_path: Path) -> None:
    """Ranks that vote count only what is made."""
    gate = tmp_path / "open"

    def act(index: int) -> int:
        while index >= 2 and not gate.exists():
            time.sleep(0.001)
        return index

    plan = Plan(Does(4, act), "map", Rules(run=1), 0, 1, True, None, None)
    pool = Pool(plan, multiprocessing.get_context("fork"), 2, Patience(restarts=1))
    with contextlib.closing(pool):
        pool.open(0, None, {})
        first, second = (pool.submit(0, MapTask(0, i, 1, [i, i + 1])) for i in (0, 2))
        wait_until(lambda: pool.ready(first), "the first batch does not come")
        assert not pool.ready(second)
        gate.touch()
        wait_until(lambda: pool.ready(second), "the second batch does not come")
        assert [pool.collect(ticket).batch.tolist() for ticket in (first, second)] == [[0, 1], [2, 3]]


def test_a_worker_that_died_is_told_of_where_a_batch_is_only_asked_after() -> None:
    plan = Plan(
        Does(4, lambda index: os.kill(os.getpid(), signal.SIGKILL)), "map", Rules(run=1), 0, 1, True, None, None
    )
    pool = Pool(plan, multiprocessing.get_context("fork"), 2, Patience(restarts=1))
    with contextlib.closing(pool):
        pool.open(0, None, {})
        ticket = pool.submit(0, MapTask(0, 0, 1, [0, 1]))
        with pytest.raises(WorkerDied, match="SIGKILL"):
            wait_until(lambda: pool.ready(ticket), "its death is not noticed")
        assert pool.ready(ticket)  # there is nothing to wait for


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_one_slow_sample_changes_no_order(num_workers: int) -> None:
    """Case 40: the other workers run ahead, and are waited for in turn."""
    read_end, write_end = os.pipe()

    def act(index: int) -> Any:
        if index == 4:
            os.read(read_end, 1)  # until another worker has come further
        if index == 6:
            os.write(write_end, b"x")
        return index

    if num_workers == 1:
        os.write(write_end, b"x")
    loader = loader_over(act, 40, num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == [[i, i + 1] for i in range(0, 40, 2)]
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("prefetch_factor", [1, 2, 5])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_run_as_far_ahead_as_they_are_told(num_workers: int, prefetch_factor: int) -> None:
    read = multiprocessing.get_context("fork").Value("i", 0)

    def act(index: int) -> Any:
        with read.get_lock():
            read.value += 1
        return index

    loader = loader_over(act, 200, num_workers=num_workers, prefetch_factor=prefetch_factor)
    iterator = iter(loader)
    for delivered in range(1, 6):
        next(iterator)
        ahead = delivered + num_workers * prefetch_factor
        wait_until(lambda ahead=ahead: read.value >= 2 * ahead, "the workers do not run ahead")  # type: ignore[misc]
        assert read.value == 2 * ahead
    loader.close()


# What datasets do in a worker


def test_what_a_dataset_prints_arrives(capfd: pytest.CaptureFixture[str]) -> None:
    def act(index: int) -> Any:
        print(f"row {index}", flush=True)
        print(f"error {index}", file=sys.stderr, flush=True)
        os.write(1, b"raw\n")
        return index

    assert len(list(loader_over(act, 4))) == 2
    out, err = capfd.readouterr()
    assert sorted(out.split("\n")) == sorted(["", *["raw"] * 4, *[f"row {i}" for i in range(4)]])
    assert sorted(err.split("\n")) == sorted(["", *[f"error {i}" for i in range(4)]])


def test_what_a_dataset_prints_without_flushing_arrives_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    def act(index: int) -> Any:
        print(f"row {index}")
        return index

    assert len(list(loader_over(act, 4))) == 2
    assert [line for line in capfd.readouterr().out.splitlines() if line] == [f"row {i}" for i in range(4)]


@within_10_s
def test_a_dataset_may_start_programs_and_end_them() -> None:
    """A program that a worker starts can be terminated: it does not inherit that the worker cannot."""

    def act(index: int) -> Any:
        echoed = subprocess.run(["echo", str(index)], capture_output=True, text=True, check=True).stdout
        with subprocess.Popen(["sleep", "100"]) as sleeping:
            sleeping.terminate()
        return int(echoed), sleeping.returncode

    batches = list(loader_over(act, 4))
    assert [[part.tolist() for part in batch] for batch in batches] == [[[0, 1], [-15] * 2], [[2, 3], [-15] * 2]]


def test_a_dataset_may_use_threads() -> None:
    def act(index: int) -> Any:
        found: list[int] = []
        threads = [threading.Thread(target=found.append, args=(index,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(found)

    assert [batch.tolist() for batch in loader_over(act, 4)] == [[0, 3], [6, 9]]


def test_workers_do_not_hold_each_other_s_channels() -> None:
    """One that is let go ends, though another was forked while its channel was open."""
    before = workers()
    held = [iter(loader_over(lambda index: index, num_workers=2)) for _ in range(2)]
    for iterator in held:
        next(iterator)
    first = held.pop(0)
    del iterator
    began = time.monotonic()
    first.close()
    assert len(workers() - before) == 2
    assert time.monotonic() - began < 10
    assert len(list(held[0])) == 5


def test_a_loader_may_be_iterated_from_a_thread_that_ends() -> None:
    found: list[Any] = []
    loader = loader_over(lambda index: index, 20)

    def begin() -> None:
        found.append(iter(loader))
        found.append(next(found[0]))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert len(list(found[0])) == 9


def test_large_tasks_and_large_answers_do_not_wait_on_each_other() -> None:
    loader = StatefulDataLoader(
        Does(400_000, lambda index: index),
        batch_size=100_000,
        num_workers=1,
        prefetch_factor=4,
        collate_fn=lambda samples: ("x" * 4_000_000, torch.tensor(samples)),
    )
    assert [int(batch[1][0]) for batch in loader] == [0, 100_000, 200_000, 300_000]


# Batches stay what they were


def full(index: int) -> Any:
    return np.full(500, index)


KEPT: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "tensors": (None, lambda batch: batch),
    "a row of them": (None, lambda batch: batch[1:]),
    "arrays": (np.stack, lambda batch: batch),
    "a row of arrays": (np.stack, lambda batch: batch[1]),
    "a list of arrays": (list, lambda batch: batch[1]),
    "arrays of tensors": (None, lambda batch: batch.numpy()[1:, :3]),
    "tensors of arrays": (np.stack, lambda batch: torch.from_numpy(batch)[0:]),
    "dicts": (lambda rows: {"a": torch.tensor(np.stack(rows)), "b": np.stack(rows)}, lambda batch: batch["b"][1]),
}


@pytest.mark.parametrize("name", KEPT)
def test_batches_that_are_kept_stay_what_they_were(name: str) -> None:
    """Case 37: silent corruption otherwise; every second one is kept, so that slots are used again."""
    collate_fn, keep = KEPT[name]
    kept = []
    loader = StatefulDataLoader(Does(240, full), batch_size=2, num_workers=1, collate_fn=collate_fn)
    for number, batch in enumerate(loader):
        if number % 2:
            kept.append((number, keep(batch)))
    for number, part in kept:
        assert np.unique(np.asarray(part)).tolist() in ([2 * number, 2 * number + 1], [2 * number + 1])


def test_thousands_of_batches_are_kept_with_few_descriptors() -> None:
    """Case 37: in slots, and in memory of their own where each is larger than the last."""
    before = descriptors()
    with few_descriptors(max(256, before + 40)):
        held = list(StatefulDataLoader(ds.Numbers(3000), num_workers=1))
        growing = list(loader_over(lambda index: torch.zeros(1000 * index + 1000), 120, batch_size=1))
    assert [int(batch) for batch in held] == list(range(3000))
    assert [batch.shape[1] for batch in growing] == [1000 * i + 1000 for i in range(120)]
    assert descriptors() <= before + 5


def shared_files(pid: Any) -> set[str]:
    """The files in /dev/shm that a process maps or holds open; the tests themselves have some."""
    mapped = {line.split()[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line}
    held = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    return {name for name in mapped | held if name.startswith("/dev/shm/")}


def test_nothing_is_put_into_dev_shm() -> None:
    """Case 38."""
    before, ours = workers(), shared_files("self")
    loader = loader_over(lambda index: torch.zeros(1000), 200, num_workers=2)
    iterator = iter(loader)
    held = [next(iterator) for _ in range(20)]
    assert set().union(*(shared_files(pid) for pid in ("self", *(workers() - before)))) <= ours
    assert len(held) == 20
    loader.close()


def test_batches_outlive_their_workers_and_their_loader() -> None:
    loader = loader_over(full, 8)
    held = list(loader)
    loader.close()
    del loader
    gc.collect()
    assert [batch[:, 0].tolist() for batch in held] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    held[0].fill_(9)
    assert held[1][:, 0].tolist() == [2, 3]


# Other ways to start a process


class Squares(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return (number * number for number in ds.my_share(12))


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_processes_that_are_not_forked_give_the_same_and_end_too(context: str) -> None:
    """Case 1: batches, errors and ends."""
    before = workers()
    for dataset in (ds.Numbers(12), Squares()):
        expected = [batch.tolist() for batch in StatefulDataLoader(dataset, batch_size=2, num_workers=2)]
        loader = StatefulDataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context=context)
        assert [batch.tolist() for batch in loader] == expected
    loader = StatefulDataLoader(
        ds.Numbers(12), batch_size=2, num_workers=1, multiprocessing_context=context, collate_fn=refuse
    )
    with pytest.raises(LookupError, match="no such row"):
        list(loader)
    gc.collect()
    assert workers() == before


def refuse(rows: list[Any]) -> Any:
    raise LookupError("no such row")


@pytest.mark.parametrize("make", [ds.Numbers, ds.WellBehaved])
def test_an_older_iterator_takes_no_batch_from_the_newer_one_over_persistent_workers(make: Any) -> None:
    """Also one that had not begun: its tasks would be answered by the newer one's lanes."""
    loader = StatefulDataLoader(make(12), 2, num_workers=2, persistent_workers=True)
    whole = [batch.tolist() for batch in loader]
    older, newer = iter(loader), iter(loader)
    found = [next(newer).tolist()]
    with pytest.raises(RuntimeError, match="A newer iterator has taken over"):
        next(older)
    assert found + [batch.tolist() for batch in newer] == whole
    loader.close()
