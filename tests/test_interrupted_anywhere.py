"""Ctrl-C, or an error raised by any handler of signals, at any line of the library: the batches are the same.

The lines are those that run in the training process. An interrupt is raised where Python would run a handler, from a
trace function, so that a place that fails can be told and tried again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import unbroken
from tests import datasets as ds
from unbroken import StatefulDataLoader, read_jsonl, seeding
from unbroken.engine.signals import PutOff

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

OURS = str(Path(unbroken.__file__).parent)


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    """A trace function may also raise where a ``with`` ends, before it does, and no handler of signals can."""
    yield
    while seeding._guard._is_owned():  # type: ignore[attr-defined]
        seeding._guard.release()


class HandlerError(Exception):
    """Such as a handler of SIGALRM or SIGTERM may raise: not told from other errors by its type."""


class Interrupt:
    """Raises ``error`` at a line of ours, counted from now on: as a trace function."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.at, self.error = at, error
        self.lines = 0
        self.where = ""
        self.process = os.getpid()

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if self.where or not name.startswith(OURS) or os.getpid() != self.process or is_swallowed(frame):
            return None
        if event in ("call", "line") and not handlers_wait():
            if self.lines == self.at:
                self.where = f"{name}:{frame.f_lineno}"
                raise self.error
            self.lines += 1
        return self


def is_swallowed(frame: FrameType | None) -> bool:
    """Whether Python prints what is raised here, and goes on: in a finalizer, or where a generator is closed."""
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        if frame.f_code.co_name in ("<genexpr>", "_places", "_died"):
            return True
        frame = frame.f_back
    return False


def handlers_wait() -> bool:
    """Whether a handler of signals would not run now."""
    return isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), PutOff)


def numbers(rows: list[dict[str, int]]) -> torch.Tensor:
    return torch.tensor([int(row["row"]) for row in rows])


def stream(folder: Path) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"row": row}) + "\n" for row in range(31)))
    return read_jsonl(path)


Make = Callable[[Path], StatefulDataLoader]
ARGUMENTS: dict[str, Any] = {"batch_size": 2, "seed": 3}
WORKERS = ARGUMENTS | {"num_workers": 2, "multiprocessing_context": "fork"}
THREADS = ARGUMENTS | {"num_workers": 2, "multiprocessing_context": "thread"}
HERE: dict[str, Make] = {
    "map": lambda folder: StatefulDataLoader(ds.Numbers(31), shuffle=True, **ARGUMENTS),
    "custom sampler": lambda folder: StatefulDataLoader(ds.Numbers(31), sampler=ds.SamplerWithState(31), **ARGUMENTS),
    "iterable": lambda folder: StatefulDataLoader(ds.Late(31), lanes=3, **ARGUMENTS),
    "stream": lambda folder: StatefulDataLoader(stream(folder), lanes=3, collate_fn=numbers, **ARGUMENTS),
}
ELSEWHERE: dict[str, Make] = {
    "map": lambda folder: StatefulDataLoader(ds.Numbers(31), shuffle=True, **WORKERS),
    "map, persistent": lambda folder: StatefulDataLoader(ds.Numbers(31), persistent_workers=True, **WORKERS),
    "map, any order": lambda folder: StatefulDataLoader(ds.Numbers(31), in_order=False, **WORKERS),
    "custom sampler": lambda folder: StatefulDataLoader(ds.Numbers(31), sampler=ds.SamplerWithState(31), **WORKERS),
    "iterable": lambda folder: StatefulDataLoader(ds.Late(31), lanes=3, **WORKERS),
    "stream": lambda folder: StatefulDataLoader(stream(folder), lanes=3, collate_fn=numbers, **WORKERS),
    "stream in threads": lambda folder: StatefulDataLoader(stream(folder), lanes=3, collate_fn=numbers, **THREADS),
}


def workers() -> list[int]:
    return sorted(process.pid for process in multiprocessing.active_children() if process.pid is not None)


def one(batches: Any, error: type[BaseException] = KeyboardInterrupt) -> list[Any]:
    """The next batch, or none at the end. Nothing comes between the iterator and the list in which it would be lost.

    An error that came where the user's sampler is asked ahead is raised when what was before it is through.
    """
    for _ in range(2):
        try:
            for batch in batches:
                return [batch]
        except error:
            continue
        return []
    raise AssertionError("there was one interrupt")


