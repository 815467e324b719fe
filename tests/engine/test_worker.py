"""The other end of a channel: tasks in, batches out, and errors that keep their names on the way."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests import datasets as ds
from unbroken.engine.channel import Channel
from unbroken.engine.cursor import Rules
from unbroken.engine.host import MapTask, Plan, TurnTask
from unbroken.engine.ring import create_memory, map_memory
from unbroken.engine.signals import handled
from unbroken.engine.wire import decode
from unbroken.engine.worker import Failure, main
from unbroken.errors import InexactDataset, UnsealableState, UnsendableBatch
from unbroken.lane_position import LanePosition

# Failures


class Odd(Exception):
    """Takes two arguments."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class Number(Exception):
    """Takes a number."""

    def __init__(self, number: Any) -> None:
        super().__init__(int(number))


class Silent(ValueError):
    """Has a text of its own."""

    def __str__(self) -> str:
        return "the disk is full"


def travelled(error: BaseException, where: str = "in worker 1 (lane 3, sample 7)") -> BaseException:
    """The error as the training process raises it."""
    try:
        raise error
    except BaseException as raised:
        failure = Failure.of(raised, where)
    try:
        pickle.loads(pickle.dumps(failure)).throw()
    except BaseException as arrived:
        return arrived
    raise AssertionError("a failure throws")


@pytest.mark.parametrize(
    "error",
    [
        KeyError("k"),
        KeyError(("a", 1)),
        ValueError("bad row"),
        IndexError(),
        FileNotFoundError(2, "No such file", "rows.bin"),
        OSError("device"),
        ZeroDivisionError("division by zero"),
        RuntimeError("boom"),
        AssertionError("no"),
        RecursionError("too deep"),
        MemoryError(),
        torch.cuda.OutOfMemoryError("out of memory"),
    ],
    ids=repr,
)
def test_an_error_keeps_its_type_and_says_where_and_what(error: Exception) -> None:
    """Case 35: with the traceback of the other process."""
    arrived = travelled(error)
    assert type(arrived) is type(error)
    text = str(arrived)
    assert text.startswith(f"Caught {type(error).__qualname__} in worker 1 (lane 3, sample 7).\nOriginal Traceback")
    assert "in travelled\n    raise error" in text
    assert text.rstrip().endswith(str(error) or type(error).__qualname__)


