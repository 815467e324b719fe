"""Signals that come at a bad moment: they wait, and none is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from unbroken.engine.signals import PutOff, blocked, handled


class Told(BaseException):
    """Raised by a handler, with the number of its signal."""


def tell(number: int, _: Any) -> None:
    raise Told(number)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    for number in before:
        signal.signal(number, tell)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_runs_at_the_end_and_not_in_between(handlers: None) -> None:
    done = []
    with pytest.raises(Told, match=str(int(signal.SIGUSR1))), PutOff():
        signal.raise_signal(signal.SIGUSR1)
        done.append(1)
    assert done == [1]
    assert signal.getsignal(signal.SIGUSR1) is tell


def test_all_handlers_run_whatever_they_raise(handlers: None) -> None:
    with pytest.raises(Told) as caught, PutOff():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR1)  # pending once, as for the system
    assert caught.value.args == (signal.SIGUSR2,)
    assert isinstance(caught.value.__context__, Told)
    assert caught.value.__context__.args == (signal.SIGUSR1,)
    assert caught.value.__context__.__context__ is None


def test_an_error_inside_is_not_lost_for_a_signal(handlers: None) -> None:
    with pytest.raises(Told) as caught, PutOff():
        signal.raise_signal(signal.SIGUSR1)
        raise KeyError("inside")
    assert isinstance(caught.value.__context__, KeyError)


def test_one_inside_another_waits_for_the_outer_one(handlers: None) -> None:
    done = []
    with pytest.raises(Told), PutOff():
        with PutOff():
            signal.raise_signal(signal.SIGUSR1)
        done.append(1)
    assert done == [1]
    assert signal.getsignal(signal.SIGUSR1) is tell


def test_in_another_thread_handlers_of_the_main_one_are_left_alone(handlers: None) -> None:
    found = []

    def look() -> None:
        with PutOff():
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [tell]


def test_signals_without_a_handler_do_what_they_do(handlers: None) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's loader may have left a handler
    try:
        with PutOff():
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
            subprocess.run(["true"], check=True)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_those_that_are_handled_and_those_that_end_groups(handlers: None) -> None:
    assert {signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM} <= handled()
    assert signal.SIGKILL not in handled()


def test_a_process_that_is_started_gets_what_is_blocked_when_it_says_so() -> None:
    with blocked({signal.SIGTERM}) as before:
        assert signal.SIGTERM not in before
        script = "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert str(int(signal.SIGTERM)) in found.split()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert os.getpid()


def test_what_a_handler_raises_on_the_way_in_comes_at_the_end(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who enters has something to do that has to be done."""
    real, done = signal.signal, []

    def interrupted(number: int, handler: Any) -> Any:
        monkeypatch.setattr(signal, "signal", real)
        raise Told(number)

    context = PutOff()
    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(Told), context:
        done.append(1)
    assert done == [1]
    assert signal.getsignal(signal.SIGUSR1) is tell
