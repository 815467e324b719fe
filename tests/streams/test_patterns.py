"""Patterns: the matches are those of fsspec, and no folder is left out because it could not be listed for a while."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from tests.streams.far import Store, far_away
from unbroken.streams.reading import retrying
from unbroken.streams.reading.files import find_files
from unbroken.streams.reading.patterns import matches_of

NAMES = [
    "a.jsonl",
    ".b.jsonl",
    "x/a.jsonl",
    "x/b.jsonl",
    "x/y/a.jsonl",
    "x/y/z/c",
    "xx/a.jsonl",
    "[x]/a.jsonl",
    "w/d e.f",
]

PATTERNS = """* *.jsonl ?.jsonl */a.jsonl x*/* x?/* [xw]/* [[]x]/* x/[!a].jsonl none/* */none ** **/a.jsonl x/**
x/**/a.jsonl x/**/* */*/* a.jsonl/* x/y/z/* [a-x]*/*.jsonl **/z/*"""


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """``far://day/a.jsonl`` and ``far://day/more/b.jsonl``; pauses between tries take no time."""
    monkeypatch.setattr(retrying, "time", SimpleNamespace(sleep=lambda seconds: None))
    with far_away() as store:
        store.files |= {"day/a.jsonl": b"1\n", "day/more/b.jsonl": b"2\n"}
        yield store


@pytest.mark.parametrize("pattern", PATTERNS.split())
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_the_matches_are_those_of_fsspec(tmp_path: Path, pattern: str, kind: str) -> None:
    files = LocalFileSystem() if kind == "local" else MemoryFileSystem()
    root = str(tmp_path)
    for name in NAMES:
        files.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        files.pipe_file(f"{root}/{name}", b"1")
    listing = files.glob(f"{root}/{pattern}", detail=True)
    ref = sorted(name for name, entry in listing.items() if entry["type"] != "directory")
    assert [entry["name"] for entry in matches_of(files, f"{root}/{pattern}", 0)] == ref


@pytest.mark.parametrize("pattern", ["far://day/**/b.jsonl", "far://day/*/*.jsonl", "far://day/more/*"])
def test_a_folder_that_cannot_be_listed_for_a_while_hides_no_file(far: Store, pattern: str) -> None:
    """fsspec passes it over, and what lies in it would be missing from every epoch."""
    failed = far.fail(2, lambda: OSError(errno.EBUSY, "slow down"), "ls", "day/more")
    assert [file.path for file in find_files("test", pattern, "infer", {})] == ["far://day/more/b.jsonl"]
    assert len(failed) == 2
    far.fail(3, lambda: OSError(errno.EBUSY, "slow down"), "ls", "day/more")
    with pytest.raises(OSError, match="slow down"):
        find_files("test", pattern, "infer", {}, retries=2)


def test_a_folder_that_may_not_be_listed_is_passed_over(far: Store) -> None:
    """As by a shell: lost+found and the like."""
    far.fail(1000, lambda: PermissionError("not allowed"), "ls", "day/more")
    assert [file.path for file in find_files("test", "far://day/**/*.jsonl", "infer", {})] == ["far://day/a.jsonl"]
