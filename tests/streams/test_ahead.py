"""Reading ahead: the same rows and positions, fetched while others are used, and nothing that hangs or is left."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.streams.far import Call, Store, far_away, global_draws
from tests.streams.runs import assert_law, plain, resumed, run, saved, write_jsonl
from unbroken.lanes import Lane
from unbroken.loader import StatefulDataLoader
from unbroken.streams.reading import ahead
from unbroken.streams.reading import files as reading_files
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage, StageIterator

ROWS = [{"id": n, "text": "x" * (n % 50)} for n in range(120)]
SECONDS = 20  # for what must happen; a test that waits so long has failed
# From Python 3.12 on a fork of a process with threads is warned of; that it does no harm here is what is tested.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """``far://a.jsonl``, ``b.jsonl`` and ``c.jsonl``, of 40 rows each, read in blocks of 512 bytes."""
    monkeypatch.setattr(reading_files, "_REMOTE_BLOCK", 512)
    with far_away() as store:
        for n, name in enumerate("abc"):
            store.files[f"{name}.jsonl"] = write_jsonl(tmp_path / name, ROWS[40 * n : 40 * n + 40]).read_bytes()
        yield store


def opened(stream: Stage) -> StageIterator:
    """The only lane, with one chunk a file."""
    rows = stream.open(Lane(0, 1))
    rows.load_state_dict({**rows.state_dict(), "grain": 1 << 20})
    return rows


class Gate:
    """Holds reads that begin at some places until it is opened, and tells when one of them is there."""

    def __init__(self, store: Store, held: Any) -> None:
        self.arrived, self.open, self.held = threading.Event(), threading.Event(), held
        store.before = self

    def __call__(self, call: Call) -> None:
        if call.what == "cat" and self.held(call):
            self.arrived.set()
            assert self.open.wait(SECONDS)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_and_positions_are_those_of_a_reader_that_does_not_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    monkeypatch.setattr(reading_files, "_LOCAL_BLOCK", 256)
    paths = [write_jsonl(tmp_path / f"{n}{name}", ROWS[60 * n : 60 * n + 60]) for n in range(2)]
    streams = [read_jsonl(paths, read_ahead=read_ahead) for read_ahead in (False, True)]
    for index in range(count):
        assert_law(streams[1].shuffle(7, seed=0), Lane(index, count), [3, 20])
        rows, ahead_rows = (stream.open(Lane(index, count)) for stream in streams)
        for row in rows:
            assert next(ahead_rows) == row
            assert saved(ahead_rows) == saved(rows)
        assert next(ahead_rows, None) is None
        assert saved(ahead_rows) == saved(rows)


def test_paths_that_are_not_local_are_read_ahead_and_local_ones_are_not(far: Store, tmp_path: Path) -> None:
    local = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert run(read_jsonl(local)) == ROWS
    here = threading.get_ident()
    threads = set()
    far.before = lambda call: threads.add(threading.get_ident()) if call.what == "cat" else None
    assert run(read_jsonl("far://*.jsonl", read_ahead=False)) == ROWS
    assert threads == {here}
    threads.clear()
    assert run(read_jsonl("far://*.jsonl")) == ROWS
    assert threads and here not in threads


def test_the_next_piece_is_fetched_while_rows_are_used(far: Store) -> None:
    gate = Gate(far, lambda call: call.path == "a.jsonl" and call.start == 512)
    rows = opened(read_jsonl("far://a.jsonl"))
    found = [next(rows)]
    assert gate.arrived.wait(SECONDS), "the second piece was not asked for"
    while len(found) < 10:  # the first piece has more rows than this
        found.append(next(rows))
    gate.open.set()
    assert [*found, *rows] == ROWS[:40]


def test_the_next_chunk_is_fetched_while_rows_are_used(far: Store) -> None:
    gate = Gate(far, lambda call: call.path == "b.jsonl" and call.start == 0)
    stream = read_jsonl(["far://a.jsonl", "far://b.jsonl"])
    rows = opened(stream)
    found = [next(rows)]
    assert gate.arrived.wait(SECONDS), "the second file was not asked for"
    while len(found) < 40:
        found.append(next(rows))
    gate.open.set()
    assert [*found, *rows] == ROWS[:80]


def test_each_piece_is_fetched_once(far: Store) -> None:
    assert list(opened(read_jsonl("far://*.jsonl"))) == ROWS
    ahead_reads = sorted(far.read())
    far.calls.clear()
    assert list(opened(read_jsonl("far://*.jsonl", read_ahead=False))) == ROWS
    assert len(ahead_reads) >= 12 and ahead_reads == sorted(far.read())


def test_an_error_in_the_thread_comes_at_its_row_and_a_second_try_goes_on(far: Store) -> None:
    """Case 31."""
    stream = read_jsonl("far://*.jsonl", retries=0)
    ref = list(opened(stream))
    places = sorted({(call.path, call.start) for call in far.read()})
    for place in places:
        failed: list[Call] = []

        def before(call: Call, place: Any = place, failed: list[Call] = failed) -> None:
            if (call.path, call.start) == place and call.what == "cat" and not failed:
                failed.append(call)
                raise OSError("once")

        far.before = before
        rows, found, errors = opened(stream), [], []
        while len(found) < len(ref):
            state = saved(rows)
            try:
                found.append(next(rows))
            except OSError as error:
                errors.append((len(found), str(error)))
                assert saved(rows) == state
        assert found == ref
        assert len(errors) == 1


