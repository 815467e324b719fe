"""How files are reached: found by name and pattern, read by range, and patiently where that fails for a while."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import fsspec
import multidict
import pytest
import yarl
from fsspec.implementations.local import LocalFileSystem

from tests.streams.far import Call, Store, far_away
from tests.streams.runs import run, saved, write_jsonl
from unbroken.errors import BadRow
from unbroken.lanes import Lane
from unbroken.streams.reading import files as reading_files
from unbroken.streams.reading import retrying
from unbroken.streams.reading.files import Access, SourceFile, check_access, find_files, read_blocks, read_range
from unbroken.streams.reading.jsonl import read_jsonl

ROWS = [{"id": n} for n in range(60)]


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """``far://day/a.jsonl`` and ``far://day/more/b.jsonl``; pauses between tries take no time."""
    monkeypatch.setattr(retrying, "time", SimpleNamespace(sleep=lambda seconds: None))
    with far_away() as store:
        store.files["day/a.jsonl"] = b"".join(b'{"id": %d}\n' % n for n in range(30))
        store.files["day/more/b.jsonl"] = b"".join(b'{"id": %d}\n' % n for n in range(30, 60))
        yield store


def tries(calls: list[Call], what: str) -> int:
    return sum(call.what == what for call in calls)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "lost"), TimeoutError("too long"), ConnectionResetError("reset")])
def test_reads_that_fail_for_a_while_lose_nothing(far: Store, error: Exception) -> None:
    """Case 31."""
    stream = read_jsonl("far://day/**/*.jsonl", retries=3, read_ahead=False)
    ref = run(stream)
    assert ref == ROWS
    reads = len(far.read())
    far.calls.clear()
    failed = far.fail(3, lambda: error)
    assert run(stream) == ROWS
    assert len(failed) == 3 and len(far.read()) == reads + 3


def test_a_read_that_goes_on_failing_is_told_with_its_path_and_tries_and_the_position_stays(far: Store) -> None:
    stream = read_jsonl("far://day/**/*.jsonl", retries=2, read_ahead=False)
    rows = stream.open(Lane(0, 1))
    found = [next(rows) for _ in range(30)]
    before, error = saved(rows), OSError(errno.EIO, "lost")
    far.calls.clear()
    far.fail(1000, lambda: error, path="b.jsonl")
    for again in (1, 2):
        with pytest.raises(OSError) as caught:
            next(rows)
        assert caught.value is error
        assert error.__notes__[-1] == "far://day/more/b.jsonl: tried 3 times. A larger retries is more patient."
        assert saved(rows) == before
        assert len(far.read("b.jsonl")) == 3 * again
    far.before = lambda call: None
    assert found + list(rows) == ROWS


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), PermissionError("not allowed")])
def test_what_does_not_pass_is_not_tried_again(far: Store, error: Exception) -> None:
    stream = read_jsonl("far://day/a.jsonl")
    far.fail(1, lambda: error)
    with pytest.raises(type(error)) as caught:
        run(stream)
    assert caught.value is error and len(far.read()) == 1


@pytest.mark.parametrize(
    ("path", "what", "told"),
    [("far://day/a.jsonl", "info", "far://day/a.jsonl"), ("far://day/*.jsonl", "ls", "far://day")],
)
def test_files_are_found_patiently(far: Store, path: str, what: str, told: str) -> None:
    failed = far.fail(3, lambda: TimeoutError("too long"), what)
    (file,) = find_files("test", path, "infer", {}, retries=3)
    assert (file.path, file.size) == ("far://day/a.jsonl", len(far.files["day/a.jsonl"]))
    assert len(failed) == 3
    far.fail(5, lambda: TimeoutError("too long"), what)
    with pytest.raises(TimeoutError) as caught:
        find_files("test", path, "infer", {}, retries=3)
    assert caught.value.__notes__[-1].startswith(f"{told}: tried 4 times")


def test_a_listing_is_as_new_as_the_stream() -> None:
    class Remembering:
        """A file system that would answer from what it listed before."""

        def __init__(self) -> None:
            self.dropped = 0

        def invalidate_cache(self) -> None:
            self.dropped += 1

        def info(self, path: str) -> dict[str, Any]:
            return {"name": path, "type": "file", "size": 1 if self.dropped else 0}

    files = Remembering()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsspec.core, "url_to_fs", lambda path, **_: (files, path))
        found = find_files("test", ["x://a", "x://b"], None, {})
    assert [file.size for file in found] == [1, 1] and files.dropped == 1