def interrupted(make: Make, folder: Path, error: type[BaseException], seed: int, lines: int, epochs: int = 2) -> Any:
    """The batches of each epoch, where about every second step is interrupted somewhere, and some workers killed; and
    where that was.
    """
    generator = random.Random(seed)
    loader = make(folder)
    found: list[list[Any]] = []
    places = []
    for _ in range(epochs):
        batches, seen, over = iter(loader), [], False
        while not over:
            if generator.random() < 0.1 and (alive := workers()):
                os.kill(generator.choice(alive), signal.SIGKILL)
            interrupt = Interrupt(generator.randrange(2 * lines), error)
            traced = sys.gettrace()
            try:
                sys.settrace(interrupt)
                try:
                    for batch in batches:
                        seen.append(batch)
                        break
                    else:
                        over = True
                finally:
                    sys.settrace(traced)
            except error:
                seen += one(batches, error)
            if interrupt.where:
                places.append(interrupt.where)
        found.append([batch.tolist() for batch in seen])
    loader.close()
    return found, places


def check(make: Make, folder: Path, error: type[BaseException], seeds: range, *, in_order: bool = True) -> None:
    calm = make(folder)
    expected = [[batch.tolist() for batch in calm] for _ in range(2)]
    calm.close()
    count = Interrupt(-1, error)
    loader = make(folder)
    batches = iter(loader)
    next(batches)
    sys.settrace(count)
    next(batches)
    sys.settrace(None)
    loader.close()
    for seed in seeds:
        found, places = interrupted(make, folder, error, seed, count.lines)
        assert len(places) >= 5
        if in_order:
            assert found == expected, (seed, places)
        else:
            assert [sorted(epoch) for epoch in found] == [sorted(epoch) for epoch in expected], (seed, places)


@pytest.mark.parametrize("kind", HERE)
def test_ctrl_c_anywhere_changes_nothing(kind: str, tmp_path: Path) -> None:
    check(HERE[kind], tmp_path, KeyboardInterrupt, range(20))


@pytest.mark.parametrize("error", [KeyboardInterrupt, HandlerError])
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_an_interrupt_anywhere_changes_nothing_while_workers_die(
    kind: str, error: type[BaseException], tmp_path: Path
) -> None:
    """An error of a handler is not taken for one of the dataset's, after which a batch would be passed over."""
    check(ELSEWHERE[kind], tmp_path, error, range(4), in_order="any order" not in kind)


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_position_that_is_saved_after_an_interrupt_anywhere_is_exact(kind: str, tmp_path: Path) -> None:
    """In the loop that was interrupted, and in a program that starts anew."""
    make = HERE[kind]
    expected = [batch.tolist() for batch in make(tmp_path)]
    generator = random.Random(5)
    for _ in range(40):
        loader, seen = make(tmp_path), []
        batches = iter(loader)
        while not seen or generator.random() < 0.8:
            seen += one(batches)
        interrupt = Interrupt(generator.randrange(250), KeyboardInterrupt)
        try:
            sys.settrace(interrupt)
            try:
                for batch in batches:
                    seen.append(batch)
                    break
            finally:
                sys.settrace(None)
        except KeyboardInterrupt:
            pass
        other = make(tmp_path)
        other.load_state_dict(loader.state_dict())
        again = [batch.tolist() for batch in seen] + [batch.tolist() for batch in other]
        whole = len(seen) == len(expected)
        assert again == expected * (1 + whole) or (whole and kind == "map"), interrupt.where


@pytest.mark.timeout(60, method="thread")  # the other one takes SIGALRM for itself
@pytest.mark.parametrize("kind", ["map", "iterable", "stream", "stream in threads"])
def test_ctrl_c_at_any_moment_changes_nothing_while_workers_die(kind: str, tmp_path: Path) -> None:
    """The same by real signals, after some microseconds."""
    make = ELSEWHERE[kind]
    calm = make(tmp_path)
    expected = [batch.tolist() for batch in calm]
    generator = random.Random(kind)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(5):
            loader, seen, over = make(tmp_path), [], False
            batches = iter(loader)
            while not over:
                if generator.random() < 0.1 and (alive := workers()):
                    os.kill(generator.choice(alive), signal.SIGKILL)
                try:
                    signal.setitimer(signal.ITIMER_REAL, generator.choice([3e-4, 1e-2]) * generator.random() + 1e-6)
                    for batch in batches:
                        seen.append(batch)
                    over = True
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    seen += one(batches)  # or nothing would ever be made
            assert [batch.tolist() for batch in seen] == expected
            loader.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