def test_a_position_is_at_its_row_however_much_was_fetched(far: Store) -> None:
    stream = read_jsonl("far://*.jsonl")
    rows = opened(stream)
    found = [next(rows) for _ in range(45)]
    assert found + list(resumed(stream, Lane(0, 1), saved(rows))) == ROWS


def test_closing_does_not_wait_for_a_read_and_begins_no_other(far: Store) -> None:
    """Case 41."""
    gate = Gate(far, lambda call: call.start == 512)
    rows = opened(read_jsonl("far://a.jsonl"))
    next(rows)
    assert gate.arrived.wait(SECONDS)
    state = saved(rows)
    rows.close()
    rows.close()
    assert saved(rows) == state
    gate.open.set()
    assert max(call.start for call in far.read()) == 512


def test_no_more_threads_than_so_many_are_started_and_they_are_used_again(far: Store) -> None:
    streams = [read_jsonl("far://*.jsonl") for _ in range(40)]
    all_rows = [opened(stream) for stream in streams]
    for rows in all_rows:
        next(rows)
    assert [list(rows) for rows in all_rows] == [ROWS[1:]] * 40
    threads = [thread for thread in threading.enumerate() if thread.name == "unbroken-read-ahead"]
    assert 0 < len(threads) <= ahead._THREADS
    assert all(thread.daemon for thread in threads)


def test_the_global_generators_are_left_alone(far: Store) -> None:
    """Case 18."""
    before = global_draws()
    stream = read_jsonl("far://*.jsonl").shuffle(10, seed=1)
    run(stream)
    assert global_draws() == before


def test_reads_fail_and_are_tried_again_without_a_draw(far: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unbroken.streams.reading.retrying.time.sleep", lambda seconds: None)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = global_draws()
    stream = read_jsonl("far://*.jsonl")
    failed = far.fail(3, lambda: OSError("again"))
    assert run(stream) == ROWS
    assert len(failed) == 3 and global_draws() == before


def in_a_fork(task: Any) -> int:
    """The exit status of ``task`` in a forked process: 0 where it returned True."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if task() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@forks
def test_a_fork_in_mid_read_goes_on_in_both_processes(far: Store) -> None:
    """Threads do not come along: what was being fetched is read again."""
    stream = read_jsonl("far://*.jsonl")
    for count in (0, 1, 15, 40, 80, 119):
        rows = opened(stream)
        for _ in range(count):
            next(rows)
        assert in_a_fork(lambda rows=rows, count=count: list(rows) == ROWS[count:]) == 0
        assert list(rows) == ROWS[count:]


@forks
def test_a_fork_while_a_read_is_under_way_does_not_hang(far: Store) -> None:
    gate = Gate(far, lambda call: call.start == 512 and os.getpid() == parent)
    parent = os.getpid()
    rows = opened(read_jsonl("far://a.jsonl"))
    next(rows)
    assert gate.arrived.wait(SECONDS)
    assert in_a_fork(lambda: list(rows) == ROWS[1:40]) == 0
    assert in_a_fork(lambda: rows.close() is None) == 0
    gate.open.set()
    assert list(rows) == ROWS[1:40]


@forks
def test_workers_read_ahead_after_their_parent_did(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    stream = read_jsonl(path, read_ahead=True)
    ref = [plain(row) for lane in range(4) for row in stream.open(Lane(lane, 4))]
    for _ in range(2):
        with closing(StatefulDataLoader(stream, batch_size=None, num_workers=2, lanes=4)) as loader:
            assert sorted(row["id"] for row in loader) == sorted(row["id"] for row in ref)


@pytest.mark.parametrize("end", ["", "rows.close()", "del rows", "os.kill(os.getpid(), 2)"])
def test_the_interpreter_ends_while_a_read_never_does(end: str) -> None:
    program = f"""
import os, threading
from tests.streams.far import far_away
from unbroken.lanes import Lane
from unbroken.streams.reading import files
from unbroken.streams.reading.jsonl import read_jsonl
files._REMOTE_BLOCK = 512
arrived = threading.Event()
with far_away() as store:
    store.files["a.jsonl"] = b"1\\n" * 5000
    rows = read_jsonl("far://a.jsonl").open(Lane(0, 1))
    rows.load_state_dict({{**rows.state_dict(), "grain": 1 << 20}})
    def before(call):
        if call.start == 512:
            arrived.set()
            threading.Event().wait()
    store.before = before
    next(rows)
    assert arrived.wait({SECONDS})
    print("reading", flush=True)
    {end}
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "reading\n"
    assert done.returncode in ((0,) if "kill" not in end else (1, -2, 130)), done.stderr
    assert ("KeyboardInterrupt" in done.stderr) if "kill" in end else not done.stderr
