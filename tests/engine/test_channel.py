"""Messages and descriptors between two ends, whatever their sizes and whoever sends at the same time."""

from __future__ import annotations

import fcntl
import itertools
import os
import pickle
import select
import socket
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.engine.channel import Channel

HANG = 20.0  # seconds until a thread that does not end is taken for a deadlock


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = Channel.pair()
    yield one, other
    one.close()
    other.close()


def messages(end: Channel, number: int) -> list[Any]:
    """The next messages, as many as asked for."""
    found: list[Any] = []
    while len(found) < number:
        found += end.receive()
    return found


def in_thread(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@given(st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=5), st.binary(max_size=200)), max_size=30))
def test_messages_arrive_as_they_were_sent_and_in_order(sent: list[Any]) -> None:
    one, other = Channel.pair()
    for message in sent:
        one.send(message)
    one.close()
    found: list[Any] = []
    with pytest.raises(EOFError):
        while True:
            found += other.receive()
    other.close()
    assert found == sent


@pytest.mark.parametrize("size", [0, 1, 32_760, 32_768, 32_769, 1 << 20])
def test_a_message_may_be_of_any_size(ends: tuple[Channel, Channel], size: int) -> None:
    one, other = ends
    sender = in_thread(lambda: [one.send(bytes(size)) for _ in range(3)])
    assert messages(other, 3) == [bytes(size)] * 3
    sender.join(HANG)
    assert not sender.is_alive()


def test_a_message_that_is_not_complete_is_waited_for(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    sender = in_thread(lambda: one.send(bytes(200_000)))
    assert other.receive() == []
    assert messages(other, 1) == [bytes(200_000)]
    sender.join(HANG)


def test_without_waiting_nothing_that_has_come_is_an_error_of_its_own(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    failures: list[BaseException] = []

    def look() -> None:
        try:
            other.receive(wait=False)
        except BaseException as error:
            failures.append(error)

    looking = in_thread(look)
    looking.join(HANG)
    blocked = looking.is_alive()
    one.send("wake up")
    looking.join(HANG)
    assert not blocked, "receive(wait=False) waits"
    assert [type(error) for error in failures] == [BlockingIOError]
    assert messages(other, 1) == ["wake up"]


def test_the_end_of_the_other_end_is_told(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    one.send("last")
    one.close()
    assert messages(other, 1) == ["last"]
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        other.send("anyone?")


def test_what_cannot_be_pickled_is_refused_before_a_byte_of_it_is_sent(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    with pytest.raises((AttributeError, pickle.PicklingError)):
        one.send(lambda: None)
    one.send("whole")
    assert messages(other, 1) == ["whole"]


# Both ways at once


@pytest.mark.timeout(60)
def test_large_messages_both_ways_at_once_do_not_block_each_other(ends: tuple[Channel, Channel]) -> None:
    """The consumer takes in what comes while its way is full; the worker answers each message by a large one."""
    consumer, worker = ends
    number, size = 20, 1 << 20
    answers: list[Any] = []

    def work() -> None:
        done = 0
        while done < number:
            for message in worker.receive():
                worker.send((len(message), bytes(size)))
                done += 1

    working = in_thread(work)
    for _ in range(number):
        consumer.send(bytes(size), when_full=lambda: answers.extend(consumer.receive()))
    while len(answers) < number:
        answers += consumer.receive()
    working.join(HANG)
    assert answers == [(size, bytes(size))] * number


@pytest.mark.timeout(60)
def test_two_ends_that_both_take_in_what_comes_never_wait_on_each_other(ends: tuple[Channel, Channel]) -> None:
    found: list[list[Any]] = [[], []]

    def talk(number: int) -> None:
        end = ends[number]
        for _ in range(10):
            end.send(bytes(1 << 20), when_full=lambda: found[number].extend(end.receive()))
        while len(found[number]) < 10:
            found[number] += end.receive()

    talkers = [in_thread(lambda number=number: talk(number)) for number in (0, 1)]
    for talker in talkers:
        talker.join(HANG)
        assert not talker.is_alive()
    assert found == [[bytes(1 << 20)] * 10] * 2


def fill(end: Channel) -> int:
    """Send small messages until the way is full, none of them cut; how many."""
    with socket.socket(fileno=os.dup(end.fileno())) as same:
        room = same.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    number = 0
    while int.from_bytes(fcntl.ioctl(end.fileno(), termios.TIOCOUTQ, bytes(4)), "little") < room:
        end.send(number)
        number += 1
    return number


@pytest.mark.timeout(60)
def test_a_descriptor_does_not_wait_on_an_end_that_waits_on_it(ends: tuple[Channel, Channel]) -> None:
    """The way is full, and the other end has a large answer to give before it reads on."""
    consumer, worker = ends
    before = fill(consumer)
    answers: list[Any] = []
    found: list[Any] = []

    def work() -> None:
        worker.send(bytes(4 << 20))
        found.extend(messages(worker, before + 1))

    working = in_thread(work)
    assert select.select([consumer], [], [], HANG)[0]
    read_end, write_end = os.pipe()
    sending = in_thread(
        lambda: consumer.send("with it", read_end, when_full=lambda: answers.extend(consumer.receive()))
    )
    sending.join(HANG)
    blocked = sending.is_alive()
    if blocked:  # let both go on
        answers += consumer.receive()
    while not answers:
        answers += consumer.receive()
    sending.join(HANG)
    working.join(HANG)
    os.close(read_end)
    os.close(write_end)
    os.close(worker.take_descriptor())
    assert not blocked, "two ends wait on each other"
    assert found == [*range(before), "with it"]


# Descriptors


def test_descriptors_arrive_with_their_messages_and_in_order(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    pipes = [os.pipe() for _ in range(6)]
    try:
        sender = in_thread(
            lambda: [
                one.send((number, bytes(100_000 * (number % 2))), descriptor=pipe[1] if number % 3 else None)
                for number, pipe in enumerate(pipes)
            ]
        )
        one_by_one = itertools.chain.from_iterable(iter(other.receive, None))
        for number in range(6):
            assert next(one_by_one)[0] == number
            if number % 3:
                fd = other.take_descriptor()
                os.write(fd, b"%d" % number)
                os.close(fd)
                assert os.read(pipes[number][0], 9) == b"%d" % number
        sender.join(HANG)
    finally:
        for pair in pipes:
            os.close(pair[0])
            os.close(pair[1])


def test_a_descriptor_is_a_copy_that_a_program_started_later_does_not_inherit(ends: tuple[Channel, Channel]) -> None:
    one, other = ends
    read_end, write_end = os.pipe()
    one.send("take", descriptor=write_end)
    os.close(write_end)
    assert messages(other, 1) == ["take"]
    fd = other.take_descriptor()
    try:
        assert os.fstat(fd).st_ino == os.fstat(read_end).st_ino
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
        os.close(read_end)


def test_descriptors_nobody_took_are_closed_with_the_channel() -> None:
    before = descriptors()
    one, other = Channel.pair()
    read_end, write_end = os.pipe()
    for _ in range(3):
        one.send("take", descriptor=read_end)
    messages(other, 3)
    os.close(read_end)
    os.close(write_end)
    one.close()
    other.close()
    other.close()
    assert descriptors() == before


def test_many_messages_with_descriptors_leave_none_open() -> None:
    before = descriptors()
    one, other = Channel.pair()
    read_end, write_end = os.pipe()
    for number in range(500):
        one.send(number, descriptor=read_end)
        assert messages(other, 1) == [number]
        os.close(other.take_descriptor())
    os.close(read_end)
    os.close(write_end)
    one.close()
    other.close()
    assert descriptors() == before
