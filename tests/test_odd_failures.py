"""Cases 34 and 35: exceptions that are odd, and what datasets do in a worker besides making samples."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.beside import BOTH, assert_the_same
from tests.beside_rows import Kind, Who, as_list
from unbroken import StatefulDataLoader, from_map

pytestmark = pytest.mark.timeout(30)
ROOT = Path(__file__).parent.parent
FORKED: Who = {"num_workers": 2, "multiprocessing_context": "fork"}


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class Does(Dataset):
    """Row 2 does something first; the others are numbers."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return self.act() if index == 2 else index


class DoesInTurn(IterableDataset):
    """The same, one after another, shared out among lanes."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(0 if info is None else info.id, 5, 1 if info is None else info.num_workers):
            yield self.act() if index == 2 else index


def does_in_a_stream(act: Any) -> Any:
    return from_map(range(5)).map(lambda index: act() if index == 2 else index)


KINDS: dict[str, Callable[[Any], Any]] = {
    "map-style": Does,
    "iterable": DoesInTurn,
    "a stream": does_in_a_stream,
}

# ---- exceptions


class TwoArguments(Exception):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because of {why}")


class Keyword(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class Unpicklable(Exception):
    """Holds what cannot be sent."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Mute(Exception):
    """Fails when it is asked for its text."""

    def __str__(self) -> str:
        raise ValueError("no text today")


class Cancelled(BaseException):
    """As those of asyncio and of test tools: no ``Exception``."""


def local() -> Exception:
    class Local(Exception):
        pass

    return Local("of a local class")


def raise_it(make: Any) -> Any:
    raise make()


def raise_chained() -> Any:
    try:
        raise LookupError("the first fault")
    except LookupError as error:
        raise ValueError("the second fault") from error


def raise_in_a_handler() -> Any:
    try:
        raise LookupError("the first fault")
    except LookupError:
        raise ValueError("the second fault")  # noqa: B904


def recurse() -> Any:
    return recurse()


ODD: dict[str, tuple[Callable[[], Any], type[BaseException], list[str]]] = {
    # what is done, what arrives from a worker, and what it says
    "two arguments": (lambda: raise_it(lambda: TwoArguments("row 2", "rain")), RuntimeError, ["row 2 because of rain"]),
    "keyword only": (lambda: raise_it(lambda: Keyword(code=7)), RuntimeError, ["Keyword: code 7"]),
    "unpicklable": (lambda: raise_it(lambda: Unpicklable("holds a lock")), Unpicklable, ["holds a lock"]),
    "without a text": (lambda: raise_it(lambda: Mute("x")), Mute, ["Mute", "raise_it"]),
    "of a local class": (lambda: raise_it(local), RuntimeError, ["Local", "of a local class"]),
    "no Exception": (lambda: raise_it(lambda: Cancelled("now")), RuntimeError, ["Cancelled: now"]),
    "cancelled": (lambda: raise_it(asyncio.CancelledError), RuntimeError, ["CancelledError"]),
    "interrupted": (lambda: raise_it(KeyboardInterrupt), RuntimeError, ["KeyboardInterrupt"]),
    "sys.exit": (lambda: sys.exit(3), RuntimeError, ["SystemExit: 3"]),
    "the end of a generator": (lambda: raise_it(GeneratorExit), RuntimeError, ["GeneratorExit"]),
    "chained": (raise_chained, ValueError, ["the first fault", "direct cause", "the second fault"]),
    "in a handler": (raise_in_a_handler, ValueError, ["the first fault", "During handling", "the second fault"]),
    "recursion": (recurse, RecursionError, ["maximum recursion depth exceeded", "in recurse"]),
}
if sys.version_info >= (3, 11):
    ODD["a group"] = (
        lambda: raise_it(lambda: ExceptionGroup("two faults", [ValueError("one"), KeyError("other")])),  # noqa: F821
        RuntimeError,
        ["two faults", "ValueError: one", "KeyError: 'other'"],
    )


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_exception_in_a_worker_is_an_error_that_names_it(name: str, kind: str) -> None:
    """Cases 34 and 35: its type where that can be made of a text, its text and traceback always; the position stays
    before it.
    """
    act, expected, parts = ODD[name]
    lanes = {} if kind == "map-style" else {"lanes": 2}
    loader = StatefulDataLoader(KINDS[kind](act), batch_size=None, **lanes, **FORKED)
    iterator = iter(loader)
    got = []
    with pytest.raises(Exception) as caught:
        for _ in range(5):
            got.append(next(iterator))
    assert type(caught.value) is expected
    text = text_of(caught.value)
    for part in [*parts, "in DataLoader worker process"]:
        assert part in text
    assert 2 not in got
    if kind == "map-style":
        assert [*got, *iterator] == [0, 1, 3, 4]
    loader.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_exception_inline_is_itself(name: str, kind: str) -> None:
    """Case 35: as with torch, whatever it is; and the next batch can be asked for."""
    act, _, parts = ODD[name]
    arrived = []
    for loader_class in BOTH:
        dataset = Does(act) if loader_class is DataLoader else KINDS[kind](act)
        lanes = {"lanes": 1} if loader_class is StatefulDataLoader and kind == "a stream" else {}
        loader = loader_class(dataset, batch_size=None, **lanes)
        with pytest.raises(BaseException) as caught:
            list(loader)
        arrived.append(caught.value)
    theirs, ours = arrived
    assert type(ours).__name__ == type(theirs).__name__
    for part in parts:
        assert part in text_of(ours)


class FailsInInit:
    def __init__(self, act: Any) -> None:
        self.act = act

    def __call__(self, worker: int) -> None:
        self.act()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["two arguments", "no Exception", "sys.exit", "of a local class"])
