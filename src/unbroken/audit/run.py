"""The process of one rank in one stretch: ``python -m unbroken.audit.run ORDERS EVENTS CONTROL``.

It makes the loader, loads the state, delivers batches into its log, saves as a trainer does, and halts where it is
told to: it writes a byte to the descriptor EVENTS and waits, and whoever started it ends it there. A halt in the middle
of a fetch or of a save counts the calls that the interpreter makes in it, and waits inside one of them.

Exit codes: 0 done; 3 the factory or the loader raised; the traceback is on stderr and its last line in the log.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import numpy as np
import orjson
import torch

from unbroken.audit.probe import probe
from unbroken.audit.records import brief, digest_of, fields_of, plain, row_of, rows_of
from unbroken.audit.saves import merged, read_states, write_state
from unbroken.audit.stretch import Halt, Line, Orders
from unbroken.audit.subject import Subject
from unbroken.errors import AuditError, FactoryError
from unbroken.factories import accepted, load_factory

__all__ = ["Runner", "carry_out", "main", "make_subject"]

FAILED: Final = 3
_UNCOUNTED: Final = 40  # calls that a fetch or save is taken to make before one was counted
_MOST_OF: Final = 0.8
_LOOKS: Final = (1, 3, 8)  # batches after a save at which its state is looked at again
_PR_SET_PDEATHSIG: Final = 1


def make_subject(factory: str, arguments: dict[str, Any], epoch: int = 0, state_of: str = "") -> Subject:
    """The loader that a factory makes, called with those of the arguments that it takes.

    Raises ``AuditError`` where more than one worker or rank is asked of a factory that takes no such argument.
    """
    function = load_factory(factory)
    given = accepted(function, arguments)
    for name, least, option in (("num_workers", 0, "--workers"), ("dp_world_size", 1, "--ranks")):
        if name not in given and arguments.get(name, least) > least:
            also = ", dp_rank" if name == "dp_world_size" else ""
            raise AuditError(
                f"{factory} does not take {name}, so that {option} cannot reach the loader.\n"
                f"Write it as def {factory.rpartition(':')[2]}({name}{also}) and pass {name} on, or leave {option} out."
            )
    return Subject(function(**given), epoch, state_of)


def seed_globals(seed: int) -> None:
    """Another process has other global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@final
