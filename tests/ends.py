"""A program that ends training loops in every way there is, and looks at what is left of them: see ``test_ends``.

It lives through all of it. Loops that end with their program run in processes that it forks, each with a session of its
own: a fresh interpreter for each would take two seconds. All processes of these carry a mark in their environment.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from tests import datasets as ds
from tests.leftovers import children, left, marked, others, wait_until
from unbroken import StatefulDataLoader, read_jsonl

ROWS = 48
# How often each is among 40 ends: an interpreter that ends in order takes long.
OF_PROGRAMS = {
    "SIGTERM to the group": 3,
    "SIGINT to the group": 1,
    "SIGKILL": 3,
    "SIGKILL beside a forked child": 2,
    "handled SIGTERM to the group": 1,
    "handled SIGINT to the group": 1,
    "exception in the loop": 1,
    "exit": 1,
    "os._exit": 2,
    "last line": 1,
}
OF_LOOPS = {
    "exception in the loop": 3,
    "iterator dropped": 3,
    "loader dropped in a cycle": 2,
    "close": 3,
    "close in a handler of signals": 2,
    "close in a thread": 2,
    "KeyboardInterrupt": 4,
    "forked child that goes by os._exit": 1,
    "forked child that goes by sys.exit": 1,
    "forked child that goes by an exception": 1,
    "forked child that iterates anew": 1,
    "forked child of multiprocessing": 1,
}


@dataclass(frozen=True)
class Case:
    """How a loop runs, and how it ends: ``at`` batches in; with a worker ``killed`` or ``blocked`` just before."""

    end: str
    program: bool
    kind: str
    workers: int
    method: str
    persistent: bool
    held: bool
    killed: bool
    blocked: bool
    at: int


def cases(number: int) -> Iterator[Case]:
    """As many ends, of all kinds; the rest is drawn, the same every time."""
    generator = random.Random(7)
    ends = [(end, of is OF_PROGRAMS) for of in (OF_PROGRAMS, OF_LOOPS) for end in of for _ in range(of[end])]
    generator.shuffle(ends)
    for place in range(number):
        end, program = ends[place % len(ends)]
        kind = ("map", "iterable", "stream")[place % 3]  # the ends come round with another one each time
        # A blocked worker is given a second where there is somebody to give it: that is for a few of them.
        at_once = "SIGKILL" in end or end in ("SIGTERM to the group", "os._exit")
        method = "spawn" if place in (20, 110) else "thread" if kind == "stream" and place % 6 == 2 else "fork"
        yield Case(
            end=end,
            program=program,
            kind=kind,
            workers=1 if method == "spawn" else generator.randint(1, 3),
            method=method,
            persistent=generator.random() < 0.3,
            held=generator.random() < 0.5,
            killed=method == "fork" and generator.random() < 0.5,
            blocked=method == "fork" and generator.random() < (0.4 if at_once else 0.05),
            at=generator.randint(1, 6),
        )


# ---- datasets; ``told`` and ``never`` are ends of pipes: a row says that it blocks, and reads what is never written


@dataclass
class Block:
    """Blocks at a row, or never (-1)."""

    row: int
    told: int
    never: int

    def __call__(self, row: int) -> None:
        if row == self.row and multiprocessing.parent_process() is not None:
            os.write(self.told, b"x")
            os.read(self.never, 1)


CALM = Block(-1, -1, -1)
now = [CALM]
"""Of the functions of streams, which would be other functions with it."""


class Rows(Dataset[Any]):
    def __init__(self, block: Block) -> None:
        self.block = block

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        self.block(index)
        return torch.tensor(index)


class Lanes(ds.WellBehaved):
    def __init__(self, block: Block) -> None:
        super().__init__(ROWS)
        self.block = block

    def row(self, number: int) -> Any:
        self.block(number)
        return torch.tensor(number)


def tensors(row: dict[str, int], _: Any) -> dict[str, Any]:
    now[0](row["row"])
    return {"row": torch.tensor(row["row"])}


def loader_of(case: Case, folder: Path, block: Block, workers: int | None = None) -> StatefulDataLoader:
    workers = case.workers if workers is None else workers
    more: dict[str, Any] = {"batch_size": 2, "seed": 5, "num_workers": workers}
    if workers:
        more |= {"multiprocessing_context": case.method, "persistent_workers": case.persistent}
    if case.kind == "map":
        return StatefulDataLoader(Rows(block), **more)
    if case.kind == "iterable":
        return StatefulDataLoader(Lanes(block), lanes=3, **more)
    path = folder / "rows.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"row": row}) + "\n" for row in range(ROWS)))
    return StatefulDataLoader(read_jsonl(path).map(tensors, rng=True), lanes=3, **more)


def rows_of(batches: Any) -> list[Any]:
    return [(batch["row"] if isinstance(batch, dict) else batch).tolist() for batch in batches]


class Loop:
    """A training loop up to its end."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        told, self._told = os.pipe()
        self._hear = told
        self._never, self._write = os.pipe()
        self._folder = folder
        self.expected = rows_of(loader_of(case, folder, CALM, 0))
        row = self.expected[case.at][0] if case.blocked else -1
        now[0] = Block(row, self._told, self._never)
        self.loader: Any = loader_of(case, folder, now[0])
        self.seen: list[Any] = []
        self.iterator: Any = None

    def run(self) -> None:
        """Some batches; a worker dies, or waits in a read."""
        self.iterator = iter(self.loader)
        for batch in self.iterator:
            self.take(batch)
            if len(self.seen) == self.case.at:
                break
        if self.case.blocked:
            os.read(self._hear, 1)
        if self.case.killed:
            os.kill(random.Random(self.case.at).choice(workers()), signal.SIGKILL)

    def is_exact(self) -> bool:
        """Whether what comes after the position of now is what was not seen."""
        other = loader_of(self.case, self._folder, CALM, 0)
        other.load_state_dict(self.loader.state_dict())
        whole = self.rows() == self.expected  # then the rest is the next epoch, which is the same
        return self.rows() + rows_of(other) == self.expected * (1 + whole)

    def take(self, batch: Any) -> None:
        self.seen.append(batch if self.case.held else rows_of([batch])[0])

    def rows(self) -> list[Any]:
        return [row if isinstance(row, list) else rows_of([row])[0] for row in self.seen]

    def close_pipes(self) -> None:
        for end in (self._told, self._hear, self._never, self._write):
            os.close(end)


