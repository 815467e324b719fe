"""Files on S3, through s3fs and its protocol, against a server on this machine."""

from __future__ import annotations

import gc
import gzip
import json
import logging
import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import fsspec
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from tests.streams.runs import assert_law, resumed, run, run_lanes, saved
from unbroken.errors import BadRow
from unbroken.lanes import Lane
from unbroken.loader import StatefulDataLoader
from unbroken.streams.reading import retrying
from unbroken.streams.reading.jsonl import read_jsonl

# From Python 3.12 on a fork of a process with threads is warned of; that it does no harm here is what is tested.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
ROWS = [{"id": n, "text": "x" * (n % 20)} for n in range(60)]


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """The ``storage_options`` of a server with two plain files and a compressed one in the bucket ``corpus``."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    given = {"key": "any", "secret": "any", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
    files = fsspec.filesystem("s3", **given)
    files.mkdir("corpus")
    files.pipe("corpus/day/a.jsonl", lines(ROWS[:20]))
    files.pipe("corpus/day/b.jsonl", lines(ROWS[20:40]))
    files.pipe("corpus/day/c.jsonl.gz", gzip.compress(lines(ROWS[40:50])) + gzip.compress(lines(ROWS[50:])))
    del files  # the file system is held by what reads from it, or by nothing
    yield given
    server.stop()


def test_every_restore_point_is_exact(options: dict[str, Any]) -> None:
    stream = read_jsonl("s3://corpus/day/*", storage_options=options)
    assert len(assert_law(stream, Lane(0, 2), [3, 9])) > 10
    assert_law(stream.shuffle(20, seed=1), Lane(1, 3), [3])


def test_paths_and_patterns_name_files(options: dict[str, Any]) -> None:
    """Case 22: lanes share them out."""
    listed = [f"s3://corpus/day/{name}" for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz")]
    for paths in ("s3://corpus/day/*", "s3://corpus/**/*.jsonl*", "s3://corpus/d*/?.jsonl*", listed):
        rows = [row for lane in run_lanes(read_jsonl(paths, storage_options=options), 5) for row in lane]
        assert sorted(row["id"] for row in rows) == list(range(60))
    assert run(read_jsonl("s3://corpus/day/b.jsonl", storage_options=options)) == ROWS[20:40]
    with pytest.raises(FileNotFoundError, match="there is no file 's3://corpus/none'"):
        read_jsonl("s3://corpus/none", storage_options=options)
    with pytest.raises(FileNotFoundError, match=r"nothing matches 's3://corpus/none\*'"):
        read_jsonl("s3://corpus/none*", storage_options=options)
    with pytest.raises(IsADirectoryError, match="'s3://corpus/day' is a folder"):
        read_jsonl("s3://corpus/day", storage_options=options)


@forks
def test_workers_read_after_their_parent_did(options: dict[str, Any]) -> None:
    """Case 20: connections and event loops do not come along into a forked process; a spawned one finds its own."""
    stream = read_jsonl("s3://corpus/day/*", storage_options=options).shuffle(8, seed=1)
    ref = [row["id"] for row in StatefulDataLoader(stream, batch_size=None, lanes=4)]
    assert sorted(ref) == list(range(60))
    with closing(StatefulDataLoader(stream, batch_size=None, num_workers=2, lanes=4)) as loader:
        found = [row["id"] for _, row in zip(range(25), loader, strict=False)]
        state = loader.state_dict()
    assert run(read_jsonl("s3://corpus/day/a.jsonl", storage_options=options)) == ROWS[:20]  # the parent reads on
    for workers, context in ((2, "fork"), (1, "spawn")):
        given: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context}
        with closing(StatefulDataLoader(stream, batch_size=None, lanes=4, **given)) as loader:
            loader.load_state_dict(state)
            assert found + [row["id"] for row in loader] == ref


@forks
def test_a_forked_process_does_not_wait_for_the_connections_of_its_parent(options: dict[str, Any]) -> None:
    """s3fs closes those of a file system that is dropped, and waits a second for a thread that is not there."""
    run(read_jsonl("s3://corpus/day/a.jsonl", storage_options=options))
    child = os.fork()
    if child == 0:
        waited: list[Any] = []
        s3fs.core.sync = lambda *call, **named: waited.append(call)
        gc.collect()
        os._exit(len(waited))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_file_that_was_replaced_by_a_shorter_one_is_named(options: dict[str, Any]) -> None:
    files = fsspec.filesystem("s3", **options)
    files.pipe("corpus/other/a.jsonl", lines(ROWS))
    stream = read_jsonl("s3://corpus/other/a.jsonl", storage_options=options)
    rows = stream.open(Lane(0, 1))
    for _ in range(50):
        next(rows)
    files.pipe("corpus/other/a.jsonl", lines(ROWS[:10]))
    with pytest.raises(BadRow, match=r"s3://corpus/other/a\.jsonl: ends at byte \d+, but had \d+ bytes"):
        list(resumed(stream, Lane(0, 1), saved(rows)))
    new = read_jsonl("s3://corpus/other/*", storage_options=options)
    assert run(new) == ROWS[:10]


def test_a_bucket_that_is_not_there_is_told_at_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying.time, "sleep", lambda seconds: pytest.fail("it was tried again"))
    with pytest.raises(FileNotFoundError, match=r"there is no file 's3://nowhere/a\.jsonl'"):
        read_jsonl("s3://nowhere/a.jsonl", storage_options=options)