def test_an_odd_exception_in_worker_init_fn_is_an_error_that_names_it(name: str, kind: str) -> None:
    act, expected, parts = ODD[name]
    loader = StatefulDataLoader(KINDS[kind](int), batch_size=None, worker_init_fn=FailsInInit(act), **FORKED)
    with pytest.raises(expected) as caught:
        list(loader)
    for part in parts:
        assert part in text_of(caught.value)
    loader.close()


# ---- what else a dataset does


def run_a_program() -> Any:
    return subprocess.run(["echo", "hello"], capture_output=True, text=True, check=True).stdout


def start_a_process() -> Any:
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    return process.exitcode


def use_a_process_pool() -> Any:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(abs, [-1, -2]))


def use_threads() -> Any:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(abs, [-1, -2]))


def leave_a_daemon_thread() -> Any:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return "left"


def run_asyncio() -> Any:
    async def answer() -> str:
        await asyncio.sleep(0)
        return "answered"

    return asyncio.run(answer())


def fork_by_hand() -> Any:
    child = os.fork()
    if child == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def warn_as_an_error() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.warn("no more of that", DeprecationWarning, stacklevel=1)


HABITS: dict[str, Callable[[], Any]] = {
    "runs a program": run_a_program,
    "uses threads": use_threads,
    "leaves a daemon thread": leave_a_daemon_thread,
    "runs asyncio": run_asyncio,
    "forks by hand": fork_by_hand,
    "recurses without an end": recurse,
    "has warnings as errors": warn_as_an_error,
    "starts a process": start_a_process,
    "uses a pool of processes": use_a_process_pool,
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", HABITS)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*use of fork:DeprecationWarning")
def test_a_habit_of_a_dataset_has_the_effect_that_it_has_under_torch(name: str, num_workers: int) -> None:
    """Workers are daemons in both, which multiprocessing does not let have children of its own."""

    def load(kind: Kind, who: Who) -> Any:
        return kind(Does(HABITS[name]), batch_size=None, collate_fn=as_list, **who)

    found = assert_the_same(load, num_workers)
    forbidden = num_workers > 0 and name in ("starts a process", "uses a pool of processes")
    failing = name in ("recurses without an end", "has warnings as errors")
    assert (found.error is None) == (not forbidden and not failing)
    if forbidden:
        assert found.error is not None
        assert "daemonic processes are not allowed to have children" in found.error.text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_contains_itself_arrives_so(num_workers: int) -> None:
    for loader_class in BOTH:
        who = FORKED if num_workers else {}
        loop = list(loader_class(Does(contain_itself), batch_size=None, collate_fn=as_list, **who))[2]
        assert loop[0] == 1
        assert loop[1] is loop


def contain_itself() -> Any:
    loop: list[Any] = [1]
    loop.append(loop)
    return loop


def leave_a_thread() -> Any:
    threading.Thread(target=threading.Event().wait).start()
    return "left"


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_a_dataset_left_behind_does_not_hold_up_the_end(kind: str) -> None:
    """Nor does it keep the worker alive."""
    loader = StatefulDataLoader(KINDS[kind](leave_a_thread), batch_size=None, **FORKED)
    iterator = iter(loader)
    assert "left" in [next(iterator) for _ in range(5)]
    workers = {worker.pid for worker in multiprocessing.active_children()}
    assert workers
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 5
    assert not {worker.pid for worker in multiprocessing.active_children()} & workers


def test_a_process_that_a_worker_left_behind_does_not_hold_up_the_end() -> None:
    """It holds copies of the worker's descriptors."""
    loader = StatefulDataLoader(Does(leave_a_process), batch_size=None, **FORKED)
    got = list(loader)
    child = got[2]
    try:
        assert [*got[:2], *got[3:]] == [0, 1, 3, 4]
        began = time.monotonic()
        loader.close()
        assert time.monotonic() - began < 5
    finally:
        os.kill(child, 9)


def leave_a_process() -> Any:
    return subprocess.Popen(["sleep", "60"], close_fds=False).pid


# ---- what a worker says

SAYS = """
import logging, sys, warnings
import torch
from torch.utils.data import DataLoader, Dataset
from unbroken import StatefulDataLoader


class Says(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        print(f"row {index} printed")
        print(f"row {index} complained", file=sys.stderr)
        warnings.warn(f"row {index} warned")
        logging.getLogger("mine").error(f"row {index} logged")
        return index


if __name__ == "__main__":
    print("the program printed")  # which workers must not repeat
    kind = {"torch": DataLoader, "ours": StatefulDataLoader}[sys.argv[1]]
    loader = kind(Says(), num_workers=1, multiprocessing_context=sys.argv[2])
    for batch in loader:
        pass
    print("the program is done")
"""


def said(path: Path, loader: str, context: str) -> tuple[list[str], list[str]]:
    """The lines of stdout and stderr of a program, sorted: the program and its worker take turns at them."""
    done = subprocess.run(
        [sys.executable, path, loader, context], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    return sorted(done.stdout.splitlines()), sorted(done.stderr.splitlines())


@pytest.mark.timeout(100)
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_what_workers_say_arrives(tmp_path: Path, context: str) -> None:
    """Prints, warnings and logs, each once, as under torch."""
    path = tmp_path / "says.py"
    path.write_text(SAYS)
    theirs, ours = (said(path, loader, context) for loader in ("torch", "ours"))
    assert ours == theirs
    assert ours[0] == sorted(["the program printed", "the program is done", *(f"row {i} printed" for i in range(4))])
    for what in ("complained", "warned", "logged"):
        assert sum(f"row {i} {what}" in line for i in range(4) for line in ours[1]) == 4