class Runner:
    """One rank, from its orders to their end."""

    def __init__(self, orders: Orders, events: int, control: int) -> None:
        self.orders, self.events, self.control = orders, events, control
        self.log = os.open(orders.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.done = orders.start
        self.subject: Subject | None = None
        self.counted = {"fetch": 0, "save": 0}
        self.handed_out: tuple[Any, bytes, int] | None = None
        self.let_go = False
        self.say(started=True)

    def say(self, **words: Any) -> None:
        os.write(self.log, orjson.dumps({name: plain(word) for name, word in words.items()}) + b"\n")

    def run(self) -> None:
        orders = self.orders
        if orders.end == 0:
            self.say(probe=probe(self.made_again))
            return
        seed_globals(orders.seed)
        subject = self.subject = make_subject(
            orders.factory,
            dict(orders.arguments),
            orders.before["epochs"][orders.rank] if orders.before else 0,
            orders.before.get("of", ""),
        )
        self.say(loader=subject.name, own_iterator=subject.iterates_itself)
        if orders.before:
            states = read_states(Path(orders.before["folder"]), orders.start, orders.before["world"], orders.format)
            subject.load(merged(states, orders.rank, len(orders.before["epochs"])))
        if orders.start == 0 in orders.saves:
            self.save_first()
        halt = orders.halt
        while self.done < orders.end:
            if halt is not None and (halt.after, halt.where) == (self.done, "between"):
                self.wait()
            try:
                batch = self.act("fetch", subject.fetch)
            except StopIteration:
                self.say(ended=True)
                return
            self.deliver(batch)
            del batch
            if halt is not None and (halt.after, halt.where) == (self.done - 1, "fetch"):
                self.wait()  # the fetch made fewer calls than were counted
            if self.done in orders.saves or (self.done in orders.over and subject.comes_to_an_end()):
                self.act("save", self.save)
                self.keep_digest()
                if halt is not None and (halt.after, halt.where) == (self.done, "save"):
                    self.wait()

    def save_first(self) -> None:
        """A save before the first batch. A loader may refuse it: without a save a run begins anew."""
        try:
            self.save()
            self.keep_digest()
        except Exception as error:
            self.say(no_first_save=f"{type(error).__name__}: {error}")

    def made_again(self) -> Subject:
        seed_globals(self.orders.seed)
        return make_subject(self.orders.factory, dict(self.orders.arguments))

    def deliver(self, batch: Any) -> None:
        if self.let_go:  # the loader swallowed it
            raise SystemExit(0)
        rows = rows_of(batch)
        if self.done == self.orders.start:
            self.say(fields=fields_of(rows[0]) if rows else [])
        epoch = self.subject.epoch if self.subject is not None else 0
        line = Line(epoch, digest_of(batch), brief(batch), tuple(map(row_of, rows)))
        os.write(self.log, line.to_json())
        self.done += 1
        self.look_again()

    def save(self) -> None:
        if self.subject is None:
            return
        orders = self.orders
        state = self.subject.state()
        if self.let_go:  # the loader swallowed it
            raise SystemExit(0)
        self.say(state_of=self.subject.state_of)
        write_state(state, Path(orders.folder), self.done, orders.rank, orders.format)
        self.handed_out = state, b"", self.done

    def keep_digest(self) -> None:
        """Of the state that was just handed out. It is no part of the save, so that halts in a save lie in the save."""
        if self.handed_out is not None:
            (state, _, step), self.handed_out = self.handed_out, None
            with suppress(Exception):  # what is in a state need not have a digest
                self.handed_out = state, digest_of(state), step

    def look_again(self) -> None:
        """Whether the state that was handed out at the last save has changed since: a live one does."""
        if self.handed_out is None or self.done - self.handed_out[2] not in _LOOKS:
            return
        state, digest, step = self.handed_out
        if digest_of(state) != digest:
            self.handed_out = None
            self.say(live=[step, self.done])

    def act(self, what: str, action: Callable[[], Any]) -> Any:
        """A fetch or a save: halted in its middle, or its calls counted where the halt comes in the next."""
        halt = self.orders.halt
        if halt is None or halt.where != what:
            return action()
        if halt.after == self.done:
            return self.halted(halt, what, action)
        calls = 0

        def count(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            return action()
        finally:
            sys.setprofile(None)
            self.counted[what] = calls

    def halted(self, halt: Halt, what: str, action: Callable[[], Any]) -> Any:
        # The first save of a process makes more calls than the next, for it imports.
        left = 1 + int(halt.part * _MOST_OF * (self.counted[what] or _UNCOUNTED))

        def count(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal left
            left -= 1
            # One that is closed in the middle of any() would swallow the end.
            if left <= 0 and frame.f_code.co_name != "<genexpr>":
                sys.setprofile(None)
                self.wait()

        sys.setprofile(count)
        try:
            return action()
        finally:
            sys.setprofile(None)

    def wait(self) -> None:
        """Say that the halt has come, and wait to be ended; end by itself when nobody does."""
        os.write(self.events, b"h")
        os.read(self.control, 1)
        self.let_go = True
        raise SystemExit(0)


def carry_out(runner: Runner) -> int:
    """Run the orders; the exit code. What the factory or the loader raised is in the log, its traceback on stderr."""
    try:
        runner.run()
        if runner.subject is not None:
            runner.subject.close()
        runner.say(done=True)
    except SystemExit as error:
        if runner.let_go:
            raise
        runner.say(error=f"SystemExit: the factory or the loader ended the program (exit code {error.code})")
        return FAILED
    except Exception as error:
        cannot = isinstance(error, AuditError | FactoryError)
        if not cannot:
            sys.stderr.write(_told(error))
        runner.say(error=f"{error}" if cannot else f"{type(error).__name__}: {error}", cannot=cannot)
        return FAILED
    return 0


def _told(error: Exception) -> str:
    """The traceback from the loader's own code on."""
    told = traceback.TracebackException.from_exception(error)
    ours = str(Path(__file__).parent)
    while told.stack and told.stack[0].filename.startswith(ours):
        del told.stack[0]
    return "".join(told.format())


def _end_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)


def main(orders: str, events: str, control: str, parent: str) -> int:
    """Run the orders in a file; the exit code."""
    _end_with_parent(int(parent))
    code = carry_out(Runner(Orders.from_json(Path(orders).read_text("utf-8")), int(events), int(control)))
    _end_with_threads(code)
    return code


def _end_with_threads(code: int) -> None:
    """End at once where a thread would keep the process alive: what it was started for is done."""
    others = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    if others:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