@pytest.mark.parametrize(
    "error",
    [
        Odd("row 5", "gone"),
        Number(3),
        UnicodeDecodeError("utf8", b"\xff", 0, 1, "invalid"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_cannot_be_made_from_a_text_is_a_runtime_error_that_names_it(error: Exception) -> None:
    """Case 34."""
    arrived = travelled(error)
    assert type(arrived) is RuntimeError
    assert f"Caught {type(error).__qualname__} in worker 1" in str(arrived)
    assert str(error) in str(arrived)


def test_an_error_that_has_a_text_of_its_own_keeps_it() -> None:
    arrived = travelled(Silent("unused"))
    assert type(arrived) is Silent
    assert str(arrived) == "the disk is full"


def test_an_error_of_a_class_that_cannot_be_found_is_a_runtime_error_that_names_it() -> None:
    """Case 34."""

    class Local(Exception):
        pass

    arrived = travelled(Local("row 5"))
    assert type(arrived) is RuntimeError
    assert "Local" in str(arrived)
    assert "row 5" in str(arrived)


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_would_end_the_training_loop_in_silence_is_a_runtime_error(error: BaseException) -> None:
    """Case 35: ``sys.exit()``, a stray ``StopIteration``."""
    arrived = travelled(error)
    assert type(arrived) is RuntimeError
    assert f"Caught {type(error).__name__} in worker 1" in str(arrived)


@pytest.mark.parametrize("error", [InexactDataset("not exact"), UnsealableState("a state")])
def test_errors_of_the_library_arrive_in_their_own_words(error: Exception) -> None:
    arrived = travelled(error)
    assert (type(arrived), str(arrived)) == (type(error), str(error))


def test_a_batch_that_cannot_be_sent_is_told_with_the_place_that_it_came_up_at() -> None:
    """Case 34."""
    arrived = travelled(UnsendableBatch("A batch holds a lock."))
    assert type(arrived) is UnsendableBatch
    assert str(arrived) == "A batch holds a lock.\nIt came up in worker 1 (lane 3, sample 7)."


class Named(Exception):
    """Takes its text by name, as torch knows it of some."""

    message = "none"

    def __init__(self, *, message: str) -> None:
        super().__init__(message)


class Mute(Exception):
    """Fails when it is asked for its text."""

    def __str__(self) -> str:
        raise ValueError("no text today")


class Swapped(Exception):
    """Is no exception when it is made."""

    def __new__(cls, *arguments: Any) -> Any:
        return super().__new__(cls) if not arguments else "text"


def test_an_error_that_takes_its_text_by_name_keeps_its_type() -> None:
    arrived = travelled(Named(message="the disk is full"))
    assert type(arrived) is Named
    assert "the disk is full" in str(arrived)


@pytest.mark.parametrize("error", [Silent("unused"), Mute("unused")], ids=lambda error: type(error).__name__)
def test_an_error_that_does_not_show_the_text_has_it_in_its_cause(error: Exception) -> None:
    """Case 35: or the worker's traceback would be lost."""
    arrived = travelled(error)
    assert type(arrived) is type(error)
    assert type(arrived.__cause__) is RuntimeError
    assert "in travelled\n    raise error" in str(arrived.__cause__)


def test_what_is_made_again_and_is_no_exception_is_not_raised() -> None:
    arrived = travelled(Swapped())
    assert type(arrived) is RuntimeError
    assert "Caught Swapped in worker 1" in str(arrived)


def test_an_error_that_was_raised_again_keeps_nothing_alive() -> None:
    """Its traceback would hold the loader's iterator, and with it the workers, until the garbage is collected."""

    class Held:
        pass

    def throw(_: Held) -> None:
        Failure.of(ValueError("bad row"), "in worker 1").throw()

    gc.collect()
    gc.disable()
    try:
        held = Held()
        watch = weakref.ref(held)
        with contextlib.suppress(ValueError):
            throw(held)
        del held
        assert watch() is None
    finally:
        gc.enable()


def test_a_cause_is_part_of_the_text() -> None:
    error = ValueError("bad row")
    error.__cause__ = KeyError("column")
    assert "KeyError: 'column'" in str(travelled(error))


# A worker process, spoken to by hand


@contextmanager
def worker_over(dataset: Any, kind: str = "map", **fields: Any) -> Iterator[tuple[Channel, Any]]:
    defaults = {"lanes": 1, "hosts": 1, "batched": True, "collate_fn": None, "worker_init_fn": None}
    plan = Plan(dataset=dataset, kind=kind, rules=Rules(run=3), **(defaults | fields))
    ours, theirs = Channel.pair()
    context = multiprocessing.get_context("fork")

    def run(parent: int) -> None:
        ours.close()
        main(theirs, plan, 0, parent, True, handled(), None)

    process = context.Process(target=run, args=(os.getpid(),), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, process
    finally:
        ours.close()
        process.join(20)
        if process.exitcode is None:
            process.kill()
            process.join()


def answers(channel: Channel, number: int = 1) -> list[Any]:
    found: list[Any] = []
    while len(found) < number:
        found += channel.receive()
    return found


def test_a_batch_without_a_slot_comes_in_memory_of_its_own() -> None:
    with worker_over(ds.Numbers(8)) as (channel, _):
        channel.send(("open", 0, None, {}))
        channel.send(("task", 1, None, MapTask(0, 0, 1, [3, 4])))
        ((kind, ticket, where, nbytes, data, _),) = answers(channel)
        assert (kind, ticket, where) == ("done", 1, "memory")
        fd = channel.take_descriptor()
        assert decode(data, map_memory(fd, nbytes)).tolist() == [3, 4]
        os.close(fd)


def test_a_batch_with_a_slot_is_written_there() -> None:
    with worker_over(ds.Numbers(8)) as (channel, _):
        fd = create_memory(8192)
        memory = map_memory(fd, 8192)
        channel.send(("arena", 0, 8192), fd)
        os.close(fd)
        channel.send(("open", 0, None, {}))
        channel.send(("task", 1, (0, 4096, 4096), MapTask(0, 0, 1, [3, 4])))
        ((_, _, where, nbytes, data, _),) = answers(channel)
        assert where == "slot"
        assert decode(data, memory[4096 : 4096 + nbytes]).tolist() == [3, 4]
        assert not memory[:4096].any()
        assert not memory[4096 + nbytes :].any()


def test_a_batch_that_is_too_large_for_its_slot_comes_by_itself() -> None:
    class Wide(ds.Numbers):
        def __getitem__(self, index: int) -> Any:
            return np.full(10_000, index)

    with worker_over(Wide(8)) as (channel, _):
        fd = create_memory(4096)
        channel.send(("arena", 0, 4096), fd)
        os.close(fd)
        channel.send(("open", 0, None, {}))
        channel.send(("task", 1, (0, 0, 4096), MapTask(0, 0, 1, [5])))
        ((_, _, where, nbytes, data, _),) = answers(channel)
        assert where == "memory"
        fd = channel.take_descriptor()
        assert (decode(data, map_memory(fd, nbytes)) == 5).all()
        os.close(fd)


def test_a_lane_that_ends_says_so() -> None:
    with worker_over(ds.WellBehaved(3), "iterable") as (channel, _):
        channel.send(("open", 0, None, {0: LanePosition()}))
        for ticket in range(3):
            channel.send(("task", ticket, None, TurnTask(0, 2)))
        made = [answer[5] for answer in answers(channel, 3)]
        assert [m.number for m in made] == [2, 1, 0]
        assert [m.ended for m in made] == [False, False, True]
        assert all(m.samples == [] for m in made), "samples travel once, as the batch"


def test_a_failed_task_is_answered_and_the_next_one_is_done() -> None:
    with worker_over(ds.Numbers(3)) as (channel, _):
        channel.send(("open", 0, None, {}))
        channel.send(("task", 1, None, MapTask(0, 0, 1, [9])))
        channel.send(("task", 2, None, MapTask(0, 0, 1, [2])))
        first, second = answers(channel, 2)
        assert first[:2] == ("failed", 1)
        with pytest.raises(IndexError, match=r"in DataLoader worker process 0 \(indices \[9\]"):
            first[2].throw()
        assert second[:2] == ("done", 2)


def test_a_worker_that_could_not_begin_answers_every_task_with_the_reason() -> None:
    def init(number: int) -> None:
        raise LookupError("no file")

    with worker_over(ds.Numbers(3), worker_init_fn=init) as (channel, process):
        channel.send(("open", 0, None, {}))
        for ticket in (1, 2):
            channel.send(("task", ticket, None, MapTask(0, 0, 1, [0])))
            ((kind, answered, failure),) = answers(channel)
            assert (kind, answered) == ("failed", ticket)
            with pytest.raises(LookupError, match="no file"):
                failure.throw()
        assert process.is_alive()


def test_a_worker_ends_in_peace_when_its_channel_closes() -> None:
    with worker_over(ds.Numbers(3)) as (channel, process):
        channel.send(("open", 0, None, {}))
        channel.close()
        process.join(20)
        assert process.exitcode == 0


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signals_to_the_group_are_the_consumer_s_to_handle(name: str) -> None:
    """Case 36: the worker goes on until the consumer lets it go."""
    with worker_over(ds.Numbers(3)) as (channel, process):
        channel.send(("open", 0, None, {}))
        channel.send(("task", 1, None, MapTask(0, 0, 1, [0])))
        answers(channel)  # by now the handlers are set
        channel.take_descriptor()
        os.kill(process.pid, getattr(signal, name))
        channel.send(("task", 2, None, MapTask(0, 0, 1, [1])))
        assert answers(channel)[0][:2] == ("done", 2)


def test_a_worker_computes_on_one_thread_as_torchs_does() -> None:
    class Threads(ds.Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.get_num_threads()

    with worker_over(Threads(3), collate_fn=list) as (channel, _):
        channel.send(("open", 0, None, {}))
        channel.send(("task", 1, None, MapTask(0, 0, 1, [0])))
        assert decode(answers(channel)[0][4], None) == [1]