def test_a_size_that_is_not_known_is_refused(far: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.streams.far.FarFileSystem.info", lambda self, path: {"name": path, "type": "file"})
    with pytest.raises(ValueError, match=r"the size of 'far://day/a\.jsonl' is not known.*Copy it first"):
        read_jsonl("far://day/a.jsonl")


def test_a_file_has_the_version_that_its_file_system_tells(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    versions = set()
    for when in (1, 2, 2):
        os.utime(path, (when, when))
        (file,) = find_files("test", path, None, {})
        versions.add(file.version)
        assert file == SourceFile(str(path), path.stat().st_size)  # a copy is the same file
    assert len(versions) == 2


def test_a_range_beyond_the_end_is_empty(far: Store) -> None:
    """S3 and web servers answer with the status 416, others with nothing."""
    assert read_range("far://day/a.jsonl", 10_000, 20_000, Access()) == b""
    url = yarl.URL("http://host/a")
    request = aiohttp.RequestInfo(url, "GET", multidict.CIMultiDictProxy(multidict.CIMultiDict()), url)
    far.fail(1, lambda: aiohttp.ClientResponseError(request, (), status=416))
    assert read_range("far://day/a.jsonl", 10_000, 20_000, Access()) == b""


@pytest.mark.parametrize("path", ["far://day/a.jsonl", "a.jsonl"])
def test_a_file_that_became_shorter_is_named(far: Store, tmp_path: Path, path: str) -> None:
    path = path if "://" in path else str(write_jsonl(tmp_path / path, ROWS))
    (file,) = find_files("test", path, None, {})
    longer = SourceFile(path, file.size + 100)
    with pytest.raises(BadRow, match=rf"ends at byte {file.size}, but had {file.size + 100} bytes"):
        list(read_blocks(longer, 0, longer.size, Access()))


@pytest.mark.parametrize("start", [0, 1, 99, 100, 101, 250])
def test_blocks_end_at_the_same_places_wherever_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    monkeypatch.setattr(reading_files, "_LOCAL_BLOCK", 100)
    path = tmp_path / "a"
    path.write_bytes(bytes(range(256)))
    blocks = list(read_blocks(SourceFile(str(path), 256), start, 256, Access()))
    assert b"".join(blocks) == bytes(range(256))[start:]
    ends = [start + sum(map(len, blocks[: n + 1])) for n in range(len(blocks))]
    assert ends == [end for end in (100, 200, 256) if end > start]


def test_file_systems_are_kept_so_that_a_fork_closes_none() -> None:
    files, _ = reading_files._reach("/", {})
    assert isinstance(files, LocalFileSystem)
    assert any(kept is files for kept in reading_files._reached.values())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"retries": -1}, ValueError, "retries must be at least 0, but got -1"),
        ({"retries": 1.5}, TypeError, "retries must be a whole number, but got 1.5"),
        ({"read_ahead": "yes"}, TypeError, "read_ahead must be True or False, but got 'yes'"),
        ({"on_error": "ignore"}, ValueError, "on_error must be 'raise' or 'skip', but got 'ignore'"),
        ({"storage_options": "key"}, TypeError, "storage_options must be a dict, but got 'key'"),
    ],
)
def test_options_that_are_none_are_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        read_jsonl(write_jsonl(tmp_path / "a.jsonl", ROWS), **options)
    assert f"read_jsonl: {text}" in str(caught.value)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("s3://b/a", True),
        (["a", "memory://a"], True),
        ("zip://a::b.zip", True),
        ("a", False),
        (["a", Path("b")], False),
    ],
)
def test_paths_that_are_not_local_are_read_ahead_unless_told(paths: Any, expected: bool) -> None:
    assert check_access("test", None, 5, None, "raise", paths).ahead is expected
    for told in (True, False):
        assert check_access("test", None, 5, told, "raise", paths).ahead is told


def test_what_goes_to_the_file_system_is_in_no_fingerprint_and_no_print(far: Store) -> None:
    plain, secret = (read_jsonl("far://day/a.jsonl", storage_options=given) for given in (None, {"key": "S3CR3T"}))
    assert plain.describe() == secret.describe()
    assert "S3CR3T" not in f"{secret!r} {secret}"


def test_a_server_that_does_not_read_by_range_is_an_error_and_not_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole:
        def cat_file(self, path: str, start: int, end: int) -> bytes:
            return b"x" * 100  # as HTTP servers do that know no ranges

    monkeypatch.setattr(reading_files, "_reach", lambda path, options: (Whole(), path))
    with pytest.raises(BadRow, match=r"asked for 10 bytes from byte 5 on, its server sent 100(?s:.*)simplecache::"):
        read_range("http://host/a.jsonl", 5, 15, Access())


def test_a_local_read_that_comes_in_parts_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(50)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 7), at))
    assert read_range(str(path), 3, 40, Access()) == bytes(range(3, 40))
    assert read_range(str(path), 45, 90, Access()) == bytes(range(45, 50))