def workers() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


# ---- loops that end with their program


class Stop(BaseException):
    pass


def stop(*_: Any) -> None:
    raise Stop


kept: list[Any] = []  # what is alive when a program ends


def be_program(case: Case, folder: Path, say: int) -> None:
    """Never returns to the loop below: it ends as the case says, or is ended."""
    if case.end.startswith("handled"):
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
    loop = Loop(case, folder)
    kept.append(loop)
    loop.run()
    child = os.fork() if "beside" in case.end else 0
    if "beside" in case.end and child == 0:
        time.sleep(100)
    try:
        os.write(say, json.dumps({"workers": workers(), "child": child}).encode() + b"\n")
        if case.end == "exception in the loop":
            raise KeyError("in the loop")
        if case.end == "os._exit":
            os._exit(0)
        if case.end in ("exit", "last line"):
            sys.exit(0)
        while True:
            for batch in loop.iterator:
                loop.take(batch)
                time.sleep(0.001)  # a step; the signal comes in it, or in what gets the next batch
            signal.pause()
    except Stop:
        os.write(say, json.dumps({"exact": loop.is_exact()}).encode() + b"\n")
        sys.exit(0)


def end_program(case: Case, folder: Path) -> dict[str, Any]:
    """Fork a program, and end it. What it wrote to standard error is told."""
    with tempfile.TemporaryFile() as errors:
        found = end_program_that_writes(case, folder, errors)
        errors.seek(0)
        return {**found, "errors": errors.read().decode()}


def end_program_that_writes(case: Case, folder: Path, errors: Any) -> dict[str, Any]:
    hear, say = os.pipe()
    process = os.fork()
    if process == 0:
        os.setsid()
        os.close(hear)
        os.dup2(errors.fileno(), 2)
        be_program(case, folder, say)
    os.close(say)
    told = os.fdopen(hear)
    ready = json.loads(told.readline() or "{}")
    found: dict[str, Any] = {"workers": len(ready.get("workers", ())), "exact": True}
    if "SIGKILL" in case.end:
        os.kill(process, signal.SIGKILL)
    elif case.end.endswith("to the group"):
        os.killpg(process, getattr(signal, re.findall("SIG[A-Z]+", case.end)[0]))
        if case.end.startswith("handled"):
            found["exact"] = json.loads(told.readline() or "{}").get("exact")
    ended: list[int] = []
    wait_until(lambda: bool(ended or has_ended(process, ended)), lambda: f"{case}: {process} does not end")
    found["status"] = ended[0]
    child = {ready["child"]} - {0} if ready else set()
    wait_until(lambda: marked() <= child, lambda: f"{case}: {marked() - child} outlived their program")
    for pid in child:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not marked(), lambda: f"{case}: {marked()} live on")
    told.close()
    return found


