"""What is left of loops and programs that have ended: processes, descriptors, memory, threads. For ``ends.py``.

Processes are known by a mark in their environment, which is that of the process that they come from.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "UNBROKEN_ENDS"
others: set[int] = set()
"""Processes that are there from the start: what started this one, and what multiprocessing starts once."""


def marked() -> set[int]:
    """All processes that carry the mark, but this one and ``others``."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{MARK}={os.environ[MARK]}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:  # it ended meanwhile, or is not ours
                continue
    return found - others


def children() -> set[int]:
    """Our children, zombies too."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


def left() -> dict[str, Any]:
    """What may not grow."""
    gc.collect()
    multiprocessing.active_children()
    return {
        "processes": sorted((marked() | children()) - others),
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in open_descriptors()),
        "maps": len(re.findall("memfd:unbroken", Path("/proc/self/maps").read_text())),
        "threads": threading.active_count(),
    }


def open_descriptors() -> list[str]:
    names = os.listdir("/proc/self/fd")
    return [name for name in names if os.path.lexists(f"/proc/self/fd/{name}")]


def wait_until(true: Callable[[], bool], what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(what())
        time.sleep(0.002)
