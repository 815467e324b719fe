"""Patterns: which files match, with no folder left out because it could not be listed at the moment.

fsspec passes over a folder that it fails to list, and the files in it would be missing without a word. Here a folder
that cannot be listed is listed again, and an error in the end; one that is gone or not allowed is passed over, as by a
shell.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem
from fsspec.utils import glob_translate

from unbroken.streams.reading.retrying import patiently

__all__ = ["matches_of"]

Entry = Mapping[str, Any]


def matches_of(files: Any, pattern: str, retries: int) -> list[Entry]:
    """What a file system says of the files that match, sorted by name.

    ``*`` and ``?`` stand for anything inside a name, ``[]`` for one of some characters, ``**`` for any folders.
    """
    if "**" not in pattern:
        found = list(_level_by_level(files, pattern, retries))
    elif _lists_flat(files):
        found = list(patiently(lambda: files.glob(pattern, detail=True), retries, pattern).values())
    else:
        is_match = re.compile(glob_translate(pattern)).match
        before = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        inside = _all_below(files, before.rpartition("/")[0] or before, retries)
        found = [entry for entry in inside if is_match(entry["name"])]
    return sorted((entry for entry in found if entry["type"] != "directory"), key=lambda entry: str(entry["name"]))


def _lists_flat(files: Any) -> bool:
    """Whether a file system lists all below a folder by a way of its own, as object stores do, rather than by walking.

    It then raises what goes wrong.
    """
    if isinstance(files, AsyncFileSystem):
        return type(files)._find is not AsyncFileSystem._find
    return type(files).find is not AbstractFileSystem.find


def _level_by_level(files: Any, pattern: str, retries: int) -> Iterator[Entry]:
    *above, name = pattern.split("/")
    folders = [""]
    for number, part in enumerate(above):
        if not glob.has_magic(part):
            folders = [f"{folder}/{part}" if number else part for folder in folders]
            continue
        found = [entry for folder in folders for entry in _matching(files, folder, part, retries)]
        folders = [str(entry["name"]).rstrip("/") for entry in found if entry["type"] == "directory"]
    for folder in folders:
        yield from _matching(files, folder, name, retries)


def _matching(files: Any, folder: str, part: str, retries: int) -> list[Entry]:
    """The entries of a folder whose names match one part of a pattern."""
    is_match = re.compile(glob_translate(part)).match
    return [entry for entry in _entries(files, folder, retries) if is_match(_name_of(entry))]


def _all_below(files: Any, folder: str, retries: int) -> Iterator[Entry]:
    for entry in _entries(files, folder, retries):
        yield entry
        if entry["type"] == "directory":
            yield from _all_below(files, str(entry["name"]).rstrip("/"), retries)


def _entries(files: Any, folder: str, retries: int) -> list[Entry]:
    try:
        listed = patiently(lambda: files.ls(folder or "/", detail=True), retries, files.unstrip_protocol(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    # A file is listed as itself, and so is the mark that an object store has in place of a folder.
    return [entry for entry in listed if str(entry["name"]).strip("/") != folder.strip("/")]


def _name_of(entry: Entry) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]