def has_ended(process: int, status: list[int]) -> bool:
    found, how = os.waitpid(process, os.WNOHANG)
    status += [os.waitstatus_to_exitcode(how)] if found else []
    return bool(found)


# ---- loops that end in a program that lives on


def end_loop(case: Case, folder: Path) -> dict[str, Any]:
    """Run a loop here and end it. Where it is not given up, it runs to the end of its epoch, and has to be exact."""
    loop = Loop(case, folder)
    pipes = loop.close_pipes
    exact = True
    try:
        loop.run()
        if case.end == "exception in the loop":
            raise KeyError
    except KeyError:
        pass
    if case.end.startswith("close"):
        exact = loop.is_exact()
        if case.end == "close":
            loop.loader.close()
        elif case.end == "close in a thread":
            run_in_thread(loop.loader.close)
        else:
            signal.signal(signal.SIGUSR1, lambda *_, loader=loop.loader: loader.close())
            signal.raise_signal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        exact &= loop.is_exact()
    elif case.end == "loader dropped in a cycle":
        cycle = [loop.loader]
        cycle.append(cycle)
    elif case.end == "KeyboardInterrupt":
        exact = interrupt(loop)
    elif case.end.startswith("forked child"):
        exact = fork(loop) and (case.blocked or go_on(loop))
    else:
        exact = loop.is_exact()
    del loop
    cycle = None
    gc.collect()
    pipes()
    return {"exact": exact, "errors": "", "status": 0}


def go_on(loop: Loop) -> bool:
    """To the end of the epoch."""
    for batch in loop.iterator:
        loop.take(batch)
    return loop.rows() == loop.expected


def interrupt(loop: Loop) -> bool:
    """Ctrl-C after some microseconds, in a batch or between two. One that Python swallows in a finalizer is none."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = lambda told: None if told.exc_type is KeyboardInterrupt else sys.__unraisablehook__(told)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005 * loop.case.at)
        for batch in loop.iterator:
            loop.seen.append(batch)  # and nothing else, in which a batch would be lost
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    sys.unraisablehook = sys.__unraisablehook__
    return loop.is_exact()


def run_in_thread(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def fork(loop: Loop) -> bool:
    """A child that has all that we have, and comes to an end; ours goes on. Whether the child found what it should."""
    how = loop.case.end.removeprefix("forked child ")
    if how == "of multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=be_child, args=(loop, how))
        process.start()
        process.join()
        return process.exitcode == 0
    child = os.fork()
    if child == 0:
        be_child(loop, how)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (1 if "exception" in how else 0)


def be_child(loop: Loop, how: str) -> None:
    try:
        next(loop.iterator)
        os._exit(3)
    except RuntimeError as error:
        if "belongs to the process that made it" not in str(error):
            os._exit(4)
    loop.loader.state_dict()
    if how == "that iterates anew" and not loop.case.blocked:
        loop.loader.load_state_dict(loop.loader.state_dict())
        if len(rows_of(loop.loader)) != ROWS // 2 - len(loop.seen):
            os._exit(5)
    if how == "that goes by an exception":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise KeyError("in the child")
    if how == "that goes by os._exit":
        os._exit(0)
    sys.exit(0)


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("unbroken").addHandler(logging.NullHandler())  # replaced workers are no news here
    first, last, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    chosen = list(cases(last))[first:]
    for case in [case for case in chosen if not case.program][:6]:  # what is opened once is open now
        end_loop(case, folder)
    gc.collect()
    gc.freeze()  # of all that was imported, which a program that we fork would look through at its end
    resource_tracker.ensure_running()
    others.update(marked() | children())
    before = left()
    print(json.dumps(before), flush=True)
    for case in chosen:
        found = end_program(case, folder) if case.program else end_loop(case, folder)
        wait_until(lambda: left() == before, lambda case=case: f"{case}: {left()}")  # threads may need a moment
        print(json.dumps({**asdict(case), **found, "left": left()}), flush=True)


if __name__ == "__main__":
    main()
